"""All four graphs of a compiled model equal the source model, whatever the length and the dtype."""

from __future__ import annotations

import functools

import pytest
import torch

import pagebinder
from pagebinder import CheckpointError, CompileConfig, ConfigError
from pagebinder.models.llama import LlamaConfig, LlamaForCausalLM
from tests.helpers import by_day, scale_weights, tiny_llama, tiny_mistral, tiny_qwen3

LEVELS = ("captured", "semantic", "paged", "fused")
LENGTHS = (1, 2, 5, 40, 77)
TOLERANCE = 1e-4


def our_llama():
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, model_type="qwen3", sliding_window=16,
        layer_types=("full_attention", "sliding_attention", "full_attention"),
    )  # fmt: skip
    return scale_weights(LlamaForCausalLM(config))


MODELS = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "mistral-window": lambda: tiny_mistral(16),
    "ours": our_llama,
}
BY_DAY = ("llama", "ours")  # the others are served in test_engine_exact.py


@functools.cache
def compiled_pair(name: str, dtype: torch.dtype):
    """(source model in dtype, compiled model), compiled once."""
    model = MODELS[name]()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", dtype=dtype))
    return compiled.source.module, compiled


@functools.cache
def exact_model(name: str) -> torch.nn.Module:
    """A float32 model with the rounded weights of the bfloat16 one."""
    model, _ = compiled_pair(name, torch.bfloat16)
    exact = MODELS[name]()
    exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    return exact


def logits(model, ids):
    positions = torch.arange(len(ids))[None]
    with torch.no_grad():
        out = model(ids[None], position_ids=positions)
    return getattr(out, "logits", out)[0]


def tokens(num_tokens):
    return torch.randint(128, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_every_level_equals_the_source_in_float32(name, level, num_tokens):
    model, compiled = compiled_pair(name, torch.float32)
    expected = logits(model, tokens(num_tokens))
    assert expected.std() > 0.3, "weights too small to show errors"
    torch.testing.assert_close(
        compiled.run_level(level, tokens(num_tokens)), expected, atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", by_day(MODELS, ["llama"]))
def test_every_level_in_bfloat16_is_as_close_to_float32_as_the_source(name, level):
    """The same bfloat16 weights, once computed in float32."""
    model, compiled = compiled_pair(name, torch.bfloat16)
    for num_tokens in (5, 77):
        exact, own = logits(exact_model(name), tokens(num_tokens)), logits(model, tokens(num_tokens))
        got = compiled.run_level(level, tokens(num_tokens))
        assert got.dtype is own.dtype is torch.bfloat16
        own_error = (own.float() - exact).square().mean().sqrt()
        assert (got.float() - exact).square().mean().sqrt() <= 2 * own_error


@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_everything_is_matched(name):
    _, compiled = compiled_pair(name, torch.float32)
    by_pass = {p.name: p for p in compiled.report.passes}
    layers = len(compiled.states)
    assert layers == compiled.source.num_attention_layers
    has_qk_norm = name in ("qwen3", "ours")
    assert len(by_pass["recognise_rms_norm"].matches) == (4 if has_qk_norm else 2) * layers + 1
    assert len(by_pass["recognise_rope"].matches) == 2 * layers
    assert len(by_pass["fuse_add_rms_norm"].matches) == 2 * layers  # all but the first layer's first norm
    assert len(by_pass["fuse_qk_norm_rope_write"].matches) == layers
    assert len(by_pass["place_linears"].matches) == 7 * layers + 1
    assert len(by_pass["fuse_gated_linear"].matches) == len(by_pass["merge_linears"].matches) == layers
    assert [r.pattern for r in compiled.report.refusals] == ["add_rms_norm"]


def test_fusions_can_be_left_out():
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager", fusions=False))
    assert "fuse_add_rms_norm" not in {p.name for p in compiled.report.passes}
    torch.testing.assert_close(
        compiled.run_level("fused", tokens(40)), compiled.run_level("paged", tokens(40))
    )


@pytest.mark.parametrize("name", by_day(["llama", "ours"], ["llama"]))
def test_the_source_model_is_unchanged(name):
    model = MODELS[name]().train()
    tensors = dict(model.state_dict(keep_vars=True))
    copies = {k: v.detach().clone() for k, v in tensors.items()}
    implementation = getattr(model.config, "_attn_implementation", None)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    compiled.run_level("fused", tokens(5))
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    assert all(after[k] is tensors[k] and torch.equal(after[k], copies[k]) for k in tensors)
    assert all(m.training for m in model.modules())
    assert getattr(model.config, "_attn_implementation", None) == implementation
    assert compiled.source.module is model


def test_a_repr_is_short():
    _, compiled = compiled_pair("llama", torch.float32)
    headline = "LlamaForCausalLM, 2 layers that mix tokens, float32 on cpu, run by eager"
    assert repr(compiled) == f"CompiledModel({headline})"


def test_weights_are_shared_not_copied():
    model = tiny_llama()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    before = compiled.run_level("fused", tokens(9))
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    torch.testing.assert_close(compiled.run_level("fused", tokens(9)), 2 * before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_llama().save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", by_day([None, "bfloat16"], ["bfloat16"]))
def test_a_checkpoint_directory(checkpoint, dtype):
    compiled = pagebinder.compile_model(str(checkpoint), CompileConfig(executable="eager", dtype=dtype))
    expected_dtype = torch.bfloat16 if dtype else torch.float32
    got = compiled.run_level("fused", tokens(40))
    assert got.dtype is expected_dtype and compiled.report.dtype == str(expected_dtype).removeprefix("torch.")
    from_module = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager", dtype=dtype))
    assert torch.equal(got, from_module.run_level("fused", tokens(40)))


def test_errors_of_a_checkpoint_reach_the_caller(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        pagebinder.compile_model(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        pagebinder.compile_model(tmp_path)


def test_max_model_len():
    config = CompileConfig(executable="eager", max_model_len=100)
    assert pagebinder.compile_model(tiny_llama(), config).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len=513 is more than the 512"):
        pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager", max_model_len=513))


def test_a_window_that_the_length_never_leaves_is_full_attention():
    compiled = pagebinder.compile_model(tiny_mistral(64), CompileConfig(executable="eager", max_model_len=64))
    assert {s.kind for s in compiled.states} == {"full_attention"}
    with torch.no_grad():
        expected = compiled.source.module(tokens(64)[None]).logits[0]
    torch.testing.assert_close(
        compiled.run_level("fused", tokens(64)), expected, atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 10}, "did you mean 'max_model_len'"),
        ({"excutable": "eager"}, "did you mean 'executable'"),
        ({"dtype": "int7"}, "use one of float32"),
        ({"executable": "magic"}, "use one of auto"),
        ({"block_size": 0}, "at least 1"),
        ({"max_model_len": 2.5}, "whole number"),
    ],
)
def test_a_bad_option_is_an_error_with_the_remedy(options, message):
    with pytest.raises(ConfigError, match=message):
        CompileConfig(**options)


def test_wrong_arguments():
    with pytest.raises(ConfigError, match="not dict"):
        pagebinder.compile_model(tiny_llama(), {"executable": "eager"})
    with pytest.raises(ConfigError, match="not int"):
        pagebinder.compile_model(7)
    _, compiled = compiled_pair("llama", torch.float32)
    with pytest.raises(ConfigError, match="'lowered'"):
        compiled.run_level("lowered", tokens(3))
