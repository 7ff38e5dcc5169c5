"""A Llama of 8B on a GPU, in bf16 with random weights: time per token of one request against what must be read for
it, and an engine's tokens a second with 64 requests beside transformers' continuous batching on the same model.

Without a GPU, `python benchmarks/gpu_llama.py --cpu` runs the same code with a small model: it shows that the
benchmark works, and says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import statistics
import time
from collections.abc import Callable

import torch
from gpu_captured import captured_rows
from gpu_isolated import Case, row_text
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL = {
    **SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
CONTEXT = 1024
REQUESTS, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 64, 128, 128, 3
PAGE = 256


def random_llama(device: str, shape: dict) -> LlamaForCausalLM:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    finally:
        torch.set_default_dtype(before)


def one_request(
    copy_gb_per_s: float, device: str = "cuda", shape: dict = SHAPE, steps: int = 20
) -> list[dict]:
    """A captured decode step, and the least that it can take: weights and K and V at the rate of a copy."""
    model = random_llama(device, shape)
    rows = captured_rows(model, (1,), CONTEXT, steps, "8B decode step")
    layers, width = shape["num_hidden_layers"], shape["hidden_size"] // shape["num_attention_heads"]
    weight_bytes = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    kv_bytes = CONTEXT * layers * 2 * shape["num_key_value_heads"] * width * 2
    least_ms = (weight_bytes + kv_bytes) / copy_gb_per_s / 1e6
    rows[0] |= {"least_ms": least_ms, "times_of_least": rows[0]["replay_ms"] / least_ms}
    return rows


def many_requests(
    device: str = "cuda", shape: dict = SHAPE, requests: int = REQUESTS, new_tokens: int = NEW_TOKENS
) -> list[dict]:
    """Tokens a second, prompts included."""
    model, vocab = random_llama(device, shape), shape["vocab_size"]
    prompts = [[(i * 31 + j) % (vocab - 1) + 1 for j in range(PROMPT_TOKENS)] for i in range(requests)]
    blocks = requests * ((PROMPT_TOKENS + new_tokens) // 64 + 1) + 1
    engine = pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=64)).engine(
        EngineConfig(
            num_kv_blocks=blocks, max_num_seqs=requests, max_num_batched_tokens=2048, prefix_caching=False
        )
    )
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    block = (
        "block_size"
        if "block_size" in inspect.signature(ContinuousBatchingConfig).parameters
        else "page_size"
    )
    batching = ContinuousBatchingConfig(
        **{block: PAGE}, num_blocks=requests * -(-(PROMPT_TOKENS + new_tokens) // PAGE), max_batch_tokens=2048,
        max_requests_per_batch=requests, allow_block_sharing=False,
    )  # fmt: skip
    peers = {
        "ours": lambda: engine.generate(prompts, params),
        "transformers": lambda: model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,
        ),
    }
    row = {"case": "8B throughput", "requests": requests, "prompt": PROMPT_TOKENS, "new": new_tokens}
    for name, run in peers.items():
        try:
            row[f"{name}_tokens_per_s"] = requests * new_tokens / _median_seconds(run)
        except Exception as error:  # of the peer: ours stands without it
            if name == "ours":
                raise
            return [row | {"peer": f"{type(error).__name__}: {error}"[:300]}]
    row["times_of_transformers"] = row["ours_tokens_per_s"] / row["transformers_tokens_per_s"]
    return [row]


def _median_seconds(run: Callable[[], object]) -> float:
    """Of some runs behind one that warms up."""
    seconds = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def cases(copy_gb_per_s: float) -> list[Case]:
    return [
        ("8B, one request", functools.partial(one_request, copy_gb_per_s)),
        ("8B, many requests", many_requests),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    if parser.parse_args().cpu:
        found = one_request(30.0, "cpu", SMALL, 3) + many_requests("cpu", SMALL, 4, 8)
    else:
        from gpu_timing import copy_gb_per_s

        found = [row for _, run in cases(copy_gb_per_s()) for row in run()]
    for row in found:
        print(row_text(row))
