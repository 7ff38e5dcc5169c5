"""`pagebinder::gated_delta_rule` and `paged_gated_delta_rule`: linear attention that overwrites what it remembers.

    S_t = exp(g_t) S_{t-1} + k_t (x) u_t       u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)       per value head
    o_t = scale * S_t^T q_t

The state S [Dk, Dv] of a head maps keys to values: u_t corrects what it answers for k_t. g_t is a number per head, or
(Kimi delta attention) a vector [Dk], one decay for each row of S. T tokens, H value heads, G key heads (head h reads
key head h // (H // G)), Dk and Dv widths, N blocks; R requests of L tokens in a chunk.

A chunk of L tokens is computed at once. With c_t = g_1 + ... + g_t and the state S_0 before the chunk,

    S_t = exp(c_t) S_0 + sum_{i <= t} exp(c_t - c_i) k_i (x) u_i

so all u solve one unit lower triangular system, and outputs and the new state are matrix products:

    u_t + beta_t sum_{i < t} exp(c_t - c_i) (k_t . k_i) u_i = beta_t (v_t - exp(c_t) S_0^T k_t)

With a decay per row of S, exp(c_t - c_i) stands inside the sum over Dk that k_t . k_i is.

Yang, Kautz, Hatamizadeh: Gated Delta Networks (arXiv:2412.06464). Kimi Team: Kimi Linear (arXiv:2510.26692).
"""

from __future__ import annotations

import functools

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.recurrent.checkpoints import scan_requests, scan_sequence

# Tokens taken at once with a decay per row: its pairwise decays [L, L, Dk] grow with the square.
ROW_DECAY_TOKENS = 16


def gated_delta_rule_reference(q_TGK, k_TGK, v_THV, g_TH, beta_TH, *, scale, l2norm_eps=None):
    """The recurrence over one sequence from a zero state, in float32.

    Args:
        q_TGK, k_TGK: [T, G, Dk]; H is a multiple of G. v_THV: [T, H, Dv]. beta_TH: [T, H] learning rates.
        g_TH: [T, H] or [T, H, Dk], log of the decay, at most 0.
        l2norm_eps: not None normalises q and k by rsqrt(sum(x ** 2) + eps) first.
    Returns:
        [T, H, Dv] in q's dtype.
    """
    _check(q_TGK, k_TGK, v_THV, g_TH, beta_TH)
    state = v_THV.new_zeros((1, v_THV.shape[1], q_TGK.shape[2], v_THV.shape[2]), dtype=torch.float32)
    scan = functools.partial(delta_scan, scale=scale, l2norm_eps=l2norm_eps)
    out, _ = scan_sequence(scan, state, [x[None] for x in (q_TGK, k_TGK, v_THV, g_TH, beta_TH)])
    return out[0].to(q_TGK.dtype).contiguous()


def paged_gated_delta_rule_reference(
    q_TGK,
    k_TGK,
    v_THV,
    g_TH,
    beta_TH,
    cache_NHKV,
    block_table,
    seq_lens,
    query_start_loc,
    *,
    block_size,
    scale,
    l2norm_eps=None,
):
    """`gated_delta_rule` of a mixed batch; states are read from and written to cache [N, H, Dk, Dv] float32.

    Other arguments as in `gated_delta_rule_reference` and `checkpoints.scan_requests`. Returns [T, H, Dv], zeros
    for padding.
    """
    check_paged_gated_delta_rule(q_TGK, k_TGK, v_THV, g_TH, beta_TH, cache_NHKV)
    scan = functools.partial(delta_scan, scale=scale, l2norm_eps=l2norm_eps)
    operands, out = [q_TGK, k_TGK, v_THV, g_TH, beta_TH], q_TGK.new_zeros(v_THV.shape)
    return scan_requests(scan, operands, out, cache_NHKV, block_table, seq_lens, query_start_loc, block_size)


def delta_scan(state_RHKV, q, k, v, g, beta, *, scale, l2norm_eps):
    """One chunk: state [R, H, Dk, Dv], operands [R, L, ...] -> (out [R, L, H, Dv] float32, new state)."""
    group = v.shape[2] // q.shape[2]
    q_RHLK, k_RHLK = (x.float().repeat_interleave(group, dim=2).transpose(1, 2) for x in (q, k))
    v_RHLV, g_RHL, beta_RHL1 = (x.float().transpose(1, 2) for x in (v, g, beta[..., None]))
    if l2norm_eps is not None:
        q_RHLK, k_RHLK = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + l2norm_eps) for x in (q_RHLK, k_RHLK)
        )
    if g.dim() == 4:
        out, state = _row_decay_scan(state_RHKV, q_RHLK, k_RHLK, v_RHLV, g_RHL, beta_RHL1)
        return scale * out.transpose(1, 2), state
    decay_RHLL = decay_between(g_RHL)
    from_start, to_end = g_RHL.cumsum(-1).exp()[..., None], decay_RHLL[..., -1, :, None]
    system = beta_RHL1 * decay_RHLL * (k_RHLK @ k_RHLK.mT)  # only what lies below the diagonal is read
    q_old, k_old = (torch.cat([q_RHLK, k_RHLK], dim=2) @ state_RHKV).chunk(2, dim=2)
    wanted = beta_RHL1 * (v_RHLV - from_start * k_old)
    u_RHLV = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = from_start * q_old + (decay_RHLL * (q_RHLK @ k_RHLK.mT)) @ u_RHLV
    state_RHKV.mul_(from_start[..., -1:, :])
    state_SKV = state_RHKV.view(-1, *state_RHKV.shape[2:])  # in place, so it must be a view
    state_SKV.baddbmm_((to_end * k_RHLK).mT.flatten(0, 1), u_RHLV.flatten(0, 1))
    return scale * out.transpose(1, 2), state_RHKV


def _row_decay_scan(state_RHKV, *operands_RHL):
    """Operands [R, H, L, ...] in short chunks -> (out [R, H, L, Dv], new state)."""
    outs = []
    for part in zip(*(x.split(ROW_DECAY_TOKENS, dim=2) for x in operands_RHL)):
        out, state_RHKV = _row_decay_chunk(state_RHKV, *part)
        outs.append(out)
    return torch.cat(outs, dim=2), state_RHKV


def _row_decay_chunk(state_RHKV, q, k, v, g_RHLK, beta_RHL1):
    decay_RHLLK = decay_between(g_RHLK.mT).movedim(2, -1)
    from_start, to_end = g_RHLK.cumsum(2).exp(), decay_RHLLK[:, :, -1]
    decayed_keys = decay_RHLLK * k[:, :, None]
    system = beta_RHL1 * (decayed_keys @ k[..., None])[..., 0]  # only what lies below the diagonal is read
    wanted = beta_RHL1 * (v - (from_start * k) @ state_RHKV)
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (from_start * q) @ state_RHKV + (decayed_keys @ q[..., None])[..., 0] @ u
    return out, from_start[:, :, -1, :, None] * state_RHKV + (to_end * k).mT @ u


def decay_between(log_decay: torch.Tensor) -> torch.Tensor:
    """exp(log_decay[i + 1] + ... + log_decay[t]) for i <= t, else 0: [..., L] -> [..., L, L].

    Each sum is added up on its own: differences of running sums lose what neighbours share after a strong decay.
    """
    length = log_decay.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=log_decay.device)
    added = log_decay[..., :, None].expand(*log_decay.shape, length).masked_fill(~ones.tril(-1), 0.0)
    return added.cumsum(-2).masked_fill(ones.triu(1), float("-inf")).exp()


def _check(q, k, v, g, beta) -> None:
    if q.dim() != 3 or v.dim() != 3 or q.shape != k.shape or q.shape[0] != v.shape[0]:
        raise ValueError("gated_delta_rule takes q and k [T, G, Dk] and v [T, H, Dv]")
    if v.shape[1] % q.shape[1]:
        raise ValueError("value heads must be a multiple of key heads")
    if g.shape[:2] != v.shape[:2] or g.shape[2:] not in ((), k.shape[2:]) or beta.shape != v.shape[:2]:
        raise ValueError("g and beta are [T, H], or g is [T, H, Dk]")


def check_paged_gated_delta_rule(q, k, v, g, beta, cache) -> None:
    _check(q, k, v, g, beta)
    if cache.shape[1:] != (v.shape[1], q.shape[2], v.shape[2]) or cache.dtype != torch.float32:
        raise ValueError("the cache of a gated delta rule is [N, H, Dk, Dv] float32")


def _fake(q, k, v, g, beta, *operands, **options):
    torch._check(q.dim() == 3 and k.dim() == 3 and v.dim() == 3, lambda: "q, k and v are [T, heads, width]")
    torch._check(v.shape[1] % q.shape[1] == 0, lambda: "value heads must be a multiple of key heads")
    torch._check(g.dim() in (2, 3) and beta.dim() == 2, lambda: "g and beta are [T, H], or g is [T, H, Dk]")
    return q.new_empty(v.shape)


GATED_DELTA_RULE = define_op(
    "gated_delta_rule",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, *, float scale, float? l2norm_eps=None) -> Tensor",
    reference=gated_delta_rule_reference,
    fake=_fake,
)

PAGED_GATED_DELTA_RULE = define_op(
    "paged_gated_delta_rule",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) cache, Tensor block_table, "
    "Tensor seq_lens, Tensor query_start_loc, *, int block_size, float scale, float? l2norm_eps=None) -> Tensor",
    reference=paged_gated_delta_rule_reference,
    fake=_fake,
)
