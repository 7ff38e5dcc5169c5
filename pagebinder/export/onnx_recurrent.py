"""Recurrences in ONNX: model-local functions with the state as operand and result; ONNX's Scan goes over the tokens.

    ShortConv(state [b, C, K - 1], x [b, L, C], weight, bias) -> y [b, L, C], state
    <Name>(state [b, ...], tokens [b, L, ...] ..., weights ...) -> y [b, L, ...], state

b sequences, L tokens of each; else the legends of custom_ops/recurrent.
"""

from __future__ import annotations

import functools

import torch
from torch._higher_order_ops.scan import scan
from torch.nn.functional import softplus

from pagebinder.custom_ops.recurrent.define import RECURRENCES, Recurrence
from pagebinder.custom_ops.recurrent.short_conv import conv_scan
from pagebinder.export.onnx_functions import local_function


def _carried(step, name: str, function, tokens, weights, *, shape, dtype, **options):
    """Rows [T, *shape] of a function of (state, tokens [b, L, ...] ..., weights ...); its new state is kept."""
    state = next(step.past)
    like = [(dtype, (*step.position_ids.shape, *shape)), (state.dtype, state.shape)]
    inputs = [state, *(step.rows(x) for x in tokens), *weights]
    out, state = local_function(step, name, function, inputs, like=like, **options)
    step.present.append(state)
    return step.flat(out, tokens[0])


def over_tokens(one, state, tokens):
    """one(state, *token [b, ...]) -> (new state, out [b, ...]), from token to token: (out [b, L, ...], state)."""
    by_token = [x.transpose(0, 1) for x in tokens]
    if torch.onnx.is_in_onnx_export():
        state, out = scan(lambda state, parts: one(state, *parts), state, by_token)
        return out.transpose(0, 1), state
    outs = []
    for parts in zip(*by_token):
        state, out = one(state, *parts)
        outs.append(out)
    return torch.stack(outs, dim=1), state


# ---- short convolutions ----------------------------------------------------------------------------------------


def short_conv(step, x, weight, bias, *, activation):
    shape = (weight.shape[0],)
    options = {"shape": shape, "dtype": x.dtype, "activation": activation}
    return _carried(step, "ShortConv", _convolved, [x], [weight, bias], **options)


def _convolved(state, x, weight, bias, *, activation):
    out, state = conv_scan(state, x, weight=weight, bias=bias, activation=activation)
    return out.to(x.dtype), state


# ---- state space duality ---------------------------------------------------------------------------------------


def ssd(step, x, dt, A, B, C, D, dt_bias, *, dt_softplus, dt_min=0.0, dt_max=None):
    options = {"dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    operands, weights = [x, dt, B, C], [A, D, dt_bias]
    shape = tuple(x.shape[1:])
    return _carried(step, "StateSpace", _ssd, operands, weights, shape=shape, dtype=torch.float32, **options)


def _ssd(state, x, dt, B, C, A, D, dt_bias, *, dt_softplus, dt_min, dt_max):
    """state [b, H, P, N]: what `ssd_scan` computes, token by token."""
    x, dt, group = x.float(), dt.float(), x.shape[2] // B.shape[2]
    dt = dt if dt_bias is None else dt + dt_bias.float()
    dt = (softplus(dt) if dt_softplus else dt).clamp(min=dt_min, max=dt_max)
    B, C = (m.float().repeat_interleave(group, dim=2) for m in (B, C))
    decay = (dt * A.float()).exp()

    def one(state, decay_RH, added_RHP, B_RHN, C_RHN):
        state = decay_RH[..., None, None] * state + added_RHP[..., None] * B_RHN[:, :, None]
        return state, (state @ C_RHN[..., None])[..., 0]

    y, state = over_tokens(one, state, (decay, dt[..., None] * x, B, C))
    return (y if D is None else y + D.float()[:, None] * x), state


# ---- gated delta rule ------------------------------------------------------------------------------------------


def gated_delta_rule(step, q, k, v, g, beta, *, scale, l2norm_eps=None):
    options = {"scale": scale, "l2norm_eps": l2norm_eps, "shape": tuple(v.shape[1:]), "dtype": q.dtype}
    return _carried(step, "GatedDeltaRule", _delta_rule, [q, k, v, g, beta], [], **options)


def _delta_rule(state, q, k, v, g, beta, *, scale, l2norm_eps):
    """state [b, H, Dk, Dv]: what `delta_scan` computes, token by token. g [b, L, H] or [b, L, H, Dk]."""
    dtype, group = q.dtype, v.shape[2] // q.shape[2]
    q, k = (x.float().repeat_interleave(group, dim=2) for x in (q, k))
    if l2norm_eps is not None:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + l2norm_eps) for x in (q, k))
    decay = g.float().exp()[..., None]
    decay = decay if g.dim() == 4 else decay[..., None]

    def one(state, q_RHK, k_RHK, v_RHV, decay, beta_RH1):
        state = decay * state
        update = beta_RH1 * (v_RHV - (k_RHK[:, :, None] @ state)[:, :, 0])
        state = state + k_RHK[..., None] * update[:, :, None]
        return state, (q_RHK[:, :, None] @ state)[:, :, 0]

    out, state = over_tokens(one, state, (q, k, v.float(), decay, beta.float()[..., None]))
    return (scale * out).to(dtype), state


# ---- those that are made from their definition -----------------------------------------------------------------


def _defined(recurrence: Recurrence, step, *operands, **options):
    like = recurrence.like(*operands)
    num_tokens = len(recurrence.tokens)
    return _carried(
        step, recurrence.name.title().replace("_", ""), functools.partial(_run_defined, recurrence),
        operands[:num_tokens], operands[num_tokens:], shape=tuple(like.shape[1:]), dtype=like.dtype, **options,
    )  # fmt: skip


def _run_defined(recurrence: Recurrence, state, *operands, **options):
    tokens, weights = operands[: len(recurrence.tokens)], operands[len(recurrence.tokens) :]

    def one(state, *token):
        out, state = recurrence.scan(state.clone(), *(x[:, None] for x in token), *weights, **options)
        return state.clone(), out[:, 0].clone()

    out, state = over_tokens(one, state, tokens)
    whole = [x[0] for x in tokens]
    return out.to(recurrence.like(*whole, *weights).dtype), state


TRANSLATIONS = {
    "pagebinder::short_conv": short_conv,
    "pagebinder::ssd": ssd,
    "pagebinder::gated_delta_rule": gated_delta_rule,
    **{
        f"pagebinder::{recurrence.name}": functools.partial(_defined, recurrence)
        for recurrence in RECURRENCES.values()
    },
}


def state_of(name: str, operands) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and type of what the op carries for one sequence, given values of its operands; None of other ops."""
    if name == "pagebinder::short_conv":
        x, weight, *_ = operands
        return (weight.shape[0], weight.shape[1] - 1), x.dtype
    if name == "pagebinder::ssd":
        x, _, _, B, *_ = operands
        return (*x.shape[1:], B.shape[2]), torch.float32
    if name == "pagebinder::gated_delta_rule":
        q, _, v, *_ = operands
        return (v.shape[1], q.shape[2], v.shape[2]), torch.float32
    defined = {f"pagebinder::{recurrence.name}": recurrence for recurrence in RECURRENCES.values()}
    return (tuple(defined[name].state_shape(*operands)), torch.float32) if name in defined else None
