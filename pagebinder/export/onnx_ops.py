"""Our semantic ops in ONNX's standard operators, as functions that torch's exporter traces.

    attention, cross_attention, relative_attention    Attention over a cache that TensorScatter writes
    rms_norm                                          RMSNormalization
    rope                                              RotaryEmbedding
    gated_activation("silu"), silu                    Swish
    moe_experts, expert_linear                        a model-local function (onnx_experts.py)
    recurrences, short_conv                           onnx_recurrent.py
    latent and compressed attention, hyper_*          onnx_sparse.py

What is not here and not a composition of ATen ops has no translation: the export is refused by its name. Each
function takes the `Step` and the op's own operands.
"""

from __future__ import annotations

import functools

import torch
from torch.onnx.ops import rotary_embedding

from pagebinder.custom_ops.activation.gated_activation import gated_activation_reference
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.custom_ops.rope.rope import rope_reference
from pagebinder.export import onnx_recurrent, onnx_sparse
from pagebinder.export.onnx_contrib import group_query_attention
from pagebinder.export.onnx_experts import expert_rows
from pagebinder.export.onnx_step import NEGATIVE, Step, attend, onnx_op, with_sinks


def attention(
    step,
    q,
    k,
    v,
    sinks=None,
    alibi_slopes=None,
    *,
    scale,
    window=None,
    chunk=None,
    soft_cap=None,
    causal=True,
):
    """ALiBi is added to the mask, and so are sinks."""
    if step.contrib:
        return group_query_attention(step, q, k, v, sinks, scale=scale, window=window, soft_cap=soft_cap)
    k, v = step.keys(k), step.keys(v)
    mask = step.mask(window=window, chunk=chunk, causal=causal)
    if alibi_slopes is not None:
        bias = alibi_slopes.float()[:, None, None] * step.distances()[:, None]
        mask = torch.where(mask, bias.to(q.dtype), NEGATIVE)
    if sinks is not None:
        mask, k, v = _with_sinks(step, mask, sinks, k, v)
    return _attend(step, q, k, v, mask, scale, soft_cap)


def relative_attention(step, q, k, v, bias, sinks=None, *, scale, num_behind, window=None, causal=True):
    """The bias of each query and key is looked up and added to the mask, and so are sinks."""
    k, v = step.keys(k), step.keys(v)
    column = (step.distances() + num_behind).clamp(0, bias.shape[-1] - 1)
    if bias.dim() == 2:
        bias = bias.to(q.dtype)[:, column].transpose(0, 1)
    else:
        bias = step.heads(bias.to(q.dtype))
        bias = bias.gather(-1, column[:, None].expand(-1, bias.shape[1], -1, -1))
    mask = torch.where(step.mask(window=window, causal=causal), bias, NEGATIVE)
    if sinks is not None:
        mask, k, v = _with_sinks(step, mask, sinks, k, v)
    return _attend(step, q, k, v, mask, scale)


def _with_sinks(step, mask, sinks, k, v):
    """The mask, keys and values with one more key for sinks [H] or [T, H]."""
    if sinks.dim() == 2:
        sinks = step.heads(sinks[..., None])  # [b, H, L, 1]
    k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v))
    return with_sinks(mask, sinks, k.dtype), k, v


def cross_attention(step, q, k, v, *, scale, soft_cap=None):
    num_keys = step.encoder_mask.shape[1]
    mask = step.encoder_mask[:, None, None].expand(-1, 1, step.position_ids.shape[1], -1)
    return _attend(step, q, step.heads(k, num_keys), step.heads(v, num_keys), mask, scale, soft_cap)


def _attend(step: Step, q, k, v, mask, scale, soft_cap=None):
    """q [T, H, D] over k [b, G, S, D], v [b, G, S, Dv] -> [T, H, Dv]; mask [b, 1 or H, L, S] bool or added."""
    out = attend(step.heads(q), k, v, mask, scale, soft_cap)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], v.shape[3])


def rms_norm(step, x, weight=None, *, eps, tail):
    """The operator rounds as "cast_scale" does, so the other tails are computed in float32 and rounded after."""
    if tail == "cast_scale":
        if weight.dtype == x.dtype:
            return _rms(x, weight, eps)
        return weight * _rms(x, torch.ones(x.shape[-1], dtype=x.dtype), eps)
    if weight is None:
        weight = torch.ones(x.shape[-1])
    weight = 1.0 + weight.float() if tail == "offset" else weight.float()
    return _rms(x.float(), weight, eps).to(x.dtype)


def _rms(x, weight, eps):
    return onnx_op("RMSNormalization", [x, weight], {"epsilon": float(eps), "axis": -1}, like=x)


def rope(step, x, cos, sin, *, style):
    """RotaryEmbedding takes heads [1, H, T, D] with tables [1, T, D/2]; other layouts are left as arithmetic."""
    interleaved = style in ("every_two", "interleaved")
    by_token = x.dim() == 4 and cos.dim() == 4 and tuple(cos.shape[:3]) == (x.shape[0], 1, x.shape[2])
    if style == "deinterleaved" or not by_token or not x.dtype == cos.dtype == sin.dtype:
        return rope_reference(x, cos, sin, style=style)
    half = x.shape[-1] // 2
    if style == "half":
        cos, sin = cos[..., :half], sin[..., :half]
    elif style == "every_two":
        cos, sin = cos[..., ::2], sin[..., ::2]
    return rotary_embedding(x, cos[:, 0], sin[:, 0], interleaved=interleaved)


def gated_activation(step, gate, up, *, activation):
    if activation != "silu":
        return gated_activation_reference(gate, up, activation=activation)
    return silu(step, gate) * up


def silu(step, x):
    return onnx_op("Swish", [x], like=x)


def moe_experts(step, x, ids, weights, up, down, up_bias, down_bias, *, transposed, **gate):
    """Slots in the order t * K + k, as the reference has them, so that sums are of the same order."""
    slots = x.repeat_interleave(ids.shape[1], dim=0)
    project = functools.partial(expert_rows, ids=ids.reshape(-1), transposed=transposed)
    h = Gate(**gate)(project(slots, weight=up, bias=up_bias))
    out = project(h, weight=down, bias=down_bias).reshape(*ids.shape, x.shape[1])
    return (out * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def expert_linear(step, x, ids, weight, bias, *, transposed):
    if x.dim() == 2:
        x = x[:, None].expand(-1, ids.shape[1], -1)
    rows = x.reshape(-1, x.shape[-1])
    out = expert_rows(rows, ids=ids.reshape(-1), weight=weight, bias=bias, transposed=transposed)
    return out.reshape(*ids.shape, out.shape[-1])


TRANSLATIONS = {
    "pagebinder::attention": attention,
    "pagebinder::relative_attention": relative_attention,
    "pagebinder::cross_attention": cross_attention,
    "pagebinder::rms_norm": rms_norm,
    "pagebinder::rope": rope,
    "pagebinder::gated_activation": gated_activation,
    "pagebinder::moe_experts": moe_experts,
    "pagebinder::expert_linear": expert_linear,
    "aten::silu": silu,
    **onnx_recurrent.TRANSLATIONS,
    **onnx_sparse.TRANSLATIONS,
}
