"""The `triton` provider: kernels for CUDA, registered in the namespace `pagebinder_triton`.

Under TRITON_INTERPRET=1, set before triton is first imported, Triton's interpreter runs the same kernels on the CPU:
slow, for tests and for looking into a kernel. They are served there only to those who ask for them by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch

from pagebinder.custom_ops.activation import gated_activation
from pagebinder.custom_ops.attention import merge_states, paged, qk_norm_rope_write, quantized_paged, unified
from pagebinder.custom_ops.latent import write
from pagebinder.custom_ops.library import OpInfo, define_schema, library, overload
from pagebinder.custom_ops.mla import paged_mla
from pagebinder.custom_ops.norm import rms_norm
from pagebinder.custom_ops.providers import OpNeed, Provider, register_provider
from pagebinder.custom_ops.rope import rope
from pagebinder.errors import ProviderError

NAMESPACE = "pagebinder_triton"
FLOAT_TYPES = ("float32", "bfloat16", "float16")
MIN_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256

# module beside this one -> the ops it has a function for, of the op's name
_FAMILIES: dict[str, tuple[OpInfo, ...]] = {
    "cache_write": (paged.KV_CACHE_WRITE, quantized_paged.QUANTIZED_KV_CACHE_WRITE),
    "paged_attention": (
        paged.PAGED_ATTENTION,
        paged.PAGED_ATTENTION_LSE,
        quantized_paged.QUANTIZED_PAGED_ATTENTION,
    ),
    "unified_attention": (
        unified.UNIFIED_ATTENTION,
        unified.ATTENTION_PART,
        merge_states.MERGE_ATTENTION_STATES,
    ),
    "latent": (write.LATENT_CACHE_WRITE, paged_mla.PAGED_MLA_ATTENTION),
    "rms_norm": (rms_norm.RMS_NORM, rms_norm.ADD_RMS_NORM),
    "rope": (rope.ROPE,),
    "gated_activation": (gated_activation.GATED_ACTIVATION,),
    "qk_norm_rope_write": (qk_norm_rope_write.QK_NORM_ROPE_WRITE,),
}
_FAMILY_OF = {info.name: family for family, infos in _FAMILIES.items() for info in infos}
# Features that a latent row or its reader may ask for, see OpNeed, and no kernel serves.
_NO_KERNEL_FOR = frozenset({"fp8_v4", "fp8_v32", "fp8_index", "fp4_index", "indices"})
_HEAD_DIM_OPS = (
    "paged_attention",
    "paged_attention_lse",
    "quantized_paged_attention",
    "unified_attention",
    "attention_part",
)

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
            reasons.append(f"it has no kernel for {need.op}")
        if need.dtype not in FLOAT_TYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(FLOAT_TYPES)}")
        if need.kv_dtype is not None and need.kv_dtype != need.dtype:
            reasons.append(f"the cache must have q's dtype {need.dtype}, not {need.kv_dtype}")
        widest = max(need.head_dim or 0, need.head_dim_v or 0)
        if need.op in _HEAD_DIM_OPS and widest > MAX_HEAD_DIM:
            reasons.append(f"heads of {widest} channels: at most {MAX_HEAD_DIM} are served")
        reasons += [f"it has no kernel for {feature}" for feature in sorted(need.features & _NO_KERNEL_FOR)]
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
        module = importlib.import_module(f"pagebinder.custom_ops.triton.{family}")
        for info in _FAMILIES[family]:
            for key in self.devices:
                library(NAMESPACE).impl(info.name, getattr(module, info.name), key.upper())

    def overload(self, op: str) -> torch._ops.OpOverload:
        return overload(NAMESPACE, op)


register_provider(TritonProvider())
