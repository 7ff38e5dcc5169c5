"""Plain PyTorch decoders from recipes: nothing here knows of pagebinder, so each is a model it has never seen."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.fuzz.mixers import LEGAL, MIXERS
from tests.fuzz.random_attention import Attention
from tests.fuzz.random_norms import norm_of
from tests.fuzz.recipes import Recipe
from tests.helpers import scale_weights

VOCAB_SIZE, WIDTH, MAX_TOKENS = 61, 32, 128


class MLP(nn.Module):
    """[.., C] -> [.., C], with or without a gate."""

    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        self.kind, wide = kind, 2 * WIDTH
        gated = kind in ("swiglu", "geglu")
        if kind == "chunked gate_up":
            self.gate_up = nn.Linear(WIDTH, 2 * wide, bias=bias)
        else:
            self.up = nn.Linear(WIDTH, wide, bias=bias)
        if gated:
            self.gate = nn.Linear(WIDTH, wide, bias=bias)
        self.down = nn.Linear(wide, WIDTH, bias=bias)

    def forward(self, x):
        if self.kind == "chunked gate_up":
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind == "geglu":
            return self.down(self.up(x) * F.gelu(self.gate(x), approximate="tanh"))
        return self.down(F.relu(self.up(x)).square() if self.kind == "relu2" else F.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention and an MLP, joined to the residual stream as the recipe says."""

    def __init__(self, recipe: Recipe, mask: str, index: int) -> None:
        super().__init__()
        self.kind = recipe.residual
        self.attention = Attention(recipe, mask, WIDTH, index, MAX_TOKENS)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if recipe.extra == "layer scale" else None
        self.mlp = None if recipe.mlp == "none" else MLP(recipe.mlp, recipe.bias)
        count = 4 if recipe.residual == "sandwich" else 2
        self.norms = nn.ModuleList(norm_of(recipe.norm, WIDTH) for _ in range(count))

    def forward(self, x, position_ids, shared):
        if self.kind == "parallel":
            h = self.norms[0](x)
            return x + self.attention(h, position_ids, shared) + (0.0 if self.mlp is None else self.mlp(h))
        x = self._joined(x, lambda h: self.attention(h, position_ids, shared), 0)
        return x if self.mlp is None else self._joined(x, self.mlp, 1)

    def _joined(self, x, block, index: int):
        if self.kind == "post":
            return self.norms[index](x + block(x))
        if self.kind == "sandwich":
            return x + self.norms[2 + index](block(self.norms[index](x)))
        y = block(self.norms[index](x))
        y = y if self.scale is None else y * self.scale
        return x + (0.7 * y if self.kind == "scaled" else y)


class RandomDecoder(nn.Module):
    """input_ids [1, T], position_ids [1, T] -> logits [1, T, V]."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.place = nn.Embedding(MAX_TOKENS, WIDTH) if recipe.positions == "learned" else None
        self.layers = nn.ModuleList(Layer(recipe, mask, i) for i, mask in enumerate(recipe.masks))
        mixer = (MIXERS | LEGAL).get(recipe.illegal or recipe.extra)
        self.mixer = None if mixer is None else mixer(WIDTH)
        self.norm = norm_of(recipe.norm, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        if recipe.tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        x = x * math.sqrt(WIDTH) if self.recipe.embedding_scale else x
        x = x if self.place is None else x + self.place(position_ids)
        shared = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, position_ids, shared)
            if index == 0 and self.mixer is not None:
                x = self.mixer(x, position_ids)
        logits = self.head(self.norm(x))
        return 5.0 * torch.tanh(logits / 5.0) if self.recipe.final_cap else logits


def decoder_of(recipe: Recipe) -> RandomDecoder:
    """The decoder of a recipe, with weights at which attention is not uniform."""
    return scale_weights(RandomDecoder(recipe), seed=recipe.seed)
