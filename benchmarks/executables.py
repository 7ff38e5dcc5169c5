"""What a compiler for loops is worth on a CPU: `native` against `inductor`, family by family.

python benchmarks/executables.py [--only gpt_neox --only mamba2] [--layers 8] [--width 1024] [--turns 15]

Random weights in bf16. Both executables of one model in one process; their steps are in turns, and what is given are
medians of the ratios of neighbours: above 1, `native` is faster. Compilation is measured with an empty cache of
inductor's, and our kernels compiled before.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Annotated

import torch
import transformers
import typer
from common import save, wide_console
from rich.table import Table

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model

PROMPT, BATCH, LONG = 64, 8, 512
VOCAB_SIZE = 4096
FAMILIES = {
    "llama": dict(num_key_value_heads=4),
    "gpt_neox": dict(),
    "gpt2": dict(),
    "cohere2": dict(num_key_value_heads=4),
    "starcoder2": dict(num_key_value_heads=4),
    "glm4": dict(num_key_value_heads=4, head_dim=64),
    "deepseek_v3": dict(
        moe_intermediate_size=512, n_routed_experts=16, num_experts_per_tok=4, n_group=1, topk_group=1,
        q_lora_rank=384, kv_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64,
        first_k_dense_replace=1,
    ),
    "mamba2": dict(head_dim=64, num_heads=32, state_size=128, n_groups=1),
    "qwen3_5_text": dict(
        num_key_value_heads=4, head_dim=64, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "gemma3n_text": dict(
        num_key_value_heads=4, head_dim=64, num_kv_shared_layers=0, vocab_size_per_layer_input=VOCAB_SIZE,
    ),
}  # fmt: skip


def model_of(family: str, layers: int, width: int) -> torch.nn.Module:
    """The family with `layers` layers of `width`, weights ~ N(0, 1 / fan_in)."""
    known = dict(
        vocab_size=VOCAB_SIZE, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config_class = transformers.CONFIG_MAPPING[family]
    config = config_class(**{**known, **FAMILIES[family]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


class Side:
    """One executable of a model, and its steps."""

    def __init__(self, model: torch.nn.Module, executable: str) -> None:
        started = time.perf_counter()
        self.compiled = compile_model(model, CompileConfig(executable=executable))
        self._serve([[1, 2, 3]], 1)
        self.start_seconds = time.perf_counter() - started

    def _engine(self, requests: int):
        config = EngineConfig(max_num_seqs=requests, max_num_batched_tokens=4_096, prefix_caching=False)
        return self.compiled.engine(config)

    def _serve(self, prompts: list[list[int]], tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._engine(len(prompts)).generate(prompts, params)

    def begin_decoding(self, requests: int, steps: int) -> None:
        self.engine = self._engine(requests)
        params = SamplingParams(max_tokens=steps + 8, temperature=0.0, ignore_eos=True)
        for number in range(requests):
            self.engine.add_request(f"r{number}", [3 + number] * PROMPT, params)
        for _ in range(4):
            self.engine.step()

    def begin_prompts(self) -> None:
        self.engine = self._engine(1)

    def prompt(self, number: int) -> None:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self.engine.generate([[5 + number % 99] * LONG], params)


def ratios(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def seconds_of(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(family: str, layers: int, width: int, turns: int) -> dict:
    model = model_of(family, layers, width)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        sides = {name: Side(model, name) for name in ("native", "inductor")}
    auto = compile_model(model, CompileConfig(executable="auto")).report.executable
    row = {"family": family, "auto": auto, "start_s": {n: s.start_seconds for n, s in sides.items()}}
    for requests in (1, BATCH):
        for side in sides.values():
            side.begin_decoding(requests, 4 * turns)
        times = {name: [] for name in sides}
        for turn in range(4 * turns):
            for name in sorted(sides, reverse=turn % 2 == 1):
                times[name].append(seconds_of(sides[name].engine.step))
        row[f"decode_{requests}"] = ratios(times["inductor"], times["native"])
        row[f"decode_{requests}_ms"] = 1e3 * statistics.median(times["native"])
    times = {name: [] for name in sides}
    for side in sides.values():
        side.begin_prompts()
    for turn in range(turns + 1):
        for name in sorted(sides, reverse=turn % 2 == 1):
            seconds = seconds_of(lambda n=name, t=turn: sides[n].prompt(t))
            if turn:
                times[name].append(seconds)
    row["prompt"] = ratios(times["inductor"], times["native"])
    row["prompt_ms"] = 1e3 * statistics.median(times["native"])
    return row


def main(
    only: Annotated[list[str] | None, typer.Option(help="Only these families.")] = None,
    layers: Annotated[int, typer.Option(min=2)] = 8,
    width: Annotated[int, typer.Option(min=64)] = 1024,
    turns: Annotated[int, typer.Option(min=3)] = 15,
) -> None:
    """Run everything, print a table, write benchmarks/results/executables_cpu.json."""
    unknown = set(only or ()) - set(FAMILIES)
    if unknown:
        raise typer.BadParameter(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    console, rows = wide_console(), []
    for family in only or FAMILIES:
        rows.append(measure(family, layers, width, turns))
        console.print(rows[-1])
    table = Table(
        "family", "auto", "native over inductor: decode of 1, of 8", "prompt", "start, s: native, inductor"
    )
    for r in rows:
        decodes = f"{r['decode_1']:.2f}, {r[f'decode_{BATCH}']:.2f}"
        starts = f"{r['start_s']['native']:.1f}, {r['start_s']['inductor']:.1f}"
        table.add_row(r["family"], r["auto"], decodes, f"{r['prompt']:.2f}", starts)
    console.print(table)
    sizes = {"layers": layers, "width": width, "prompt": LONG, "context": PROMPT}
    path = save("executables_cpu", {**sizes, "results": rows})
    console.print(f"wrote {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
