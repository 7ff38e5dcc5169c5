"""Models that call ops of a user's own: refused with the way out, taken at their word, and looked at all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.models.llama import LlamaForCausalLM
from tests.test_compile_probe import tiny_decoder

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


def define(name, function):
    op = torch.library.custom_op(f"pagebinder_tests::{name}", function, mutates_args=())
    op.register_fake(lambda x, *_: torch.empty_like(x))
    return op


def gate(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.nn.functional.silu(x) * factor


def centre(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x - factor * x.mean(-2, keepdim=True)


def shift(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x + factor * x.roll(1, -2)


def count(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * (1 + factor * x.shape[-2])


OPS = {f.__name__: define(f"tokenwise_{f.__name__}", f) for f in (gate, centre, shift, count)}


class WithOp(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.inner: LlamaForCausalLM = tiny_decoder()
        self.op = op

    def forward(self, input_ids, position_ids):
        return self.op(self.inner(input_ids, position_ids), 0.5)


def compiled_of(name, **options):
    torch.manual_seed(0)
    options = {"executable": "eager", "tokenwise_ops": [f"pagebinder_tests::tokenwise_{name}"], **options}
    return pagebinder.compile_model(WithOp(OPS[name]).eval(), CompileConfig(**options))


def test_an_unknown_op_is_refused_with_the_way_out():
    with pytest.raises(CaptureError, match=r'tokenwise_ops=\["pagebinder_tests::tokenwise_gate"\]'):
        compiled_of("gate", tokenwise_ops=())


@pytest.mark.parametrize("executable", ["eager", "native", "inductor"])
def test_an_op_that_is_named_is_served_exactly(executable):
    verify = "full" if executable == "eager" else "off"
    compiled = compiled_of("gate", executable=executable, verify=verify)
    assert any("tokenwise_gate is taken to compute" in note for note in compiled.report.notes)
    ids = [3, 1, 4, 1, 5]
    (output,) = compiled.engine(EngineConfig(num_kv_blocks=16)).generate([ids], GREEDY)
    torch.manual_seed(0)
    model = WithOp(OPS["gate"]).eval()
    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens):
            tokens = torch.tensor([ids])
            ids = [*ids, int(model(tokens, torch.arange(tokens.shape[1])[None])[0, -1].argmax())]
    assert output.token_ids == ids[5:]


def test_models_of_few_positions_are_looked_at_as_far_as_they_go():
    model = WithOp(OPS["gate"]).eval()
    model.positions = nn.Embedding(12, 64)
    forward = model.forward
    model.forward = lambda input_ids, position_ids: (
        forward(input_ids, position_ids) + model.positions(position_ids)
    )
    config = CompileConfig(executable="eager", tokenwise_ops=["pagebinder_tests::tokenwise_gate"])
    assert pagebinder.compile_model(model, config).max_model_len == 12


@pytest.mark.parametrize("name", ["centre", "shift", "count"])
def test_an_op_that_does_relate_tokens_is_found_out(name):
    with pytest.raises(CaptureError, match=f"tokenwise_{name} .* is said to .* and does not") as caught:
        compiled_of(name)
    assert "While executing" not in str(caught.value)


def test_explain_takes_it_at_its_word():
    with torch.device("meta"):
        model = WithOp(OPS["gate"])
    compiled = pagebinder.compile_model(
        model, CompileConfig(tokenwise_ops="pagebinder_tests::tokenwise_gate.default")
    )
    assert compiled.report.notes[-1].endswith("as tokenwise_ops says (1 call).")


@pytest.mark.parametrize("name", ["pagebinder_tests::gaet", "aten::silu", "pagebinder::rope"])
def test_names_that_the_model_does_not_call(name):
    with pytest.raises(ConfigError, match=r"calls no .* it calls: pagebinder_tests::tokenwise_gate"):
        compiled_of("gate", tokenwise_ops=[name])


@pytest.mark.parametrize("value", [3, ["silu"], [3], {"a::b": 1}])
def test_bad_options(value):
    with pytest.raises(ConfigError, match="tokenwise_ops"):
        CompileConfig(tokenwise_ops=value)
