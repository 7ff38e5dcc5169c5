"""Leaf: DBRX's experts, a loop over experts whose three projections lie below each other in one matrix each."""

from __future__ import annotations

import torch

from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.moe_projections import expert_linear, flat_tokens


def dbrx_experts(self, hidden_states, top_k_index, top_k_weights):
    """hidden [1, T, C], index and weights [T, K] -> [1, T, C]."""
    x = flat_tokens("DbrxExperts", hidden_states)
    mlp, shape = self.mlp, (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    w1, v1, w2 = (getattr(mlp, name).view(shape) for name in ("w1", "v1", "w2"))
    h = mlp.activation_fn(expert_linear(x, top_k_index, w1)) * expert_linear(x, top_k_index, v1)
    out_TKC = expert_linear(h, top_k_index, w2, transposed=True)
    return (out_TKC * top_k_weights.unsqueeze(-1)).sum(dim=1).view(hidden_states.shape)


DBRX_EXPERTS = Leaf(
    name="experts",
    classes=("DbrxExperts",),
    functions={"DbrxExperts.forward": dbrx_experts},
    emits=(torch.ops.pagebinder.expert_linear.default,) * 3,
    seen_on=("5.23", "5.24"),
)
