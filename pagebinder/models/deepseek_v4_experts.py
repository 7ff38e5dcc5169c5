"""DeepSeek-V4's mixture of experts: routers, routed experts, the shared expert.

Parameter names are those of `transformers`. Shapes: B sequences, T tokens (of all sequences), C hidden width,
E experts, I expert width, k experts per token.
"""

import torch
import torch.nn.functional as F
from torch import nn

from pagebinder.models.deepseek_v4_config import DeepseekV4Config
from pagebinder.models.deepseek_v4_parts import linear


def swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """[..., 2I], gates first -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def weighted_experts(
    x_TC: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    *, limit: float,
) -> torch.Tensor:  # fmt: skip
    """Weighted sum of the chosen experts: indices, weights [T, k], gate_up [E, 2I, C], down [E, C, I] -> [T, C].

    An expert is silu(min(gate, limit)) * clamp(up, +-limit), projected down. Rows are sorted by expert, so each
    expert's matrices are used once.
    """
    num_chosen = indices.shape[1]
    order = indices.flatten().argsort(stable=True)
    counts = indices.flatten().bincount(minlength=len(gate_up)).tolist()
    rows = x_TC[order // num_chosen].split(counts)
    inner = swiglu(torch.cat([F.linear(r, w) for r, w in zip(rows, gate_up)]), limit).split(counts)
    out = torch.cat([F.linear(r, w) for r, w in zip(inner, down)])[order.argsort()]
    return (out.unflatten(0, (-1, num_chosen)) * weights[..., None].to(x_TC.dtype)).sum(dim=1)


class Router(nn.Module):
    """Scores sqrt(softplus(x W)) and the experts they, or the token itself, select.

    Score-routed: the k largest of score + correction bias; the bias balances load and takes no part in the weights.
    Hash-routed: a fixed table from token id to experts.
    """

    def __init__(self, config: DeepseekV4Config, is_hash: bool):
        super().__init__()
        self.is_hash, self.num_chosen = is_hash, config.num_experts_per_tok
        self.scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        if is_hash:
            table = torch.zeros(config.vocab_size, config.num_experts_per_tok, dtype=torch.long)
            self.register_buffer("tid2eid", table)
        else:
            self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x_TC: torch.Tensor, ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> expert indices [T, k] int64, their weights [T, k] in x's dtype."""
        scores = F.softplus(F.linear(x_TC, self.weight)).sqrt()
        if self.is_hash:
            indices = self.tid2eid[ids_T]
        else:
            indices = (scores + self.e_score_correction_bias).topk(self.num_chosen, sorted=False).indices
        weights = scores.gather(1, indices)
        return indices, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * self.scaling_factor


class Experts(nn.Module):
    """The routed experts' matrices, stacked."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__()
        E, inner, width = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.limit = config.swiglu_limit
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.zeros(E, width, inner))

    def forward(self, x_TC, indices, weights):
        return weighted_experts(x_TC, indices, weights, self.gate_up_proj, self.down_proj, limit=self.limit)


class MLP(nn.Module):
    """The shared expert: every token passes it."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__()
        self.limit = config.swiglu_limit
        self.gate_proj = linear(config.hidden_size, config.moe_intermediate_size)
        self.up_proj = linear(config.hidden_size, config.moe_intermediate_size)
        self.down_proj = linear(config.moe_intermediate_size, config.hidden_size)

    def forward(self, x):
        gate_up = torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1)
        return self.down_proj(swiglu(gate_up, self.limit))


class MixtureOfExperts(nn.Module):
    """k routed experts per token plus the shared one: [B, T, C] and ids [B, T] -> [B, T, C]."""

    def __init__(self, config: DeepseekV4Config, is_hash: bool):
        super().__init__()
        self.gate = Router(config, is_hash)
        self.experts = Experts(config)
        self.shared_experts = MLP(config)

    def forward(self, x_BTC: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
        flat = x_BTC.flatten(0, 1)
        indices, weights = self.gate(flat, ids_BT.flatten())
        return self.experts(flat, indices, weights).view_as(x_BTC) + self.shared_experts(x_BTC)
