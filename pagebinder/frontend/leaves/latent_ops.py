"""The ops of DeepSeek-V4 for one sequence of a batch of one, as source models have their values: [1, T, ...].

T tokens, H query heads, D width of a latent row, d width of an entry, c = 2 where windows overlap, Hi index heads,
K top-k, S streams, C width. Rows count as positions. The names are those of `models/deepseek_v4_mixing.py`.
"""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError


def compress(kv, gate, position_bias, norm_weight, inv_freq, *, ratio, overlap, eps, rope_scale=1.0):
    """kv, gate [1, T, c * d] -> entries [1, T, d], in the rows that complete them."""
    kv, gate = _rows("compress", kv, gate)
    options = {"ratio": int(ratio), "overlap": bool(overlap), "eps": float(eps)}
    out = torch.ops.pagebinder.compress(
        kv, gate, position_bias, norm_weight, inv_freq, **options, rope_scale=float(rope_scale)
    )
    return out.unsqueeze(0)


def index_topk(q, k, weights, *, topk, ratio, scale):
    """q [1, T, Hi, d], k [1, T, d], weights [1, T, Hi] -> entries [1, T, K] int32, -1 unused."""
    q, k, weights = _rows("index_topk", q, k, weights)
    options = {"topk": int(topk), "ratio": int(ratio), "scale": float(scale)}
    return torch.ops.pagebinder.index_topk(q, k, weights, **options).unsqueeze(0)


def compressed_attention(q, kv, entries, indices, sinks, *, scale, window, ratio):
    """q [1, T, H, D], kv and entries [1, T, D], indices [1, T, K], sinks [H] -> [1, T, H, D]."""
    q, kv, entries, indices = _rows("compressed_attention", q, kv, entries, indices)
    ratio = ratio if entries is not None else 1  # says nothing then, and must be positive
    options = {"scale": float(scale), "window": int(window), "ratio": int(ratio)}
    return torch.ops.pagebinder.compressed_attention(q, kv, entries, indices, sinks, **options).unsqueeze(0)


def hyper_connection(streams, fn, base, scale, *, sinkhorn_iters, norm_eps, eps):
    """streams [1, T, S, C] -> post [1, T, S], comb [1, T, S, S], collapsed [1, T, C]."""
    (streams,) = _rows("hyper_connection", streams)
    options = {"sinkhorn_iters": int(sinkhorn_iters), "norm_eps": float(norm_eps), "eps": float(eps)}
    out = torch.ops.pagebinder.hyper_connection(streams, fn, base, scale, **options)
    return tuple(x.unsqueeze(0) for x in out)


def hyper_mix(streams, post, comb, update):
    """streams [1, T, S, C], post [1, T, S], comb [1, T, S, S], update [1, T, C] -> streams [1, T, S, C]."""
    return torch.ops.pagebinder.hyper_mix(*_rows("hyper_mix", streams, post, comb, update)).unsqueeze(0)


def hyper_head(streams, fn, base, scale, *, norm_eps, eps):
    """streams [1, T, S, C] -> [1, T, C]."""
    (streams,) = _rows("hyper_head", streams)
    out = torch.ops.pagebinder.hyper_head(streams, fn, base, scale, norm_eps=float(norm_eps), eps=float(eps))
    return out.unsqueeze(0)


def rotate(x, cos, sin):
    """RoPE of the trailing channels in pairs: x [..., D], cos and sin [..., r] -> x's shape and dtype.

    Computed in the wider of float32 and the tables' dtype and rounded once.
    """
    width = 2 * cos.shape[-1]
    kept, turned = x.split([x.shape[-1] - width, width], dim=-1)
    turned = torch.ops.pagebinder.rope(turned.float(), cos, sin, style="interleaved")
    return torch.cat((kept, turned.to(x.dtype)), dim=-1)


def _rows(name: str, *values):
    """[1, T, ...] -> [T, ...] of each.

    Raises:
        CaptureError: several sequences.
    """
    if any(x is not None and x.shape[0] != 1 for x in values):
        raise CaptureError(f"{name} is traced for one sequence at a time.")
    return [None if x is None else x[0] for x in values]
