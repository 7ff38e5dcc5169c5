"""Mixtures of experts as people write them: a loop over experts that picks each one's tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, NUM_EXPERTS, TOP_K = 16, 4, 2


class Expert(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=bias) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Loop(nn.Module):
    """body(experts, x [T, C], weights [T, K], ids [T, K]) -> [T, C], behind a router by softmax and topk."""

    def __init__(self, body: Callable, expert: Callable[[], nn.Module] = Expert):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.router = body, nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(NUM_EXPERTS))

    def forward(self, h, positions=None):
        x = h.view(-1, h.shape[-1])
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        return self.body(self.experts, x, weights, ids).view(h.shape)


def where_and_add(experts, x, w, ids):
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        token, slot = torch.where(ids == i)
        y[token] += w[token, slot, None] * expert(x[token])
    return y


def masks_of_all(experts, x, w, ids):
    y = torch.zeros_like(x)
    masks = (ids.unsqueeze(-1) == torch.arange(NUM_EXPERTS)).permute(2, 0, 1)
    for mask, expert in zip(masks, experts):
        token, slot = torch.where(mask)
        y[token] += w[token, slot, None] * expert(x[token])
    return y


def one_hot_and_index_add(experts, x, w, ids):
    w = w / w.sum(-1, keepdim=True)
    y = torch.zeros(x.shape, dtype=x.dtype)
    mask = F.one_hot(ids, num_classes=NUM_EXPERTS).permute(2, 1, 0)
    for i, expert in enumerate(experts):
        slot, token = torch.where(mask[i])
        y.index_add_(0, token, expert(x[None, token].reshape(-1, WIDTH)) * w[token, slot, None])
    return y


def masks_as_indices(experts, x, w, ids):
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        mask = ids == i
        y[mask.any(-1)] += expert(x[mask.any(-1)]) * w[ids == i].unsqueeze(-1)
    return y


def nonzero_of_any(experts, x, w, ids):
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        token = (ids == i).any(dim=-1).nonzero().flatten()
        y.index_add_(0, token, expert(x[token]) * w[ids == i].view(-1, 1))
    return y


def columns_of_nonzero(experts, x, w, ids):
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        places = torch.nonzero(ids == i)
        token, slot = places[:, 0], places[:, 1]
        y.index_put_((token,), expert(x.index_select(0, token)) * w[token, slot, None], accumulate=True)
    return y


def scatter_of_rows(experts, x, w, ids):
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        token, slot = (ids == i).nonzero(as_tuple=True)
        y = y.scatter_add(0, token.unsqueeze(-1).expand(-1, WIDTH), expert(x[token]) * w[token, slot, None])
    return y


def rows_of_slots(experts, x, w, ids):
    flat, rows = ids.view(-1), x.repeat_interleave(TOP_K, dim=0)
    y = torch.empty_like(rows)
    for i, expert in enumerate(experts):
        y[flat == i] = expert(rows[flat == i])
    return (y.view(*w.shape, -1) * w.unsqueeze(-1)).sum(1)


def put_by_slot(experts, x, w, ids):
    y = x.new_zeros(len(x), TOP_K, WIDTH)
    for i, expert in enumerate(experts):
        token, slot = torch.where(ids == i)
        y[token, slot] = expert(x[token])
    return (y * w[..., None]).sum(1)


def with_a_batch(experts, x, w, ids):
    x, w, ids = x[None], w[None], ids[None]
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        batch, token, slot = torch.where(ids == i)
        y[batch, token] += expert(x[batch, token]) * w[batch, token, slot, None]
    return y


def best_alone(experts, x, w, ids):
    best, y = ids[:, 0], torch.zeros_like(x)
    for i, expert in enumerate(experts):
        y[best == i] = expert(x[best == i]) * w[best == i][:, :1]
    return y


def kinds_of_tokens(experts, x, w, ids):
    """Two networks for two kinds of tokens, as of text and images; a norm of heads and dropout within."""
    is_one, y = x[:, 0] > 0, x.clone()
    heads = F.dropout(x[is_one], 0.5, training=False).view(-1, 2, WIDTH // 2).softmax(-1)
    y[is_one] = experts[0](heads.reshape(-1, WIDTH))
    return y.index_copy(0, (~is_one).nonzero()[:, 0], experts[1](x[~is_one]))


def not_finite_for_others(experts, x, w, ids):
    is_one, y = x[:, 0] > 0, x.clone()
    y[is_one] = x[is_one] / (x[is_one][:, :1] > 0) + x[is_one][:, :1].log()
    return y


# Loops as in form 1 to 3, as mistral-inference, litgpt and transformers had them, and kin.
SERVED = (
    where_and_add, masks_of_all, one_hot_and_index_add, masks_as_indices, nonzero_of_any, columns_of_nonzero,
    scatter_of_rows, rows_of_slots, put_by_slot, with_a_batch, best_alone, kinds_of_tokens, not_finite_for_others,
)  # fmt: skip


def by_count(experts, x, w, ids):
    """As DeepSeek-V3 was published."""
    y = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=NUM_EXPERTS).tolist()
    for i, expert in enumerate(experts):
        if counts[i] == 0:
            continue
        token, slot = torch.where(ids == i)
        y[token] += expert(x[token]) * w[token, slot, None]
    return y


def by_number_of_rows(experts, x, w, ids):
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        token, slot = torch.where(ids == i)
        if token.numel() > 0:
            y.index_add_(0, token, expert(x[token]) * w[token, slot, None])
    return y


def hit_experts(experts, x, w, ids):
    """As mixtures in transformers were, and what was copied from them."""
    y = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=NUM_EXPERTS).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for i in hit:
        slot, token = torch.where(mask[i].squeeze(0))
        rows = x[None, token].reshape(-1, WIDTH)
        y.index_add_(0, token, (experts[i](rows) * w[token, slot, None]).to(x.dtype))
    return y


def numbers_of_hit_experts(experts, x, w, ids):
    y = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=NUM_EXPERTS).permute(2, 1, 0)
    for i in mask.sum((1, 2)).nonzero().flatten().tolist():
        slot, token = torch.where(mask[i])
        y[token] += experts[i](x[token]) * w[token, slot, None]
    return y


def unique_experts(experts, x, w, ids):
    """As in Raschka's Qwen3."""
    flat, y = ids.reshape(-1), torch.zeros_like(x)
    for number in torch.unique(flat):
        i = int(number.item())
        mask = ids == i
        if not mask.any():
            continue
        token = mask.any(dim=-1).nonzero(as_tuple=False).squeeze(-1)
        if token.numel() == 0:
            continue
        rows = x.index_select(0, token)
        slot = mask[token].int().argmax(dim=-1, keepdim=True)
        weight = torch.gather(w.index_select(0, token), dim=-1, index=slot)
        y.index_add_(0, token, experts[i](rows) * weight)
    return y


# Experts that nobody chose are left out.
LEFT_OUT = (by_count, by_number_of_rows, hit_experts, numbers_of_hit_experts, unique_experts)
