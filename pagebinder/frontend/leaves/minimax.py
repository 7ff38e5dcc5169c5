"""Leaf: the lightning attention of MiniMax, linear attention whose heads forget at a fixed rate.

    S_t = exp(-slope) S_{t-1} + k_t (x) v_t        o_t = q_t^T S_t

That is the recurrence of `ssd` with every time step 1: x = v, B = k, C = q, A = -slope. The source computes it block
by block with tables of powers, in a loop over as many blocks as there are tokens for.
"""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.functions import require_no_state, require_plain


def lightning_attention(
    self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """MiniMaxLightningAttention.forward on hidden states [1, T, C]; it reads no position embeddings."""
    require_plain("MiniMaxLightningAttention", hidden_states, kwargs | {"attention_mask": attention_mask})
    require_no_state("MiniMaxLightningAttention", cache, False)
    num_tokens, heads, width = hidden_states.shape[1], self.num_attention_heads, self.head_dim
    qkv = self.act_fn(self.qkv_proj(hidden_states))[0].reshape(num_tokens, heads, 3 * width)
    q, k, v = torch.split(qkv, width, dim=2)
    ones = hidden_states.new_ones((num_tokens, heads))
    A = -self.slope_rate[:, 0, 0].float()
    out = torch.ops.pagebinder.ssd(v, ones, A, k, q, None, None, dt_softplus=False)
    out = out.to(v.dtype).reshape(1, num_tokens, heads * width)
    out = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(out)
    return self.out_proj(out), None


def remake_decays(module: torch.nn.Module) -> None:
    """Powers of the slope's decay. The source rounds them to the model's dtype, one by one, for prompts; its decode
    takes the slope itself, as we do."""
    tables = module.decay_factors(module.slope_rate)
    module.query_decay, module.key_decay, module.diagonal_decay = tables


LIGHTNING_ATTENTION = Leaf(
    name="lightning attention",
    classes=("MiniMaxLightningAttention",),
    functions={"MiniMaxLightningAttention.forward": lightning_attention},
    emits=(torch.ops.pagebinder.ssd.default,),
    seen_on=("5.23", "5.24"),
    remake=remake_decays,
)
