"""The `flex_attention` provider: torch's own attention with masks and scores as functions.

Keys of all requests are gathered from their pages into one sequence, and a query sees those of its own request that
the layer's mask allows. Gathering needs lengths on the host, so graphs are cut around it. On a GPU it is compiled on
its first call; on a CPU it is torch's plain form: correct, and slow.
"""

from __future__ import annotations

import functools

import torch

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.optional.library_provider import AttentionLibrary, library_function
from pagebinder.custom_ops.providers import register_provider

MODULE = "torch.nn.attention.flex_attention"


class FlexAttentionProvider(AttentionLibrary):
    name = "flex_attention"
    devices = ("cuda", "cpu")
    graph_capture = "never"
    module, package = MODULE, "torch"
    features = frozenset({"window", "chunk", "soft_cap", "alibi", "sinks", "bidirectional"})
    dtypes = ("float32", "bfloat16", "float16")

    def attend(
        self, q, k_NGBD, v_NGBD, table, seq_lens, query_start_loc, *, scale, alibi_slopes, needs_lse, window, chunk,
        soft_cap, causal,
    ):  # fmt: skip
        lens, starts = seq_lens.long(), query_start_loc.long()
        block_size, num_keys = k_NGBD.shape[2], int(lens.sum())
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        num_tokens = int(starts[-1])
        if not num_tokens or not num_keys:
            return out, lse
        rows = torch.arange(len(lens), device=q.device)
        row_of_key = rows.repeat_interleave(lens, output_size=num_keys)
        ends = lens.cumsum(0)
        key_at = torch.arange(num_keys, device=q.device) - (ends - lens)[row_of_key]
        blocks = table.long()[row_of_key, key_at // block_size]
        k, v = (x[blocks, :, key_at % block_size].transpose(0, 1)[None] for x in (k_NGBD, v_NGBD))
        counts = starts.diff()
        row_of_query = rows.repeat_interleave(counts, output_size=num_tokens)
        query_at = torch.arange(num_tokens, device=q.device) + (lens - starts[1:])[row_of_query]

        def sees(batch, head, i, j):
            own = row_of_query[i] == row_of_key[j]
            return own & visible_keys(query_at[i], key_at[j], window=window, chunk=chunk, causal=causal)

        def score(value, batch, head, i, j):
            if soft_cap is not None:
                value = soft_cap * torch.tanh(value / soft_cap)
            if alibi_slopes is not None:
                value = value + alibi_slopes[head] * (key_at[j] - query_at[i])
            return value

        mask = library_function(MODULE, "create_block_mask")(
            sees, None, None, num_tokens, num_keys, device=q.device
        )
        found, found_lse = _attention(q.device.type)(
            q[:num_tokens].transpose(0, 1)[None].contiguous(), k.contiguous(), v.contiguous(), score_mod=score,
            block_mask=mask, scale=scale, enable_gqa=True, **_with_lse(),
        )  # fmt: skip
        out[:num_tokens] = found[0].transpose(0, 1)
        lse[:num_tokens] = _lse(found_lse)[0].transpose(0, 1)
        return out, lse


@functools.cache
def _attention(device: str):
    function = library_function(MODULE, "flex_attention")
    return torch.compile(function, dynamic=True) if device == "cuda" else function


@functools.cache
def _with_lse() -> dict:
    """Later versions of torch ask for the log-sum-exp by another argument."""
    request = getattr(__import__(MODULE, fromlist=["AuxRequest"]), "AuxRequest", None)
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def _lse(result) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.lse


register_provider(FlexAttentionProvider())
