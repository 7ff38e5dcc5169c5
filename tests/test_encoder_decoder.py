"""Encoder-decoders: every level and the encoder equal the source model; what has no encoder prompt is told."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoConfig

import pagebinder
from pagebinder import CaptureError, CompileConfig, ConfigError
from pagebinder.errors import ProviderError
from tests.encoder_decoders import FAMILIES, eager_logits, eager_states, tiny, tokens
from tests.helpers import by_day, tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")

LEVELS = ("captured", "semantic", "paged", "fused")
LENGTHS = ((1, 1), (1, 5), (7, 1), (40, 3), (100, 77))  # encoder, decoder
TOLERANCE = 1e-4


@functools.cache
def compiled_pair(family: str):
    model = tiny(family)
    return model, pagebinder.compile_model(model, CompileConfig(executable="eager"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", by_day(FAMILIES, ("bart",)))
def test_every_level_equals_the_source(family, level):
    model, compiled = compiled_pair(family)
    for encoder_len, num_tokens in LENGTHS:
        encoder_ids, ids = tokens(encoder_len), tokens(num_tokens, seed=1)
        expected = eager_logits(model, encoder_ids, ids)
        assert expected.std() > 0.3, "weights too small to show errors"
        got = compiled.run_level(level, ids, encoder_ids)
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", by_day(FAMILIES, ("bart",)))
def test_the_encoder_equals_the_source(family):
    model, compiled = compiled_pair(family)
    for encoder_len in (1, 2, 40, 100):
        ids = tokens(encoder_len)
        torch.testing.assert_close(compiled.encode(ids), eager_states(model, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", by_day(["bart", "t5"], ["bart"]))
def test_bfloat16_is_as_close_to_float32_as_the_source(family):
    """The same bfloat16 weights, once computed in float32."""
    model = tiny(family).bfloat16()
    exact = tiny(family)
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    encoder_ids, ids = tokens(60), tokens(50, seed=1)
    expected = eager_logits(exact, encoder_ids, ids)
    own_error = (eager_logits(model, encoder_ids, ids).float() - expected).square().mean().sqrt()
    for level in LEVELS:
        got = compiled.run_level(level, ids, encoder_ids)
        assert got.dtype is torch.bfloat16
        assert (got.float() - expected).square().mean().sqrt() <= 2 * own_error


def test_the_encoder_prompt_matters():
    _, compiled = compiled_pair("bart")
    one, other = (compiled.run_level("fused", tokens(9), tokens(20, seed=s)) for s in (1, 2))
    assert (one - other).abs().max() > 0.1


def test_both_halves_are_explained():
    _, compiled = compiled_pair("bart")
    assert [s.kind for s in compiled.states] == ["full_attention", "cross_attention"] * 3
    assert {g.spec.kind for g in compiled.kv_spec.groups} == {"full_attention", "cross_attention"}
    kinds = [layer["kind"] for layer in compiled.report.layers]
    assert kinds == ["encoder_only"] * 2 + ["full_attention", "cross_attention"] * 3
    by_pass = {p.name: p for p in compiled.report.passes}
    assert len(by_pass["encoder.attention_hook"].matches) == 2
    assert len(by_pass["attention_hook"].matches) == 6
    assert len(by_pass["page_cross_attention"].matches) == 3
    assert len(by_pass["gather_logits"].matches) == 1, "the bias of the logits must not hide the LM head"
    text = compiled.explain()
    assert "encoder_only" in text and "cross_atten" in text


def test_the_source_model_is_unchanged():
    model = tiny("bart", encoder_layers=1, decoder_layers=1).train()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    pagebinder.compile_model(model, CompileConfig(executable="eager"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(m.training for m in model.modules())
    assert not any("forward" in vars(m) for m in model.modules())
    assert model.config._attn_implementation != "pagebinder"


def test_a_checkpoint_directory_and_its_config_alone(tmp_path):
    model = tiny("bart", encoder_layers=1, decoder_layers=1)
    model.save_pretrained(tmp_path)
    compiled = pagebinder.compile_model(str(tmp_path), CompileConfig(executable="eager"))
    expected = eager_logits(model, tokens(20), tokens(7, seed=1))
    got = compiled.run_level("fused", tokens(7, seed=1), tokens(20))
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
    explained = pagebinder.compile.explain_model(AutoConfig.from_pretrained(tmp_path))
    assert [s.kind for s in explained.states] == [s.kind for s in compiled.states]


def test_encoder_ids_are_required_or_refused():
    _, compiled = compiled_pair("bart")
    with pytest.raises(ConfigError, match="needs its encoder_input_ids"):
        compiled.run_level("fused", tokens(3))
    with pytest.raises(ConfigError, match="encode takes 1 to 128 tokens, not 129"):
        compiled.run_level("fused", tokens(3), tokens(129))
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        compiled.encode(torch.tensor([5, 128]))
    decoder = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager"))
    with pytest.raises(ConfigError, match="takes no encoder_input_ids"):
        decoder.run_level("fused", tokens(3), tokens(3))
    with pytest.raises(ConfigError, match="has no encoder"):
        decoder.encode(tokens(3))


def test_the_shapes_of_the_source_are_kept_apart():
    """The decoder's counts of layers and positions are not the encoder's."""
    source = compiled_pair("bart")[1].source
    assert source.num_attention_layers == 3
    assert source.encoder.num_attention_layers == 2
    assert source.encoder.max_len == source.max_model_len == 128
    assert source.encoder.decoder_start_token_id == 2


def test_a_provider_without_a_kernel_for_a_relative_bias_says_so():
    model = tiny("t5", num_layers=1, num_decoder_layers=1)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    choice = next(c for c in compiled.report.providers if c.op == "paged_relative_attention")
    assert choice.provider == "cpu" and choice.num_nodes == 1
    config = CompileConfig(executable="eager", providers={"paged_relative_attention": "flex_attention"})
    with pytest.raises(ProviderError, match="no kernel for paged_relative_attention"):
        pagebinder.compile_model(model, config)


def test_two_vocabularies():
    """A translation model may have one for each language."""
    apart = {
        "decoder_vocab_size": 90,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
    }
    model = tiny("marian", encoder_layers=1, decoder_layers=1, **apart)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    assert (compiled.source.encoder.vocab_size, compiled.source.vocab_size) == (128, 90)
    encoder_ids, ids = torch.tensor([127, 95, 3]), torch.tensor([2, 89, 5])
    expected = eager_logits(model, encoder_ids, ids)
    assert expected.shape == (3, 90)
    got = compiled.run_level("fused", ids, encoder_ids)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(ConfigError, match="outside the vocabulary of 90"):
        compiled.run_level("fused", encoder_ids, encoder_ids)


def test_a_missing_cross_attention_is_found():
    model = tiny("bart", encoder_layers=1, decoder_layers=1)
    model.config.decoder_layers = 2
    with pytest.raises(CaptureError, match="1 cross attention layers were found, but the config says 2"):
        pagebinder.compile_model(model, CompileConfig(executable="eager"))


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_float16_is_refused_with_what_helps(family):
    """They look for infinities among all tokens then, and clamp those of all."""
    sizes = {"num_layers": 1} if family == "t5" else {"encoder_layers": 1, "decoder_layers": 1}
    model = tiny(family, **sizes).half()
    with pytest.raises(CaptureError, match=r'in float16.*CompileConfig\(dtype="bfloat16"\)'):
        pagebinder.compile_model(model, CompileConfig(executable="eager"))
