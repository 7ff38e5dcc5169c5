"""Leaf: LongCat-Flash's experts, the last of which compute nothing: they return their input."""

from __future__ import annotations

import torch

from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.moe_projections import gated_by, run_experts


def longcat_experts(self, hidden_states, top_k_index, top_k_weights):
    """hidden [T, C], index and weights [T, K] -> [T, C]."""
    is_identity = top_k_index >= self.num_routed_experts
    # An id past the last expert adds nothing, so each slot is counted by one of the two sums.
    identity = hidden_states * top_k_weights.masked_fill(~is_identity, 0.0).sum(dim=1, keepdim=True)
    if self.gate_up_proj is None:
        return identity.to(hidden_states.dtype)
    up = self.gate_up_proj[: self.num_routed_experts]
    routed = run_experts(
        hidden_states, top_k_index, top_k_weights, up=up, down=self.down_proj, between=gated_by(self.act_fn)
    )
    return routed + identity.to(hidden_states.dtype)


LONGCAT_EXPERTS = Leaf(
    name="experts",
    classes=("LongcatFlashExperts",),
    functions={"LongcatFlashExperts.forward": longcat_experts},
    emits=(torch.ops.pagebinder.expert_linear.default,) * 2,
    seen_on=("5.23", "5.24"),
)
