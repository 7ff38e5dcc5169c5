"""Attention as people write it, each style as a small decoder: for the tests of the recognisers."""

from __future__ import annotations

import math

import torch
from torch import nn

VOCAB_SIZE, WIDTH, HEADS, MAX_TOKENS = 32, 32, 4, 64
HEAD_DIM = WIDTH // HEADS


class Attention(nn.Module):
    """Projections; subclasses say how scores, masks and values meet."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)


class NanoGPT(Attention):
    """masked_fill with a tril buffer that is cut to size."""

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "tril", torch.tril(torch.ones(MAX_TOKENS, MAX_TOKENS)).view(1, 1, MAX_TOKENS, MAX_TOKENS)
        )

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, HEAD_DIM).transpose(1, 2) for y in self.qkv(x).split(WIDTH, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(HEAD_DIM))
        att = att.masked_fill(self.tril[:, :, :t, :t] == 0, float("-inf"))
        y = self.dropout(att.softmax(dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, WIDTH))


class MinGPT(Attention):
    """where with a boolean buffer that is cut to size, scores divided by a tensor, one KV head repeated for all."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(MAX_TOKENS, MAX_TOKENS, dtype=torch.bool)))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, HEAD_DIM).permute(0, 2, 1, 3) for y in self.qkv(x).chunk(3, dim=-1))
        k, v = (y[:, :1].repeat_interleave(HEADS, dim=1) for y in (k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], HEAD_DIM**0.5)
        scores = torch.where(self.bias[:t, :t], scores, torch.full([], torch.finfo(scores.dtype).min))
        y = torch.matmul(torch.softmax(scores.float(), dim=-1).type_as(v), v)
        return self.out(y.permute(0, 2, 1, 3).reshape(b, t, WIDTH))


class MaskedInPlace(Attention):
    """A mask added in place to the last t columns, which are all that there are without a cache (MiniMind)."""

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, HEAD_DIM).transpose(1, 2) for y in self.qkv(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(HEAD_DIM)
        scores[:, :, :, -t:] += torch.full((t, t), float("-inf")).triu(1)
        y = self.dropout(scores.float().softmax(dim=-1).type_as(q)) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class Einsum(Attention):
    """einsum on [B, T, H, D], a causal window from positions' differences."""

    window = 9

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, HEAD_DIM).unbind(2)
        scores = torch.einsum("bthd,bshd->bhts", q * HEAD_DIM**-0.5, k)
        place = torch.arange(t)
        distance = place[:, None] - place[None, :]
        scores = scores.masked_fill((distance < 0) | (distance >= self.window), -1e9)
        return self.out(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2))


class Bloom(Attention):
    """baddbmm onto ALiBi [H, 1, T], then an additive mask."""

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, HEAD_DIM).transpose(1, 2) for y in self.qkv(x).split(WIDTH, dim=2))
        q, k, v = (y.reshape(b * HEADS, t, HEAD_DIM) for y in (q, k, v))
        slopes = torch.pow(2.0, -2.0 * torch.arange(1, HEADS + 1))
        alibi = slopes[:, None, None] * torch.arange(t)[None, None, :]
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=HEAD_DIM**-0.5).view(b, HEADS, t, t)
        scores = scores + torch.full((t, t), torch.finfo(torch.float32).min).triu(1)
        weights = self.dropout(torch.softmax(scores, dim=-1)).view(b * HEADS, t, t)
        y = torch.bmm(weights, v).view(b, HEADS, t, HEAD_DIM).permute(0, 2, 1, 3)
        return self.out(y.reshape(b, t, WIDTH))


class MultiheadAttention(Attention):
    """As torch.nn.MultiheadAttention computes it: heads in the batch, scaled queries, an additive -inf triu mask."""

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.transpose(0, 1) for y in self.qkv(x).chunk(3, dim=-1))
        q, k, v = (y.contiguous().view(t, b * HEADS, HEAD_DIM).transpose(0, 1) for y in (q, k, v))
        mask = torch.triu(torch.full((t, t), float("-inf")), diagonal=1).unsqueeze(0)
        scores = torch.baddbmm(mask, q * math.sqrt(1.0 / HEAD_DIM), k.transpose(-2, -1))
        y = torch.bmm(torch.softmax(scores, dim=-1), v)
        return self.out(y.transpose(0, 1).contiguous().view(t, b, WIDTH).transpose(0, 1))


class Grouped(Attention):
    """Heads as [G, group] beside each other, soft-capped, with chunks; values wider than keys are not repeated."""

    chunk, cap = 12, 3.0

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, HEAD_DIM) for y in self.qkv(x).split(WIDTH, dim=2))
        q = q.view(b, t, 2, HEADS // 2, HEAD_DIM).permute(0, 2, 3, 1, 4)
        k, v = (y[:, :, :2].permute(0, 2, 1, 3).unsqueeze(2) for y in (k, v))
        scores = self.cap * torch.tanh((q @ k.transpose(-1, -2)) * 0.5 / self.cap)
        p, j = torch.arange(t)[:, None], torch.arange(t)[None, :]
        visible = (j <= p) & (p // self.chunk == j // self.chunk)
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        y = torch.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype) @ v
        return self.out(y.permute(0, 3, 1, 2, 4).reshape(b, t, WIDTH))


class Decoder(nn.Module):
    """Two layers of one kind of attention over learned positions."""

    def __init__(self, attention: type[Attention], num_layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(2048, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num_layers))
        self.layers = nn.ModuleList(attention() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids) + self.place(position_ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)
