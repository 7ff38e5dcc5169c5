"""`pagebinder::compress_norm_rope_store`: `compress` of a mixed batch, with its state and entries in paged caches.

The softmax over a window is a running one: per channel its maximum m of z so far, l = sum of exp(z - m), and the sum
of exp(z - m) * kv. So a state is small, does not depend on how far a window has come, and tokens are added one after
the other: the entries have the same bits however a prompt is cut into steps.

    state of a request [c, 3, d] float32, zeros = no tokens yet
      slot 0   the next entry: a halves of the window before, b halves of this window so far (or just this window)
      slot 1   with overlap: this window's a halves so far
    a window closes: slot 0 becomes entry w = p // ratio, at entry_table[r, w // n], row w % n;
                     slot 1 moves to slot 0 and is empty again

States are checkpoints like those of a recurrence (`recurrent.checkpoints`): block i of `state_table` holds the state
after the last computed token of [i * B, (i + 1) * B). In both tables 0 is the null block, which is never written.

T tokens, R requests, L tokens of a chunk, d width of an entry, c slots, N blocks, B tokens per state block, n entries
per entry block.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.compress.compress import check_compress, check_fake, norm_and_rotate
from pagebinder.custom_ops.latent.layouts import require, row_layout, rows_per_block, store_rows
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.recurrent.checkpoints import check_metadata, scan_requests

# Below every z, and finite: what is empty then needs no case of its own, not even beside a z of -inf.
EMPTY = torch.finfo(torch.float32).min


def compress_norm_rope_store_reference(
    kv_TC,
    gate_TC,
    position_bias,
    norm_weight,
    inv_freq,
    state_cache,
    state_table,
    entry_cache,
    entry_table,
    seq_lens,
    query_start_loc,
    *,
    ratio,
    overlap,
    eps,
    rope_scale,
    block_size,
    layout="plain",
    rope_dim=0,
):
    """Advance the states of a step's requests and store the entries whose last token is among the new ones.

    Args:
        kv_TC ... inv_freq: as in `compress_reference`; all tokens of a step, padding behind query_start_loc[R].
        state_cache: [N, c, 3, d] float32. state_table: [R or more, M] int32, block_size tokens per block.
        entry_cache: rows of width d in `layout` (`latent.layouts`). entry_table: [R or more, M'] int32.
        seq_lens: [R] int32, tokens including the new ones. query_start_loc: [R + 1] int32.
    Raises:
        ValueError: operands or metadata do not fit, a length exceeds a table, a block id is not valid, or the block
            of a request's start state is null. Nothing is written then, except where a state's block is not valid.
    """
    width = check_compress(kv_TC, gate_TC, position_bias, norm_weight, inv_freq, ratio, overlap)
    shape = (2 if overlap else 1, 3, width)
    require(
        state_cache.shape[1:] == shape and state_cache.dtype == torch.float32,
        "state_cache is [N, c, 3, d] float32",
    )
    check_metadata(len(kv_TC), state_table, seq_lens, query_start_loc, block_size)
    requests, positions = token_positions(seq_lens, query_start_loc)
    closing = ((positions + 1) % ratio == 0).nonzero().flatten()
    entries, requests = positions[closing] // ratio, requests[closing]
    slots = entry_slots(entry_cache, entry_table, requests, entries, layout, width, rope_dim, len(seq_lens))
    z_TC = gate_TC.to(torch.float32, copy=True)
    z_TC[: len(positions)] += position_bias.float()[positions % ratio]
    closes_T = torch.zeros(len(kv_TC), dtype=torch.bool, device=kv_TC.device)
    closes_T[closing] = True
    raw = kv_TC.new_zeros((len(kv_TC), width), dtype=torch.float32)
    operands, metadata = [kv_TC.float(), z_TC, closes_T], (state_table, seq_lens, query_start_loc)
    scan_requests(running_softmax_scan, operands, raw, state_cache, *metadata, block_size)
    rows = norm_and_rotate(raw[closing], norm_weight, inv_freq, entries * ratio, eps, rope_scale)
    store_rows(rows[slots >= 0], entry_cache, slots[slots >= 0], layout, rope_dim)


def running_softmax_scan(state_RS3D, kv_RLC, z_RLC, closes_RL):
    """state [R, c, 3, d], kv and z [R, L, c * d] float32 -> (entries before the norm [R, L, d], new state).

    Rows where no window closes are zeros. Tokens are added one by one, so cutting L changes no bit.
    """
    num_slots, width = state_RS3D.shape[1], state_RS3D.shape[-1]
    out = torch.zeros_like(kv_RLC[..., :width])
    for t in range(kv_RLC.shape[1]):
        # [a | b]: the a half is of slot 1, the b half of slot 0; without overlap there is one of each
        kv, z = (x[:, t].unflatten(-1, (num_slots, width)).flip(1) for x in (kv_RLC, z_RLC))
        state_RS3D = _add_token(state_RS3D, kv, z)
        closes = closes_RL[:, t]
        _, total, weighted = state_RS3D[:, 0].unbind(1)
        out[:, t] = (weighted / total).where(closes[:, None], 0.0)
        moved = torch.cat([state_RS3D[:, 1:], torch.zeros_like(state_RS3D[:, :1])], dim=1)
        state_RS3D = moved.where(closes[:, None, None, None], state_RS3D)
    return out, state_RS3D


def _add_token(state_RS3D, kv_RSD, z_RSD):
    most, total, weighted = state_RS3D.unbind(2)
    most = most.where(total > 0, EMPTY)
    higher = torch.maximum(most, z_RSD)
    kept, weight = torch.exp(most - higher), torch.exp(z_RSD - higher)
    total, weighted = total * kept + weight, weighted * kept + weight * kv_RSD
    return torch.stack([higher.where(total > 0, 0.0), total, weighted], dim=2)


def token_positions(seq_lens, query_start_loc) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and absolute position of every token before query_start_loc[R], int64."""
    lengths = query_start_loc.diff().long()
    requests = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    first = seq_lens.long() - lengths - query_start_loc[:-1].long()
    return requests, torch.arange(len(requests), device=lengths.device) + first[requests]


def entry_slots(entry_cache, entry_table, requests_E, entries_E, layout, width, rope_dim, num_requests):
    """Slots of entries (block * n + row), -1 in a null block. Raises ValueError where there is none."""
    per_block = rows_per_block(entry_cache, layout, width, rope_dim)
    require(entry_table.dtype == torch.int32 and entry_table.dim() == 2, "entry_table is [R, M] int32")
    require(len(entry_table) >= num_requests, "entry_table must have at least as many rows as requests")
    columns = entries_E // per_block
    require(bool((columns < entry_table.shape[1]).all()), "a seq_len exceeds its entry table")
    blocks = entry_table[requests_E, columns].long()
    require(
        bool(((blocks >= 0) & (blocks < len(entry_cache))).all()), "a block id in entry_table is not valid"
    )
    return (blocks * per_block + entries_E % per_block).masked_fill(blocks == 0, -1)


def _fake(
    kv, gate, position_bias, norm_weight, inv_freq, state_cache, state_table, entry_cache, *_, **options
):
    width = check_fake(kv, norm_weight, options["overlap"])
    torch._check(state_cache.dim() == 4, lambda: "state_cache is [N, c, 3, d]")
    if options.get("layout", "plain") != "plain":
        row_layout(options["layout"], width, options.get("rope_dim", 0))


COMPRESS_NORM_ROPE_STORE = define_op(
    "compress_norm_rope_store",
    "(Tensor kv, Tensor gate, Tensor position_bias, Tensor? norm_weight, Tensor inv_freq, Tensor(a!) state_cache, "
    "Tensor state_table, Tensor(b!) entry_cache, Tensor entry_table, Tensor seq_lens, Tensor query_start_loc, *, "
    "int ratio, bool overlap, float eps, float rope_scale, int block_size, "
    'str layout="plain", int rope_dim=0) -> ()',
    reference=compress_norm_rope_store_reference,
    fake=_fake,
)
