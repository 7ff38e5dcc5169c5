"""What the trace leaves of Python state: in objects that modules hold, and in closures of hooks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError
from pagebinder.frontend.capture import capture
from pagebinder.frontend.python_state import put_back
from pagebinder.frontend.source import source_from_module
from tests.frontend import plain_decoders as plain


class Held(nn.Module):
    """Keeps state in an object, as hooks of accelerate do."""

    def __init__(self, change):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.change, self.state = change, SimpleNamespace(device=None, calls=0)

    def forward(self, input_ids, position_ids):
        self.change(self.state)
        return self.head(self.embed(input_ids)) + self.state.calls


def note_device(state):
    if state.device is None:
        state.device = torch.device("cpu")


def count(state):
    state.calls += 1


def count_once(state):
    state.calls = 1


@pytest.mark.parametrize("change", [note_device, count_once])
def test_objects_that_settle_after_one_call_are_served(change):
    model = Held(change)
    capture(source_from_module(model))
    assert (model.state.device, model.state.calls) == (None, 0)


def test_objects_that_change_with_every_call_are_not():
    with pytest.raises(CaptureError, match=r"state\.calls \(0 -> 1\)"):
        capture(source_from_module(Held(count)))


def test_containers_that_hooks_close_over_are_put_back():
    model, rows, by_name = Held(note_device), [], {}

    def collect(module, args, out):
        rows.append(out)
        by_name["head"] = out

    model.head.register_forward_hook(collect)
    capture(source_from_module(model))
    assert not rows and not by_name


class RescaledOnce(nn.Module):
    """As RWKV: the first call in eval mode divides weights in place, and an attribute says that it is done."""

    def __init__(self):
        super().__init__()
        self.decoder = plain.Decoder(plain.MultiheadAttention)
        self.is_rescaled = False

    def forward(self, input_ids, position_ids):
        if not self.is_rescaled:
            with torch.no_grad():
                self.decoder.head.weight.div_(2)
            self.is_rescaled = True
        return self.decoder(input_ids, position_ids)


def test_weights_that_the_first_call_writes_are_written_once():
    """Attributes are not put back without the weights that they tell of."""
    ids, positions = torch.randint(plain.VOCAB_SIZE, (1, 9)), torch.arange(9)[None]
    model = RescaledOnce().eval()
    weight = model.decoder.head.weight.clone()
    with put_back(model):
        expected = model(ids, positions)[0]
    assert model.is_rescaled and torch.equal(model.decoder.head.weight, weight / 2)
    gm, _ = capture(source_from_module(model))
    assert torch.allclose(gm(ids[0], positions[0]), expected, atol=1e-5)
    assert torch.equal(model(ids, positions)[0], expected)


def test_a_model_whose_first_call_writes_weights_is_served_as_that_leaves_it():
    ids, positions = torch.randint(plain.VOCAB_SIZE, (1, 9)), torch.arange(9)[None]
    model = RescaledOnce().eval()
    weight = model.decoder.head.weight.clone()
    gm, _ = capture(source_from_module(model))
    assert model.is_rescaled and torch.equal(model.decoder.head.weight, weight / 2)
    assert torch.allclose(gm(ids[0], positions[0]), model(ids, positions)[0], atol=1e-5)


class ScaledByTheFirst(nn.Module):
    """Keeps a scale in a buffer, that of the first tokens it ever sees."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        if self.scale.item() == 0:
            self.scale.copy_(x.abs().mean())
        return self.head(x / self.scale)


def test_what_is_written_into_buffers_is_put_back():
    model = ScaledByTheFirst().eval()
    with pytest.raises(CaptureError, match="reduces over the tokens"):
        pagebinder.compile_model(model)
    assert model.scale == 0
    with put_back(model), torch.no_grad():
        model(torch.tensor([[1, 2]]), None)
        assert model.scale > 0
    assert model.scale == 0
