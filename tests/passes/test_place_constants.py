"""What lies on the CPU in a graph of another device's, and is known before any step, is put there.

The other device is "meta", which needs no GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from pagebinder.graph_tools import (
    aten,
    attach,
    attribute,
    attributes,
    calls,
    device_of,
    devices,
    fake_mode_of,
    tensors,
    val,
)
from pagebinder.passes.place_constants import MAX_BYTES, place_constants, values_elsewhere
from pagebinder.passes.simplify import simplify
from tests.graphs import (
    WIDTH,
    Embedded,
    assert_metadata_kept,
    captured,
    captured_model,
    clone,
    count,
    run,
)

META = torch.device("meta")


def on_meta(body) -> GraphModule:
    return captured_model(Embedded(body).to(META))


def as_elsewhere(gm: GraphModule) -> GraphModule:
    """A graph of the CPU's that says of all that depends on inputs and weights that it lies on another device, as it
    would on a GPU. It still runs."""
    for node in gm.graph.nodes:
        is_weight = node.op == "get_attr" and isinstance(attribute(gm, node.target), nn.Parameter)
        if tensors(node) and (is_weight or node.op == "placeholder" or META in devices(node)):
            with fake_mode_of(gm.graph):
                node.meta["val"] = torch.empty_strided(
                    val(node).shape, val(node).stride(), dtype=val(node).dtype, device=META
                )
    return gm


def placed(before: GraphModule):
    after = clone(before)
    return after, place_constants(after)


def elsewhere(gm: GraphModule) -> list:
    return [n for n in gm.graph.nodes if devices(n) - {device_of(gm.graph)}]


def assert_same_numbers(before: GraphModule, after: GraphModule) -> None:
    for node, value in values_elsewhere(before).items():
        if (name := f"constant_{node.name}") in attributes(after):
            attach(after, name, value)
    for num_tokens in (3, 9):
        assert torch.equal(run(after, num_tokens), run(before, num_tokens))


def frequencies(x):
    return 1.0 / 1e6 ** (torch.arange(0, WIDTH, device="cpu") / WIDTH)


def filled(x, mask, number):
    """What torch up to 2.14 makes of `x[mask] = number`; 2.15 makes a masked_fill itself."""
    return x.index_put((mask,), torch.tensor(number, dtype=x.dtype))


def assigned(x, mask, number):
    y = x.clone()
    y[mask] = number
    return y


PLACED = {
    "a chain of ops": (lambda x, p: x * frequencies(x), ["mul.Tensor"]),
    "and a cast": (lambda x, p: x * frequencies(x).bfloat16(), ["mul.Tensor"]),
    "a number beside a tensor": (lambda x, p: x * torch.tensor(2.5), ["mul.Tensor"]),
    "several readers": (lambda x, p: (c := frequencies(x)) * x + c, ["mul.Tensor", "add.Tensor"]),
    "two rows of a table": (lambda x, p: x * (c := torch.ones(2, WIDTH))[0] - c[1], ["mul.Tensor", "sub.Tensor"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_a_constant_of_the_cpu_becomes_an_attribute_on_the_device(name):
    body, readers = PLACED[name]
    before = as_elsewhere(captured(body))
    after, result = placed(before)
    assert elsewhere(before) and not elsewhere(after)
    assert [m.detail for m in result.matches] == [f"aten.{reader}" for reader in readers]
    assert result.changed and not result.refusals
    assert all(m.module_path == "body" for m in result.matches)
    new = [n for n in attributes(after) if n.startswith("constant_")]
    assert len(new) == (2 if "rows" in name else 1) and all(attribute(after, n).is_meta for n in new)
    assert_metadata_kept(after, aten.mul.Tensor)
    assert_same_numbers(before, after)


def test_a_copy_to_the_device_is_dropped_behind_it():
    before = on_meta(lambda x, p: x * frequencies(x).to(x.device))
    after, result = placed(before)
    simplify(after)
    assert [m.detail for m in result.matches] == ["aten.to.dtype_layout"]
    assert [n.target for n in after.graph.nodes if n.op == "get_attr"] == ["embed.weight", "constant_mul"]
    assert count(after, aten.to.dtype_layout) == 0 and not elsewhere(after)
    assert torch.equal(list(values_elsewhere(before).values())[-1], frequencies(None))


FILLED = {
    "a mask of entries": lambda x, p: filled(x, x > 0, 0.5),
    "a mask of tokens": lambda x, p: filled(x, p == 1, -1.5),
    "integers": lambda x, p: x * filled(p, p == 2, 7)[..., None],
    "two fills": lambda x, p: filled(filled(x, x > 0.5, 0.5), x < -0.5, -0.5),
    "masked_fill with a tensor": lambda x, p: x.masked_fill(x > 0, torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", FILLED)
def test_a_fill_of_masked_entries_takes_a_number(name):
    before = as_elsewhere(captured(FILLED[name]))
    after, result = placed(before)
    assert elsewhere(before) and not elsewhere(after)
    assert count(after, aten.index_put.default, aten.masked_fill.Tensor) == 0
    assert (
        count(after, aten.masked_fill.Scalar)
        == len(result.matches)
        == count(before, aten.index_put.default, aten.masked_fill.Tensor)
    )
    assert not any(n.startswith("constant_") for n in attributes(after))
    assert_metadata_kept(after, aten.masked_fill.Scalar)
    assert_same_numbers(before, after)


@pytest.mark.parametrize("number", [-1.5, 2])
def test_so_is_an_assignment_whatever_torch_makes_of_it(number):
    before = as_elsewhere(captured(lambda x, p: assigned(x, p == 1, number)))
    after, _ = placed(before)
    assert not elsewhere(after) and not count(after, aten.index_put.default)
    assert [n.args[2] for n in calls(after.graph, aten.masked_fill.Scalar)] == [number]
    assert_same_numbers(before, after)


def test_so_does_one_whose_number_is_made_on_the_device():
    """What torch up to 2.14 makes of an assignment on the meta device, where `explain` looks at a graph."""

    def body(x, p):
        return x.index_put((p == 1,), torch.scalar_tensor(-1.5, dtype=x.dtype, device=x.device))

    after, result = placed(on_meta(body))
    assert [m.detail for m in result.matches] == ["aten.index_put.default"]
    assert count(after, aten.index_put.default, aten.scalar_tensor.default) == 0
    assert [n.args[2] for n in calls(after.graph, aten.masked_fill.Scalar)] == [-1.5]


NOT_FILLED = {
    "added": lambda x, p: x.index_put((x > 0,), torch.tensor(1.0), accumulate=True),
    "places": lambda x, p: x.index_put((torch.zeros_like(p[0, :1]),), torch.tensor(1.0)),
    "two masks": lambda x, p: x.index_put((p[:, 0] == 0, p[0] == 1), torch.tensor(1.0)),
    "several numbers": lambda x, p: x.index_put((p == 1,), torch.arange(float(WIDTH), device="cpu")),
}


@pytest.mark.parametrize("name", NOT_FILLED)
def test_other_writes_by_index_read_the_attribute(name):
    before = as_elsewhere(captured(NOT_FILLED[name]))
    after, result = placed(before)
    assert [m.detail for m in result.matches] == ["aten.index_put.default"]
    assert count(after, aten.index_put.default) == 1 and not elsewhere(after)
    assert_same_numbers(before, after)


class Counting(nn.Module):
    """Adds a number on the CPU that each step raises."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def _apply(self, function, recurse=True):
        return self  # stays on the CPU

    def forward(self, x, positions):
        self.steps.add_(1)
        return x + self.steps.to(x.device)


def on_cpu(x, make):
    """What `make` gives on the CPU, brought to the device."""
    with torch.device("cpu"):
        return make().to(x.device)


REFUSED = {
    "a number of tokens": (
        lambda x, p: x + on_cpu(x, lambda: torch.arange(x.shape[1]))[:, None],
        "it depends on sym_size",
    ),
    "what the model computes": (
        lambda x, p: x + on_cpu(x, lambda: p.cpu().sin())[..., None],
        "it depends on unsqueeze_1",
    ),
    "a random number": (
        lambda x, p: x + on_cpu(x, lambda: torch.rand(WIDTH)),
        "aten.rand.default is not known to give the same",
    ),
    "a large table": (
        lambda x, p: x + on_cpu(x, lambda: torch.zeros(MAX_BYTES // 4 + 1))[p][..., None],
        "it takes 16 MiB",
    ),
    "one of several results": (
        lambda x, p: x + on_cpu(x, lambda: torch.arange(2.0 * WIDTH).split(WIDTH)[1]),
        "it is one of several results",
    ),
    "what is written to": (Counting(), "it is written to"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_before_a_step_stays(name):
    body, reason = REFUSED[name]
    before = on_meta(body)
    after, result = placed(before)
    assert not result.matches and not result.changed
    assert [r.pattern for r in result.refusals] == ["constant_elsewhere"] and reason in result.refusals[
        0
    ].reason
    assert ".py:" in result.refusals[0].source_line or name == "what is written to"
    assert str(after.graph) == str(before.graph)


UNTOUCHED = {
    "constants of the model's device": lambda x, p: x * torch.arange(WIDTH, device=x.device),
    "a weight": lambda x, p: x.sin(),
    "what nobody reads there": lambda x, p: (torch.arange(3, device="cpu").sum(), x.sin())[1],
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_lies_on_the_device_is_left_alone(name):
    _, result = placed(on_meta(UNTOUCHED[name]))
    assert not result.matches and not result.refusals and not result.changed


@pytest.mark.parametrize("name", [*PLACED, *FILLED, *NOT_FILLED])
def test_a_model_on_the_cpu_is_left_alone(name):
    body = {**{n: b for n, (b, _) in PLACED.items()}, **FILLED, **NOT_FILLED}[name]
    gm = captured(body)
    before, result = str(gm.graph), place_constants(gm)
    assert not result.matches and not result.refusals and str(gm.graph) == before
