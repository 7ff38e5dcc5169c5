"""Leaves: JetMoe's experts, in its feed-forward layers and around its attention.

The source sorts tokens by expert and cuts them by counts that only the data knows. Attention is a mixture, too:
each token's queries come from its K experts, and so do the output projections:

    map      x [1, T, C] -> queries [1, T, K, H]        K groups of heads, each by another expert
    reduce   heads [1, T, K, H] -> [1, T, C]            weighted by the same routing, which `map` hands over
"""

from __future__ import annotations

import torch

from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.moe_projections import expert_linear, flat_tokens, gated_by, run_experts


def jetmoe_feed_forward(self, layer_input):
    """[1, T, C] -> [1, T, C]."""
    x = flat_tokens("JetMoeMoE", layer_input)
    ids, gates, _ = _route(self.router, x)
    up, down = self.input_linear.weight, self.output_linear.weight
    out = run_experts(x, ids, gates, up=up, down=down, between=gated_by(self.activation))
    return out.view(layer_input.shape) + self.bias


def jetmoe_map(self, layer_input):
    """[1, T, C] -> (queries [1, T, K, H], router logits [T, E], what `reduce` is given)."""
    x = flat_tokens("JetMoeMoA", layer_input)
    ids, gates, logits = _route(self.router, x)
    return expert_linear(x, ids, self.input_linear.weight).unsqueeze(0), logits, (ids, gates)


def jetmoe_reduce(self, layer_input, topo_info):
    """[1, T, K, H] -> [1, T, C]."""
    ids, gates = topo_info
    out_TKC = expert_linear(layer_input[0], ids, self.output_linear.weight) * gates.unsqueeze(-1)
    return out_TKC.sum(dim=1).unsqueeze(0) + self.bias


def _route(router, x_TC):
    """Expert ids and weights [T, K], and logits [T, E], by the source's formula."""
    logits = router.layer(x_TC).float()
    top_logits, ids = logits.topk(router.top_k, dim=1)
    return ids, torch.softmax(top_logits, dim=1).type_as(x_TC), logits


JETMOE_FEED_FORWARD = Leaf(
    name="experts",
    classes=("JetMoeMoE",),
    functions={"JetMoeMoE.forward": jetmoe_feed_forward},
    emits=(torch.ops.pagebinder.expert_linear.default,) * 2,
    seen_on=("5.23", "5.24"),
)
JETMOE_ATTENTION = Leaf(
    name="experts of attention",
    classes=("JetMoeAttention",),
    functions={"JetMoeMoA.map": jetmoe_map, "JetMoeMoA.reduce": jetmoe_reduce},
    emits=(torch.ops.pagebinder.expert_linear.default,) * 2,
    seen_on=("5.23", "5.24"),
)
