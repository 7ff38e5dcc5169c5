"""Modules that no trace can read are told before it, with what to give instead."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pagebinder import CaptureError
from pagebinder.frontend.capture import capture
from pagebinder.frontend.python_state import unchanged
from pagebinder.frontend.source import source_from_module
from tests.helpers import tiny_llama


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids, position_ids):
        return self.head(self.embed(input_ids))


def traced():
    ids = torch.arange(6)[None]
    return torch.jit.trace(Small(), (ids, ids))


def packed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(Small(), {nn.Linear}, dtype=torch.qint8)


def offloaded(*names, hook=None):
    model = tiny_llama()
    for name in names or [name for name, _ in model.named_parameters()]:
        model.get_submodule(name.rpartition(".")[0]).to("meta")
    if hook is not None:
        model._hf_hook = hook
    return model


HOOK = SimpleNamespace(offload=True)
UNREADABLE = {
    "traced": (traced, "TopLevelTracedModule is TorchScript"),
    "scripted": (lambda: torch.jit.script(Small()), "RecursiveScriptModule is TorchScript"),
    "packed": (packed, r"head of Small keep their weights packed \(torch\.ao\.nn\.quantized\.dynamic"),
    "offloaded": (
        lambda: offloaded("lm_head.weight"),
        r"lm_head\.weight of LlamaForCausalLM are on the meta",
    ),
    "all offloaded": (
        lambda: offloaded(hook=HOOK),
        r"and \d+ more of LlamaForCausalLM are on the meta device",
    ),
    "by several hooks": (lambda: offloaded(hook=SimpleNamespace(hooks=[HOOK])), "are on the meta device"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_told(name):
    make, message = UNREADABLE[name]
    with pytest.raises(CaptureError, match=message):
        source_from_module(make())


def test_shards_are_told(monkeypatch):
    model = Small()
    kind = type("DTensor", (torch.Tensor,), {})
    model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(kind))
    with pytest.raises(CaptureError, match=r"head\.weight of Small are kept in shards \(DTensor"):
        source_from_module(model)


def test_a_model_on_meta_is_read():
    assert source_from_module(tiny_llama().to("meta")).device.type == "meta"


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        return x * self.proj(x).sigmoid()


class Counts(Scale):
    def forward(self, x):
        self.calls += 1
        return x * self.calls


def with_part(part):
    model = Small()
    model.head = nn.Sequential(part, model.head)
    return model


def test_a_part_that_was_traced_is_served():
    model = with_part(torch.jit.trace(Scale(), torch.randn(1, 6, 8)))
    ids, positions = torch.arange(9), torch.arange(9)
    gm = capture(source_from_module(model))[0]
    torch.testing.assert_close(gm(ids, positions), model(ids[None], positions[None])[0])


def test_a_part_that_torch_cannot_call_is_told():
    with pytest.raises(CaptureError, match=r"head\.0: TorchScript \(torch\.jit\.script"):
        capture(source_from_module(with_part(torch.jit.script(Scale()))))


def test_what_torchscript_keeps_in_attributes_is_compared():
    part = torch.jit.script(Counts())
    with pytest.raises(CaptureError, match=r"calls \(0 -> 1\)"), unchanged(with_part(part)):
        part(torch.randn(1, 6, 8))
