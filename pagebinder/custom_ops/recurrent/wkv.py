"""`pagebinder::wkv` and `paged_wkv`: the weighted mean of values of RWKV-4.

    y_t = (sum_{i < t} exp((t - 1 - i) w + k_i) v_i + exp(u + k_t) v_t)  /  (the same sum without v)      per channel

w = `decay` <= 0 is per token of distance, u = `first` is the bonus of the token itself. T tokens, W channels; R
requests of L tokens in a chunk. The state [3, W] holds both sums over the past, scaled by exp(-m), and m, the
largest exponent:

    state   [ sum of exp(..) v ]      m' = max(m + w, k_t)
            [ sum of exp(..)   ]      sums' = exp(m + w - m') sums + exp(k_t - m') (v_t, 1)
            [ m                ]

After the first token the second sum is at least 1, so 0 there means that no token has been seen.

Peng et al.: RWKV (arXiv:2305.13048).
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.recurrent.define import Recurrence, define_recurrence, require

NOTHING_SEEN = -1e38  # an exponent below all others, whose distance to any of them is still finite


def wkv_scan(state_R3W, k_RLW, v_RLW, decay_W, first_W):
    num, den, largest = state_R3W.unbind(1)
    largest = torch.where(den == 0, NOTHING_SEEN, largest)
    decay, first, outs = decay_W.float(), first_W.float(), []
    for k, v in zip(k_RLW.float().unbind(1), v_RLW.float().unbind(1)):
        seen, new = _scaled(largest, k + first)
        outs.append((seen * num + new * v) / (seen * den + new))
        seen, new = _scaled(largest + decay, k)
        num, den, largest = seen * num + new * v, seen * den + new, torch.maximum(largest + decay, k)
    return torch.stack(outs, dim=1), torch.stack([num, den, largest], dim=1)


def _scaled(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp of both exponents, the larger one taken off."""
    largest = torch.maximum(a, b)
    return (a - largest).exp(), (b - largest).exp()


def _check(k, v, decay, first) -> None:
    require(k.dim() == 2 and k.shape == v.shape, "wkv takes k and v [T, W]")
    require(decay.shape == first.shape == k.shape[1:], "decay and first are [W]")


# k, v [T, W], decay [W] negative, first [W] -> [T, W] in k's dtype.
define_recurrence(
    Recurrence(
        name="wkv",
        tokens=("Tensor k", "Tensor v"),
        weights=("Tensor decay", "Tensor first"),
        scan=wkv_scan,
        check=_check,
        state_shape=lambda k, *_: (3, k.shape[1]),
        like=lambda k, *_: k.new_empty(k.shape),
    )
)
