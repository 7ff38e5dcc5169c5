"""Attention as people write it, in every combination of a recipe: q [1, H, T, D], k [1, G, T, D], v [1, G, T, Dv]."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.fuzz.random_norms import RMSNorm
from tests.fuzz.recipes import BIASES, ILLEGAL_MASKS, Recipe


class Attention(nn.Module):
    """[1, T, C] -> [1, T, C]."""

    def __init__(self, recipe: Recipe, mask: str, width: int, index: int, max_tokens: int) -> None:
        super().__init__()
        self.recipe, self.mask_kind, self.index = recipe, mask, index
        h, g, d, dv = recipe.heads, recipe.kv_heads, recipe.head_dim, recipe.value_dim
        self.sizes = [h * d, g * d, g * dv]
        if recipe.fused_qkv:
            self.qkv = nn.Linear(width, sum(self.sizes), bias=recipe.bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, n, bias=recipe.bias) for n in self.sizes)
        self.out = nn.Linear(h * dv, width, bias=recipe.bias)
        if recipe.qk_norm is not None:
            self.q_norm, self.k_norm = RMSNorm(d, "cast_scale"), RMSNorm(d, "cast_scale")
        if recipe.extra == "output gate":
            self.gate = nn.Linear(width, h * dv)
        if recipe.sinks:
            self.sinks = nn.Parameter(torch.zeros(h))
        if recipe.positions == "by distance":
            self.table = nn.Parameter(torch.zeros(h, recipe.reach + 4))
        if recipe.mask_source == "buffer":
            self.register_buffer(
                "tril", torch.ones(max_tokens, max_tokens, dtype=torch.bool).tril(), persistent=False
            )
        self.turned = {"partial": d // 2}.get(recipe.positions, d)
        frequencies = 100.0 ** -(torch.arange(0, self.turned, 2).float() / self.turned)
        self.register_buffer("frequencies", frequencies, persistent=False)
        slopes = 2.0 ** -(8.0 * torch.arange(1, h + 1) / h)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x, position_ids, shared: dict):
        """`shared`: what the first layer leaves for later ones."""
        q, k, v = self._projected(x, position_ids)
        extra, t = self.recipe.extra, x.shape[1]
        if extra == "first values":
            v = 0.5 * (v + shared.setdefault("v", v))
        if extra == "shared cache":
            k, v = shared.setdefault("kv", (k, v))
        k, v = (k / 3 if extra == "scaled keys" else k), (v * 0.5 if extra == "scaled values" else v)
        if extra == "log scaling":
            q = q * (1 + 0.1 * torch.log1p(position_ids.float()))[:, None, :, None]
        y = (self._written if self.recipe.written else self._sdpa)(q, k, v, position_ids, x)
        y = y.transpose(1, 2).reshape(1, t, -1) * (1.5 if extra == "scaled output" else 1)
        return self.out(y * torch.sigmoid(self.gate(x)) if extra == "output gate" else y)

    def _projected(self, x, position_ids):
        recipe, t = self.recipe, x.shape[1]
        parts = (
            self.qkv(x).split(self.sizes, dim=-1) if recipe.fused_qkv else (self.q(x), self.k(x), self.v(x))
        )
        parts = [part.clamp(-1.5, 1.5) for part in parts] if recipe.extra == "clipped" else parts
        counts = (recipe.heads, recipe.kv_heads, recipe.kv_heads)
        q, k, v = (part.view(1, t, n, -1) for part, n in zip(parts, counts))
        v = k if recipe.extra == "values from keys" else v
        k = k - k.mean(-1, keepdim=True) if recipe.extra == "centred keys" else k
        if recipe.qk_norm == "before transpose":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if recipe.qk_norm == "after transpose":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotated(q, position_ids), self._rotated(k, position_ids)
        if recipe.qk_norm == "after rope":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _rotated(self, x, position_ids):
        kind = self.recipe.positions
        if kind in ("learned", *BIASES, "none"):
            return x
        if self.recipe.extra == "alternating positions" and self.index % 2:
            return x
        place = position_ids[..., None].float()
        place = {
            "scaled positions": place / 4,
            "one position late": place + 1,
            "whole positions": place // 2,
        }.get(self.recipe.extra, place)
        angles = (place * self.frequencies)[:, None]
        if kind == "partial":
            return torch.cat((_half(x[..., : self.turned], angles), x[..., self.turned :]), dim=-1)
        return {"half": _half, "every_two": _every_two, "chunked": _chunked, "interleaved": _interleaved}[
            kind
        ](x, angles)

    def visible(self, position_ids, x):
        """[T, T] bool: which key each query sees."""
        t, reach = x.shape[1], self.recipe.reach
        place = position_ids[0] if self.recipe.mask_source == "positions" else torch.arange(t)
        p, j = place[:, None], place[None, :]
        visible = j <= p
        if self.recipe.mask_source == "triangle":
            visible = torch.ones(t, t, dtype=torch.bool).tril()
        if self.recipe.mask_source == "buffer":
            visible = self.tril[:t, :t]
        if self.mask_kind == "window":
            visible = visible & (p - j < reach)
        if self.mask_kind == "chunk":
            visible = visible & (p // reach == j // reach)
        if self.recipe.illegal in ILLEGAL_MASKS:
            visible = _illegal(self.recipe.illegal, visible, p, j, x)
        return visible

    def _bias(self, position_ids):
        """ALiBi or a learned bias [1, H, T, T]."""
        if self.recipe.positions == "by distance":
            distance = position_ids[0, :, None] - position_ids[0]
            return self.table[None, :, distance.clamp(0, self.table.shape[1] - 1)]
        place = position_ids[0].float()
        return self.slopes[None, :, None, None] * (place[None, :] - place[:, None])

    def _sdpa(self, q, k, v, position_ids, x):
        recipe, mask = self.recipe, None
        gqa = recipe.repeat == "native" and recipe.group > 1
        if not gqa:
            k, v = self._repeated(k), self._repeated(v)
        if recipe.attention != "sdpa is_causal":
            mask = self.visible(position_ids, x)
        if recipe.attention == "sdpa float":
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
            mask = mask + self._bias(position_ids) if recipe.positions in BIASES else mask
        causal = recipe.attention == "sdpa is_causal"
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=recipe.scale, enable_gqa=gqa
        )

    def _repeated(self, x):
        group = self.recipe.group
        if group == 1:
            return x
        if self.recipe.repeat == "expand":
            _, g, t, d = x.shape
            return x[:, :, None].expand(1, g, group, t, d).reshape(1, g * group, t, d)
        return x.repeat_interleave(group, dim=1)

    def _written(self, q, k, v, position_ids, x):
        recipe = self.recipe
        scale = recipe.scale if recipe.scale is not None else recipe.head_dim**-0.5
        grouped = recipe.repeat == "native" and recipe.group > 1 and recipe.attention != "einsum"
        if grouped:
            q = q.reshape(1, recipe.kv_heads, recipe.group, -1, recipe.head_dim)
            k, v = k[:, :, None], v[:, :, None]
        else:
            k, v = self._repeated(k), self._repeated(v)
        if recipe.attention == "einsum":
            scores = torch.einsum("bhtd,bhsd->bhts", q * scale, k)
        else:
            scores = (q @ k.transpose(-1, -2)) * scale
        if recipe.soft_cap is not None:
            scores = recipe.soft_cap * torch.tanh(scores / recipe.soft_cap)
        if recipe.positions in BIASES:
            scores = scores + self._bias(position_ids).view(*scores.shape[:-2], *scores.shape[-2:])
        scores = self._masked(scores, self.visible(position_ids, x))
        weights = self._softmax(scores)
        if recipe.attention == "einsum":
            return torch.einsum("bhts,bhsd->bhtd", weights, v)
        y = weights @ v
        return y.reshape(1, recipe.heads, y.shape[-2], y.shape[-1]) if grouped else y

    def _masked(self, scores, visible):
        if self.recipe.attention == "additive":
            return scores + torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        if self.recipe.attention == "where":
            return torch.where(visible, scores, torch.tensor(float("-inf")))
        return scores.masked_fill(~visible, float("-inf"))

    def _softmax(self, scores):
        if not self.recipe.sinks:
            return torch.softmax(scores, dim=-1)
        column = self.sinks.view(*scores.shape[:-2], 1, 1).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def _half(x, angles):
    both = torch.cat((angles, angles), dim=-1)
    a, b = x.chunk(2, dim=-1)
    return x * both.cos() + torch.cat((-b, a), dim=-1) * both.sin()


def _every_two(x, angles):
    both = angles.repeat_interleave(2, -1)
    return x * both.cos() + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * both.sin()


def _chunked(x, angles):
    (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _interleaved(x, angles):
    a, b, cos, sin = x[..., ::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def _illegal(kind: str, visible, p, j, x):
    """Masks that no cache of earlier tokens can serve, or that are of no known family."""
    if kind == "bidirectional":
        return torch.ones_like(visible)
    if kind == "prefix of two":
        return visible | (j < 2)
    if kind == "strictly causal":
        return (j < p) | ((p == 0) & (j == 0))
    if kind == "window ahead":
        return (p - j < 5) & (j - p < 3)
    return visible & ((x[0, :, 0] > 0)[None, :] | (p == j))  # of content
