"""What the leaves of mixtures of experts share: two projections by the experts chosen, the family's code between."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagebinder.errors import CaptureError


def expert_linear(x, expert_ids_TK, weight, *, transposed=False):
    """x [T, C] or [T, K, C] -> [T, K, O]; weight [E, O, C], or [E, C, O] if `transposed`."""
    ids = expert_ids_TK.to(torch.int64)
    return torch.ops.pagebinder.expert_linear(x.to(weight.dtype), ids, weight, None, transposed=transposed)


def run_experts(
    x_TC, expert_ids_TK, expert_weights_TK, *, up, down, between: Callable, transposed: bool = False
):  # fmt: skip
    """A mixture of experts in two `expert_linear`; between: [T, K, J] -> [T, K, I]. Returns [T, C] in x's dtype."""
    h = between(expert_linear(x_TC, expert_ids_TK, up, transposed=transposed))
    out_TKC = expert_linear(h, expert_ids_TK, down, transposed=transposed)
    return (out_TKC * expert_weights_TK.unsqueeze(-1)).sum(dim=1).to(x_TC.dtype)


def gated_by(act_fn: Callable) -> Callable:
    """[gate | up] -> act_fn(gate) * up."""

    def between(h):
        gate, up = h.chunk(2, dim=-1)
        return act_fn(gate) * up

    return between


def flat_tokens(name: str, hidden_states: torch.Tensor) -> torch.Tensor:
    """[1, T, C] or [T, C] -> [T, C].

    Raises:
        CaptureError: several sequences.
    """
    if hidden_states.dim() == 3 and hidden_states.shape[0] == 1:
        return hidden_states[0]
    if hidden_states.dim() == 2:
        return hidden_states
    raise CaptureError(
        f"{name} is called with {hidden_states.dim()} dimensions or several sequences during capture."
    )
