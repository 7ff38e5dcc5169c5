"""`CompileConfig(streams=...)`: what may run beside what on a second stream, and whether it does.

Costs of ops are the formulas of the report's page (`passes/op_costs.py`), at the rates of a GPU (`StreamRates`), for
a decode step of one request. The answer is estimated; what is carried out is safe whatever the estimate was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from pagebinder.config import CompileConfig
from pagebinder.graph_tools import module_path
from pagebinder.passes.layer_blocks import name_of_layers, place_of
from pagebinder.passes.layer_view import scenarios
from pagebinder.passes.op_costs import OpCost
from pagebinder.passes.op_costs_ours import cost_model
from pagebinder.report import CompileReport
from pagebinder.runtime.executables import EagerExecutable, InductorExecutable
from pagebinder.runtime.streams import NodeCost, Overlap, Schedule, StreamRates
from pagebinder.runtime.streams.branches import Region, op_name
from pagebinder.runtime.streams.overlap import plan_streams, streams_of

RATES = StreamRates()
LONGEST = 1 << 20  # tokens of a model that does not say how long its sequences may be


def eager_executable(graph: GraphModule, config: CompileConfig, report: CompileReport) -> EagerExecutable:
    """Runs a graph op by op: on two streams if it is on a GPU and they are not off, or anywhere if they are on."""
    return EagerExecutable(graph, overlap=overlap_of(graph, config, report))


def inductor_executable(
    graph: GraphModule, config: CompileConfig, report: CompileReport
) -> InductorExecutable:
    """Runs a compiled graph, on one stream; so do the pieces that captured steps are cut into."""
    return InductorExecutable(graph)


def overlap_of(graph: GraphModule, config: CompileConfig, report: CompileReport) -> Overlap | None:
    """How a graph that runs op by op uses two streams; None: it does not. The report says what of it may overlap."""
    device = next(n.meta["val"].device for n in graph.graph.nodes if n.op == "placeholder")
    if config.streams == "off" or (config.streams == "auto" and device.type != "cuda"):
        return None
    note_streams(graph, config, report)
    return Overlap(streams_of(device), node_costs(graph, _decode(report)["symbols"]), RATES)


def _decode(report: CompileReport) -> dict[str, Any]:
    """The step that costs are estimated for."""
    return scenarios(report.kv.get("max_model_len", LONGEST))["decode"]


def note_streams(graph: GraphModule, config: CompileConfig, report: CompileReport) -> None:
    """Fill in `report.streams`, and `report.stream_forks` where ops could run side by side, unless that was done."""
    if not report.streams:
        report.streams, report.stream_forks = describe_streams(graph, config, report)


def describe_streams(
    graph: GraphModule, config: CompileConfig, report: CompileReport
) -> tuple[list[str], list[dict]]:
    """Whether two streams are used, what runs beside what and how much of a step that is, or why nothing does: as
    text, and for each kind of fork as numbers."""
    step = _decode(report)
    costs = node_costs(graph, step["symbols"])
    plan, schedule = plan_streams(graph, costs, RATES)
    if not plan.regions:
        return [f"one stream: {plan.refused}"], []
    share = plan.gain_seconds / plan.serial_seconds
    forks = _forks(plan.regions, schedule, costs)
    lines = [
        _in_use(config, report),
        *map(_line, forks),
        f"estimated, not measured: {len(plan.regions)} forks save {share:.1%} of a step's "
        f"{plan.serial_seconds * 1e6:,.0f} us on a GPU ({step['text']})",
        f"{len(plan.side)} of {len(schedule.order)} ops on the side stream, {len(schedule.waits)} waits for "
        f"{len(schedule.recorded)} events, {len(schedule.held)} values kept until their join",
    ]
    return lines, forks


def _in_use(config: CompileConfig, report: CompileReport) -> str:
    on_gpu = report.device.startswith("cuda")
    if config.streams == "off":
        return 'not used (streams="off"); it would be:'
    if config.streams == "auto" and not on_gpu:
        return 'not used: streams="auto" is for a GPU where ops run one by one; there it would be:'
    if report.executable not in ("", EagerExecutable.name):
        return f"not used: {report.executable} runs on one stream; op by op it would be:"
    return "used:" if on_gpu else "used, simulated on the CPU:"


def _forks(regions: Iterable[Region], schedule: Schedule, costs: Mapping[str, NodeCost]) -> list[dict]:
    """One entry for all layers in which the same ops run side by side; microseconds are of one of them."""
    found: dict[tuple[str, str, int], list[Region]] = {}
    waiting = set(schedule.waits)
    for region in regions:
        here = waiting.intersection((*region.side, *region.beside, *region.before, region.join))
        waiting -= here  # one region's join may be in the next one
        key = _names(region.side, costs), _names(region.beside, costs), len(here)
        found.setdefault(key, []).append(region)
    forks = []
    for (side, beside, num_waits), alike in found.items():
        fork = {
            "where": _where(alike),
            "count": len(alike),
            "side": side,
            "beside": beside,
            "waits": num_waits,
        }
        fork["serial_us"] = sum(r.serial_seconds for r in alike) / len(alike) * 1e6
        fork["parallel_us"] = sum(r.parallel_seconds for r in alike) / len(alike) * 1e6
        forks.append({**fork, "text": _line(fork)})
    return forks


def _line(fork: Mapping[str, Any]) -> str:
    return (
        f"{fork['where']}: {fork['side']} on the second stream, beside {fork['beside']}; {fork['waits']} waits; "
        f"{fork['serial_us']:.1f} -> {fork['parallel_us']:.1f} us"
    )


def _names(nodes: Iterable[Node], costs: Mapping[str, NodeCost]) -> str:
    """Ops and how many of each, without those that launch nothing."""
    counts: dict[str, int] = {}
    for node in nodes:
        if costs[node.name].seconds > 0:
            counts[op_name(node)] = counts.get(op_name(node), 0) + 1
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in counts.items())


def _where(regions: Iterable[Region]) -> str:
    layers: dict[str, list[int]] = {}
    for region in regions:
        place = place_of(module_path(region.side[-1]))
        layers.setdefault(place.stack, []).extend([] if place.index is None else [place.index])
    return "; ".join(
        name_of_layers(stack, indices) if indices else "(no layer)" for stack, indices in layers.items()
    )


def node_costs(gm: GraphModule, symbols: Mapping[sympy.Symbol, int]) -> dict[str, NodeCost]:
    """Costs of a graph's calls by name, for the step that `symbols` describe. Equal calls are counted once."""
    model = cost_model(gm)
    known: dict[tuple, NodeCost] = {}
    costs = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            key = _signature(node)
            if key not in known:
                known[key] = _cost(model.cost(node), symbols)
            costs[node.name] = known[key]
    return costs


def _cost(cost: OpCost, symbols: Mapping[sympy.Symbol, int]) -> NodeCost:
    if cost.is_free:
        return NodeCost()
    return RATES.cost(*(_number(formula, symbols) for formula in (cost.flops, cost.bytes)))


def _number(formula: Any, symbols: Mapping[sympy.Symbol, int]) -> float:
    """The formula's value; 0 if it depends on what no rule knows, so that the smallest kernel's time remains."""
    value = sympy.sympify(formula).subs(symbols)
    return float(value) if value.is_number else 0.0


def _signature(node: Node) -> tuple:
    """What a call's cost follows from: the op, its options, shapes and dtypes."""
    operands = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _shapes(n.meta.get("val")))
    return node.target, repr(operands), _shapes(node.meta.get("val"))


def _shapes(value: Any) -> str:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return " ".join(f"{v.dtype}{tuple(v.shape)}" if isinstance(v, torch.Tensor) else str(v) for v in values)
