"""The `flash_attn` provider: FlashAttention 2 over pages, through `flash_attn_varlen_func`.

It wants pages as [N, B, G, D], which our cache gives without a copy: any strides will do but the last. Lengths stay
on the device and bounds follow from shapes (a step has at most T queries of a request, a table holds at most M * B
keys), so calls can be captured.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.optional.library_provider import AttentionLibrary, library_function, windows
from pagebinder.custom_ops.providers import OpNeed, register_provider

PAGE_MULTIPLE = 256


class FlashAttnProvider(AttentionLibrary):
    name = "flash_attn"
    devices = ("cuda",)
    graph_capture = "always"
    module, package = "flash_attn", "flash-attn>=2.6"
    features = frozenset({"window", "soft_cap", "alibi", "sinks", "bidirectional"})

    def reasons_against(self, need: OpNeed) -> list[str]:
        reasons = super().reasons_against(need)
        if need.block_size is not None and need.block_size % PAGE_MULTIPLE:
            reasons.append(
                f"blocks of {need.block_size} tokens: its pages are multiples of {PAGE_MULTIPLE} "
                f"(CompileConfig(block_size={PAGE_MULTIPLE}))"
            )
        return reasons

    def attend(
        self, q, k_NGBD, v_NGBD, table, seq_lens, query_start_loc, *, scale, alibi_slopes, needs_lse, window, chunk,
        soft_cap, causal,
    ):  # fmt: skip
        lens = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        result = library_function(self.module, "flash_attn_varlen_func")(
            q, k_NGBD.transpose(1, 2), v_NGBD.transpose(1, 2), query_start_loc, lens, len(q),
            table.shape[1] * k_NGBD.shape[2], softmax_scale=scale, causal=causal, window_size=windows(window, causal),
            softcap=soft_cap or 0.0, alibi_slopes=alibi_slopes, block_table=table, return_attn_probs=needs_lse,
        )  # fmt: skip
        if not needs_lse:
            return result, None
        out, lse_HT, *_ = result
        return out, lse_HT.transpose(0, 1)


register_provider(FlashAttnProvider())
