"""Decode steps of small mixtures of experts with the router in the experts' op, and with its ops one by one.

python benchmarks/moe_routing.py [--executable eager --executable inductor] [--requests 1] [--only softmax]

Random weights in bf16, 4 layers of 64 experts of which 8 are chosen: a softmax router (Qwen3-MoE) and a sigmoid one
with a correction and groups (GLM-4-MoE, as DeepSeek-V3 has it). Both engines take a step in turn; the ratio is the
median over steps of the ratio within a turn.
"""

from __future__ import annotations

from typing import Annotated

import torch
import transformers
import typer
from common import alternate, median, save, wide_console
from decode_step import decoding_engine
from rich.table import Table

from pagebinder import CompileConfig, compile_model

CONTEXT = 64
SHAPE = {
    "vocab_size": 1_024, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 1_024,
}  # fmt: skip
MODELS = {
    "softmax": lambda: transformers.Qwen3MoeConfig(num_experts=64, **SHAPE),
    "sigmoid in groups": lambda: transformers.Glm4MoeConfig(
        n_routed_experts=64, n_shared_experts=1, n_group=8, topk_group=4, first_k_dense_replace=0, **SHAPE
    ),
}
# A provider that is asked for by name keeps moe_experts an op of its own.
CONFIGS = {"apart": {"providers": {"moe_experts": "cpu"}}, "in one op": {}}


def measure(name: str, executable: str, requests: list[int], steps: int) -> list[dict]:
    torch.manual_seed(0)
    config = MODELS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    compiled = {
        kind: compile_model(model, CompileConfig(executable=executable, **options))
        for kind, options in CONFIGS.items()
    }
    num_ops = {kind: c.report.node_counts["fused"] for kind, c in compiled.items()}
    rows = []
    for count in requests:
        engines = {kind: decoding_engine(c, count, CONTEXT, steps) for kind, c in compiled.items()}
        seconds = alternate({kind: e.step for kind, e in engines.items()}, rounds=steps, warmups=3)
        rows.append(
            {
                "router": name,
                "executable": executable,
                "requests": count,
                "ops": num_ops,
                "median_ms": {kind: 1e3 * median(values) for kind, values in seconds.items()},
                "best_ms": {kind: 1e3 * min(values) for kind, values in seconds.items()},
                "apart_over_one_op": median([a / b for a, b in zip(seconds["apart"], seconds["in one op"])]),
            }
        )
    return rows


def main(
    executable: Annotated[list[str] | None, typer.Option(help="eager, native, inductor")] = None,
    requests: Annotated[list[int] | None, typer.Option(min=1)] = None,
    steps: Annotated[int, typer.Option(min=1)] = 60,
    only: Annotated[str, typer.Option(help="Routers whose name contains this.")] = "",
) -> None:
    """Run everything, print a table, write benchmarks/results/moe_routing.json."""
    console = wide_console()
    rows = [
        row
        for name in MODELS
        if only in name
        for kind in executable or ("eager", "inductor")
        for row in measure(name, kind, requests or [1, 8], steps)
    ]
    table = Table("router", "executable", "requests", "ops", "ms, median (best)", "apart / one op")
    for row in rows:
        times = (f"{row['median_ms'][kind]:.2f} ({row['best_ms'][kind]:.2f})" for kind in CONFIGS)
        ops = " -> ".join(map(str, row["ops"].values()))
        ratio = f"{row['apart_over_one_op']:.2f}"
        table.add_row(row["router"], row["executable"], str(row["requests"]), ops, " -> ".join(times), ratio)
    console.print(table)
    path = save("moe_routing", {"results": rows})
    console.print(f"wrote {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
