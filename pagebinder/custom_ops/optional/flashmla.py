"""The `flashmla` provider: absorbed multi-head latent attention over pages, through FlashMLA.

    q_nope [T, H, N] x w_k [H, N, 512] | q_rope [T, H, 64]  ->  queries [R, S, H, 576]       S: most of a request
    out [R, S, H, 512] x w_v [H, V, 512]                    ->  [T, H, V]

A request's queries stand at the end of its S, as its mask is aligned to the last one. How many there are is known on
the device only, unless every request has one: steps of decodes can be captured, others are cut around it.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_schema, library, overload
from pagebinder.custom_ops.mla.paged_mla import PAGED_MLA_ATTENTION
from pagebinder.custom_ops.optional.library_provider import library_function, library_problem
from pagebinder.custom_ops.providers import OpNeed, Provider, no_kernel_for, register_provider
from pagebinder.errors import ProviderError

LATENT_DIM, ROPE_DIM, PAGE_TOKENS = 512, 64, 64


class FlashMLAProvider(Provider):
    name = "flashmla"
    devices = ("cuda",)
    graph_capture = "uniform_decode"

    def __init__(self) -> None:
        define_schema(self.namespace, PAGED_MLA_ATTENTION)
        self._is_registered = False

    def problem(self) -> ProviderError | None:
        return library_problem("flash_mla", "flash-mla", (9, 0))

    def reasons_against(self, need: OpNeed) -> list[str]:
        reasons = super().reasons_against(need)
        if need.op != PAGED_MLA_ATTENTION.name:
            return [*reasons, no_kernel_for(need.op)]
        if need.dtype != "bfloat16":
            reasons.append(f"dtype {need.dtype} is not bfloat16")
        return reasons + [f"it cannot do {feature}" for feature in sorted(need.features)]

    def prepare(self, op: str | None = None) -> None:
        problem = self.problem()
        if problem is not None:
            raise problem
        if not self._is_registered:
            library(self.namespace).impl(PAGED_MLA_ATTENTION.name, self.paged_mla_attention, "CUDA")
            self._is_registered = True

    def overload(self, op: str) -> torch._ops.OpOverload:
        return overload(self.namespace, op)

    def paged_mla_attention(
        self, q_nope, q_rope, w_k, w_v, cache, table, seq_lens, query_start_loc, indices=None, sinks=None, *, scale,
        window=None, layout="plain", ratio=1,
    ) -> torch.Tensor:  # fmt: skip
        """See `paged_mla_attention_reference`. Raises ValueError for what FlashMLA does not have."""
        sizes = (w_k.shape[2], q_rope.shape[2], cache.shape[1])
        unserved = any(option is not None for option in (window, indices, sinks)) or ratio > 1
        if sizes != (LATENT_DIM, ROPE_DIM, PAGE_TOKENS) or unserved:
            raise ValueError(
                f"flashmla serves latents of {LATENT_DIM} + {ROPE_DIM} in blocks of {PAGE_TOKENS} tokens without "
                f"window, indices or sinks, not {sizes[0]} + {sizes[1]} in blocks of {sizes[2]}: choose another "
                "provider"
            )
        num_tokens, num_heads, num_reqs = len(q_nope), q_nope.shape[1], len(seq_lens)
        q_THD = torch.cat([torch.einsum("thn,hnl->thl", q_nope, w_k), q_rope], dim=2)
        rows = _rows(query_start_loc, num_tokens, num_reqs)
        q_RSHD = q_THD[:, None] if rows is None else q_THD[rows.clamp(min=0)]
        metadata, splits = library_function("flash_mla", "get_mla_metadata")(
            seq_lens, q_RSHD.shape[1] * num_heads, 1
        )
        latents, _ = library_function("flash_mla", "flash_mla_with_kvcache")(
            q_RSHD, cache.unsqueeze(2), table[:num_reqs], seq_lens, LATENT_DIM, metadata, splits, softmax_scale=scale,
            causal=True,
        )  # fmt: skip
        if rows is None:
            latents = latents[:, 0]
        else:
            latents = q_THD.new_zeros((num_tokens, num_heads, LATENT_DIM)).index_put_(
                (rows[rows >= 0],), latents[rows >= 0]
            )
        is_real = torch.arange(num_tokens, device=q_THD.device) < query_start_loc[-1]
        return torch.einsum("thl,hvl->thv", torch.where(is_real[:, None, None], latents, 0), w_v)


def _rows(query_start_loc: torch.Tensor, num_tokens: int, num_reqs: int) -> torch.Tensor | None:
    """Token of each place [R, S], -1: none; None where token r is request r's only one."""
    if query_start_loc.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # only steps of decodes are captured
    counts = query_start_loc.diff().long()
    if num_tokens == num_reqs and bool((counts == 1).all()):
        return None
    most = max(1, int(counts.max()))
    places = torch.arange(most, device=counts.device)[None] - (most - counts)[:, None]
    return torch.where(places >= 0, query_start_loc[:-1, None] + places, -1)


register_provider(FlashMLAProvider())
