"""Where a decode step of ours goes, op by op, beside what each op takes at the machine's own rates."""

from __future__ import annotations

from pathlib import Path

from decode_step import measure

from pagebinder import CompileConfig, compile_model
from pagebinder.explain_rates import Rates
from pagebinder.passes.layer_view import numbers, short_name
from pagebinder.passes.op_costs import scenario
from pagebinder.passes.op_costs_ours import cost_model

STEPS = 20


def limits_of_ops(graph, requests: int, context: int, rates: Rates) -> dict[str, float]:
    """Seconds of each kind of op in a decode step: weights are read once, all else for each request."""
    model, seconds = cost_model(graph), {}
    for node in graph.graph.nodes:
        cost = model.cost(node)
        if cost.is_free:
            continue
        one = numbers(cost, scenario(1, context))
        moved = one["weight_bytes"] + requests * (one["activation_bytes"] + one["cache_bytes"])
        name = short_name(node)
        seconds[name] = seconds.get(name, 0.0) + rates.seconds(requests * one["flops"], moved)
    return seconds


def step_by_op(folder: Path, batches: list[int], context: int, limits: dict) -> list[dict]:
    """A row for each number of requests: milliseconds of a step and of each op, measured and at least."""
    compiled = compile_model(str(folder), CompileConfig())
    rates = Rates(limits["product"], limits["read"], "read bandwidth and matrix rate")
    weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rows = []
    for requests in batches:
        row = measure(compiled, weight_bytes, requests, context, STEPS)
        least = limits_of_ops(compiled.graphs["fused"], requests, context + STEPS // 2, rates)
        step_ms = row["step_ms"]["median"]
        ops = {
            name: {"ms": share * step_ms, "limit_ms": 1e3 * least.pop(name, 0.0)}
            for name, share in row["share"].items()
            if name != "other"
        }
        ops["other"] = {"ms": row["share"]["other"] * step_ms, "limit_ms": 1e3 * sum(least.values())}
        rows.append({"requests": requests, "context": context, "step_ms": step_ms, "ops": ops})
    return rows
