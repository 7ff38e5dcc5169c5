"""The `flashinfer` provider: FlashInfer's attention over pages.

Its plan for a step is made on the host from lists of pages: lengths are read back from the device in each layer, so
graphs are cut around it. Layers with the same options share a plan as long as what was read back is the same. K and V
pages are two views [N, G, B, D] of our cache with equal strides ("HND").

    block_table  2 5 .    seq_lens 20, 9    B = 16        indptr 0 2 3    indices 2 5 4    last page 4 9
                 4 . .
"""

from __future__ import annotations

import functools

import torch

from pagebinder.custom_ops.optional.library_provider import AttentionLibrary, library_function, windows
from pagebinder.custom_ops.providers import register_provider

WORKSPACE_BYTES = 128 << 20
LOG_2 = 0.6931471805599453  # its log-sum-exp is to base 2


class FlashInferProvider(AttentionLibrary):
    name = "flashinfer"
    devices = ("cuda",)
    graph_capture = "never"
    module, package = "flashinfer", "flashinfer-python"
    features = frozenset({"window", "soft_cap", "sinks"})

    def attend(
        self, q, k_NGBD, v_NGBD, table, seq_lens, query_start_loc, *, scale, alibi_slopes, needs_lse, window, chunk,
        soft_cap, causal,
    ):  # fmt: skip
        step = tuple(t.to("cpu", copy=True) for t in (table, seq_lens, query_start_loc))
        options = {
            "causal": causal, "sm_scale": scale, "window_left": windows(window, causal)[0],
            "logits_soft_cap": soft_cap or 0.0, "q_data_type": q.dtype, "kv_data_type": k_NGBD.dtype,
        }  # fmt: skip
        sizes = (q.shape[1], k_NGBD.shape[1], q.shape[2], k_NGBD.shape[2])
        plan = _plan(self.module, q.device, sizes, tuple(options.items()))
        plan.follow(step, sizes, options)
        wrapper, num_tokens = plan.wrapper, int(step[2][-1])
        real = q[:num_tokens].contiguous()
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        if not needs_lse:
            out[:num_tokens] = wrapper.run(real, (k_NGBD, v_NGBD))
            return out, None
        lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
        out[:num_tokens], base_2 = wrapper.run(real, (k_NGBD, v_NGBD), return_lse=True)
        lse[:num_tokens] = base_2 * LOG_2
        return out, lse


def page_lists(
    table: torch.Tensor, seq_lens: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(where each request's pages begin [R + 1], the pages of all, tokens in the last page of each [R]), int32."""
    counts = -(-seq_lens // block_size)
    columns = torch.arange(table.shape[1], device="cpu")
    indices = table[columns[None] < counts[:, None]]
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    last_page = torch.where(counts > 0, seq_lens - (counts - 1) * block_size, 0)
    return indptr.int(), indices.int(), last_page.int()


class Plan:
    """FlashInfer's wrapper for layers of the same sizes and options, and the step that it was planned for."""

    def __init__(self, module: str, device: torch.device):
        self.device = device
        self.wrapper = library_function(module, "BatchPrefillWithPagedKVCacheWrapper")(
            _workspace(device), "HND"
        )
        self.step: tuple[torch.Tensor, ...] = ()

    def follow(self, step: tuple[torch.Tensor, ...], sizes: tuple[int, ...], options: dict) -> None:
        """Plan for `step` (block table, lengths, where queries begin; on the host), unless it is that already."""
        if self.step and all(map(torch.equal, self.step, step)):
            return
        self.step = ()
        table, seq_lens, query_start_loc = step
        indptr, indices, last_page = page_lists(table, seq_lens, sizes[-1])
        self.wrapper.plan(query_start_loc, indptr, indices.to(self.device), last_page, *sizes, **options)
        self.step = step


@functools.cache
def _plan(module: str, device: torch.device, sizes: tuple[int, ...], options: tuple) -> Plan:
    return Plan(module, device)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Of floats; each wrapper has one of its own for the numbers of its plan."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


register_provider(FlashInferProvider())
