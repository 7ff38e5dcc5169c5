"""DeepSeek-V4's own operations, as functions: compression, index, attention over entries, hyper-connections.

The layers call them as `mixing.<name>`, so whoever captures the model can put an op in a function's place.
A row's index is its position. An *entry* summarises `ratio` consecutive tokens; tensors of entries are
token-aligned: entry w lies in row (w + 1) ratio - 1, the row of the last token it saw, and query p may see it
when w < (p + 1) // ratio.

    tokens      0 1 2 3 4 5 6 7 8 9        ratio 4
    entries     . . . 0 . . . 1 . .        rows without an entry are zero

Shapes: B sequences, T tokens, H query heads, D width of a row (K = V), W window, n entries, K top-k,
Hi index heads, d width of an entry, c = 2 with overlap else 1, S residual streams, C hidden width.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, in float32, cast once to x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else weight * wide).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Interleaved RoPE of the trailing channels of x [..., D] by cos, sin [..., rope / 2], in float32.

    `rotate(x, cos, -sin)` undoes it.
    """
    kept, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    even, odd = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((kept, turned.to(x.dtype)), dim=-1)


def q_norm_rope(q_BTHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, eps: float) -> torch.Tensor:
    """RMSNorm of every head without a weight, then RoPE. cos, sin [B, T, rope / 2] float32."""
    return rotate(rms_norm(q_BTHD, None, eps), cos[:, :, None], sin[:, :, None])


def inverse_rope_grouped_linear(
    x_BTHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor, *, groups: int
) -> torch.Tensor:
    """Undo RoPE at the query's position, then project each group of heads by its own rows of `weight`.

    V is the rotated K, so what attention sums up is rotated too. weight [groups r, H D / groups] -> [B, T, groups r].
    """
    x = rotate(x_BTHD, cos[:, :, None], -sin[:, :, None])
    x_BTgi = x.flatten(2).unflatten(2, (groups, -1))
    return torch.einsum("btgi,gri->btgr", x_BTgi, weight.unflatten(0, (groups, -1))).flatten(2)


def _with_previous(windows_BnrC: torch.Tensor, fill: float) -> torch.Tensor:
    """[.., r, 2d] -> [.., 2r, d]: the previous window's first halves, then this window's second halves."""
    first, second = windows_BnrC.chunk(2, dim=-1)
    previous = F.pad(first, (0, 0, 0, 0, 1, 0), value=fill)[:, : first.shape[1]]
    return torch.cat((previous, second), dim=2)


def compress(
    kv: torch.Tensor, gate: torch.Tensor, position_bias: torch.Tensor, norm_weight: torch.Tensor,
    inv_freq: torch.Tensor, *, ratio: int, overlap: bool, eps: float, rope_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Summarise every complete window of `ratio` tokens in one entry: gated mean, RMSNorm, RoPE.

    kv, gate [B, T, c d], position_bias [ratio, c d], norm_weight [d], inv_freq [rope / 2] float32 -> [B, T, d] in
    kv's dtype, token-aligned. The gate is a softmax per channel over the window's tokens; with `overlap` also over
    the previous window's, whose kv and gate are the first half of the channels. Entry w is rotated as position
    w ratio. DeepSeek-V4 report, section 2.3.
    """
    B, T, _ = kv.shape
    n = T // ratio
    windows = kv[:, : n * ratio].float().reshape(B, n, ratio, kv.shape[-1])
    logits = gate[:, : n * ratio].float().reshape(B, n, ratio, kv.shape[-1]) + position_bias.float()
    if overlap:
        windows, logits = _with_previous(windows, 0.0), _with_previous(logits, float("-inf"))
    entries = rms_norm((logits.softmax(dim=2) * windows).sum(dim=2), norm_weight.float(), eps)
    angles = (torch.arange(n, device=kv.device) * ratio)[:, None].float() * inv_freq
    entries = rotate(entries, angles.cos() * rope_scale, angles.sin() * rope_scale).to(kv.dtype)
    aligned = F.pad(entries[:, :, None], (0, 0, ratio - 1, 0)).flatten(1, 2)
    return F.pad(aligned, (0, 0, 0, T - n * ratio))


def visible_entries(num_tokens: int, ratio: int, device: torch.device) -> torch.Tensor:
    """bool [T, T // ratio]: may query p see entry w."""
    complete = (torch.arange(num_tokens, device=device) + 1) // ratio
    return torch.arange(num_tokens // ratio, device=device) < complete[:, None]


def index_head_scores(q: torch.Tensor, k_BnD: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale q_h . k` in float32: q [B, T, Hi, d] -> [B, T, Hi, n]."""
    scores = q.float().flatten(1, 2) @ k_BnD.float().transpose(1, 2)
    return (scores * scale).unflatten(1, q.shape[1:3])


def index_scores(head_scores_BTHn: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`sum_h weights_h relu(score_h)` in float32: weights [B, T, Hi] -> [B, T, n]."""
    return (F.relu(head_scores_BTHn) * weights.float()[..., None]).sum(dim=2)


@torch.no_grad()
def index_topk(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, *, topk: int, ratio: int, scale: float
) -> torch.Tensor:
    """The `topk` visible entries with the largest index scores (Lightning Indexer).

    q [B, T, Hi, d], k [B, T, d] token-aligned, weights [B, T, Hi] -> [B, T, topk] int32, ascending, then -1. Ties go
    to the lowest entry. Not differentiable.
    """
    scores = index_scores(index_head_scores(q, k[:, ratio - 1 :: ratio], scale), weights)
    num_entries = scores.shape[-1]
    scores = scores.masked_fill(~visible_entries(q.shape[1], ratio, q.device), float("-inf"))
    best, chosen = scores.sort(dim=-1, descending=True, stable=True)
    chosen = chosen.masked_fill(best == float("-inf"), num_entries)[..., :topk].sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == num_entries, -1)
    return F.pad(chosen, (0, topk - chosen.shape[-1]), value=-1).int()


def _window_scores(q: torch.Tensor, kv: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q . k for the keys p - W < j <= p, -inf elsewhere, and the keys.

    Tokens are cut into blocks of W, and a block's queries meet the keys of its own and the previous block:
    q [B, N W, H, D], kv [B, N W, D] -> scores [B, N, W, H, 2W], keys [B, N, 2W, D].
    """
    blocks = kv.unflatten(1, (-1, window))
    keys = torch.cat((F.pad(blocks, (0, 0, 0, 0, 1, -1)), blocks), dim=2)
    scores = q.unflatten(1, (-1, window)).flatten(2, 3) @ keys.transpose(2, 3)
    query, key = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    seen = (query < key) & (key <= query + window)
    starts = torch.arange(blocks.shape[1], device=q.device)[:, None, None] == 0
    seen = seen & ~(starts & (key < window))
    scores = scores.unflatten(2, (window, -1)).masked_fill(~seen[None, :, :, None], float("-inf"))
    return scores, keys


def _listed(indices_BTK: torch.Tensor, num_entries: int) -> torch.Tensor:
    """bool [B, T, n]: is the entry in the query's list. -1 lists nothing."""
    listed = torch.zeros(*indices_BTK.shape[:2], num_entries + 1, dtype=torch.bool, device=indices_BTK.device)
    places = indices_BTK.long().masked_fill(indices_BTK < 0, num_entries)
    return listed.scatter(2, places, True)[..., :num_entries]


def compressed_attention(
    q: torch.Tensor, kv: torch.Tensor, entries: torch.Tensor | None, indices: torch.Tensor | None,
    sinks: torch.Tensor | None, *, scale: float, window: int, ratio: int,
) -> torch.Tensor:  # fmt: skip
    """One softmax over the last `window` tokens, the visible entries and a sink per head, in float32.

    q [B, T, H, D], kv [B, T, D] (K = V), entries [B, T, D] token-aligned or None, indices [B, T, K] int32 (only these
    entries) or None (all visible ones), sinks [H] -> [B, T, H, D] in q's dtype. A sink takes weight, not value.
    """
    B, T, H, _ = q.shape
    padding = -T % window
    wide_q = F.pad(q, (0, 0, 0, 0, 0, padding)).float() * scale
    near, keys = _window_scores(wide_q, F.pad(kv, (0, 0, 0, padding)).float(), window)
    logits = [near.flatten(1, 2)[:, :T]]
    if entries is not None:
        far_keys = entries[:, ratio - 1 :: ratio].float()
        seen = visible_entries(T, ratio, q.device)[None]
        if indices is not None:
            seen = seen & _listed(indices, far_keys.shape[1])
        far = (wide_q[:, :T].flatten(1, 2) @ far_keys.transpose(1, 2)).view(B, T, H, -1)
        logits.append(far.masked_fill(~seen[:, :, None], float("-inf")))
    if sinks is not None:
        logits.append(sinks.float()[:, None].expand(B, T, H, 1))
    weights = torch.cat(logits, dim=-1).softmax(dim=-1)
    near = F.pad(weights[..., : 2 * window], (0, 0, 0, 0, 0, padding))
    out = near.unflatten(1, (-1, window)).flatten(2, 3) @ keys
    out = out.unflatten(2, (window, H)).flatten(1, 2)[:, :T]
    if entries is not None:
        far = weights[..., 2 * window : 2 * window + far_keys.shape[1]]
        out = out + (far.flatten(1, 2) @ far_keys).view_as(out)
    return out.to(q.dtype)


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Matrices [..., S, S] of positive rows made doubly stochastic; columns are normalised last."""
    # The matrices are 4 x 4 and there is one per token: with tokens innermost, sums are vectorised over tokens.
    comb = logits.movedim((-2, -1), (0, 1)).contiguous().softmax(dim=1) + eps
    comb = comb / (comb.sum(dim=0, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=0, keepdim=True) + eps)
    return comb.movedim((0, 1), (-2, -1)).contiguous()


def _weighted_streams(share: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """Sum of the streams [B, T, S, C] by share [B, T, S], in float32, cast to the streams' dtype."""
    return (share[..., None] * streams).sum(dim=-2).to(streams.dtype)


def _stream_logits(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """Linear map of the normalised streams [B, T, S, C] by fn [F, S C], float32 [B, T, F]."""
    flat = streams.flatten(-2).float()
    return F.linear(flat, fn.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def hyper_connection(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, sinkhorn_iters: int,
    norm_eps: float, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """How a block reads the residual streams and writes to them (manifold-constrained hyper-connections).

    streams [B, T, S, C], fn [(2 + S) S, S C], base [(2 + S) S], scale [3] -> post [B, T, S] float32: the block's
    share in each stream; comb [B, T, S, S] float32: how streams mix, doubly stochastic; collapsed [B, T, C]: the
    block's input in the streams' dtype. Xie et al. 2026.
    """
    S = streams.shape[-2]
    pre, post, comb = _stream_logits(streams, fn, norm_eps).split([S, S, S * S], dim=-1)
    pre_base, post_base, comb_base = base.float().split([S, S, S * S])
    pre_scale, post_scale, comb_scale = scale.float().unbind()
    pre = torch.sigmoid(pre * pre_scale + pre_base) + eps
    post = 2 * torch.sigmoid(post * post_scale + post_base)
    comb = sinkhorn((comb * comb_scale + comb_base).unflatten(-1, (S, S)), sinkhorn_iters, eps)
    return post, comb, _weighted_streams(pre, streams)


def hyper_mix(
    streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, update: torch.Tensor
) -> torch.Tensor:
    """`X'_k = post_k update + sum_j comb[j, k] X_j`: streams [B, T, S, C], update [B, T, C].

    post and comb are rounded to the streams' dtype first, as in transformers.
    """
    post, comb = post.to(streams.dtype), comb.to(streams.dtype)
    mixed = sum(comb[..., j, :, None].float() * streams[..., j, None, :] for j in range(streams.shape[-2]))
    return post[..., None] * update[..., None, :] + mixed.to(streams.dtype)


def hyper_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
) -> torch.Tensor:
    """Streams [B, T, S, C] to one [B, T, C]: a gated sum. fn [S, S C], base [S], scale [1]."""
    share = torch.sigmoid(_stream_logits(streams, fn, norm_eps) * scale.float() + base.float()) + eps
    return _weighted_streams(share, streams)
