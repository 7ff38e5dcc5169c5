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
REQUESTS, PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 64, 128, 64, 3
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
    if "gpu_ms" in rows[0]:
        rows[0]["times_of_least_on_gpu"] = rows[0]["gpu_ms"] / least_ms
    return [*rows, _one_by_engine(model, least_ms, shape)]


def _one_by_engine(model, least_ms: float, shape: dict, tokens: tuple[int, int] = (32, 160)) -> dict:
    """Milliseconds a token of one request in an engine, where the host prepares a step beside the one before."""
    most = max(tokens)
    engine = pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=64)).engine(
        EngineConfig(
            num_kv_blocks=(CONTEXT + most) // 64 + 2, max_num_seqs=1, max_num_batched_tokens=CONTEXT,
            prefix_caching=False,
        )
    )  # fmt: skip
    prompt = [[i * 31 % (shape["vocab_size"] - 1) + 1 for i in range(CONTEXT - sum(tokens) // 2)]]
    few, many = (
        _median_seconds(
            lambda n=n: engine.generate(
                prompt, SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)
            ),
            ROUNDS,
        )
        for n in tokens
    )
    ms = 1e3 * (many - few) / (tokens[1] - tokens[0])
    case = "8B decode of one request by an engine"
    return {"case": case, "context": CONTEXT, "ms_per_token": ms, "times_of_least": ms / least_ms}


def many_requests(
    device: str = "cuda", shape: dict = SHAPE, requests: int = REQUESTS, new_tokens: int = NEW_TOKENS
) -> list[dict]:
    """Tokens a second of an engine of ours, prompts included."""
    model = random_llama(device, shape)
    blocks = requests * ((PROMPT_TOKENS + new_tokens) // 64 + 1) + 1
    engine = pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=64)).engine(
        EngineConfig(
            num_kv_blocks=blocks, max_num_seqs=requests, max_num_batched_tokens=2048, prefix_caching=False
        )
    )
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    given = prompts(requests, shape)
    rate = requests * new_tokens / _median_seconds(lambda: engine.generate(given, params), ROUNDS)
    _ours[requests, new_tokens] = rate
    sizes = {"requests": requests, "prompt": PROMPT_TOKENS, "new": new_tokens}
    return [{"case": "8B throughput", **sizes, "tokens_per_s": rate}]


_ours: dict[tuple[int, int], float] = {}  # tokens a second by requests and new tokens


def transformers_batching(
    device: str = "cuda", shape: dict = SHAPE, requests: int = REQUESTS, new_tokens: int = NEW_TOKENS
) -> list[dict]:
    """The same by transformers' continuous batching; one round behind another, as it takes long."""
    model, given = random_llama(device, shape), prompts(requests, shape)
    block = (
        "block_size"
        if "block_size" in inspect.signature(ContinuousBatchingConfig).parameters
        else "page_size"
    )
    batching = ContinuousBatchingConfig(
        **{block: PAGE}, num_blocks=requests * -(-(PROMPT_TOKENS + new_tokens) // PAGE), max_batch_tokens=2048,
        max_requests_per_batch=requests, allow_block_sharing=False,
    )  # fmt: skip
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    run = functools.partial(
        model.generate_batch, given, generation_config=generation, continuous_batching_config=batching,
        persistent_manager=True,
    )  # fmt: skip
    rate = requests * new_tokens / _median_seconds(run, 1)
    ours = _ours.get((requests, new_tokens))
    sizes = {"requests": requests, "prompt": PROMPT_TOKENS, "new": new_tokens}
    row = {"case": "8B throughput of transformers", **sizes, "tokens_per_s": rate}
    return [row | ({"ours_over_it": ours / rate} if ours else {})]


def prompts(requests: int, shape: dict) -> list[list[int]]:
    vocab = shape["vocab_size"]
    return [[(i * 31 + j) % (vocab - 1) + 1 for j in range(PROMPT_TOKENS)] for i in range(requests)]


def _median_seconds(run: Callable[[], object], rounds: int) -> float:
    """Of some runs behind one that warms up."""
    seconds = []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def cases(copy_gb_per_s: float) -> list[Case]:
    return [
        ("8B, one request", functools.partial(one_request, copy_gb_per_s)),
        ("8B, many requests", many_requests),
        ("8B by transformers", transformers_batching),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    if parser.parse_args().cpu:
        found = one_request(30.0, "cpu", SMALL, 3) + many_requests("cpu", SMALL, 4, 8)
        found += transformers_batching("cpu", SMALL, 4, 8)
    else:
        from gpu_timing import copy_gb_per_s

        found = [row for _, run in cases(copy_gb_per_s()) for row in run()]
    for row in found:
        print(row_text(row))
