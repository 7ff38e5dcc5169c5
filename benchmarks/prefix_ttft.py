"""Time to first token with most of the prompt cached, against none of it, in one process and in turns.

    cached     |== 83 % of the prompt: a prefix that earlier requests shared ==|-- fresh --|
    uncached   |---------------------------- fresh ----------------------------------------|

python benchmarks/prefix_ttft.py [--rounds 9]

A round times one request of each kind; its ratio is that of the two times, so a slow spell hits both. All tokens are
random and every fresh part is new, so only the prefix can be hit. Processor times stand beside: with one thread,
other processes hardly change them. Of the work, 17 % of the linear layers and 31 % of attention's pairs remain.
"""

from __future__ import annotations

import os
import random
import time
from typing import Annotated

import torch
import typer
from common import median, save, wide_console
from kv_targets import goal
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model
from pagebinder.models import tiny_path

# (cached, all) tokens of a prompt, 83 % each. Prefixes are multiples of 64: whole blocks whatever size is planned.
# The short one has a system prompt of about 500 tokens, as in the published measurement.
PROMPTS = ((1_728, 2_082), (512, 617))
STEP_TOKENS = 4_096
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def shipped_model() -> torch.nn.Module:
    """The shipped weights (256 wide, 6 layers) with room for longer prompts than they were trained for."""
    return AutoModelForCausalLM.from_pretrained(tiny_path(), max_position_embeddings=STEP_TOKENS).eval()


def random_llama() -> torch.nn.Module:
    """8 layers, 768 wide, 12 heads over 4 KV heads, bf16, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=STEP_TOKENS, tie_word_embeddings=True,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def qwen3_600m() -> torch.nn.Module:
    """The shape of Qwen3-0.6B: 28 layers, 1024 wide, 16 heads over 8 KV heads of 128, bf16, random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=STEP_TOKENS, tie_word_embeddings=True,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


MODELS = {
    "shipped, 6 x 256": shipped_model,
    "random Llama, 8 x 768": random_llama,
    "random Qwen3-0.6B, 28 x 1024": qwen3_600m,
}


def first_token(engine, prompt: list[int]) -> tuple[float, float, int]:
    """Seconds to the first token, processor seconds of this process, and how many prompt tokens the cache had."""
    started, processor = time.perf_counter(), time.process_time()
    (output,) = engine.generate([prompt], FIRST_TOKEN)
    return time.perf_counter() - started, time.process_time() - processor, output.num_cached_tokens


def measure(name: str, compiled, prefix_tokens: int, prompt_tokens: int, rounds: int) -> dict:
    """One model and length of prompt, as a row of results."""
    engine = compiled.engine(EngineConfig(max_num_seqs=4, max_num_batched_tokens=STEP_TOKENS))
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(1, compiled.source.vocab_size), k=count)

    prefix, cached = tokens(prefix_tokens), 0
    seconds, processor = ({"uncached": [], "cached": []} for _ in range(2))
    engine.generate([prefix + tokens(prompt_tokens - prefix_tokens)], FIRST_TOKEN)
    for number in range(rounds + 1):
        prompts = {
            "uncached": tokens(prompt_tokens),
            "cached": prefix + tokens(prompt_tokens - prefix_tokens),
        }
        # The order turns round after round.
        for case in sorted(prompts, reverse=bool(number % 2)):
            took, used, cached_tokens = first_token(engine, prompts[case])
            if number:  # the first round warms both cases up
                seconds[case].append(took)
                processor[case].append(used)
            if case == "cached":
                cached = cached_tokens
            elif cached_tokens:
                raise RuntimeError(f"{cached_tokens} tokens of a fresh prompt were found in the cache")
    ratios = [c / u for c, u in zip(seconds["cached"], seconds["uncached"])]
    return {
        "model": name,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached,
        "cached_share": round(cached / prompt_tokens, 4),
        "median_ms": {case: round(1e3 * median(values), 3) for case, values in seconds.items()},
        "ratio_median": round(median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "processor_ms": {case: round(1e3 * median(values), 3) for case, values in processor.items()},
        "processor_ratio": round(median(processor["cached"]) / median(processor["uncached"]), 4),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    executable: Annotated[str, typer.Option(help="auto, eager, native or inductor.")] = "auto",
    only: Annotated[str, typer.Option(help="Models whose name contains this.")] = "",
) -> None:
    """Run everything, print a table, write benchmarks/results/prefix_ttft.json."""
    console = wide_console()
    rows = []
    for name in MODELS:
        if only in name:
            config = CompileConfig(executable=executable, pack_weights=True)  # as from a checkpoint directory
            compiled = compile_model(MODELS[name](), config)
            rows += [measure(name, compiled, *tokens, rounds) for tokens in PROMPTS]
    table = Table("model", "prompt", "cached", "uncached ms", "cached ms", "ratio", "range", "processor time")
    for r in rows:
        low, high = r["ratio_range"]
        table.add_row(
            r["model"], f"{r['prompt_tokens']:,}", f"{r['cached_share']:.1%}",
            *(f"{r['median_ms'][case]:.1f}" for case in ("uncached", "cached")),
            f"{r['ratio_median']:.1%}", f"{low:.1%} - {high:.1%}",
            f"{r['processor_ratio']:.1%}",
        )  # fmt: skip
    console.print(table)
    goals = [
        goal(f"time to first token, 83 % of {r['prompt_tokens']:,} tokens cached against none, {r['model']}",
             r["ratio_median"], 0.25, at_most=True)
        for r in rows
    ]  # fmt: skip
    for g in goals:
        console.print(
            f"{'pass' if g['pass'] else 'FAIL'} {g['name']}: {g['value']:g} (at most {g['target']:g})"
        )
    path = save("prefix_ttft", {"rounds": rounds, "results": rows, "goals": goals})
    console.print(f"wrote {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
