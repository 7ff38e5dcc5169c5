"""Which CPU kernels a compilation will ask for: they are built on first use beside the reading and the capture.

A build takes seconds of both cores where nothing is cached. What shows in config.json is begun before the weights are
read, the rest once the model is there; a part that is begun twice is built once.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.fx import GraphModule

from pagebinder.config import CompileConfig
from pagebinder.custom_ops.attention.quantized_cache import KV_FORMATS
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu import provider as cpu_provider
from pagebinder.custom_ops.cpu.parts import ELEMENT_PARTS
from pagebinder.custom_ops.library import is_our_op
from pagebinder.frontend.leaves import LEAVES
from pagebinder.frontend.lookahead import kinds_that_see_on
from pagebinder.frontend.position_bias import is_known as has_distance_bias
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import aten, calls

# What no larger op of ours takes in: where layers have such, they are computed by pointwise programs.
FUNCTIONS = {
    aten.gelu.default, aten.tanh.default, aten.exp.default, aten.softplus.default, aten.silu.default,
}  # fmt: skip
LATENT_OPS = {
    torch.ops.pagebinder.compress.default,
    torch.ops.pagebinder.mla_attention.default,
    torch.ops.pagebinder.compressed_attention.default,
}


def start_by_config(directory: Path, config: CompileConfig) -> None:
    """Begin what a checkpoint directory's model will need on a CPU, as far as its config.json says."""
    if (config.device == "auto" and torch.cuda.is_available()) or config.device.startswith("cuda"):
        return
    try:
        stored = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return  # loading the model will say what is wrong
    if not isinstance(stored, dict):
        return
    named = config.dtype or stored.get("dtype") or stored.get("torch_dtype")
    for part in (*_attention_parts(named, "num_attention_heads" in stored, config), "core"):
        cpu_build.start_build(part)


def start_by_source(source: ModelSource, config: CompileConfig) -> None:
    """Begin all that the graph will ask for, as far as that shows before it is there."""
    for part in _parts(source, config):
        cpu_build.start_build(part)


def start_by_graph(semantic: GraphModule, source: ModelSource) -> None:
    """Begin what shows in the graph: recurrences, experts, and loops that ours take (passes/fuse_pointwise.py)."""
    if source.device.type != "cpu":
        return
    targets = {n.target for n in semantic.graph.nodes if n.op == "call_function"}
    names = {t._opname for t in targets if is_our_op(t)}
    parts = {part for name in names for op in (name, f"paged_{name}") for part in cpu_provider.parts_of(op)}
    parts &= {"recurrent", "moe"}
    if aten.layer_norm.default in targets:
        parts |= {"layer_norm", "pointwise"}
    if targets & FUNCTIONS:
        parts.add("pointwise")
    styles = {n.kwargs.get("style") for n in calls(semantic.graph, torch.ops.pagebinder.rope.default)}
    if styles - {"half"}:
        parts.add("rope")
    for part in sorted(parts):
        cpu_build.start_build(part)


def _attention_parts(dtype, attends: bool, config: CompileConfig) -> tuple[str, ...]:
    """To be begun first: it takes longest."""
    part = str(dtype).removeprefix("torch.")
    return (part,) if attends and part in ELEMENT_PARTS and config.kv_dtype not in KV_FORMATS else ()


def _parts(source: ModelSource, config: CompileConfig) -> tuple[str, ...]:
    emitted = {op for leaf in LEAVES if leaf.applies(source.module) for op in leaf.emits}
    attention = _attention_parts(source.dtype, source.num_attention_layers != 0, config)
    unified = ("unified",) if config.cascade else ()
    latent = ("latent",) if emitted & LATENT_OPS else ()
    relative = ("relative",) if any(map(has_distance_bias, source.module.modules())) else ()
    sees_on = config.prompt_embeds and source.is_transformers and kinds_that_see_on(source.module)
    lookahead = ("lookahead",) if sees_on else ()
    quantized_kv = ("quantized_kv",) if config.kv_dtype in KV_FORMATS else ()
    weights = ("quant",) if config.quantization or source.stored_weights is not None else ()
    activations = ("fp8",) if config.activation_quantization else ()
    return (
        *attention,
        "core",
        *latent,
        *relative,
        *lookahead,
        *quantized_kv,
        *weights,
        *activations,
        *unified,
        "sampling",
    )
