"""Leaf: Step 3.7's experts, whose class has transformers' usual layout and does not go through its interface."""

from __future__ import annotations

import torch

from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.moe_projections import run_experts


def step3p7_experts(self, hidden_states, top_k_index, top_k_weights):
    """hidden [T, C], index and weights [T, K] -> [T, C]."""
    return run_experts(
        hidden_states, top_k_index, top_k_weights,
        up=self.gate_up_proj, down=self.down_proj, between=self._apply_gate,
    )  # fmt: skip


STEP3P7_EXPERTS = Leaf(
    name="experts",
    classes=("Step3p7Experts",),
    functions={"Step3p7Experts.forward": step3p7_experts},
    emits=(torch.ops.pagebinder.expert_linear.default,) * 2,
    seen_on=("5.23", "5.24"),
)
