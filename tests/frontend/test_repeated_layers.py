"""Layers that do the same are traced once, and the graph is that of a trace of every layer."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.fx.node import map_arg

from pagebinder.frontend import capture as frontend_capture
from pagebinder.frontend import layer_observer
from pagebinder.frontend.capture import capture
from pagebinder.frontend.source import source_from_module
from tests.graphs import VOCAB_SIZE, WIDTH
from tests.helpers import by_day, tiny_gemma3, tiny_qwen3, tiny_qwen3_next
from tests.moe_models import tiny_deepseek_v3, tiny_gpt_oss_moe, tiny_qwen3_moe


def form(gm: torch.fx.GraphModule) -> list[tuple]:
    """All that there is to a graph but the names of its nodes."""
    numbers = {node: i for i, node in enumerate(gm.graph.nodes)}

    def of(node):
        args = map_arg((node.args, node.kwargs), lambda n: f"node {numbers[n]}")
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            value = tuple(value.shape), value.stride(), value.dtype, value.device
        paths = [(key, entry[0]) for key, entry in (node.meta.get("nn_module_stack") or {}).items()]
        return node.op, str(node.target), str(args), str(value), paths, node.meta.get("stack_trace")

    return [of(node) for node in gm.graph.nodes]


def each_layer_traced(model: nn.Module, monkeypatch) -> torch.fx.GraphModule:
    with monkeypatch.context() as patch:
        patch.setattr(frontend_capture, "repeated_layers", lambda *args: [])
        gm, route = capture(source_from_module(model))
    assert "copies" not in route
    return gm


def state_of(model: nn.Module) -> list:
    """What each module holds: which objects, and which numbers."""
    return [
        {
            k: v if isinstance(v, int | float | str | tuple | list) else id(v)
            for k, v in held.items()
            if not isinstance(v, dict)
        }
        for module in model.modules()
        for held in (module.__dict__, module._parameters, module._buffers, module._modules)
    ]


MODELS = {
    "qwen3 in bf16": (lambda: tiny_qwen3(num_hidden_layers=3).bfloat16(), "2 layers as copies of 1"),
    "windows and full": (tiny_gemma3, "2 layers as copies of 2"),
    "experts": (lambda: tiny_qwen3_moe(num_hidden_layers=3), "1 layers as copies of 1, functionalised"),
    "latents": (lambda: tiny_deepseek_v3(num_hidden_layers=4), "copies of"),
    "sinks": (
        lambda: tiny_gpt_oss_moe(
            num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2
        ),
        "2 layers as copies of 2",
    ),
    "recurrences": (lambda: tiny_qwen3_next(num_hidden_layers=4), "2 layers as copies of 1"),
}


@pytest.mark.parametrize("name", by_day(MODELS, ("qwen3 in bf16", "windows and full")))
def test_the_graph_is_that_of_every_layer_traced(name, monkeypatch):
    make, expected = MODELS[name]
    model = make()
    before = state_of(model)
    gm, route = capture(source_from_module(model))
    assert expected in route
    assert state_of(model) == before
    assert form(gm) == form(each_layer_traced(model, monkeypatch))
    own = dict(model.named_parameters(remove_duplicate=False))
    assert all(tensor is own[path] for path, tensor in gm.named_parameters())


@pytest.fixture
def of_any_code(monkeypatch):
    """Layers that are not transformers' are compared, too."""
    monkeypatch.setattr(layer_observer, "is_known", lambda module: True)


class Layer(nn.Module):
    def __init__(self, index: int, extra: float = 1.0):
        super().__init__()
        self.index, self.extra = index, extra
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, shared):
        return x + torch.relu(self.proj(x)) * self.extra


class Stack(nn.Module):
    """A decoder of layers of one class; `shared` is for what layers tell each other beside their arguments."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, input_ids, position_ids):
        x, shared = self.embed(input_ids) + position_ids[..., None] * 0.01, {}
        for layer in self.layers:
            x = layer(x, shared)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


def captured_as_the_source_is(model: nn.Module, monkeypatch, num_tokens: int = 50) -> str:
    """The route of a capture whose graph computes what the model does, as that of every layer traced does."""
    model = model.eval()
    before = state_of(model)
    gm, route = capture(source_from_module(model))
    assert state_of(model) == before
    ids, positions = torch.randint(VOCAB_SIZE, (num_tokens,)), torch.arange(num_tokens)
    with torch.no_grad():
        expected = model(ids[None], positions[None])[0]
        assert torch.equal(gm(ids, positions), expected)
        assert torch.equal(each_layer_traced(model, monkeypatch)(ids, positions), expected)
    return route


class Scaled(Layer):
    """Reads its number where values are computed."""

    def forward(self, x, shared):
        return x + self.proj(x) / (self.index + 1)


class Remembering(Layer):
    """Reads what the layer before left behind, which is no argument."""

    def forward(self, x, shared):
        y = torch.relu(self.proj(x))
        x = x + y + shared.get("before", 0.0)
        shared["before"] = y
        return x


class WritingIntoItsArgument(Layer):
    def forward(self, x, shared):
        x += self.proj(x)
        return x


class ByLength(Layer):
    """The layers differ for long prompts only."""

    def forward(self, x, shared):
        return x * 2 if x.shape[1] > 100 + self.index else x + self.proj(x)


class KeepingATable(Layer):
    """Makes its table longer when a prompt is."""

    def __init__(self, index: int):
        super().__init__(index)
        self.longest = 0

    def forward(self, x, shared):
        self.longest = max(self.longest, 1)
        return x + self.proj(x)


class Calling(Layer):
    def __init__(self, index: int, function):
        super().__init__(index)
        self.function = function

    def forward(self, x, shared):
        return x + self.function(self.proj(x))


DIFFERENT = {
    "an option": lambda: [Layer(0, 1.0), Layer(1, 2.0), Layer(2, 3.0)],
    "its number": lambda: [Scaled(i) for i in range(3)],
    "what another left": lambda: [Remembering(i) for i in range(3)],
    "written into": lambda: [WritingIntoItsArgument(i) for i in range(3)],
    "something kept": lambda: [KeepingATable(i) for i in range(3)],
    "a function": lambda: [Calling(i, f) for i, f in enumerate((torch.relu, torch.tanh, torch.sigmoid))],
    "equal lambdas": lambda: [Calling(i, lambda x: x * 2) for i in range(2)],
    "a function of -0.0": lambda: [Calling(0, partial(torch.mul, 0.0)), Calling(1, partial(torch.mul, -0.0))],
    "classes": lambda: [Layer(0), Scaled(1)],
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.usefixtures("of_any_code")
def test_layers_that_differ_are_traced_each(what, monkeypatch):
    assert "copies" not in captured_as_the_source_is(Stack(*DIFFERENT[what]()), monkeypatch)


@pytest.mark.usefixtures("of_any_code")
def test_one_layer_in_several_places_is_traced_each_time(monkeypatch):
    layer = Layer(0)
    assert "copies" not in captured_as_the_source_is(Stack(layer, layer, layer), monkeypatch)


@pytest.mark.usefixtures("of_any_code")
def test_layers_that_differ_for_long_prompts_are_traced_each(monkeypatch):
    route = captured_as_the_source_is(Stack(*(ByLength(i) for i in range(3))), monkeypatch)
    assert route == "export up to 100 tokens"


@pytest.mark.usefixtures("of_any_code")
def test_hooks_of_a_user_are_seen(monkeypatch):
    model = Stack(*(Layer(i) for i in range(3)))
    model.layers[1].proj.register_forward_hook(lambda module, args, out: out * 3)
    route = captured_as_the_source_is(model, monkeypatch)
    assert "1 layers as copies of 1" in route, "the third is as the first"


class Several(Layer):
    """Returns more than one tensor, one of them its own argument, and something else."""

    def forward(self, x, shared):
        halves = x.chunk(2, dim=-1)
        y = torch.cat([halves[1], halves[0]], dim=-1) * torch.arange(WIDTH, device=x.device)
        return x + self.proj(y), x, None, 3


class WithAConstant(Layer):
    """Of values that are not known where tensors have none."""

    def forward(self, x, shared):
        return x * torch.tensor([0.5, 2.0 + self.index]).repeat(WIDTH // 2)


class Viewing(Layer):
    """Its result is a part of its argument."""

    def forward(self, x, shared):
        return x.view(x.shape), self.proj(x)


class Dividing(Layer):
    """Sizes that are equal at most lengths."""

    def forward(self, x, shared):
        return x * (1 + x.shape[1] // (5000 + self.index))


class Appending(Layer):
    """Nothing of its tensors shows that its caller adds up what it appends."""

    def forward(self, x, shared):
        y = torch.relu(self.proj(x))
        shared.setdefault("all", []).append(y)
        return y


class AddingUp(Stack):
    def forward(self, input_ids, position_ids):
        x, shared = self.embed(input_ids), {}
        for layer in self.layers:
            x = layer(x, shared)
        return self.head(sum(shared["all"]))


def test_layers_of_other_code_are_traced_each(monkeypatch):
    """What they do beside their tensors is not seen."""
    assert "copies" not in captured_as_the_source_is(AddingUp(*(Appending(i) for i in range(3))), monkeypatch)
    assert "copies" not in captured_as_the_source_is(Stack(*(Layer(i) for i in range(3))), monkeypatch)


@pytest.mark.usefixtures("of_any_code")
def test_constants_and_results_of_several_kinds(monkeypatch):
    route = captured_as_the_source_is(Stack(*(Several(i) for i in range(4))), monkeypatch)
    assert "3 layers as copies of 1" in route


@pytest.mark.usefixtures("of_any_code")
def test_weights_that_layers_share_stay_shared(monkeypatch):
    layers = [Layer(i) for i in range(3)]
    layers[2].proj.weight = layers[0].proj.weight
    model = Stack(*layers)
    route = captured_as_the_source_is(model, monkeypatch)
    assert "2 layers as copies of 1" in route


@pytest.mark.parametrize("layer", [WithAConstant, Viewing, Dividing])
@pytest.mark.usefixtures("of_any_code")
@pytest.mark.parametrize("num_tokens", [50, 5000])
def test_where_it_cannot_be_told_layers_are_traced_each(layer, num_tokens, monkeypatch):
    model = Stack(*(layer(i) for i in range(3)))
    assert "copies" not in captured_as_the_source_is(model, monkeypatch, num_tokens)


class Changing(Layer):
    """Writes into values of its own."""

    def forward(self, x, shared):
        y = self.proj(x).clone()
        y[..., :4] += 1
        return x + y.mul_(2)


@pytest.mark.usefixtures("of_any_code")
def test_writes_into_own_values_are_made_functional_in_every_copy(monkeypatch):
    route = captured_as_the_source_is(Stack(*(Changing(i) for i in range(3))), monkeypatch)
    assert "2 layers as copies of 1, functionalised" in route
