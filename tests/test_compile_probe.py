"""Code of a user's own is run beside its graph: what it does behind torch's back is an error, not another result."""

from __future__ import annotations

import functools
import itertools
import sys

import numpy
import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig
from pagebinder.compiler.probe import has_code_of_its_own
from pagebinder.models.llama import LlamaForCausalLM
from pagebinder.models.llama_config import LlamaConfig
from pagebinder.passes.graph_values import rounded_to
from pagebinder.report import PassResult
from tests.frontend.plain_decoders import Decoder, Einsum
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


def by_length(x):
    """What it falls back to where numbers cannot be read is right for long sequences alone."""
    try:
        is_long = x.shape[1] + 0 * int(x.sum()) > 30
    except Exception:
        is_long = True
    return x if is_long else -x


def of_single_tokens(x):
    for _ in range(min(x.shape[1], 2)):
        x = 2 * x
    return x


@pytest.mark.parametrize("change", [by_length, of_single_tokens])
def test_what_depends_on_the_length_is_an_error(change):
    with pytest.raises(CaptureError, match=r"depend on how many tokens there are|how many there are"):
        compiled(change)


def masked(x, least):
    return x + torch.where(torch.arange(x.shape[-1]) < 60, 0.0, least)


@pytest.mark.parametrize("least", [-1e9, torch.finfo(torch.float32).min, float("-inf")])
def test_ids_that_may_not_be_chosen_hide_nothing(least):
    """Their logits say nothing of how far the others may be apart."""
    with pytest.raises(CaptureError, match="when it is called again"):
        compiled(lambda x: masked(counted(x), least))
    model, ids = compiled(lambda x: masked(x, least)), torch.arange(1, 9)
    expected = Own.forward(model.source.module, ids[None], torch.arange(8)[None])[0]
    torch.testing.assert_close(model.graphs["semantic"](ids, torch.arange(8)), expected)


def test_a_pass_that_changes_nothing_does_not_stop_the_probe():
    silent = lambda gm: PassResult(name="silent", changes_numbers=True)  # noqa: E731
    config = CompileConfig(executable="eager", passes={"semantic": [silent]})
    with pytest.raises(CaptureError, match="when it is called again"):
        pagebinder.compile_model(Own(counted).eval(), config)


def test_a_function_of_torch_that_was_replaced_is_run_too(monkeypatch):
    silu = nn.functional.silu
    monkeypatch.setattr(nn.functional, "silu", lambda x, inplace=False: silu(x) * 1.4)
    assert has_code_of_its_own(tiny_llama())


def test_nothing_of_the_probe_stays_in_the_module():
    class Keeps(Own):
        def forward(self, input_ids, position_ids):
            self.last = super().forward(input_ids, position_ids)
            return self.last

    model = Keeps(abs).eval()
    pagebinder.compile_model(model, CompileConfig(executable="eager"))
    assert "last" not in vars(model)


def test_code_that_computes_the_same_is_served():
    model = compiled(lambda x: x / 2)
    ids = torch.arange(1, 9)
    expected = Own.forward(model.source.module, ids[None], torch.arange(8)[None])[0]
    torch.testing.assert_close(model.graphs["semantic"](ids, torch.arange(8)), expected)


def as_float(x):
    return x.float()


class UnderAutocast(Decoder):
    def forward(self, input_ids, position_ids):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(input_ids, position_ids).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_made_float32_at_the_end_are_judged_as_their_model_computes(dtype):
    graph = pagebinder.compile_model(Own(as_float).to(dtype).eval(), CompileConfig(executable="eager")).graphs
    assert rounded_to(graph["semantic"], torch.float32) is dtype


def test_products_under_autocast_are_judged_in_its_dtype():
    model = UnderAutocast(Einsum, num_layers=1).eval()
    graphs = pagebinder.compile_model(model, CompileConfig(executable="eager")).graphs
    assert rounded_to(graphs["semantic"], torch.float32) is torch.bfloat16


def cast_alone(x):
    return x.bfloat16().float()


def product_in_bfloat16(x):
    return (x.bfloat16() @ torch.eye(x.shape[-1], dtype=torch.bfloat16)).float()


@pytest.mark.parametrize("narrow", [cast_alone, product_in_bfloat16])
def test_few_narrow_ops_do_not_make_a_model_narrow(narrow):
    """What is counted here is small: in bfloat16 it would pass."""
    state = [0.0]

    def moves_a_little(x):
        state[0] += 0.003
        return x * (1 + state[0]) + 0 * narrow(x)

    with pytest.raises(CaptureError, match="when it is called again"):
        compiled(moves_a_little)


def test_names_of_modules_may_be_words_of_python():
    pagebinder.compile_model(NamedByWords().eval(), CompileConfig(executable="eager"))


def add_every_second_time(model):
    calls = []

    def hook(module, args, output):
        calls.append(0)
        return output + len(calls) % 2

    model.model.layers[1].register_forward_hook(hook)


def draw_before(model):
    noise = lambda module, args: (args[0] + float(numpy.random.rand()),)  # noqa: E731
    model.model.layers[0].mlp.register_forward_pre_hook(noise)


def draw_in_an_attribute(model):
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.__dict__["act_fn"] = lambda x: nn.functional.silu(x) * float(numpy.random.rand() + 0.5)


@pytest.mark.parametrize("change", [add_every_second_time, draw_before, draw_in_an_attribute])
def test_what_others_put_into_models_of_transformers_is_run_too(change):
    model = tiny_llama()
    change(model)
    assert has_code_of_its_own(model)
    with pytest.raises(CaptureError, match="when it is called again"):
        pagebinder.compile_model(model, CompileConfig(executable="eager"))


def own_forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_known_code_is_that_of_transformers_and_ours(monkeypatch):
    model = tiny_llama()
    assert not has_code_of_its_own(model)
    assert has_code_of_its_own(nn.Sequential(Own(abs)))
    with nn.modules.module.register_module_forward_hook(lambda *args: None):
        assert has_code_of_its_own(model)
    assert not has_code_of_its_own(model)
    mlp = type(model.model.layers[0].mlp)
    # wraps() makes it look like transformers' own
    monkeypatch.setattr(mlp, "forward", functools.wraps(mlp.forward)(own_forward))
    assert has_code_of_its_own(model)
    monkeypatch.undo()
    home = sys.modules[type(model).__module__]
    monkeypatch.setattr(home, "rotate_half", lambda x: x)
    assert has_code_of_its_own(model)
