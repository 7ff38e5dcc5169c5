"""`pagebinder_cpu::paged_mla_attention`: each request in the form of MLA that takes less arithmetic.

Legend of `custom_ops/mla/mla.py`. Per head, for n new tokens that see S rows in p pairs of a query and a row:

    absorbed   n (N + V) L   +   p (L + P + L)      decodes, short chunks, lists of rows: rows are read as they are
    expanded   S (N + V) L   +   p (N + P + V)      long chunks: K and V of the rows, some heads at a time

    tokens     | d | d | d | d | prefill chunk ......... | d | padding |
    runs       [ absorbed      ][ expanded, alone        ][ab.]           one call of the attention kernel each

Neighbours that are absorbed are one run. The form of a request depends on that request alone. Lists of groups become
lists of tokens first; a request whose queries list all groups that they see needs none.
"""

from __future__ import annotations

import itertools

import torch

from pagebinder.custom_ops.cpu.torch_threads import torch_threads
from pagebinder.custom_ops.library import define_schema, library, overload
from pagebinder.custom_ops.mla.groups import listed_tokens
from pagebinder.custom_ops.mla.mla import check_mla_operands
from pagebinder.custom_ops.mla.paged_mla import PAGED_MLA_ATTENTION, check_step, stored_rope
from pagebinder.custom_ops.sparse.sparse_mla import gather_rows

NAMESPACE = "pagebinder_cpu"
# Up to so many tokens our kernel is faster than a library's product, which brings the weights into its own order
# first. A transposed weight takes the library longer.
FEW_TOKENS = {"absorb": 16, "project": 64}
# That kernel works in steps of up to two vectors of 16 floats.
MIN_LATENT = 32
EXPANDED_BYTES = 64 << 20
# Shorter steps gain nothing from a call of their own.
EXPANDED_FROM_TOKENS = 16


def paged_mla_attention(
    q_nope, q_rope, w_k, w_v, cache, table, seq_lens, query_start_loc, indices=None, sinks=None, *, scale,
    window=None, layout="plain", ratio=1,
):  # fmt: skip
    """See `paged_mla_attention_reference`; float32, bfloat16 or float16."""
    check_mla_operands(q_nope, q_rope, w_k, w_v, indices, sinks, ratio)
    block_size, starts, lens = check_step(
        q_nope, q_rope, w_k, cache, table, seq_lens, query_start_loc, layout
    )
    news = [end - start for start, end in itertools.pairwise(starts)]
    sizes = (w_k.shape[2], q_rope.shape[2], q_nope.shape[2], w_v.shape[1])
    sees_all = [indices is None] * len(lens)
    if indices is not None and (ratio > 1 or window is not None):
        indices, lists_all = listed_tokens(indices, seq_lens, query_start_loc, ratio, window)
        if ratio > 1:  # else an index may be there twice
            sees_all = [bool(lists_all[start:end].all()) for start, end in itertools.pairwise(starts)]
    long = [a and is_expanded_cheaper(n, s, window, *sizes) for a, n, s in zip(sees_all, news, lens)]
    out = q_nope.new_empty((*q_nope.shape[:2], w_v.shape[1]))
    out[starts[-1] :] = 0
    for first, last in _runs(long, sees_all):
        options = {"sinks": sinks, "scale": scale, "window": window if sees_all[first] else None}
        step = slice(starts[first], starts[last])
        operands = (q_nope[step], q_rope[step], w_k, w_v)
        if long[first]:
            begin = first_seen(news[first], lens[first], window)
            rows = _rows(cache, table[first], begin, lens[first], block_size, layout, *sizes[:2])
            _expanded(*operands, rows, out[step], **options)
        else:
            of_run = (
                table[first:last],
                seq_lens[first:last],
                query_start_loc[first : last + 1] - starts[first],
            )
            listed = None if sees_all[first] else indices[step]
            _absorbed(*operands, cache, *of_run, listed, out[step], layout=layout, **options)
    return out


def is_expanded_cheaper(num_new, seq_len, window, latent_dim, rope_dim, nope_dim, value_dim) -> bool:
    """By multiplications per head, see above."""
    if num_new < EXPANDED_FROM_TOKENS:
        return False
    seen = seq_len - first_seen(num_new, seq_len, window)
    pairs = num_new * (seen - num_new) + num_new * (num_new + 1) // 2
    pairs = pairs if window is None else min(pairs, num_new * window)
    weights = (nope_dim + value_dim) * latent_dim
    absorbed = num_new * weights + pairs * (2 * latent_dim + rope_dim)
    return seen * weights + pairs * (nope_dim + rope_dim + value_dim) < absorbed


def first_seen(num_new, seq_len, window) -> int:
    """The first position that the new tokens of a request see."""
    return 0 if window is None else max(0, seq_len - num_new - window + 1)


def _runs(long: list[bool], sees_all: list[bool]) -> list[tuple[int, int]]:
    """Half-open ranges of requests: one for every long one, one for neighbours that are not and are as listed."""
    runs, kinds = [], list(zip(long, sees_all))
    for (is_long, _), requests in itertools.groupby(range(len(long)), key=kinds.__getitem__):
        requests = list(requests)
        runs += [(r, r + 1) for r in requests] if is_long else [(requests[0], requests[-1] + 1)]
    return runs


# ---- absorbed --------------------------------------------------------------------------------------------------


def _absorbed(
    q_nope, q_rope, w_k, w_v, cache, table, seq_lens, query_start_loc, indices, out, *, sinks, scale, window,
    layout,
) -> None:  # fmt: skip
    num_tokens, num_heads, _ = q_nope.shape
    latent_dim, rope_dim = w_k.shape[2], q_rope.shape[2]
    q = q_nope.new_empty((num_tokens, num_heads, latent_dim + rope_dim))
    _head_product(q_nope, w_k, q[..., :latent_dim], dotted=False)
    q[..., latent_dim:] = q_rope
    if layout == "plain" and indices is None:
        attended = q_nope.new_empty((num_tokens, num_heads, latent_dim))
        attend = overload(NAMESPACE, "latent_attention")
        attend(q, cache, table, seq_lens, query_start_loc, sinks, attended, scale=scale, window=window)
    else:
        paged, nothing = (cache, table), (None, None)
        of_window, of_all = (nothing, paged) if window is None else (paged, nothing)
        attended = overload(NAMESPACE, "sparse_mla_attention")(
            q, *of_window, *of_all, indices, seq_lens, query_start_loc, sinks, scale=scale, window=window or 0,
            ratio=1, head_dim_v=latent_dim, layout=layout, rope_dim=stored_rope(layout, rope_dim),
        )  # fmt: skip
    _head_product(attended, w_v, out, dotted=True)


def _head_product(x_THI, weight, out_THO, *, dotted: bool) -> None:
    """out = x weight_h for each head: weight [H, I, O], or [H, O, I] if `dotted`."""
    few = FEW_TOKENS["project" if dotted else "absorb"]
    if len(x_THI) <= few and weight.shape[2] >= MIN_LATENT:
        overload(NAMESPACE, "mla_head_product")(x_THI, weight, out_THO, dotted)
    else:
        with torch_threads(limited=False):
            product = torch.bmm(x_THI.transpose(0, 1), weight.transpose(1, 2) if dotted else weight)
        out_THO.copy_(product.transpose(0, 1))


# ---- expanded --------------------------------------------------------------------------------------------------


def _rows(cache, blocks, begin, end, block_size, layout, latent_dim, rope_dim):
    """The rows of positions [begin, end) of a request: [S, L + P]."""
    if layout != "plain":
        return gather_rows(
            cache, blocks, torch.arange(begin, end, device="cpu"), layout, rope_dim, latent_dim + rope_dim
        )
    ids = blocks[begin // block_size : -(-end // block_size)]
    if bool(((ids < 0) | (ids >= len(cache))).any()):
        raise ValueError("a block id in the table is not valid")
    return cache.index_select(0, ids).flatten(0, 1)[begin % block_size :][: end - begin]


def _expanded(q_nope, q_rope, w_k, w_v, rows, out, *, sinks, scale, window) -> None:
    latent_dim, nope_dim, value_dim = w_k.shape[2], w_k.shape[1], w_v.shape[1]
    q = torch.cat([q_nope, q_rope], dim=-1)
    (num_tokens, num_heads, width), num_rows = q.shape, len(rows)
    latent, k_rope = rows.to(q.dtype).split((latent_dim, width - nope_dim), dim=1)
    heads_at_once = max(1, EXPANDED_BYTES // (num_rows * (width + value_dim) * q.element_size()))
    table = torch.zeros((1, 1), dtype=torch.int32, device="cpu")
    lens = torch.tensor([num_rows], dtype=torch.int32, device="cpu")
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device="cpu")
    for first in range(0, num_heads, heads_at_once):
        heads = slice(first, first + heads_at_once)
        weight = torch.cat([w_k[heads], w_v[heads]], dim=1)
        expanded = q.new_empty((1, len(weight), num_rows, width + value_dim))  # one block of all rows
        with torch_threads(limited=False):
            kv = torch.nn.functional.linear(latent, weight.flatten(0, 1)).unflatten(1, weight.shape[:2])
            expanded[0, :, :, :nope_dim] = kv[..., :nope_dim].transpose(0, 1)
            expanded[0, :, :, nope_dim:width] = k_rope
            expanded[0, :, :, width:] = kv[..., nope_dim:].transpose(0, 1)
        out[:, heads] = overload(NAMESPACE, "paged_attention")(
            q[:, heads], expanded, table, lens, starts, None if sinks is None else sinks[heads],
            head_dim_v=value_dim, scale=scale, window=window,
        )  # fmt: skip


define_schema(NAMESPACE, PAGED_MLA_ATTENTION)
library(NAMESPACE).impl("paged_mla_attention", paged_mla_attention, "CPU")
