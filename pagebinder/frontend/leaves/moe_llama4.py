"""Leaf: Llama 4's experts. The source runs all of them for every token, on inputs of 0 where one is not chosen.

source    out[t] = sum over E experts of  expert(score[t, e] * x[t])      score is 0 for experts not chosen
ours      out[t] = sum over the K chosen                                   an expert has no bias: expert(0) = 0
"""

from __future__ import annotations

import torch

from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.moe_projections import expert_linear, gated_by


def llama4_moe(self, hidden_states):
    """[1, T, C] -> ([T, C], router logits [T, E])."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    scores_TK, ids = scores.topk(self.top_k, dim=1)
    experts = self.experts
    h = expert_linear(x.unsqueeze(1) * scores_TK.unsqueeze(-1), ids, experts.gate_up_proj, transposed=True)
    h = expert_linear(gated_by(experts.act_fn)(h), ids, experts.down_proj, transposed=True)
    return self.shared_expert(x) + h.sum(dim=1), logits


LLAMA4_MOE = Leaf(
    name="experts",
    classes=("Llama4TextMoe",),
    functions={"Llama4TextMoe.forward": llama4_moe},
    emits=(torch.ops.pagebinder.expert_linear.default,) * 2,
    seen_on=("5.23", "5.24"),
)
