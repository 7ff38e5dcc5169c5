"""T5Gemma: a config for each half, RoPE in both, windows to both sides in the encoder, soft caps everywhere."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration

import pagebinder
from pagebinder import CompileConfig, EngineConfig, RequestError, SamplingParams
from pagebinder.frontend.numbering import numbering
from tests.encoder_decoders import eager_logits, eager_states, tokens
from tests.helpers import VOCAB_SIZE, scale_weights

LEVELS = ("captured", "semantic", "paged", "fused")
START, WINDOW, TOLERANCE = 2, 8, 1e-4
CAP = 2.0  # low enough to bend most scores


@functools.cache
def compiled_pair():
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": CAP,
        "max_position_embeddings": 256,
    }
    encoder = {**shape, "num_hidden_layers": 2}
    decoder = {**shape, "num_hidden_layers": 3, "cross_attention_hidden_size": 48}
    config = T5GemmaConfig(
        encoder=encoder, decoder=decoder, vocab_size=VOCAB_SIZE, pad_token_id=0, eos_token_id=1, bos_token_id=START
    )  # fmt: skip
    config.tie_word_embeddings = False
    model = scale_weights(T5GemmaForConditionalGeneration(config))
    model.generation_config.eos_token_id = None
    return model, pagebinder.compile_model(model, CompileConfig(executable="eager"))


def test_facts_are_those_of_the_halves():
    _, compiled = compiled_pair()
    kinds = {"sliding_window", "full_attention", "cross_attention"}
    assert {g.spec.kind for g in compiled.kv_spec.groups} == kinds
    assert [layer["kind"] for layer in compiled.report.layers].count("encoder_only") == 2
    assert (
        compiled.source.encoder.decoder_start_token_id == START
    )  # a T5Gemma says no other token to begin with
    assert compiled.source.max_model_len == compiled.source.encoder.max_len == 256


def test_padding_is_refused_as_the_source_masks_it():
    """A prompt that comes without a mask; verify's random ids hold none, or its lengths would show another model."""
    _, compiled = compiled_pair()
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    with pytest.raises(
        RequestError, match="encoder prompt holds the padding token 0, which this model leaves out"
    ):
        engine.add_request("a", [START], encoder_prompt=[5, 0, 6])
    counted = numbering(compiled.source.module).counted
    assert 0 not in counted(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("encoder_len", [1, WINDOW, WINDOW + 1, WINDOW + 2, 60])
def test_the_encoder_equals_the_source(encoder_len):
    """Its mask shows the key at the distance of the window, too."""
    model, compiled = compiled_pair()
    ids = tokens(encoder_len)
    torch.testing.assert_close(compiled.encode(ids), eager_states(model, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_equals_the_source(level):
    model, compiled = compiled_pair()
    for encoder_len, num_tokens in ((1, 1), (1, 5), (7, 1), (40, 30), (100, 77)):
        encoder_ids, ids = tokens(encoder_len), tokens(num_tokens, seed=1)
        expected = eager_logits(model, encoder_ids, ids)
        assert expected.std() > 0.3, "weights too small to show errors"
        got = compiled.run_level(level, ids, encoder_ids)
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_engine_writes_what_generate_writes():
    model, compiled = compiled_pair()
    engine = compiled.engine(EngineConfig(num_kv_blocks=200, max_num_batched_tokens=48))
    prompts = {f"{n}": tokens(n, seed=3).tolist() for n in (1, 9, 30, 90)}
    params = SamplingParams(max_tokens=24, temperature=0.0)
    for name, prompt in prompts.items():
        engine.add_request(name, [START], params, encoder_prompt=prompt)
    written = {}
    while engine.has_unfinished:
        written |= {out.request_id: out.token_ids for out in engine.step() if out.finished}
    for name, prompt in prompts.items():
        with torch.no_grad():
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0]
        assert [START, *written[name]] == expected.tolist()


def test_every_step_is_verified():
    model, _ = compiled_pair()
    config = CompileConfig(executable="eager", verify="full", max_model_len=40, dtype=torch.bfloat16)
    report = pagebinder.compile_model(model, config).report
    assert {s.chain for s in report.verified} == {"encoder", "decoder"}
    assert all(s.max_rel_error < s.tolerance for s in report.verified)
