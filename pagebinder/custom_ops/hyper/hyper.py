"""Manifold-constrained hyper-connections: a residual of S parallel streams (Xie et al., 2026; DeepSeek-V4).

Legend: T tokens, S streams, C channels, K = S * C, M = (2 + S) * S mixing logits of a token.

    streams X [T, S, C] --hyper_connection--> collapsed [T, C] --norm, attention or MLP--> update [T, C]
         |                      |                                                              |
         |                      +---- comb [T, S, S], post [T, S] -----+                       |
         +-------------------------------------------------------- hyper_mix <-----------------+
                                                                       |
                                                                   X' [T, S, C]

    logits   m = (X fn^T) * rsqrt(mean(X^2) + norm_eps)            one product over all K channels, float32
    pre      sigmoid(m[:S] * scale[0] + base[:S]) + eps            collapsed = sum_i pre_i X_i
    post     2 * sigmoid(m[S:2S] * scale[1] + base[S:2S])
    comb     Sinkhorn-Knopp of softmax(m[2S:] * scale[2] + base[2S:], rows) + eps: columns first, then
             sinkhorn_iters - 1 times rows and columns; every divisor gets eps added

The mixing weights are float32 whatever the streams are: errors in them act on all layers that follow.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from pagebinder.custom_ops.library import define_op


def hyper_connection_reference(streams, fn, base, scale, *, sinkhorn_iters, norm_eps, eps):
    """The mixing weights of a block, and its input.

    Args:
        streams: [T, S, C] floating. fn: [(2 + S) * S, S * C]. base: [(2 + S) * S]. scale: [3]. The last three are
            float32, or are widened to it.
        sinkhorn_iters: 1 or more; the first normalises columns only.
    Returns:
        post [T, S] float32, comb [T, S, S] float32 (row: old stream, column: new one), collapsed [T, C] in the
        dtype of `streams`.
    Raises:
        ValueError: shapes that do not fit, or no iteration.
    """
    check_connection(streams, fn, base, scale, sinkhorn_iters)
    S = streams.shape[1]
    pre, post, comb = _normed_product(streams, fn, norm_eps).split([S, S, S * S], dim=-1)
    pre_base, post_base, comb_base = base.float().split([S, S, S * S])
    pre_scale, post_scale, comb_scale = scale.float().unbind(0)
    pre = torch.sigmoid(pre * pre_scale + pre_base) + eps
    post = 2 * torch.sigmoid(post * post_scale + post_base)
    comb = (comb * comb_scale + comb_base).unflatten(-1, (S, S))
    return post, sinkhorn(comb, sinkhorn_iters, eps), _collapse(pre, streams)


def sinkhorn(logits, num_iters, eps):
    """Logits [..., S, S] -> nearly doubly stochastic matrices; columns are normalised last."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def hyper_mix_reference(streams, post, comb, update):
    """X'_k = post_k * update + sum_j comb[j, k] X_j: the streams after a block.

    Rounding is that of the source model: weights are cast to the streams' dtype, the two terms are rounded to it,
    and so is their sum.

    Args:
        streams: [T, S, C]. post: [T, S] float32. comb: [T, S, S] float32. update: [T, C] in the streams' dtype.
    Returns:
        [T, S, C] in the streams' dtype.
    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_mix(streams, post, comb, update)
    kept = torch.matmul(comb.to(streams.dtype).transpose(-1, -2), streams)
    return post.to(streams.dtype).unsqueeze(-1) * update.unsqueeze(-2) + kept


def hyper_head_reference(streams, fn, base, scale, *, norm_eps, eps):
    """The last collapse, before the final norm: sum_i (sigmoid(m_i * scale + base_i) + eps) X_i.

    Args:
        streams: [T, S, C]. fn: [S, S * C]. base: [S]. scale: [1]. As in `hyper_connection_reference`.
    Returns:
        [T, C] in the streams' dtype.
    Raises:
        ValueError: shapes that do not fit.
    """
    check_head(streams, fn, base, scale)
    logits = _normed_product(streams, fn, norm_eps)
    return _collapse(torch.sigmoid(logits * scale.float() + base.float()) + eps, streams)


def _normed_product(streams, fn, norm_eps):
    """(X fn^T) * rsqrt(mean(X^2) + norm_eps) in float32: [T, rows of fn]."""
    flat = streams.flatten(1).float()
    return linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps), fn.float())


def _collapse(pre, streams):
    return (pre.unsqueeze(-1) * streams).sum(dim=1).to(streams.dtype)


def check_connection(streams, fn, base, scale, sinkhorn_iters) -> None:
    _, S, _ = _sizes(streams)
    _check_logits(streams, fn, base, scale, rows=(2 + S) * S, num_scales=3)
    if sinkhorn_iters < 1:
        raise ValueError(f"sinkhorn_iters must be 1 or more, not {sinkhorn_iters}")


def check_head(streams, fn, base, scale) -> None:
    _, S, _ = _sizes(streams)
    _check_logits(streams, fn, base, scale, rows=S, num_scales=1)


def check_mix(streams, post, comb, update) -> None:
    T, S, C = _sizes(streams)
    if update.shape != (T, C) or update.dtype != streams.dtype:
        raise ValueError(
            f"update must be {streams.dtype} [{T}, {C}], not {update.dtype} {tuple(update.shape)}"
        )
    if post.shape != (T, S) or comb.shape != (T, S, S):
        raise ValueError(f"post and comb must be [{T}, {S}] and [{T}, {S}, {S}]: {_shapes(post, comb)}")


def _sizes(streams):
    if streams.dim() != 3:
        raise ValueError(f"streams must be [T, S, C], not {tuple(streams.shape)}")
    return streams.shape


def _check_logits(streams, fn, base, scale, *, rows, num_scales):
    _, S, C = _sizes(streams)
    if fn.shape != (rows, S * C) or base.shape != (rows,) or scale.shape != (num_scales,):
        raise ValueError(
            f"for streams {tuple(streams.shape)}, fn, base and scale must be [{rows}, {S * C}], [{rows}] and "
            f"[{num_scales}]: {_shapes(fn, base, scale)}"
        )


def _shapes(*tensors):
    return ", ".join(str(tuple(t.shape)) for t in tensors)


def _hyper_connection_fake(streams, fn, base, scale, *, sinkhorn_iters, norm_eps, eps):
    T, S, C = streams.shape
    weights = (streams.new_empty(shape, dtype=torch.float32) for shape in ((T, S), (T, S, S)))
    return (*weights, streams.new_empty((T, C)))


HYPER_CONNECTION = define_op(
    "hyper_connection",
    "(Tensor streams, Tensor fn, Tensor base, Tensor scale, *, int sinkhorn_iters, float norm_eps, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    reference=hyper_connection_reference,
    fake=_hyper_connection_fake,
    capture="always",
)

HYPER_MIX = define_op(
    "hyper_mix",
    "(Tensor streams, Tensor post, Tensor comb, Tensor update) -> Tensor",
    reference=hyper_mix_reference,
    fake=lambda streams, post, comb, update: streams.new_empty(streams.shape),
    capture="always",
)

HYPER_HEAD = define_op(
    "hyper_head",
    "(Tensor streams, Tensor fn, Tensor base, Tensor scale, *, float norm_eps, float eps) -> Tensor",
    reference=hyper_head_reference,
    fake=lambda streams, fn, base, scale, **_: streams.new_empty((streams.shape[0], streams.shape[2])),
    capture="always",
)
