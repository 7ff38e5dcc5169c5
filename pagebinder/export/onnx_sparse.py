"""Latent and compressed attention, indexers and hyper-connections in ONNX.

    mla_attention            Attention over rows [ latent | k_rope ] that all heads share (absorbed form)
    compress                 Compress: the last tokens' rows as a state, entries into a cache of their own
    index_topk               IndexTopK: scores of all keys, their TopK
    compressed_attention     CompressedAttention: one Attention over the rows of tokens and the compressed entries
    hyper_connection, ...    HyperConnection, HyperMix, HyperHead

    latents [b, S, D]     slot j of a row holds position j; a window is a mask, as in attention
    entries [b, E, d]     slot w holds entry w, of the tokens [w * ratio, (w + 1) * ratio); E >= S // ratio + 1
    window  [b, 2, n, C]  kv and gate of the last n tokens before this step

b sequences, L tokens of each, S slots, E slots of entries; else the legends of custom_ops/compress and sparse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.compress.compress import norm_and_rotate
from pagebinder.custom_ops.hyper.hyper import (
    hyper_connection_reference,
    hyper_head_reference,
    hyper_mix_reference,
)
from pagebinder.custom_ops.sparse.semantic import num_visible
from pagebinder.errors import ExportError
from pagebinder.export.onnx_functions import local_function
from pagebinder.export.onnx_step import NEGATIVE, attend, onnx_op, with_sinks


@dataclass(frozen=True)
class Entries:
    """What `compress` returns here: all entries so far [b, E, d], with this step's written."""

    rows: torch.Tensor


# ---- compressors -----------------------------------------------------------------------------------------------


def tokens_kept(ratio: int, overlap: bool) -> int:
    """Tokens before a step that may share an entry with its first token."""
    return (2 * ratio if overlap else ratio) - 1


def compress(step, kv, gate, position_bias, norm_weight, inv_freq, *, ratio, overlap, eps, rope_scale=1.0):
    window, entries = next(step.past), next(step.past)
    inputs = [
        window,
        entries,
        step.rows(kv),
        step.rows(gate),
        step.position_ids,
        position_bias,
        norm_weight,
        inv_freq,
    ]
    like = [(entries.dtype, entries.shape), (window.dtype, window.shape)]
    options = {"ratio": ratio, "overlap": overlap, "eps": eps, "rope_scale": rope_scale}
    entries, window = local_function(step, "Compress", _compress, inputs, like=like, **options)
    step.present += [window, entries]
    return Entries(entries)


def _compress(
    window, entries, kv, gate, position_ids, position_bias, norm_weight, inv_freq, *, ratio, overlap, eps, rope_scale
):  # fmt: skip
    """Writes every entry that the new tokens touch; one that is not complete is seen by none and written again."""
    behind, length, width = window.shape[2], kv.shape[1], entries.shape[2]
    rows_B2SC = torch.cat(
        [window, torch.stack([kv, gate], dim=1)], dim=2
    )  # row i is of position first - behind + i
    first = position_ids[:, :1]
    w_BE = first // ratio + torch.arange((length + ratio - 1) // ratio)
    span = behind + 1  # tokens that an entry weighs
    p_BEN = (w_BE[..., None] + 1) * ratio - span + torch.arange(span)
    index = (p_BEN - first[..., None] + behind).clamp(0, behind + length - 1).flatten(1)
    index = index[:, None, :, None].expand(-1, 2, -1, kv.shape[2])
    kv_BENC, z_BENC = rows_B2SC.gather(2, index).unflatten(2, (-1, span)).float().unbind(1)
    z_BENC = z_BENC + position_bias.float().repeat(span // ratio, 1)
    if overlap:  # the window before gives its a half, the entry's own its b half
        kv_BENC, z_BENC = (
            torch.cat([x[:, :, :ratio, :width], x[:, :, ratio:, width:]], dim=2) for x in (kv_BENC, z_BENC)
        )
        z_BENC = torch.where(p_BEN[..., None] < 0, NEGATIVE, z_BENC)
    new_BEd = (torch.softmax(z_BENC, dim=2) * kv_BENC).sum(2)
    positions = (w_BE * ratio).flatten()
    new_Ed = norm_and_rotate(new_BEd.flatten(0, 1), norm_weight, inv_freq, positions, eps, rope_scale)
    new_BEd = new_Ed.reshape(new_BEd.shape).to(entries.dtype)
    entries = onnx_op("TensorScatter", [entries, new_BEd, w_BE[:, 0]], like=entries)
    return entries, rows_B2SC[:, :, length:]


# ---- indexers --------------------------------------------------------------------------------------------------


def index_topk(step, q, k, weights, *, topk, ratio, scale):
    """Keys are a compressor's entries, or rows of tokens (ratio 1) that are cached here."""
    if ratio != 1 and not isinstance(k, Entries):
        raise ExportError("An indexer's keys are entries of several tokens, but no compressor made them.")
    keys = k.rows if isinstance(k, Entries) else step.latents(k)
    inputs = [step.rows(q), keys, step.rows(weights), step.position_ids]
    like = [(torch.int32, (*step.position_ids.shape, topk))]
    options = {"topk": topk, "ratio": ratio, "scale": scale}
    (indices,) = local_function(step, "IndexTopK", _index_topk, inputs, like=like, **options)
    return step.flat(indices, q)


def _index_topk(q_BLHd, keys_BEd, weights_BLH, position_ids, *, topk, ratio, scale):
    """[b, L, topk]; -1 is unused. Equal scores go to the lower index, as TopK has it. In no order."""
    dots = q_BLHd.float().flatten(1, 2) @ keys_BEd.float().mT
    scores = torch.relu(dots.unflatten(1, (-1, q_BLHd.shape[2])) * scale) * weights_BLH.float()[..., None]
    scores_BLE = scores.sum(2)
    num_seen = num_visible(position_ids, ratio)[..., None]
    seen = torch.arange(keys_BEd.shape[1]) < num_seen
    scores_BLE = torch.where(seen & ~scores_BLE.isnan(), scores_BLE, NEGATIVE)
    best = pad(scores_BLE, (0, topk), value=NEGATIVE).topk(topk, dim=-1).indices
    return torch.where(best < num_seen, best, -1).to(torch.int32)


# ---- attention -------------------------------------------------------------------------------------------------


def compressed_attention(step, q, kv, entries, indices, sinks, *, scale, window, ratio):
    if window < 1:
        raise ExportError("A query of compressed_attention sees no token, not even its own.")
    rows = None if entries is None else entries.rows
    listed = None if indices is None else step.rows(indices)
    inputs = [step.rows(q), step.latents(kv), step.position_ids, sinks, rows, listed]
    like, options = [(q.dtype, inputs[0].shape)], {"scale": scale, "window": window, "ratio": ratio}
    (out,) = local_function(step, "CompressedAttention", _compressed_attention, inputs, like=like, **options)
    return step.flat(out, q)


def _compressed_attention(
    q_BLHD, latents_BSD, position_ids, sinks, entries_BED, indices_BLK, *, scale, window, ratio
):
    """One softmax over tokens in the window, complete (and listed) entries, and the sink."""
    p = position_ids[..., None]
    rows, seen = latents_BSD, visible_keys(p, torch.arange(latents_BSD.shape[1]), window=window)
    if entries_BED is not None:
        num_entries = entries_BED.shape[1]
        complete = torch.arange(num_entries) < num_visible(p, ratio)
        if indices_BLK is not None:
            complete = complete & listed(indices_BLK, num_entries)
        rows, seen = torch.cat([rows, entries_BED.to(rows.dtype)], dim=1), torch.cat([seen, complete], dim=-1)
    mask = torch.zeros_like(seen, dtype=q_BLHD.dtype).masked_fill(~seen, NEGATIVE)[:, None]
    if sinks is not None:
        mask = with_sinks(mask, sinks, q_BLHD.dtype)
        rows = torch.cat([rows, torch.zeros_like(rows[:, :1])], dim=1)
    return attend(q_BLHD.transpose(1, 2), rows[:, None], rows[:, None], mask, scale).transpose(1, 2)


def mla_attention(
    step, q_nope, q_rope, latent, k_rope, w_k, w_v, indices=None, sinks=None, *, scale, window=None, ratio=1
):
    """Absorbed: queries become as wide as a cached row, and w_v follows the sum."""
    rows = step.latents(torch.cat([latent, k_rope], dim=-1))[:, None]
    q_THL = torch.einsum("thn,hnl->thl", q_nope, w_k)
    q = step.heads(torch.cat([q_THL, q_rope], dim=-1))
    mask = step.mask(window=window, chunk=None, causal=True)
    if indices is not None:
        mask = mask & listed_tokens(step, step.rows(indices), ratio)[:, None]
    if sinks is not None:
        mask, rows = (
            with_sinks(mask, sinks, q.dtype),
            torch.cat([rows, torch.zeros_like(rows[:, :, :1])], dim=2),
        )
    out = attend(q, rows, rows[..., : latent.shape[1]], mask, scale)
    return torch.einsum("thl,hvl->thv", step.flat(out.transpose(1, 2), q_nope), w_v).contiguous()


def listed_tokens(step, indices_BLK, ratio):
    """[b, L, S] bool: is slot j among a query's indices, by itself or by its complete group, or of its tail?"""
    if ratio == 1:
        return listed(indices_BLK, step.num_slots)
    group = torch.arange(step.num_slots) // ratio
    complete = group < num_visible(step.position_ids, ratio)[..., None]
    found = listed(indices_BLK, step.num_slots // ratio + 1)[..., group]
    return found | ~complete


def listed(indices_BLK, num_rows):
    """[b, L, num_rows] bool: is row j among a query's indices? What is negative or too large is no row."""
    outside = (indices_BLK < 0) | (indices_BLK >= num_rows)
    columns = torch.where(outside, num_rows, indices_BLK).long()
    found = torch.zeros((*columns.shape[:2], num_rows + 1)).scatter(-1, columns, 1.0)
    return found[..., :num_rows] > 0


# ---- hyper-connections -----------------------------------------------------------------------------------------


def hyper_connection(step, streams, fn, base, scale, **options):
    num_tokens, num_streams, width = streams.shape
    float32 = ((num_tokens, num_streams), (num_tokens, num_streams, num_streams))
    like = [*((torch.float32, shape) for shape in float32), (streams.dtype, (num_tokens, width))]
    inputs = [streams, fn, base, scale]
    return local_function(step, "HyperConnection", hyper_connection_reference, inputs, like=like, **options)


def hyper_mix(step, *inputs):
    like = [(inputs[0].dtype, inputs[0].shape)]
    return local_function(step, "HyperMix", hyper_mix_reference, inputs, like=like)[0]


def hyper_head(step, streams, *weights, **options):
    like = [(streams.dtype, (streams.shape[0], streams.shape[2]))]
    inputs = [streams, *weights]
    return local_function(step, "HyperHead", hyper_head_reference, inputs, like=like, **options)[0]


TRANSLATIONS = {
    "pagebinder::compress": compress,
    "pagebinder::index_topk": index_topk,
    "pagebinder::compressed_attention": compressed_attention,
    "pagebinder::mla_attention": mla_attention,
    "pagebinder::hyper_connection": hyper_connection,
    "pagebinder::hyper_mix": hyper_mix,
    "pagebinder::hyper_head": hyper_head,
}
