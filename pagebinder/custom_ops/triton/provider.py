"""The `triton` provider: kernels for CUDA, registered in the namespace `pagebinder_triton`.

Under TRITON_INTERPRET=1, set before triton is first imported, Triton's interpreter runs the same kernels on the CPU:
slow, for tests and for looking into a kernel. They are served there only to those who ask for them by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys

import torch

from pagebinder.custom_ops.activation import gated_activation
from pagebinder.custom_ops.attention import (
    indexed,
    lookahead,
    merge_states,
    packed,
    paged,
    qk_norm_rope_quantized_write,
    qk_norm_rope_write,
    quantized_paged,
    relative,
    unified,
)
from pagebinder.custom_ops.compress import paged_compress
from pagebinder.custom_ops.fp8 import fused as fp8_fused
from pagebinder.custom_ops.fp8 import linear as fp8_linear
from pagebinder.custom_ops.fp8 import quant as fp8_quant
from pagebinder.custom_ops.fp8.attention import FP8_QUANT_FORMS
from pagebinder.custom_ops.hyper import hyper
from pagebinder.custom_ops.latent import write
from pagebinder.custom_ops.library import OpInfo, define_schema, library, op_info, overload
from pagebinder.custom_ops.linear import (
    gated_linear,
    inverse_rope_grouped,
    linear,
    linears,
    norm_linears,
    quantized,
)
from pagebinder.custom_ops.mla import paged_mla
from pagebinder.custom_ops.moe import experts, quantized_experts
from pagebinder.custom_ops.norm import q_norm_rope, rms_norm
from pagebinder.custom_ops.providers import OpNeed, Provider, no_kernel_for, register_provider
from pagebinder.custom_ops.recurrent import gated_delta_rule, short_conv, ssd
from pagebinder.custom_ops.rope import rope
from pagebinder.custom_ops.sampling import sample_tokens
from pagebinder.custom_ops.sparse import indexer, sparse_mla
from pagebinder.custom_ops.triton.gpu import leave_out_in_rehearsals, on_its_device, rehearsal, settle_key
from pagebinder.errors import ProviderError

NAMESPACE = "pagebinder_triton"
PACKAGE = "pagebinder.custom_ops.triton"
FLOAT_TYPES = ("float32", "bfloat16", "float16")
MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 576

# module beside this one -> the ops it has a function for, of the op's name
_FAMILIES: dict[str, tuple[OpInfo, ...]] = {
    "cache_write": (paged.KV_CACHE_WRITE, quantized_paged.QUANTIZED_KV_CACHE_WRITE),
    "paged_attention": (
        paged.PAGED_ATTENTION,
        paged.PAGED_ATTENTION_LSE,
        quantized_paged.QUANTIZED_PAGED_ATTENTION,
        relative.PAGED_RELATIVE_ATTENTION,
        lookahead.PAGED_LOOKAHEAD_ATTENTION,
    ),
    "indexed_attention": (indexed.PAGED_INDEXED_ATTENTION,),
    "packed_attention": (packed.PACKED_ATTENTION, packed.PACKED_RELATIVE_ATTENTION),
    "unified_attention": (
        unified.UNIFIED_ATTENTION,
        unified.ATTENTION_PART,
        merge_states.MERGE_ATTENTION_STATES,
    ),
    "latent": (write.LATENT_CACHE_WRITE, paged_mla.PAGED_MLA_ATTENTION),
    "sparse_mla": (sparse_mla.SPARSE_MLA_ATTENTION,),
    "indexer": (indexer.INDEXER_SCORE_TOPK,),
    "compress": (paged_compress.COMPRESS_NORM_ROPE_STORE,),
    "norm_rope": (q_norm_rope.Q_NORM_ROPE, write.KV_ROPE_QUANT_STORE),
    "inverse_rope_grouped": (inverse_rope_grouped.INVERSE_ROPE_GROUPED_LINEAR,),
    "hyper": (hyper.HYPER_CONNECTION, hyper.HYPER_MIX, hyper.HYPER_HEAD),
    "rms_norm": (rms_norm.RMS_NORM, rms_norm.ADD_RMS_NORM),
    "rope": (rope.ROPE,),
    "gated_activation": (gated_activation.GATED_ACTIVATION,),
    "qk_norm_rope_write": (
        qk_norm_rope_write.QK_NORM_ROPE_WRITE,
        qk_norm_rope_quantized_write.QK_NORM_ROPE_QUANTIZED_WRITE,
    ),
    "fp8_quant": (
        fp8_quant.SCALED_FP8_QUANT,
        fp8_fused.RMS_NORM_FP8_QUANT,
        fp8_fused.ADD_RMS_NORM_FP8_QUANT,
        fp8_fused.GATED_ACTIVATION_FP8_QUANT,
    ),
    "attention_fp8": tuple(FP8_QUANT_FORMS.values()),
    "linear": (linear.LINEAR, linears.LINEARS, gated_linear.GATED_LINEAR, norm_linears.NORM_LINEARS),
    "quantized_linear": (quantized.QUANTIZED_LINEAR, fp8_linear.FP8_LINEAR),
    "sampling": (sample_tokens.ARGMAX_TOKENS, sample_tokens.SAMPLE_TOKENS),
    "moe": (experts.MOE_EXPERTS, experts.EXPERT_LINEAR),
    "quantized_moe": (quantized_experts.QUANTIZED_MOE_EXPERTS,),
    "short_conv": (short_conv.PAGED_SHORT_CONV,),
    "delta_rule": (gated_delta_rule.PAGED_GATED_DELTA_RULE,),
    "ssd": (ssd.PAGED_SSD,),
    "selective_scan": (op_info("paged_selective_scan"),),
    "channel_scans": (op_info("paged_linear_recurrence"), op_info("paged_wkv")),
    "mlstm": (op_info("paged_mlstm"),),
}
_FAMILY_OF = {info.name: family for family, infos in _FAMILIES.items() for info in infos}
# op -> features, see OpNeed, that its kernel does not serve.
_NO_KERNEL_FOR = {
    "paged_mla_attention": frozenset({"fp8_index", "fp4_index"}),
    "sparse_mla_attention": frozenset({"fp8_index", "fp4_index"}),
    "indexer_score_topk": frozenset({"fp8_v4", "fp8_v32"}),
}
_HEAD_DIM_OPS = (
    "paged_attention",
    "paged_attention_lse",
    "quantized_paged_attention",
    "paged_relative_attention",
    "paged_lookahead_attention",
    "paged_indexed_attention",
    "packed_attention",
    "packed_relative_attention",
    *(info.name for info in FP8_QUANT_FORMS.values()),
    "unified_attention",
    "attention_part",
)

_LINEAR_OPS = ("linear", "linears", "gated_linear", "norm_linears")

for _infos in _FAMILIES.values():
    for _info in _infos:
        define_schema(NAMESPACE, _info)


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


class TritonProvider(Provider):
    """Serves the ops of _FAMILIES for float32, bfloat16 and float16."""

    name = "triton"
    graph_capture = "always"

    def __init__(self) -> None:
        self._registered: set[str] = set()

    @property
    def devices(self) -> tuple[str, ...]:
        return ("cuda", "cpu") if is_interpreted() else ("cuda",)

    def problem(self) -> ProviderError | None:
        if importlib.util.find_spec("triton") is None:
            return ProviderError("triton is not installed")
        if is_interpreted():
            return None
        if not torch.cuda.is_available():
            return ProviderError("there is no CUDA GPU")
        capability = torch.cuda.get_device_capability()
        if capability < MIN_CAPABILITY:
            return ProviderError("the GPU's compute capability is {}.{}, not 8.0 or more".format(*capability))
        return None

    def reasons_against(self, need: OpNeed) -> list[str]:
        reasons = super().reasons_against(need)
        if need.device == "cuda" and is_interpreted() and not torch.cuda.is_available():
            reasons.append("there is no CUDA GPU")
        if need.op not in _FAMILY_OF:
            reasons.append(no_kernel_for(need.op))
        if need.dtype not in FLOAT_TYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(FLOAT_TYPES)}")
        if need.kv_dtype is not None and need.kv_dtype != need.dtype:
            reasons.append(f"the cache must have q's dtype {need.dtype}, not {need.kv_dtype}")
        widest = max(need.head_dim or 0, need.head_dim_v or 0)
        if need.op in _HEAD_DIM_OPS and widest > MAX_HEAD_DIM:
            reasons.append(f"heads of {widest} channels: at most {MAX_HEAD_DIM} are served")
        if need.op in _LINEAR_OPS and need.dtype == "float32":
            reasons.append("products in float32 are the library's")
        unserved = need.features & _NO_KERNEL_FOR.get(need.op, frozenset())
        reasons += [f"it has no kernel for {feature}" for feature in sorted(unserved)]
        return reasons

    def prepare(self, op: str | None = None) -> None:
        for family in _FAMILIES if op is None else (_FAMILY_OF[op],):
            if family not in self._registered:
                self._register(family)
                self._registered.add(family)

    def _register(self, family: str) -> None:
        problem = self.problem()
        if problem is not None:
            raise problem
        module = _module(family)
        for info in _FAMILIES[family]:
            function = on_its_device(getattr(module, info.name))
            for key in self.devices:
                library(NAMESPACE).impl(info.name, function, key.upper())

    def overload(self, op: str) -> torch._ops.OpOverload:
        return overload(NAMESPACE, op)

    def rehearse(self, op: str, device: torch.device, operands: tuple, options: dict):
        """See `Provider.rehearse`: the function that serves an op runs without its launches, so what it allocates can
        be seen. None where kernels cannot run, and for operands that the function refuses or torch has no meta form
        of: a prediction is no place to fail."""
        if self.problem() is not None:
            return None
        with rehearsal(device), contextlib.suppress(Exception):
            return getattr(_module(_FAMILY_OF[op]), op)(*operands, **options)
        return None


@functools.cache
def _module(family: str):
    from triton.runtime import KernelInterface

    module = importlib.import_module(f"{PACKAGE}.{family}")
    # It calls functions of others, too.
    with_others = [m for name, m in sys.modules.items() if name.startswith(f"{PACKAGE}.")]
    for kernel in [value for m in with_others for value in vars(m).values()]:
        if isinstance(kernel, KernelInterface):
            settle_key(kernel)
            leave_out_in_rehearsals(kernel)
    return module


register_provider(TritonProvider())
