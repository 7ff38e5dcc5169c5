"""Code of a user's own is run beside its graph: what it does behind torch's back is an error, not another result."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig
from pagebinder.compile_probe import has_code_of_its_own
from pagebinder.models.llama import LlamaForCausalLM
from pagebinder.models.llama_config import LlamaConfig
from tests.helpers import tiny_llama

CALLS = [0]
FACTORS = itertools.cycle([2.0, 3.0, 0.5])


def counted(x):
    CALLS[0] += 1
    return x * CALLS[0]


def tiny_decoder() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        layer_types=("full_attention", "full_attention"), model_type="qwen3",
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Own(nn.Module):
    """A decoder and something that is done to its logits."""

    def __init__(self, change):
        super().__init__()
        self.decoder, self.change = tiny_decoder(), change

    def forward(self, input_ids, position_ids):
        return self.change(self.decoder(input_ids, position_ids))


class NamedByWords(nn.Module):
    """Its parts have names that no attribute in code may have; asks whether there is one token."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"class": Own(abs), "0": nn.Linear(1, 1)})

    def forward(self, input_ids, position_ids):
        logits = self.parts["class"](input_ids, position_ids)
        return logits if input_ids.shape[1] > 1 else logits + 0


def compiled(change):
    return pagebinder.compile_model(Own(change).eval(), CompileConfig(executable="eager"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (counted, "when it is called again"),
        (lambda x: x * next(FACTORS), "when it is called again"),
        (lambda x: x * float(numpy.random.rand()), "when it is called again"),
        (lambda x: -x if torch.compiler.is_exporting() else x, "The graph of Own"),
    ],
    ids=["a global", "an iterator", "NumPy", "another result while it is traced"],
)
def test_what_torch_does_not_see_is_an_error(change, reason):
    with pytest.raises(CaptureError, match=reason):
        compiled(change)


def test_code_that_computes_the_same_is_served():
    model = compiled(lambda x: x / 2)
    ids = torch.arange(1, 9)
    expected = Own.forward(model.source.module, ids[None], torch.arange(8)[None])[0]
    torch.testing.assert_close(model.graphs["semantic"](ids, torch.arange(8)), expected)


def test_names_of_modules_may_be_words_of_python():
    pagebinder.compile_model(NamedByWords().eval(), CompileConfig(executable="eager"))


def test_known_code_is_that_of_transformers_and_ours():
    assert not has_code_of_its_own(tiny_llama())
    assert has_code_of_its_own(nn.Sequential(Own(abs)))
