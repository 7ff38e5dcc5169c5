"""Fills the report's facts about a compiled model: the model, its layers, its cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import num_ops
from pagebinder.report import CompileReport
from pagebinder.runtime.kv import KVPlan


def fill_report(
    report: CompileReport,
    source: ModelSource,
    graphs: dict[str, GraphModule],
    states: Sequence,
    plan: KVPlan,
    device: torch.device,
) -> None:
    """Everything that is known once all stages ran; passes, providers and times are in the report already."""
    parameters = list(source.module.parameters())
    report.model, report.model_class = source.name, type(source.module).__name__
    report.num_parameters = sum(p.numel() for p in parameters)
    report.weight_bytes = sum(p.numel() * p.element_size() for p in parameters)
    report.dtype, report.device = str(source.dtype).removeprefix("torch."), str(device)
    report.node_counts = {level: num_ops(gm) for level, gm in graphs.items()}
    report.layers = [_layer(state, page.group) for state, page in zip(states, plan.layers, strict=True)]
    report.kv = _cache(plan)


def _layer(state, group: int) -> dict:
    return {
        "layer": state.layer,
        "kind": state.kind,
        "window": state.window,
        "num_kv_heads": state.num_kv_heads,
        "head_dim": state.head_dim,
        "head_dim_v": state.head_dim_v,
        "dtype": state.dtype,
        "bytes_per_token": state.entry_bytes,
        "formula": str(state.formula),
        "group": group,
    }


def _cache(plan: KVPlan) -> dict:
    waste = plan.waste()
    return {
        "max_model_len": plan.max_model_len,
        "groups": len(plan.groups),
        "block_sizes": [g.block_size for g in plan.groups],
        "bytes_per_block": plan.bytes_per_block,
        "bytes_per_token": plan.bytes_per_token,
        "fixed_bytes_per_request": plan.fixed_bytes_per_request,
        "request_bytes_formula": str(plan.request_bytes_formula),
        "bytes_per_request_at_max_len": waste.held_bytes,
        "waste_percent_at_max_len": waste.percent,
        "lines": plan.describe(),
    }
