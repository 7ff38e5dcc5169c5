"""`pagebinder::mlstm` and `paged_mlstm`: the matrix memory of xLSTM, with exponential input gates.

    m_t = max(logsigmoid(f_t) + m_{t-1}, i_t)                                            per head
    S_t = exp(logsigmoid(f_t) + m_{t-1} - m_t) S_{t-1} + exp(i_t - m_t) k_t (x) [v_t, 1]
    h_t = (scale q_t^T S_t)[: Dv] / (max(|(scale q_t^T S_t)[Dv]|, exp(-m_t)) + eps)

m keeps the exponentials finite. The last column of S is the source's "normaliser" n. T tokens, H heads, Dk and Dv
widths; R requests of L tokens in a chunk. The state, [Dk + 1, Dv + 1] per head:

    [ S  Dk x Dv | n  Dk ]
    [ unused     | m     ]

Beck et al.: xLSTM (arXiv:2405.04517).
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid, pad

from pagebinder.custom_ops.recurrent.define import Recurrence, define_recurrence, require


def mlstm_scan(state_RHKV, q_RLHK, k_RLHK, v_RLHV, igate_RLH, fgate_RLH, *, scale, eps):
    memory, m = state_RHKV[:, :, :-1], state_RHKV[:, :, -1, -1]
    q, k, igate = scale * q_RLHK.float(), k_RLHK.float(), igate_RLH.float()
    v, log_f, outs = pad(v_RLHV.float(), (0, 1), value=1.0), logsigmoid(fgate_RLH.float()), []
    for t in range(q.shape[1]):
        kept, m = log_f[:, t] + m, torch.maximum(log_f[:, t] + m, igate[:, t])
        forget, write = (kept - m).exp()[..., None, None], (igate[:, t] - m).exp()[..., None, None]
        memory = forget * memory + write * k[:, t, :, :, None] * v[:, t, :, None]
        read = (q[:, t, :, None] @ memory)[:, :, 0]
        outs.append(read[..., :-1] / (torch.maximum(read[..., -1].abs(), (-m).exp()) + eps)[..., None])
    state_RHKV[:, :, :-1] = memory
    state_RHKV[:, :, -1, -1] = m
    return torch.stack(outs, dim=1), state_RHKV


def _check(q, k, v, igate, fgate) -> None:
    require(q.dim() == 3 and q.shape == k.shape, "mlstm takes q and k [T, H, Dk]")
    require(v.dim() == 3 and v.shape[:2] == q.shape[:2], "v is [T, H, Dv]")
    require(igate.shape == fgate.shape == q.shape[:2], "igate and fgate are [T, H]")


# q, k [T, H, Dk], v [T, H, Dv], gates before activation [T, H] -> [T, H, Dv] in q's dtype.
define_recurrence(
    Recurrence(
        name="mlstm",
        tokens=("Tensor q", "Tensor k", "Tensor v", "Tensor igate", "Tensor fgate"),
        options="float scale, float eps",
        scan=mlstm_scan,
        check=_check,
        state_shape=lambda q, k, v, *_: (q.shape[1], q.shape[2] + 1, v.shape[2] + 1),
        like=lambda q, k, v, *_: q.new_empty(v.shape),
    )
)
