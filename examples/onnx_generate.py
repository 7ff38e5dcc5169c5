"""Greedy generation from an exported decoder with numpy and ONNX Runtime alone; prompts are token ids.

    pagebinder export --onnx --dtype float32 pagebinder/models/tiny tiny_onnx
    python examples/onnx_generate.py tiny_onnx/model.onnx 511,24,7 1200,9 --max-tokens 16

Prompts of different lengths share a batch: they are padded on the right, and a row's cache slot j holds its position
j, so padding is overwritten before a token sees it. (Rows of a model with past_state inputs must be of one length.)
"""

import argparse

import numpy as np
import onnxruntime


def generate(session, prompts, max_tokens):
    """Prompts (lists of token ids) -> as many lists of `max_tokens` ids."""
    lengths = np.array([len(prompt) for prompt in prompts])
    batch, longest = len(prompts), lengths.max()
    if any(i.name.startswith("past_state") for i in session.get_inputs()) and lengths.min() != longest:
        raise SystemExit("This model carries recurrent states: give prompts of one length.")
    sizes = {"batch": batch, "capacity": longest + max_tokens}
    for size in {size for i in session.get_inputs() for size in i.shape if str(size).startswith("entries_")}:
        sizes[size] = sizes["capacity"] // int(size[8:]) + 1  # one compressed entry for so many tokens
    past = {
        i.name: np.zeros([sizes.get(size, size) for size in i.shape], np.float32)
        for i in session.get_inputs()
        if i.name.startswith("past_")
    }
    ids = np.stack([np.pad(prompt, (0, longest - len(prompt))) for prompt in prompts])
    positions = np.broadcast_to(np.arange(longest), ids.shape)
    last, tokens = lengths - 1, []
    for _ in range(max_tokens):
        logits, *present = session.run(None, {"input_ids": ids, "position_ids": positions, **past})
        past = dict(zip(past, present, strict=True))
        ids = logits[np.arange(batch), last].argmax(-1)[:, None]
        tokens.append(ids)
        positions, last = (lengths + len(tokens) - 1)[:, None], 0
    return np.concatenate(tokens, axis=1).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model.onnx, in float32")
    parser.add_argument("prompts", nargs="+", help="token ids: 1,2,3")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that numpy's caches are copied and not updated in place
    session = onnxruntime.InferenceSession(args.model, options)
    prompts = [[int(token) for token in prompt.split(",")] for prompt in args.prompts]
    for tokens in generate(session, prompts, args.max_tokens):
        print(",".join(map(str, tokens)))


if __name__ == "__main__":
    main()
