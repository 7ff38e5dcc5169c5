"""Small captured graphs: an embedding with any few lines of PyTorch behind it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.fx import GraphModule

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.capture import capture
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.executables import EagerExecutable
from pagebinder.runtime.single_sequence import single_sequence_inputs

WIDTH = 16
VOCAB_SIZE = 32


class Function(nn.Module):
    """A function as a module: torch records source lines of `forward` methods only."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, x, positions):
        return self.function(x, positions)


class Embedded(nn.Module):
    """ids -> embedding x [1, T, C] -> body(x, positions [1, T])."""

    def __init__(self, body: Callable, width: int = WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, width)
        self.body = body if isinstance(body, nn.Module) else Function(body)

    def forward(self, input_ids, position_ids):
        return self.body(self.embed(input_ids), position_ids)


class EmbeddedWithHead(Embedded):
    """The same with logits, tied to the embedding, for compilations as a whole."""

    def forward(self, input_ids, position_ids):
        return super().forward(input_ids, position_ids) @ self.embed.weight.T


def captured(body: Callable, *, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> GraphModule:
    """The captured graph of an embedding followed by `body`, a module or a function of (x, positions)."""
    return captured_model(Embedded(body, width).to(dtype))


def captured_model(model: nn.Module) -> GraphModule:
    return capture(source_from_module(model.eval()))[0]


def clone(gm: GraphModule) -> GraphModule:
    return GraphModule(gm, copy.deepcopy(gm.graph))


def run(gm: GraphModule, num_tokens: int, **inputs: torch.Tensor) -> torch.Tensor:
    """Run a graph on random tokens at positions 0, 1, ...; further inputs by name."""
    generator = torch.Generator().manual_seed(num_tokens)
    known = {
        "input_ids": torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator),
        "positions": torch.arange(num_tokens),
        **inputs,
    }
    names = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        return gm(*(known[name] for name in names))


def run_in_steps(gm: GraphModule, plan, states, ids: torch.Tensor, ends, num_blocks: int) -> torch.Tensor:
    """Run a paged graph on one sequence in steps that end at `ends`, over one cache: logits of all tokens."""
    arena, parts = KVArena(plan, states, num_blocks, torch.device("cpu")), []
    for start, end in itertools.pairwise((0, *ends)):
        inputs = single_sequence_inputs(plan, states, ids[start:end], start=start, arena=arena)
        parts.append(EagerExecutable(gm).run(inputs))
    return torch.cat(parts)


def count(gm: GraphModule, *targets) -> int:
    return sum(1 for _ in calls(gm.graph, *targets))


def assert_metadata_kept(gm: GraphModule, *targets) -> None:
    """Each of these calls knows its value, its source module and its source line."""
    for node in calls(gm.graph, *targets):
        assert node.meta["val"] is not None
        assert node.meta["nn_module_stack"]
        assert ".py" in node.meta["stack_trace"]
