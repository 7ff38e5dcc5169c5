"""`pagebinder::ssd` and `paged_ssd`: the state space recurrence of Mamba-2 (state space duality).

    d_t = clamp(softplus(dt_t + dt_bias), dt_min, dt_max)                                      per head
    S_t = exp(d_t A) S_{t-1} + d_t x_t (x) B_t            S [P, N]
    y_t = S_t C_t + D x_t

T tokens, H heads of width P, G groups of B and C (head h reads group h // (H // G)), N width of the state; R requests
of L tokens in a chunk; `blocks` are counted by the first dimension of the cache.

A chunk of L tokens is computed at once. With c_t = (d_1 + ... + d_t) A and the state S_0 before the chunk,

    y_t = exp(c_t) S_0 C_t + sum_{i <= t} exp(c_t - c_i) (C_t . B_i) d_i x_i + D x_t

Dao, Gu: Transformers are SSMs (arXiv:2405.21060).
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import softplus

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.recurrent.checkpoints import scan_requests, scan_sequence
from pagebinder.custom_ops.recurrent.gated_delta_rule import decay_between


def ssd_reference(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H, *, dt_softplus, dt_min=0.0, dt_max=None):
    """The recurrence over one sequence from a zero state, in float32.

    Args:
        x_THP: [T, H, P]. dt_TH: [T, H] time steps. A_H: [H], negative. B_TGN, C_TGN: [T, G, N]; H is a multiple
            of G. D_H: [H] weight of the skip connection, or None. dt_bias_H: [H] or None.
        dt_softplus: apply softplus to the biased time steps. dt_min, dt_max: then clamp them; None = no limit.
    Returns:
        [T, H, P] float32 whatever the operands are: a gated norm in float32 follows it in every model.
    """
    _check(x_THP, dt_TH, A_H, B_TGN, C_TGN)
    state = x_THP.new_zeros((1, *x_THP.shape[1:], B_TGN.shape[2]), dtype=torch.float32)
    scan = _scan(A_H, D_H, dt_bias_H, dt_softplus, dt_min, dt_max)
    return scan_sequence(scan, state, [x[None] for x in (x_THP, dt_TH, B_TGN, C_TGN)])[0][0].contiguous()


def paged_ssd_reference(
    x_THP,
    dt_TH,
    A_H,
    B_TGN,
    C_TGN,
    D_H,
    dt_bias_H,
    cache_NHPN,
    block_table,
    seq_lens,
    query_start_loc,
    *,
    block_size,
    dt_softplus,
    dt_min=0.0,
    dt_max=None,
):
    """`ssd` of a mixed batch; states are read from and written to cache [blocks, H, P, N] float32.

    Other arguments as in `ssd_reference` and `checkpoints.scan_requests`. Returns [T, H, P] float32, zeros for
    padding.
    """
    check_paged_ssd(x_THP, dt_TH, A_H, B_TGN, C_TGN, cache_NHPN)
    scan = _scan(A_H, D_H, dt_bias_H, dt_softplus, dt_min, dt_max)
    operands, out = [x_THP, dt_TH, B_TGN, C_TGN], x_THP.new_zeros(x_THP.shape, dtype=torch.float32)
    return scan_requests(scan, operands, out, cache_NHPN, block_table, seq_lens, query_start_loc, block_size)


def _scan(A, D, dt_bias, dt_softplus, dt_min, dt_max):
    return functools.partial(
        ssd_scan, A=A, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_min=dt_min, dt_max=dt_max
    )


def ssd_scan(state_RHPN, x, dt, B, C, *, A, D, dt_bias, dt_softplus, dt_min, dt_max):
    """One chunk: state [R, H, P, N], operands [R, L, ...] -> (y [R, L, H, P] float32, new state)."""
    group = x.shape[2] // B.shape[2]
    B_RHLN, C_RHLN = (m.float().repeat_interleave(group, dim=2).transpose(1, 2) for m in (B, C))
    dt_RLH = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt_RLH = (softplus(dt_RLH) if dt_softplus else dt_RLH).clamp(min=dt_min, max=dt_max)
    x_RHLP, dt_RHL = x.float().transpose(1, 2), dt_RLH.transpose(1, 2)
    log_decay = dt_RHL * A.float()[:, None]
    decay_RHLL = decay_between(log_decay)
    from_start, to_end = log_decay.cumsum(-1).exp()[..., None], decay_RHLL[..., -1, :, None]
    added_RHLP = dt_RHL[..., None] * x_RHLP
    y = from_start * (C_RHLN @ state_RHPN.mT) + (decay_RHLL * (C_RHLN @ B_RHLN.mT)) @ added_RHLP
    if D is not None:
        y = y + D.float()[:, None, None] * x_RHLP
    state_RHPN.mul_(from_start[..., -1:, :])
    state_SPN = state_RHPN.view(-1, *state_RHPN.shape[2:])  # in place, so it must be a view
    state_SPN.baddbmm_((to_end * added_RHLP).mT.flatten(0, 1), B_RHLN.flatten(0, 1))
    return y.transpose(1, 2), state_RHPN


def _check(x, dt, A, B, C) -> None:
    if x.dim() != 3 or B.dim() != 3 or B.shape != C.shape or B.shape[0] != x.shape[0]:
        raise ValueError("ssd takes x [T, H, P] and B and C [T, G, N]")
    if x.shape[1] % B.shape[1]:
        raise ValueError("heads must be a multiple of the groups of B and C")
    if dt.shape != x.shape[:2] or A.shape != x.shape[1:2]:
        raise ValueError("dt is [T, H] and A is [H]")


def check_paged_ssd(x, dt, A, B, C, cache) -> None:
    _check(x, dt, A, B, C)
    if cache.shape[1:] != (*x.shape[1:], B.shape[2]) or cache.dtype != torch.float32:
        raise ValueError("the cache of a state space layer is [blocks, H, P, N] float32")


def _fake(x, dt, A, B, C, *operands, **options):
    torch._check(x.dim() == 3 and B.dim() == 3 and C.dim() == 3, lambda: "x is [T, H, P], B and C [T, G, N]")
    torch._check(x.shape[1] % B.shape[1] == 0, lambda: "heads must be a multiple of groups")
    torch._check(dt.dim() == 2 and A.dim() == 1, lambda: "dt is [T, H] and A is [H]")
    return x.new_empty(x.shape, dtype=torch.float32)


_OPERANDS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias"
_OPTIONS = "bool dt_softplus, float dt_min=0.0, float? dt_max=None"

SSD = define_op("ssd", f"({_OPERANDS}, *, {_OPTIONS}) -> Tensor", reference=ssd_reference, fake=_fake)

PAGED_SSD = define_op(
    "paged_ssd",
    f"({_OPERANDS}, Tensor(a!) cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, *, "
    f"int block_size, {_OPTIONS}) -> Tensor",
    reference=paged_ssd_reference,
    fake=_fake,
)
