"""What adapters of attention libraries have in common: reasons, registration, and what libraries leave out.

our cache [N, G, B, D + Dv], one tensor           K = cache[..., :D], V = cache[..., D:], views with equal strides
sinks          out * sigmoid(lse - sink)          no library needs to know them, if it returns the log-sum-exp
padding        rows from query_start_loc[R] on    libraries leave them unwritten: they become zeros
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from pagebinder.custom_ops.attention.paged import PAGED_ATTENTION, check_attention, check_options
from pagebinder.custom_ops.library import define_schema, library, overload
from pagebinder.custom_ops.providers import OpNeed, Provider, no_kernel_for
from pagebinder.errors import ProviderError


class AttentionLibrary(Provider):
    """Serves `paged_attention` by `attend` of a subclass.

    `module`, `package`: what is imported, and how it is installed. `features`, `dtypes`, `max_head_dim`: what the
    library can do.
    """

    module: str
    package: str
    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    max_head_dim = 256
    min_capability = (8, 0)

    def __init__(self) -> None:
        define_schema(self.namespace, PAGED_ATTENTION)
        self._is_registered = False

    def problem(self) -> ProviderError | None:
        return library_problem(
            self.module, self.package, None if "cpu" in self.devices else self.min_capability
        )

    def reasons_against(self, need: OpNeed) -> list[str]:
        reasons = super().reasons_against(need)
        if "cpu" in self.devices and need.device == "cuda" and not torch.cuda.is_available():
            reasons.append("there is no CUDA GPU")
        if need.op != PAGED_ATTENTION.name:
            return [*reasons, no_kernel_for(need.op)]
        if need.dtype not in self.dtypes:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(self.dtypes)}")
        if need.kv_dtype is not None and need.kv_dtype != need.dtype:
            reasons.append(f"the cache must have q's dtype {need.dtype}, not {need.kv_dtype}")
        if (need.head_dim or 0) > self.max_head_dim:
            reasons.append(f"heads of {need.head_dim} channels: at most {self.max_head_dim} are served")
        if need.head_dim_v is not None and need.head_dim_v != need.head_dim:
            reasons.append(f"K and V of {need.head_dim} and {need.head_dim_v} channels: they must be as wide")
        return reasons + [f"it cannot do {feature}" for feature in sorted(need.features - self.features)]

    def prepare(self, op: str | None = None) -> None:
        problem = self.problem()
        if problem is not None:
            raise problem
        if not self._is_registered:
            for device in self.devices:
                library(self.namespace).impl(PAGED_ATTENTION.name, self.paged_attention, device.upper())
            self._is_registered = True

    def overload(self, op: str) -> torch._ops.OpOverload:
        return overload(self.namespace, op)

    def paged_attention(
        self, q, kv_cache, block_table, seq_lens, query_start_loc, sinks=None, alibi_slopes=None, *, head_dim_v,
        scale, window=None, chunk=None, soft_cap=None, causal=True,
    ) -> torch.Tensor:  # fmt: skip
        """See `paged_attention_reference`."""
        step = (block_table, seq_lens, query_start_loc)
        check_attention(q, kv_cache, *step, sinks, alibi_slopes, head_dim_v)
        check_options(window=window, chunk=chunk, soft_cap=soft_cap)
        if not len(q):
            return q.new_empty((0, q.shape[1], head_dim_v))
        k, v = kv_cache.split([q.shape[2], head_dim_v], dim=3)
        table = block_table[: len(seq_lens)]
        options = {"window": window, "chunk": chunk, "soft_cap": soft_cap, "causal": causal}
        out, lse_TH = self.attend(
            q, k, v, table, seq_lens, query_start_loc, scale=scale, alibi_slopes=alibi_slopes,
            needs_lse=sinks is not None, **options,
        )  # fmt: skip
        if sinks is not None:
            out = out * torch.sigmoid(lse_TH - sinks).unsqueeze(-1)
        is_real = torch.arange(len(q), device=q.device) < query_start_loc[-1]
        return torch.where(is_real[:, None, None], out, 0).to(q.dtype)

    def attend(
        self, q, k_NGBD, v_NGBD, table, seq_lens, query_start_loc, *, scale, alibi_slopes, needs_lse, window, chunk,
        soft_cap, causal,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Without sinks: out [T, H, D], anything in padding; log-sum-exp [T, H] float32 if it is needed."""
        raise NotImplementedError


def library_problem(
    module: str, package: str, min_capability: tuple[int, int] | None
) -> ProviderError | None:
    """What keeps a library from working here. `min_capability`: of the GPU it needs; None: it needs none."""
    if importlib.util.find_spec(module) is None:
        return ProviderError(f"{module} is not installed (pip install {package})")
    if min_capability is None:
        return None
    if not torch.cuda.is_available():
        return ProviderError("there is no CUDA GPU")
    capability = torch.cuda.get_device_capability()
    if capability < min_capability:
        wanted = "{}.{}".format(*min_capability)
        return ProviderError(
            "the GPU's compute capability is {}.{}, not {} or more".format(*capability, wanted)
        )
    return None


def library_function(module: str, name: str) -> Callable:
    """A function or class of an optional package. Raises ProviderError where this version has none of the name."""
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise ProviderError(f"the installed version of {module} has no {name}; install a later one")
    return found


def windows(window: int | None, causal: bool) -> tuple[int, int]:
    """Keys to the left and right of a query's position that it sees besides its own, -1: all of them."""
    left = -1 if window is None else window - 1
    return left, 0 if causal else left
