"""Names that a model's top may have and a graph has, too: its own attributes, and its inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams

VOCAB_SIZE, WIDTH, HEADS = 160, 32, 2
PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(20)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Named(nn.Module):
    """A decoder with a weight of that name at its top."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.name, self.kind = name, kind
        self.embed, self.places = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)
        if kind == "module":
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        elif kind == "parameter":
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH)))
        else:
            self.register_buffer(name, torch.randn(WIDTH))

    def forward(self, input_ids, position_ids):
        x, own = self.embed(input_ids) + self.places(position_ids), getattr(self, self.name)
        x = own(x) if self.kind == "module" else x * own
        for layer in self.layers:
            x = layer(x)
        return self.head(F.rms_norm(x, (WIDTH,)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("meta", "parameter"), ("meta", "module"), ("graph", "module"), ("graph", "buffer"), ("code", "module")),
        *(("recompile", "module"), ("_graph", "buffer"), ("positions", "buffer"), ("input_ids", "module")),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_models_names_may_be_a_graphs_own(name, kind, tmp_path):
    torch.manual_seed(0)
    model, tokens = Named(name, kind).eval(), list(PROMPT)
    for _ in range(GREEDY.max_tokens):
        tokens.append(int(model(torch.tensor([tokens]), torch.arange(len(tokens))[None])[0, -1].argmax()))
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", verify="full"))
    compiled.save(tmp_path / "saved")
    for one in (compiled, pagebinder.load(tmp_path / "saved")):
        (output,) = one.engine(EngineConfig(num_kv_blocks=16)).generate([PROMPT], GREEDY)
        assert output.token_ids == tokens[len(PROMPT) :]
