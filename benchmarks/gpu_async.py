"""What asynchronous stepping gains on a GPU: an engine's tokens a second with steps one by one and launched ahead.

Without a GPU, `python benchmarks/gpu_async.py --cpu` runs the same code on a CPU, where there is nothing to gain: it
shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from gpu_captured import SHAPE, SMALL
from gpu_isolated import row_text
from transformers import Qwen3Config, Qwen3ForCausalLM

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams

REQUESTS = (1, 8, 64)
PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 128, 128, 3


def asynchronous_steps(
    device: str = "cuda", shape: dict = SHAPE, new_tokens: int = NEW_TOKENS, rounds: int = ROUNDS
) -> list[dict]:
    """One row for each number of requests: median tokens a second of decoding, both ways in turn."""
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).to(torch.bfloat16).eval()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=64))
    engines = {
        stepping: compiled.engine(
            EngineConfig(
                num_kv_blocks=max(REQUESTS) * ((PROMPT_TOKENS + new_tokens) // 64 + 1) + 1,
                max_num_seqs=max(REQUESTS), max_num_batched_tokens=2048, prefix_caching=False,
                async_stepping=stepping,
            )
        )
        for stepping in ("off", "on")
    }  # fmt: skip
    params = SamplingParams(max_tokens=new_tokens, temperature=0.7, seed=0, ignore_eos=True)
    vocab, results = shape["vocab_size"], []
    for num_requests in REQUESTS:
        prompts = [
            [(i * 31 + j) % (vocab - 1) + 1 for j in range(PROMPT_TOKENS)] for i in range(num_requests)
        ]
        rates, tokens = {"off": [], "on": []}, {}
        for number in range(rounds + 1):
            for stepping, engine in engines.items():
                start = time.perf_counter()
                outputs = engine.generate(prompts, params)
                if number:  # the first round warms both up
                    rates[stepping].append(num_requests * new_tokens / (time.perf_counter() - start))
                tokens[stepping] = [o.token_ids for o in outputs]
        medians = {stepping: statistics.median(values) for stepping, values in rates.items()}
        results.append(
            {
                "case": "asynchronous stepping",
                "requests": num_requests,
                "prompt_tokens": PROMPT_TOKENS,
                "new_tokens": new_tokens,
                "tokens_per_s_one_by_one": medians["off"],
                "tokens_per_s_ahead": medians["on"],
                "gain": medians["on"] / medians["off"],
                "same_tokens": tokens["on"] == tokens["off"],
            }
        )
    if not all(r["same_tokens"] for r in results):
        results.append(
            {"case": "asynchronous stepping", "error": "tokens differ from those of steps one by one"}
        )
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    for row in asynchronous_steps("cpu", SMALL, 4, 1) if options.cpu else asynchronous_steps():
        print(row_text(row))
