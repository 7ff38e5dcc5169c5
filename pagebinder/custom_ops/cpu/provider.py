"""The `cpu` provider: C++ SIMD kernels, prebuilt or built on first use, in the namespace `pagebinder_cpu`."""

from __future__ import annotations

import itertools

import torch

from pagebinder.custom_ops.attention import (
    lookahead,
    merge_states,
    paged,
    qk_norm_rope_quantized_write,
    qk_norm_rope_write,
    quantized_paged,
    relative,
    unified,
)
from pagebinder.custom_ops.compress import paged_compress
from pagebinder.custom_ops.cpu import attention_fp8, build, indexed, mla, packed
from pagebinder.custom_ops.cpu.parts import ELEMENT_PARTS, PARTS
from pagebinder.custom_ops.fp8 import fused as fp8_fused
from pagebinder.custom_ops.fp8 import linear as fp8_linear
from pagebinder.custom_ops.fp8 import quant as fp8_quant
from pagebinder.custom_ops.fp8.attention import FP8_QUANT_FORMS
from pagebinder.custom_ops.hyper import hyper
from pagebinder.custom_ops.latent import write
from pagebinder.custom_ops.library import OpInfo, define_schema, library, op_info, overload
from pagebinder.custom_ops.linear import gated_linear, inverse_rope_grouped, linear, linears, quantized
from pagebinder.custom_ops.moe import experts, quantized_experts, routed_experts
from pagebinder.custom_ops.norm import layer_norm, q_norm_rope, rms_norm
from pagebinder.custom_ops.pointwise import pointwise
from pagebinder.custom_ops.providers import OpNeed, Provider, no_kernel_for, register_provider
from pagebinder.custom_ops.recurrent import gated_delta_rule, short_conv, ssd
from pagebinder.custom_ops.rope import rope
from pagebinder.custom_ops.sampling import sample_tokens
from pagebinder.custom_ops.sparse import indexer, sparse_mla
from pagebinder.errors import ProviderError

NAMESPACE = "pagebinder_cpu"
FLOAT_TYPES = ("float32", "bfloat16", "float16")

# part of the kernels (parts.PARTS) -> the ops whose C++ it registers
_PARTS: dict[str, tuple[OpInfo, ...]] = {
    "core": (
        paged.KV_CACHE_WRITE,
        paged.PAGED_ATTENTION,
        paged.PAGED_ATTENTION_LSE,
        linear.LINEAR,
        linears.LINEARS,
        gated_linear.GATED_LINEAR,
        qk_norm_rope_write.QK_NORM_ROPE_WRITE,
        rms_norm.RMS_NORM,
        rms_norm.ADD_RMS_NORM,
        sample_tokens.ARGMAX_TOKENS,
    ),
    "latent": (
        write.LATENT_CACHE_WRITE,
        write.KV_ROPE_QUANT_STORE,
        paged_compress.COMPRESS_NORM_ROPE_STORE,
        hyper.HYPER_CONNECTION,
        hyper.HYPER_MIX,
        hyper.HYPER_HEAD,
        q_norm_rope.Q_NORM_ROPE,
        inverse_rope_grouped.INVERSE_ROPE_GROUPED_LINEAR,
        sparse_mla.SPARSE_MLA_ATTENTION,
        indexer.INDEXER_SCORE_TOPK,
    ),
    "quantized_kv": (
        quantized_paged.QUANTIZED_KV_CACHE_WRITE,
        quantized_paged.QUANTIZED_PAGED_ATTENTION,
        qk_norm_rope_quantized_write.QK_NORM_ROPE_QUANTIZED_WRITE,
    ),
    "quant": (
        quantized.QUANTIZED_LINEAR,
        quantized.QUANTIZED_LINEARS,
        quantized.QUANTIZED_GATED_LINEAR,
        fp8_linear.FP8_LINEAR,
    ),
    "fp8": (
        fp8_quant.SCALED_FP8_QUANT,
        fp8_fused.RMS_NORM_FP8_QUANT,
        fp8_fused.ADD_RMS_NORM_FP8_QUANT,
        fp8_fused.GATED_ACTIVATION_FP8_QUANT,
    ),
    "layer_norm": (layer_norm.LAYER_NORM, layer_norm.ADD_LAYER_NORM),
    "pointwise": (pointwise.POINTWISE,),
    "recurrent": (
        short_conv.PAGED_SHORT_CONV,
        gated_delta_rule.PAGED_GATED_DELTA_RULE,
        ssd.PAGED_SSD,
        *map(op_info, ("paged_linear_recurrence", "paged_selective_scan", "paged_wkv", "paged_mlstm")),
    ),
    "lookahead": (lookahead.PAGED_LOOKAHEAD_ATTENTION,),
    "moe": (experts.MOE_EXPERTS, experts.EXPERT_LINEAR, routed_experts.MOE_ROUTED_EXPERTS),
    "quantized_moe": (
        quantized_experts.QUANTIZED_MOE_EXPERTS,
        quantized_experts.QUANTIZED_MOE_ROUTED_EXPERTS,
    ),
    "relative": (relative.PAGED_RELATIVE_ATTENTION,),
    "rope": (rope.ROPE,),
    "sampling": (sample_tokens.SAMPLE_TOKENS,),
    "unified": (unified.UNIFIED_ATTENTION, unified.ATTENTION_PART, merge_states.MERGE_ATTENTION_STATES),
}
for _info in itertools.chain(*_PARTS.values()):
    define_schema(NAMESPACE, _info)
attention_fp8.register()

# op -> the parts that its kernel is made of; those after the table are put together in Python, see there.
_PARTS_OF = {info.name: (part,) for part, infos in _PARTS.items() for info in infos}
_PARTS_OF[packed.PACKED_ATTENTION.name] = ("core",)
_PARTS_OF[packed.PACKED_RELATIVE_ATTENTION.name] = ("relative",)
_PARTS_OF |= {fused.name: (*_PARTS_OF[info.name], "fp8") for info, fused in FP8_QUANT_FORMS.items()}
_PARTS_OF[mla.PAGED_MLA_ATTENTION.name] = ("core", "latent")
_PARTS_OF[indexed.PAGED_INDEXED_ATTENTION.name] = ("core",)

# ops that also call the kernels of q's element type, a part each
_BY_ELEMENT_TYPE = {
    info.name
    for info in (
        paged.PAGED_ATTENTION,
        paged.PAGED_ATTENTION_LSE,
        qk_norm_rope_write.QK_NORM_ROPE_WRITE,
        FP8_QUANT_FORMS[paged.PAGED_ATTENTION],
        relative.PAGED_RELATIVE_ATTENTION,
        lookahead.PAGED_LOOKAHEAD_ATTENTION,
        packed.PACKED_ATTENTION,
        packed.PACKED_RELATIVE_ATTENTION,
        mla.PAGED_MLA_ATTENTION,
        indexed.PAGED_INDEXED_ATTENTION,
        unified.UNIFIED_ATTENTION,
        unified.ATTENTION_PART,
    )
}
# ops that also call kernels of linear layers in float16, which its part holds
_LINEAR = {linear.LINEAR.name, linears.LINEARS.name, gated_linear.GATED_LINEAR.name}


def _load_part(part: str) -> str:
    """Called from C++ where kernels of an element type are missing; returns what is wrong, "" if nothing is."""
    try:
        build.load(part)
    except ProviderError as error:
        return str(error)
    return ""


library(NAMESPACE).define("load_part(str part) -> str")
library(NAMESPACE).impl("load_part", _load_part, "CompositeExplicitAutograd")


def parts_of(op: str, dtype: str | None = None) -> tuple[str, ...]:
    """The parts of the kernels (parts.PARTS) that serve an op; none for an op without a kernel.

    `dtype`: of its operands ("bfloat16"), if it is known; without it the parts of element types are left out, which
    are loaded by the first call that needs them.
    """
    parts = _PARTS_OF.get(op, ())
    calls_more = op in _BY_ELEMENT_TYPE or (op in _LINEAR and dtype == "float16")
    return (*parts, dtype) if calls_more and dtype in ELEMENT_PARTS else parts


class CpuProvider(Provider):
    """Serves linear layers, and every feature of the paged ops, for float32, bfloat16 and float16."""

    name = "cpu"
    devices = ("cpu",)
    graph_capture = "always"  # a recorded call is made again as a whole, and plans its work anew

    def problem(self) -> ProviderError | None:
        return build.problem()

    def reasons_against(self, need: OpNeed) -> list[str]:
        reasons = super().reasons_against(need)
        if need.op not in _PARTS_OF:
            reasons.append(no_kernel_for(need.op))
        if need.dtype not in FLOAT_TYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(FLOAT_TYPES)}")
        if need.kv_dtype is not None and need.kv_dtype != need.dtype:
            reasons.append(f"the cache must have q's dtype {need.dtype}, not {need.kv_dtype}")
        return reasons

    def prepare(self, op: str | None = None) -> None:
        for part in PARTS if op is None else parts_of(op):
            build.load(part)

    def prepare_for(self, need: OpNeed) -> None:
        for part in parts_of(need.op, need.dtype):
            build.load(part)

    def overload(self, op: str) -> torch._ops.OpOverload:
        return overload(NAMESPACE, op)


def has_matrix_tiles() -> bool:
    """Are the kernels of linear layers loaded, and does this machine let them use matrix tiles?"""
    kernels = torch.ops.pagebinder_cpu
    return hasattr(kernels, "has_matrix_tiles") and kernels.has_matrix_tiles()


def reads_packed_weights() -> bool:
    """Are the kernels of linear layers loaded, and are there some for packed weights on this machine?"""
    kernels = torch.ops.pagebinder_cpu
    return hasattr(kernels, "reads_packed_weights") and kernels.reads_packed_weights()


register_provider(CpuProvider())
