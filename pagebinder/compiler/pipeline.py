"""Which passes run on each graph level, and in which order: captured -> semantic -> paged -> fused."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch.fx import GraphModule

from pagebinder.compiler.executable import has_loops, is_compiled, loops_are_ours
from pagebinder.config import CompileConfig
from pagebinder.custom_ops.attention.quantized_cache import KV_FORMATS
from pagebinder.errors import ConfigError
from pagebinder.frontend.recognise import (
    recognise_causal_conv,
    recognise_expert_loop,
    recognise_first_rows,
    recognise_gated_activation,
    recognise_layer_norm,
    recognise_raw_attention,
    recognise_rms_norm,
    recognise_rope,
    recognise_row_positions,
    recognise_sdpa,
)
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import clone
from pagebinder.passes.cascade_attention import cascade_attention
from pagebinder.passes.fuse_add_rms_norm import fuse_add_rms_norm
from pagebinder.passes.fuse_attention_fp8_quant import fuse_attention_fp8_quant
from pagebinder.passes.fuse_gated_activation_fp8_quant import fuse_gated_activation_fp8_quant
from pagebinder.passes.fuse_gated_linear import fuse_gated_linear
from pagebinder.passes.fuse_inverse_rope_linear import fuse_inverse_rope_linear
from pagebinder.passes.fuse_kv_rope_store import fuse_kv_rope_store
from pagebinder.passes.fuse_layer_norm import fuse_layer_norm
from pagebinder.passes.fuse_moe_routing import fuse_moe_routing
from pagebinder.passes.fuse_norm_linears import fuse_norm_linears
from pagebinder.passes.fuse_pointwise import fuse_pointwise
from pagebinder.passes.fuse_q_norm_rope import fuse_q_norm_rope
from pagebinder.passes.fuse_qk_norm_rope_write import fuse_qk_norm_rope_write
from pagebinder.passes.fuse_quantized_linear import fuse_quantized_linear
from pagebinder.passes.fuse_rms_norm_fp8_quant import fuse_rms_norm_fp8_quant
from pagebinder.passes.gather_logits import gather_logits
from pagebinder.passes.layer_states import Paging
from pagebinder.passes.manager import run_passes
from pagebinder.passes.merge_linears import merge_linears
from pagebinder.passes.narrow_rows import narrow_rows
from pagebinder.passes.own_passes import run_own_passes
from pagebinder.passes.page_attention import page_attention
from pagebinder.passes.page_compressed import page_compressed
from pagebinder.passes.page_cross_attention import page_cross_attention
from pagebinder.passes.page_mla import page_mla
from pagebinder.passes.page_recurrent import page_recurrent
from pagebinder.passes.place_constants import place_constants
from pagebinder.passes.place_linears import place_linears
from pagebinder.passes.quantize_activations import quantize_activations
from pagebinder.passes.quantize_kv import quantize_kv
from pagebinder.passes.quantize_weights import quantize_weights
from pagebinder.passes.select_providers import select_providers, unused_requests
from pagebinder.passes.share_values import share_values
from pagebinder.passes.simplify import simplify
from pagebinder.passes.simplify_views import simplify_views
from pagebinder.passes.trail import ENCODER, Trail
from pagebinder.passes.turn_weights import turn_weights
from pagebinder.paths import user_path
from pagebinder.report import CompileReport, PassResult

RECOGNISERS = (
    recognise_layer_norm,
    recognise_rms_norm,
    recognise_rope,
    recognise_sdpa,
    recognise_raw_attention,
    recognise_gated_activation,
    recognise_expert_loop,
    simplify,
)
PAGE_PASSES = (page_attention, page_cross_attention, page_compressed, page_mla, page_recurrent)
LOOPS_OF_OURS = (share_values, fuse_layer_norm, fuse_pointwise)
FP8_QUANT_FUSIONS = (fuse_rms_norm_fp8_quant, fuse_gated_activation_fp8_quant, fuse_attention_fp8_quant)


def recognise(
    captured: GraphModule,
    encoder: GraphModule | None,
    config: CompileConfig,
    report: CompileReport,
    trail: Trail,
) -> GraphModule:
    """The semantic graph; the encoder's becomes one in place."""
    semantic = clone(captured, "semantic")
    recognisers = (recognise_first_rows, recognise_causal_conv, *RECOGNISERS, recognise_row_positions)
    report.passes += run_passes(semantic, recognisers, after=trail.after("semantic"))
    report.passes += run_own_passes(semantic, "semantic", config.passes, report, trail)
    if encoder is not None:
        results = run_passes(encoder, RECOGNISERS, after=trail.after("encoder", chain=ENCODER))
        results += run_own_passes(
            encoder, "semantic", config.passes, report, trail, chain=ENCODER, graph="encoder"
        )
        report.passes += [of_encoder(result) for result in results]
    return semantic


def store_kv(
    semantic: GraphModule, config: CompileConfig, report: CompileReport, trail: Trail
) -> GraphModule:
    """The semantic graph with K and V as a quantised cache gives them back, or as it is."""
    if not quantizes_kv(config):
        return semantic
    stored = clone(semantic, "stored")
    scales = _scales_file("kv_scales", config.kv_scales)
    quantize = functools.partial(quantize_kv, format=config.kv_dtype, scales=scales)
    report.passes += run_passes(stored, (quantize,), after=trail.after("stored"))
    return stored


def page(
    stored: GraphModule, paging: Paging, config: CompileConfig, report: CompileReport, trail: Trail
) -> GraphModule:
    """The paged graph: attention and recurrences over the pages that `paging` gives each layer."""
    paged = clone(stored, "paged")
    passes = (*(functools.partial(one, paging=paging) for one in PAGE_PASSES), gather_logits)
    report.passes += run_passes(paged, passes, after=trail.after("paged"))
    report.passes += run_own_passes(paged, "paged", config.passes, report, trail)
    return paged


def fuse(
    paged: GraphModule, source: ModelSource, device: torch.device, config: CompileConfig, report: CompileReport,
    trail: Trail,
) -> GraphModule:  # fmt: skip
    """The fused graph, each op of ours with a provider that serves it on `device`."""
    fused = clone(paged, "fused")
    report.passes += run_passes(fused, _fuse_passes(config, source), after=trail.after("fused"))
    report.passes += run_own_passes(fused, "fused", config.passes, report, trail)
    results, compiled = fuse_loops(fused, device, config, trail.after("fused"))
    report.passes += results
    if config.quantization is not None and source.encoder is not None:
        report.notes.append(f"quantization={config.quantization}: the encoder keeps its weights")
    report.providers = select_providers(
        fused, device=device, requested=config.providers, prepare=source.device.type != "meta",
        is_compiled=compiled,
    )  # fmt: skip
    report.notes += unused_requests(config.providers, report.providers)
    trail.add("fused", "select_providers", fused)
    return fused


def fuse_encoder(
    encoder: GraphModule, source: ModelSource, device: torch.device, config: CompileConfig, report: CompileReport,
    trail: Trail,
) -> None:  # fmt: skip
    """Of a model that also decodes, in place: the loops of its layers, and kernels for them."""
    results, compiled = fuse_loops(encoder, device, config, trail.after("encoder", chain=ENCODER))
    report.passes += [of_encoder(result) for result in results]
    if device.type == "cpu":
        report.providers += select_providers(
            encoder, device=device, requested=config.providers, prepare=source.device.type != "meta",
            is_compiled=compiled,
        )  # fmt: skip
        trail.add("encoder", "select_providers", encoder, chain=ENCODER)


def fuse_loops(
    gm: GraphModule, device: torch.device, config: CompileConfig, after: Callable[[PassResult, GraphModule], None]
) -> tuple[list[PassResult], bool]:  # fmt: skip
    """On a CPU, what layers compute by ops of torch becomes ops of ours, in place; the passes' results, and whether a
    compiler fuses what is left, with those."""
    if device.type != "cpu":
        return [], is_compiled(config)
    results = run_passes(gm, LOOPS_OF_OURS, after=after) if config.fusions and has_loops(gm) else []
    return results, not loops_are_ours(gm, config)


def _fuse_passes(config: CompileConfig, source: ModelSource) -> tuple:
    """The passes from the paged graph to the fused one, in their order."""
    quantization = _quantization(config, source)
    cascade = (cascade_attention,) if config.cascade else ()
    if not config.fusions:
        return (place_constants, *quantization, *cascade)
    around_rope = (fuse_kv_rope_store, fuse_q_norm_rope, fuse_inverse_rope_linear, fuse_qk_norm_rope_write)
    around_linears = (place_linears, fuse_gated_linear, merge_linears)
    routing = functools.partial(fuse_moe_routing, requested=config.providers)
    cleaning = (fuse_add_rms_norm, place_constants, simplify, turn_weights)
    fusions = (*around_rope, *cleaning, *quantization, *around_linears, routing, *cascade)
    before_layers = (fuse_norm_linears,) if _fuses_norms(config, source) else ()
    # Last, as fusions look through views, and through the last layer, as the model wrote them.
    return (*fusions, narrow_rows, simplify_views, *before_layers)


def _fuses_norms(config: CompileConfig, source: ModelSource) -> bool:
    """Are norms one op with the layers behind them? On a GPU, unless a compiler fuses them with what is before."""
    return "norm_linears" in config.providers or (source.device.type == "cuda" and not is_compiled(config))


def of_encoder(result: PassResult) -> PassResult:
    """The result, under a name that says whose graph it is about."""
    result.name = f"encoder.{result.name}"
    return result


def quantizes_kv(config: CompileConfig) -> bool:
    return config.kv_dtype in KV_FORMATS


def _scales_file(option: str, path: str | os.PathLike | None) -> dict[str, torch.Tensor] | None:
    """The tensors of the safetensors file that an option names."""
    if path is None:
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = user_path(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{option}={str(path)!r} cannot be read: {error}") from error


def _quantization(config: CompileConfig, source: ModelSource) -> tuple:
    """The passes that make weights smaller, and activations, if that was asked for or the checkpoint has them so."""
    if config.quantization is None:
        return () if source.stored_weights is None else (fuse_quantized_linear,)
    weights = functools.partial(quantize_weights, format=config.quantization), fuse_quantized_linear
    if config.activation_quantization is None:
        return weights
    activations = functools.partial(
        quantize_activations,
        granularity=config.activation_quantization.removeprefix("fp8_per_"),
        scales=_scales_file("activation_scales", config.activation_scales),
    )
    return *weights, activations, *(FP8_QUANT_FUSIONS if config.fusions else ())
