"""A decode step of DeepSeek-V4's layers by context: flat, but for the indexer, which scores every entry there is.

    python benchmarks/v4_decode.py [--rounds 15]

One layer of each kind at V4-Flash's sizes (4,096 wide, 64 heads of 512, 512 selected entries, 64 index heads), random
bf16 weights, 8 experts instead of 256 and a small vocabulary: what is left out costs the same at every context. The
caches hold random rows; the step is the compiled one that an engine runs. `indexer` is that op alone, same cache.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from common import median, save, wide_console
from rich.table import Table
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from pagebinder import CompileConfig, compile_model
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.single_sequence import single_sequence_inputs

CONTEXTS = (8_192, 16_384, 32_768, 65_536)
LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
INDEXER = "pagebinder_cpu::indexer_score_topk"


def v4_layers() -> torch.nn.Module:
    """One layer of each kind."""
    torch.manual_seed(0)
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65_536,
            "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
    config = DeepseekV4Config(
        num_hidden_layers=len(LAYERS), layer_types=LAYERS, mlp_layer_types=["moe"] * len(LAYERS), vocab_size=1_024,
        n_routed_experts=8, num_experts_per_tok=2, rope_parameters=yarn,
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config).to(torch.bfloat16).eval()


def filled(compiled) -> KVArena:
    """A cache for the longest context, every value random and finite."""
    plan = compiled.kv_spec
    most = max(-(-max(CONTEXTS) // group.block_size) for group in plan.groups)
    arena = KVArena(plan, compiled.states, 1 + len(plan.groups) * most, compiled.device)
    for cache in arena.caches.values():
        cache.uniform_(-1, 1)
    for state in compiled.states:
        if state.kind == "recurrent":  # sums of exponentials are positive
            arena.caches[f"kv_cache_{state.index}"][:, :, 1].uniform_(0.5, 2.0)
    return arena


def step_seconds(run, rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def main(
    rounds: Annotated[int, typer.Option(min=3, help="Steps of each context, in turns.")] = 15,
    kv_dtype: Annotated[str, typer.Option(help="auto or fp8_ds_mla.")] = "auto",
) -> None:
    compiled = compile_model(v4_layers(), CompileConfig(kv_dtype=kv_dtype))
    ours = (n for n in compiled.graphs["fused"].graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    scores = next(n for n in ours if n.target._schema.name == INDEXER)
    arena = filled(compiled)
    inputs = {
        tokens: single_sequence_inputs(
            compiled.kv_spec, compiled.states, torch.tensor([7]), start=tokens - 1, arena=arena
        )
        for tokens in CONTEXTS
    }
    q, weights = (torch.randn(n.meta["val"].shape[1:], dtype=torch.bfloat16)[None] for n in scores.args[:2])
    weights = weights.to(scores.args[1].meta["val"].dtype)

    def index(tokens: int):
        metadata = [inputs[tokens][node.target] for node in scores.args[2:]]
        return scores.target(q, weights, *metadata, **scores.kwargs)

    steps: dict[int, list[float]] = {tokens: [] for tokens in CONTEXTS}
    scans: dict[int, list[float]] = {tokens: [] for tokens in CONTEXTS}
    for round_number in range(rounds + 1):
        for tokens in CONTEXTS:
            step = step_seconds(lambda t=tokens: compiled.executable.run(inputs[t]), 1)
            scan = step_seconds(lambda t=tokens: index(t), 1)
            if round_number:  # the first is a warm-up
                steps[tokens] += step
                scans[tokens] += scan
    table = Table("context", "step, ms", "indexer, ms", "the rest, ms", "the rest against 8k")
    rows = []
    for tokens in CONTEXTS:
        rest = median([a - b for a, b in zip(steps[tokens], scans[tokens])])
        rows.append({"context": tokens, "step_ms": 1e3 * median(steps[tokens]),
                     "indexer_ms": 1e3 * median(scans[tokens]), "rest_ms": 1e3 * rest})  # fmt: skip
        rows[-1]["rest_ratio"] = rows[-1]["rest_ms"] / rows[0]["rest_ms"]
        table.add_row(f"{tokens:,}", *(f"{rows[-1][k]:.2f}" for k in ("step_ms", "indexer_ms", "rest_ms")),
                      f"{rows[-1]['rest_ratio']:.3f}")  # fmt: skip
    wide_console().print(table)
    save("v4_decode_cpu", {"kv_dtype": kv_dtype, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
