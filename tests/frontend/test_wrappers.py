"""Modules around a model: which are taken off, which are compiled with their own code, which are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CheckpointError, CompileConfig, compile_model
from pagebinder.frontend.source import source_from_module
from tests.helpers import VOCAB_SIZE, tiny_llama


def of_peft(name: str, base: type, **body) -> type:
    """A class as the package peft has it, which is not installed for tests."""
    return type(name, (base,), {"__module__": "peft.peft_model", **body})


BaseTuner = of_peft("BaseTuner", nn.Module, forward=lambda self, *args, **kwargs: self.model(*args, **kwargs))
LoraModel = of_peft("LoraModel", BaseTuner)
AdaLoraModel = of_peft("AdaLoraModel", BaseTuner, forward=lambda self, *args, **kwargs: self.model(*args))
XLoraModel = of_peft("XLoraModel", BaseTuner, forward=lambda self, *args, **kwargs: self.model(*args))
PeftModel = of_peft(
    "PeftModel",
    nn.Module,
    forward=lambda self, *args, **kwargs: self.base_model(*args, **kwargs),
    active_peft_config=property(lambda self: self.peft_config["default"]),
)
ForCausalLM = of_peft("PeftModelForCausalLM", PeftModel, forward=lambda self, ids=None, **kwargs: None)


def tuned(model, tuner=LoraModel, **options):
    made = tuner()
    made.model = model
    made.peft_config = {
        "default": SimpleNamespace(is_prompt_learning=False, peft_type="PeftType.LORA", **options)
    }
    return made


def with_adapters(model, kind=ForCausalLM, tuner=LoraModel, **options):
    made = kind()
    made.base_model = tuned(model, tuner, **options)
    made.peft_config = made.base_model.peft_config
    return made


TRANSPARENT = {
    "torch.compile": torch.compile,
    "DataParallel": nn.DataParallel,
    "peft": with_adapters,
    "peft without a task": lambda model: with_adapters(model, PeftModel),
    "a tuner": tuned,
    "AdaLoRA": lambda model: tuned(model, AdaLoraModel),
    "several": lambda model: torch.compile(nn.DataParallel(with_adapters(model))),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparent_wrappers_are_taken_off(name):
    model = tiny_llama(eos_token_id=5)
    source = source_from_module(TRANSPARENT[name](model))
    assert source.module is model and source.is_transformers
    assert source.config is model.config and source.eos_token_ids == {5}


class Scaled(nn.DataParallel):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs).logits


def with_another_forward(model):
    made = torch.compile(model)
    made.forward = lambda input_ids: -model(input_ids).logits
    return made


OPAQUE = {
    "torch.compile with another forward": with_another_forward,
    "a subclass": Scaled,
    "X-LoRA": lambda model: with_adapters(model, tuner=XLoraModel),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_wrappers_that_do_more_are_not(name):
    model = OPAQUE[name](tiny_llama(eos_token_id=5))
    assert source_from_module(model).module is model


def test_prompts_that_are_learnt_are_refused_by_name():
    model = with_adapters(tiny_llama())
    model.base_model = model.base_model.model
    model.peft_config = {
        "default": SimpleNamespace(is_prompt_learning=True, peft_type="PeftType.PROMPT_TUNING")
    }
    with pytest.raises(
        CaptureError, match=r"puts rows that it has learnt \(PROMPT_TUNING\) before every prompt"
    ):
        source_from_module(model)


def test_adapters_that_look_for_tokens_are_refused_by_name():
    with pytest.raises(CaptureError, match=r"activated LoRA.*alora_invocation_tokens"):
        source_from_module(with_adapters(tiny_llama(), alora_invocation_tokens=[7]))


def test_an_adapters_directory_is_told_from_a_checkpoints(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"AutoPeftModelForCausalLM.from_pretrained\(dir\)"):
        compile_model(tmp_path)


def test_hooks_of_a_wrapper_are_not_lost():
    model = nn.DataParallel(tiny_llama())
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="DataParallel around a LlamaForCausalLM has hooks of its own"):
        source_from_module(model)


# torch 2.11 cannot export a layer with one output: it wants to know which of two strides is the smaller one.
FROM_2_12 = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot export it")


class PassingOn(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class MaskFirst(PassingOn):
    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        return self.model(input_ids, attention_mask, position_ids, **kwargs)


class ValueHead(PassingOn):
    def __init__(self, model):
        super().__init__(model)
        self.value = nn.Linear(model.config.hidden_size, 1)

    def forward(self, input_ids=None, past_key_values=None, attention_mask=None, **kwargs):
        out = self.model(input_ids, attention_mask, output_hidden_states=True, **kwargs)
        return out.logits, out.loss, self.value(out.hidden_states[-1])


@pytest.mark.parametrize(
    "around",
    [
        pytest.param(PassingOn, id="passing on"),
        pytest.param(MaskFirst, id="mask first"),
        pytest.param(ValueHead, id="value head", marks=FROM_2_12),
        pytest.param(lambda model: PassingOn(nn.DataParallel(model)), id="two"),
    ],
)
def test_other_code_around_a_model_is_compiled_with_it(around):
    """compile_model compares logits with those of the module itself: its code is a user's own."""
    model = tiny_llama(eos_token_id=5)
    model.generation_config.eos_token_id = [6, 7]
    source = pagebinder.compile_model(around(model), CompileConfig(executable="eager")).source
    assert not source.is_transformers and source.eos_token_ids == {6, 7}
    assert (source.vocab_size, source.max_model_len) == (VOCAB_SIZE, 512)


class IdsAlone(PassingOn):
    def forward(self, input_ids):
        return self.model(input_ids).logits


def test_behind_a_wrapper_that_keeps_positions_away_the_model_counts_them():
    model = tiny_llama()
    served = pagebinder.compile_model(IdsAlone(model), CompileConfig(executable="eager", verify="sample"))
    ids = torch.arange(1, 20)
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(served.run_level("fused", ids), expected, atol=1e-4, rtol=1e-4)


def test_a_model_that_is_called_twice_in_a_step_is_told():
    class Twice(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config = model, model.config

        def forward(self, input_ids, position_ids):
            options = {"position_ids": position_ids, "use_cache": False}
            return self.model(input_ids, **options).logits + self.model(input_ids + 1, **options).logits

    message = (
        r"4 attention layers were found, but the config says 2: model\.model\.layers\.0\S* is called 2 times"
    )
    with pytest.raises(CaptureError, match=message):
        pagebinder.compile_model(Twice(tiny_llama()), CompileConfig(executable="eager"))
