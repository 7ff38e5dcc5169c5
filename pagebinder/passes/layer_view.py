"""The four graphs of a model side by side, module by module, with equal layers folded: what the report's page shows.

    block "model.layers.[1-31]", 31 layers
      rows      module           captured                   semantic        paged            fused
                input_layernorm  to, pow, mean, add, ...    rms_norm        rms_norm         add_rms_norm
      costs     one entry for each op of the fused graph that costs anything: formulas, and numbers in two `steps`
      matches, refusals of its layers

Everything is plain data. Layers are compared first, and only one of each kind is described, because the formulas
take sympy a moment.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import module_path
from pagebinder.passes.layer_blocks import name_of_layers, place_of
from pagebinder.passes.lock_facts import is_ours, op_name, op_options, provider_of
from pagebinder.passes.op_costs import CostModel, OpCost, scenario
from pagebinder.passes.op_costs_ours import cost_model
from pagebinder.report import CompileReport

LEVELS = ("captured", "semantic", "paged", "fused")
DECODE_CONTEXT, PREFILL_TOKENS, ENCODER_PROMPT = 4096, 2048, 512
BEFORE, AFTER = "before the layers", "after the layers"
DEFAULT_OVERLOADS = ("default", "Tensor", "Scalar", "int", "dim", "dtype")

Key = tuple[str, int | None]  # stack and layer; (BEFORE or AFTER, None) outside of layers


def scenarios(max_model_len: int) -> dict[str, dict[str, Any]]:
    """The two steps of one request that the numbers are for: name -> what it is, and values of the symbols."""
    context, tokens = min(DECODE_CONTEXT, max_model_len - 1), min(PREFILL_TOKENS, max_model_len)
    return {
        "decode": {
            "text": f"1 token at a context of {context:,}",
            "symbols": scenario(1, context, ENCODER_PROMPT, 1),
        },
        "prefill": {
            "text": f"{tokens:,} tokens of a prompt",
            "symbols": scenario(tokens, 0, ENCODER_PROMPT, ENCODER_PROMPT),
        },
    }


def layer_view(graphs: Mapping[str, GraphModule], report: CompileReport) -> list[dict[str, Any]]:
    """The blocks of a compiled model, in the order in which it runs."""
    levels = {level: _by_layer(graphs[level]) for level in LEVELS}
    order = list(dict.fromkeys(key for level in LEVELS for key in levels[level]))
    model = cost_model(graphs["fused"])
    steps = scenarios(int(report.kv["max_model_len"]))
    blocks: dict[tuple, dict[str, Any]] = {}
    for key in sorted(order, key=_position):
        nodes = {level: levels[level].get(key, []) for level in LEVELS}
        kind = (key[0], *(tuple(map(_signature, nodes[level])) for level in LEVELS))
        if kind not in blocks:
            blocks[kind] = {"stack": key[0], "layers": [], **_described(nodes, model, steps)}
        blocks[kind]["layers"].append(key[1])
    return [_named(block, report) for block in blocks.values()]


def _by_layer(gm: GraphModule) -> dict[Key, list[Node]]:
    """Call nodes by layer, but for those that take several results apart.

    What is outside of layers comes before them or after the last.
    """
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    places = [place_of(module_path(n)) for n in calls]
    last = max((i for i, place in enumerate(places) if place.index is not None), default=-1)
    found: dict[Key, list[Node]] = {}
    for i, (node, place) in enumerate(zip(calls, places, strict=True)):
        outside = (AFTER if i > last else BEFORE, None)
        found.setdefault(outside if place.index is None else (place.stack, place.index), []).append(node)
    return found


def _position(key: Key) -> tuple[int, str, int]:
    return {BEFORE: 0, AFTER: 2}.get(key[0], 1), key[0], key[1] or 0


def _signature(node: Node) -> tuple:
    """What makes the nodes of two layers the same: place, op, options, shapes."""
    options = tuple(op_options(node).items()) if is_ours(node) else ()
    shapes = tuple(str(tuple(t.shape)) for t in _tensors(node))
    return place_of(module_path(node)).inside, str(node.target), options, shapes


def _described(nodes: Mapping[str, Sequence[Node]], model: CostModel, steps: Mapping) -> dict[str, Any]:
    names = {str(symbol): str(name) for symbol, name in model.symbols.items()}
    cells = {level: _cells(nodes[level], names) for level in LEVELS}
    modules = dict.fromkeys(at for level in LEVELS for at in cells[level])
    rows = [{"at": at, **{level: cells[level].get(at, []) for level in LEVELS}} for at in modules]
    texts = {name: step["text"] for name, step in steps.items()}
    return {"rows": rows, "costs": list(_costs(nodes["fused"], model, steps)), "steps": texts}


def _cells(nodes: Iterable[Node], names: Mapping[str, str]) -> dict[str, list[dict]]:
    """Module -> its ops in order; equal neighbours are one entry with a count."""
    found: dict[str, list[dict]] = {}
    for node in nodes:
        found.setdefault(place_of(module_path(node)).inside, []).append(_cell(node, names))
    return {
        at: [{**cell, "count": len(list(run))} for cell, run in groupby(cells)] for at, cells in found.items()
    }


def _cell(node: Node, names: Mapping[str, str]) -> dict[str, Any]:
    ours = is_ours(node)
    options = {k: v for k, v in op_options(node).items() if v != ""} if ours else {}
    shapes = " ".join(str(list(t.shape)) for t in _tensors(node))
    return {
        "op": short_name(node),
        "ours": ours,
        "provider": provider_of(node) if ours else "",
        "options": ", ".join(
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in options.items()
        ),
        "shape": re.sub(r"[su]\d+", lambda m: names.get(m[0], m[0]), shapes),
        "free": not ours and not _moves(node),
    }


def short_name(node: Node) -> str:
    """aten.mul.Tensor -> "mul", pagebinder_cpu.paged_attention.default -> "paged_attention"."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", str(node.target))
    if is_ours(node):
        return op_name(node)
    name, _, variant = str(node.target).removeprefix("aten.").rpartition(".")
    return name if variant in DEFAULT_OVERLOADS else f"{name}.{variant}"


def _moves(node: Node) -> bool:
    """False for views and sizes, which a reader may skip."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not _tensors(node):
        return False
    return all(r.alias_info is None for r in target._schema.returns) or short_name(node) == "to"


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _costs(nodes: Iterable[Node], model: CostModel, steps: Mapping) -> Iterator[dict[str, Any]]:
    for node in nodes:
        cost = model.cost(node)
        if not cost.is_free:
            yield {
                "at": place_of(module_path(node)).inside,
                "op": short_name(node),
                "provider": provider_of(node) if is_ours(node) else "",
                "counted": cost.counted,
                "flops": str(cost.flops),
                "bytes": str(sympy.expand(cost.bytes)),
                "numbers": {name: numbers(cost, step["symbols"]) for name, step in steps.items()},
            }


def numbers(cost: OpCost, symbols: Mapping[sympy.Symbol, int]) -> dict[str, float]:
    """The formulas evaluated."""
    parts = {
        "flops": cost.flops,
        "weight_bytes": cost.weight_bytes,
        "activation_bytes": cost.activation_bytes,
        "cache_bytes": cost.cache_bytes,
    }
    return {name: float(sympy.sympify(formula).subs(symbols)) for name, formula in parts.items()}


def _named(block: dict[str, Any], report: CompileReport) -> dict[str, Any]:
    """Adds what the block is called, how often it runs, and what the passes said about its layers."""
    stack, layers = block.pop("stack"), block.pop("layers")
    outside = layers == [None]
    first = layers[0]
    members = set() if outside else {(stack, index) for index in layers}

    def inside(path: str) -> bool:
        place = place_of(path)
        if outside:
            return place.index is None and path in {row["at"] for row in block["rows"]}
        return (place.stack, place.index) in members

    states = [row for row in report.layers if inside(row["layer"])]
    return {
        "title": stack if outside else name_of_layers(stack, layers),
        "count": len(layers),
        "states": [s for s in states if outside or place_of(s["layer"]).index == first],
        "groups": sorted({s["group"] for s in states if s["group"] is not None}),
        "matches": _matches(report, inside),
        "refusals": _refusals(report, inside),
        **block,
    }


def _matches(report: CompileReport, inside) -> list[dict[str, Any]]:
    """Matches by pass, pattern and place, with their number over all layers of the block."""
    counts: dict[tuple, int] = {}
    for result in report.passes:
        for match in result.matches:
            if inside(match.module_path) and result.name != "simplify":
                key = (
                    result.name,
                    match.pattern,
                    place_of(match.module_path).inside,
                    _without_layer(match.detail),
                )
                counts[key] = counts.get(key, 0) + 1
    names = ("pass", "pattern", "at", "detail")
    return [{**dict(zip(names, key)), "count": count} for key, count in counts.items()]


def _without_layer(detail: str) -> str:
    """KV groups differ among equal layers, and are shown with the block's states."""
    return re.sub(r", KV group \d+", "", detail)


def _refusals(report: CompileReport, inside) -> list[dict[str, Any]]:
    found: dict[tuple, dict[str, Any]] = {}
    for refusal in report.refusals:
        if inside(refusal.module_path):
            at = place_of(refusal.module_path).inside
            entry = {"pattern": refusal.pattern, "at": at, "reason": refusal.reason, "node": refusal.node}
            entry |= {"source_line": refusal.source_line, "count": 0}
            found.setdefault((refusal.pattern, at, refusal.reason), entry)["count"] += 1
    return list(found.values())
