"""The `cpu` provider: C++ SIMD kernels, built on first use, registered in the namespace `pagebinder_cpu`."""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention import paged
from pagebinder.custom_ops.cpu import build, packed
from pagebinder.custom_ops.library import OpInfo, define_schema, overload
from pagebinder.custom_ops.linear import linear
from pagebinder.custom_ops.providers import OpNeed, Provider, register_provider
from pagebinder.errors import ProviderError

NAMESPACE = "pagebinder_cpu"
FLOAT_TYPES = ("float32", "bfloat16", "float16")

_SERVED: dict[str, OpInfo] = {
    info.name: info
    for info in (paged.KV_CACHE_WRITE, paged.PAGED_ATTENTION, paged.PAGED_ATTENTION_LSE, linear.LINEAR)
}
for _info in _SERVED.values():
    define_schema(NAMESPACE, _info)
_SERVED[packed.PACKED_ATTENTION.name] = packed.PACKED_ATTENTION  # made of the paged kernel, see there


class CpuProvider(Provider):
    """Serves linear layers, and every feature of the paged ops, for float32, bfloat16 and float16."""

    name = "cpu"
    devices = ("cpu",)
    graph_capture = "never"

    def problem(self) -> ProviderError | None:
        return build.problem()

    def reasons_against(self, need: OpNeed) -> list[str]:
        reasons = super().reasons_against(need)
        if need.op not in _SERVED:
            reasons.append(f"it has no kernel for {need.op}")
        if need.dtype not in FLOAT_TYPES:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(FLOAT_TYPES)}")
        if need.kv_dtype is not None and need.kv_dtype != need.dtype:
            reasons.append(f"the cache must have q's dtype {need.dtype}, not {need.kv_dtype}")
        return reasons

    def prepare(self) -> None:
        build.load()

    def overload(self, op: str) -> torch._ops.OpOverload:
        return overload(NAMESPACE, op)


register_provider(CpuProvider())
