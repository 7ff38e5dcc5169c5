"""Fills the report's facts about a compiled model: the model, its layers, its cache."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch.fx import GraphModule

from pagebinder.custom_ops.layer_state import ENCODER_TOKENS, TOKENS
from pagebinder.frontend.coded_experts import QuantizedExperts
from pagebinder.frontend.quantized_module import QuantizedLinear
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import attributes, num_ops
from pagebinder.passes.layer_view import layer_view
from pagebinder.report import CompileReport
from pagebinder.runtime.kv import NO_GROUP, KVPlan


def fill_report(
    report: CompileReport,
    source: ModelSource,
    graphs: dict[str, GraphModule],
    states: Sequence,
    plan: KVPlan,
    device: torch.device,
    *,
    encoder_layers: Sequence = (),
) -> None:
    """Everything that is known once all stages ran; passes, providers and times are in the report already."""
    describe_model(report, source, graphs, device)
    report.layers = [_layer(state, None) for state in encoder_layers]
    report.layers += [_layer(state, page.group) for state, page in zip(states, plan.layers, strict=True)]
    report._describe_blocks = functools.partial(layer_view, graphs)
    report.kv = _cache(plan, [state.layer for state in encoder_layers])


def fill_encoder_report(
    report: CompileReport,
    source: ModelSource,
    graphs: dict[str, GraphModule],
    states: Sequence,
    device: torch.device,
) -> None:
    """The same for an encoder alone, which keeps nothing between calls."""
    describe_model(report, source, graphs, device)
    report.layers = [_layer(state, None) for state in states]
    report.kv = {"lines": ["none: an encoder is given its sequences whole"]}


def describe_model(
    report: CompileReport, source: ModelSource, graphs: dict[str, GraphModule], device: torch.device
) -> None:
    """What the model is: class, size, dtype, ops of each level."""
    coded = [m for m in source.module.modules() if isinstance(m, QuantizedLinear | QuantizedExperts)]
    pairs = [pair for module in coded for pair in module.coded_weights()]
    parameters = list(source.module.parameters())
    report.model, report.model_class = source.name, type(source.module).__name__
    report.num_parameters = sum(p.numel() for p in parameters) + sum(m.num_weights() for m in coded)
    report.weight_bytes = sum(t.nbytes for t in (*parameters, *itertools.chain(*pairs)))
    report.dtype, report.device = str(source.dtype).removeprefix("torch."), str(device)
    report.node_counts = {level: num_ops(gm) for level, gm in graphs.items()}
    report.graph_weight_bytes = _weight_bytes(graphs.get("fused") or graphs["packed"])


def _weight_bytes(gm: GraphModule) -> int:
    """Of all tensors that a graph reads, each counted once."""
    tensors = attributes(gm).values()
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


def _layer(state, group: int | None) -> dict:
    """What a layer keeps. Keys that a kind of state lacks are None, so that all rows have the same ones."""
    return {
        "layer": state.layer,
        "kind": state.kind,
        "window": getattr(state, "window", None),
        "chunk": getattr(state, "chunk", None),
        "num_kv_heads": getattr(state, "num_kv_heads", None),
        "head_dim": getattr(state, "head_dim", None),
        "head_dim_v": getattr(state, "head_dim_v", None),
        "layout": getattr(state, "layout", None),
        "shape": getattr(state, "shape", None),
        "dtype": state.dtype,
        "bytes_per_token": _bytes_per_token(state) if state.formula.has(TOKENS, ENCODER_TOKENS) else 0,
        "formula": str(state.formula),
        "group": None if group == NO_GROUP else group,
    }


def _bytes_per_token(state) -> int | float:
    """Of an entry that stands for several tokens, a token's share."""
    whole, rest = divmod(state.entry_bytes, getattr(state, "tokens_per_entry", 1))
    return state.entry_bytes / state.tokens_per_entry if rest else whole


def _cache(plan: KVPlan, stateless: Sequence[str]) -> dict:
    waste = plan.waste()
    return {
        "max_model_len": plan.max_model_len,
        "groups": len(plan.groups),
        "block_sizes": [g.block_size for g in plan.groups],
        "bytes_per_block": plan.bytes_per_block,
        "bytes_per_token": plan.bytes_per_token,
        "bytes_per_encoder_token": plan.bytes_per_encoder_token,
        "fixed_bytes_per_request": plan.fixed_bytes_per_request,
        "request_bytes_formula": str(plan.request_bytes_formula),
        "used_bytes_formula": str(plan.used_formula),
        "prefix_granularity": plan.granularity,
        "bytes_per_request_at_max_len": waste.held_bytes,
        "waste_percent_at_max_len": waste.percent,
        "workload_waste_bytes": plan.wasted_bytes,
        "workload_waste_percent": plan.wasted_percent,
        "group_facts": [_group(plan, i) for i in range(len(plan.groups))],
        "next_best": asdict(plan.next_best) if plan.next_best else None,
        "constraint_cost": asdict(plan.constraint_cost) if plan.constraint_cost else None,
        "lines": plan.describe(stateless=stateless),
    }


def _group(plan: KVPlan, index: int) -> dict:
    group, waste = plan.groups[index], plan.group_waste[index]
    return {
        "kind": group.spec.kind,
        "layers": list(group.layers),
        "block_size": group.block_size,
        "used_bytes_per_block": group.page_bytes,
        "wasted_bytes_per_block": plan.padding_bytes_per_block[index],
        "workload_waste_bytes": waste.by_cause,
        "workload_waste_percent": waste.percent,
    }
