"""`linear_recurrence` and `selective_scan` (and their paged forms): states whose entries decay each on its own.

linear_recurrence, of RG-LRU:                                        state [W]
    h_t = a_t * h_{t-1} + x_t                                        and h_t is the output

selective_scan, of Mamba-1:                                          state [W, N]
    d_t = softplus(dt_t + dt_bias)                                   per channel
    S_t = exp(d_t A) * S_{t-1} + (d_t * x_t) (x) B_t
    y_t = S_t C_t + D * x_t

T tokens, W channels, N width of a channel's state; R requests of L tokens in a chunk. The decays are products over
tokens that may reach 0, so nothing is divided by them: the states of a chunk are computed one after the other.

De et al.: Griffin (arXiv:2402.19427). Gu, Dao: Mamba (arXiv:2312.00752).
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from pagebinder.custom_ops.recurrent.define import Recurrence, define_recurrence, require


def decayed_sums(state: torch.Tensor, decay: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """S_t = decay_t * S_{t-1} + added_t for every token: [R, ...], [R, L, ...], [R, L, ...] -> [R, L, ...]."""
    states = torch.empty_like(added)
    for t in range(added.shape[1]):
        state = torch.addcmul(added[:, t], decay[:, t], state, out=states[:, t])
    return states


def linear_scan(state_RW, x_RLW, decay_RLW):
    states = decayed_sums(state_RW, decay_RLW.float(), x_RLW.float())
    return states, states[:, -1]


def selective_scan(state_RWN, x_RLW, dt_RLW, B_RLN, C_RLN, A_WN, D_W, dt_bias_W, *, dt_softplus):
    x, dt = x_RLW.float(), dt_RLW.float()
    dt = dt if dt_bias_W is None else dt + dt_bias_W.float()
    dt = softplus(dt) if dt_softplus else dt
    added = (dt * x)[..., None] * B_RLN.float()[:, :, None]
    states_RLWN = decayed_sums(state_RWN, (dt[..., None] * A_WN.float()).exp(), added)
    y = (states_RLWN @ C_RLN.float()[..., None])[..., 0]
    return y if D_W is None else y + D_W.float() * x, states_RLWN[:, -1]


def _check_linear(x, decay) -> None:
    require(x.dim() == 2 and x.shape == decay.shape, "linear_recurrence takes x and decay [T, W]")


def _check_selective(x, dt, B, C, A, D, dt_bias) -> None:
    require(x.dim() == 2 and x.shape == dt.shape, "selective_scan takes x and dt [T, W]")
    require(B.dim() == 2 and B.shape == C.shape and len(B) == len(x), "selective_scan takes B and C [T, N]")
    require(A.shape == (x.shape[1], B.shape[1]), "A is [W, N]")
    require(D is None or D.shape == x.shape[1:], "D is [W]")
    require(dt_bias is None or dt_bias.shape == x.shape[1:], "dt_bias is [W]")


# x [T, W], decay [T, W] from 0 to 1 -> [T, W] in x's dtype.
define_recurrence(
    Recurrence(
        name="linear_recurrence",
        tokens=("Tensor x", "Tensor decay"),
        scan=linear_scan,
        check=_check_linear,
        state_shape=lambda x, decay: (x.shape[1],),
        like=lambda x, decay: x.new_empty(x.shape),
    )
)

# x, dt [T, W], B, C [T, N], A [W, N] negative, D and dt_bias [W] or None -> [T, W] float32, which a gate follows.
define_recurrence(
    Recurrence(
        name="selective_scan",
        tokens=("Tensor x", "Tensor dt", "Tensor B", "Tensor C"),
        weights=("Tensor A", "Tensor? D", "Tensor? dt_bias"),
        options="bool dt_softplus",
        scan=selective_scan,
        check=_check_selective,
        state_shape=lambda x, dt, B, *_: (x.shape[1], B.shape[1]),
        like=lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
    )
)
