"""Capturing an encoder-decoder as two graphs: inputs, leaves, the two token dimensions, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.bart.modeling_bart import BartDecoder, BartEncoder

import pagebinder
from pagebinder import CaptureError
from pagebinder.frontend.attention_interface import attention_forward
from pagebinder.frontend.audit import audit
from pagebinder.frontend.encoder_decoder import capture_decoder, capture_encoder, states_of
from pagebinder.frontend.leaves.given_positions import given_positions
from pagebinder.frontend.leaves.relative_bias import bias_by_distance
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls
from tests.encoder_decoders import tiny, tokens
from tests.helpers import VOCAB_SIZE, by_day, scale_weights

ATTENTION = torch.ops.pagebinder.attention.default
CROSS = torch.ops.pagebinder.cross_attention.default
RELATIVE = torch.ops.pagebinder.relative_attention.default


def graphs(model):
    source = source_from_module(model)
    encoder, _ = capture_encoder(source)
    return encoder, capture_decoder(source, states_of(encoder))[0]


def inputs(gm):
    return {n.target: n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"}


def targets(gm):
    return [n.target for n in calls(gm.graph, ATTENTION, CROSS, RELATIVE)]


def test_two_graphs_with_two_dynamic_sizes():
    encoder, decoder = graphs(tiny("bart"))
    assert list(inputs(encoder)) == ["input_ids", "positions"]
    assert list(inputs(decoder)) == ["input_ids", "positions", "encoder_states"]
    sizes = [v.shape[0].node.expr for v in inputs(decoder).values()]
    assert sizes[0] == sizes[1] != sizes[2]
    assert targets(encoder) == [ATTENTION] * 2
    assert targets(decoder) == [ATTENTION, CROSS] * 3
    assert audit(encoder, bidirectional=True) == [] == audit(decoder)


def test_an_encoder_is_no_decoder():
    encoder, _ = graphs(tiny("bart"))
    assert {v.reason for v in audit(encoder)} == {
        "it attends to later tokens (not causal), which a decoder with a cache cannot do"
    }


@pytest.mark.parametrize("max_len", by_day([3, 10], [3]))
def test_a_short_model_keeps_the_two_sizes_apart(max_len):
    _, decoder = graphs(tiny("bart", max_position_embeddings=max_len))
    sizes = {v.shape[0].node.expr for v in inputs(decoder).values()}
    assert len(sizes) == 2


@pytest.mark.parametrize("family", by_day(["bart", "marian"], ["bart"]))
def test_positions_are_those_of_the_call(family):
    _, decoder = graphs(tiny(family))
    states, ids = torch.randn(7, 64), tokens(1)
    at = {p: decoder(ids, torch.tensor([p]), states) for p in (0, 3, 50)}
    assert (at[0] - at[3]).abs().max() > 0.01 and (at[3] - at[50]).abs().max() > 0.01


def test_leaves_are_put_back_after_an_error():
    for leaf, family in ((given_positions, "bart"), (bias_by_distance, "t5")):
        model = tiny(family)
        with pytest.raises(KeyError), leaf(model):
            raise KeyError
        assert not any({"forward", "compute_bias"} & set(vars(m)) for m in model.modules())


def test_an_embedding_that_is_not_called_is_an_error():
    model = tiny("bart").model.decoder
    not_called = pytest.raises(CaptureError, match="embed_positions was not called")
    with given_positions(model) as given, not_called, given.of_call(torch.arange(3)):
        pass
    with given_positions(model), pytest.raises(CaptureError, match="outside of the call"):
        model(input_ids=tokens(3)[None])


def test_an_unknown_compute_bias_is_an_error():
    model = tiny("t5")
    attention = model.decoder.block[0].layer[0].SelfAttention
    attention.compute_bias = lambda query_length, key_length, buckets: None
    with pytest.raises(CaptureError, match="seen on transformers 5.23"), bias_by_distance(model):
        pass


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_a_relative_bias_is_by_distance(family):
    encoder, decoder = graphs(tiny(family))
    assert targets(encoder) == [RELATIVE] * 2
    assert targets(decoder) == [RELATIVE, CROSS] * 3
    for gm, num_distances, causal in ((encoder, 41, False), (decoder, 21, True)):
        for node in calls(gm.graph, RELATIVE):
            assert list(node.args[3].meta["val"].shape) == [4, num_distances]
            assert (node.kwargs["num_behind"], node.kwargs.get("causal", True)) == (20, causal)
    assert audit(encoder, bidirectional=True) == [] == audit(decoder)


def changed(monkeypatch, part, argument, change):
    """BART whose encoder or decoder sees a changed input: change(hidden [1, E, C]) before cross attention."""
    forward = part.forward

    def changed_forward(self, *args, **kwargs):
        if argument is not None:
            kwargs[argument] = change(kwargs[argument])
            return forward(self, *args, **kwargs)
        out = forward(self, *args, **kwargs)
        out.last_hidden_state = change(out.last_hidden_state)
        return out

    monkeypatch.setattr(part, "forward", changed_forward)
    return tiny("bart")


MIXES = {
    "mean": (lambda x: x + x.mean(1, keepdim=True), "reduces over the tokens"),
    "flip": (lambda x: x.flip(1), "along the token dimension"),
    "softmax": (lambda x: x.softmax(1), "along the token dimension"),
    "scores": (lambda x: (x @ x.mT).softmax(-1) @ x, "two token dimensions"),
    "roll": (lambda x: x.roll(1, 1), "along the token dimension"),
    "row numbers": (lambda x: x + torch.arange(x.shape[1])[:, None], "counts the tokens"),
}


@pytest.mark.parametrize("name", by_day(MIXES, ["mean", "scores"]))
def test_encoder_states_must_not_be_mixed_in_the_decoder(name, monkeypatch):
    change, reason = MIXES[name]
    _, decoder = graphs(changed(monkeypatch, BartDecoder, "encoder_hidden_states", change))
    assert any(reason in v.reason for v in audit(decoder))


@pytest.mark.parametrize("name", by_day(MIXES, ["roll", "row numbers"]))
def test_an_encoder_mixes_tokens_in_its_attention_only(name, monkeypatch):
    """A shift or a pooling may be right in an encoder that is run whole, but it is not proven, so it is refused."""
    change, reason = MIXES[name]
    encoder, _ = graphs(changed(monkeypatch, BartEncoder, None, change))
    assert any(reason in v.reason for v in audit(encoder, bidirectional=True))


def cross_decoder(combine):
    """Audit of a hand-written graph over two sequences: combine(x [T, C], y [E, C]) traced."""
    from pagebinder.frontend.capture import TracedInput, trace

    class TwoSequences(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(VOCAB_SIZE, 16)

        def forward(self, input_ids, positions, encoder_states):
            return combine(self.table(input_ids), encoder_states)

    source = SimpleNamespace(
        module=torch.nn.Identity(), is_transformers=False, max_model_len=64, encoder=None, vocab_size=8
    )
    traced = {
        "input_ids": TracedInput(torch.zeros(10, dtype=torch.int64)),
        "positions": TracedInput(torch.arange(10)),
        "encoder_states": TracedInput(torch.zeros(17, 16), "num_encoder_tokens"),
    }
    return audit(trace(source, TwoSequences(), traced)[0])


def heads(x):
    return x.view(-1, 2, 8)


COMBINED = {
    "scores": (lambda x, y: (x @ y.T).softmax(-1) @ y, "two sequences"),
    "look-up": (lambda x, y: x + y[x.long()[:, 0]], "two sequences"),
    "broadcast": (lambda x, y: (x[:, None] + y[None]).amax(1), "two sequences"),
    "attention of the encoder's tokens": (
        lambda x, y: x + torch.ops.pagebinder.attention(*[heads(y)] * 3, scale=1.0).flatten(1).amax(0),
        "other tokens than the decoder's",
    ),
    "queries of the encoder": (
        lambda x, y: (
            x
            + torch.ops.pagebinder.cross_attention(heads(y), heads(y), heads(y), scale=1.0).flatten(1).amax(0)
        ),
        "its queries not the decoder's",
    ),
    "keys of the decoder": (
        lambda x, y: torch.ops.pagebinder.cross_attention(*[heads(x)] * 3, scale=1.0).flatten(1),
        "not those of the encoder's tokens",
    ),
}


@pytest.mark.parametrize("name", COMBINED)
def test_only_cross_attention_relates_the_two_sequences(name):
    combine, reason = COMBINED[name]
    assert any(reason in v.reason for v in cross_decoder(combine))


def test_cross_attention_is_the_way_to_do_it():
    cross = torch.ops.pagebinder.cross_attention
    assert cross_decoder(lambda x, y: x + cross(heads(x), heads(y), heads(y * 2), scale=1.0).flatten(1)) == []


def test_position_biases_that_are_not_understood_are_refused():
    q = torch.randn(1, 4, 6, 8)
    module = SimpleNamespace(training=False, is_causal=True, config=None, has_relative_attention_bias=False)
    for bias in (torch.zeros(1, 4, 6, 6), torch.zeros(4, 21)):
        with pytest.raises(CaptureError, match="position_bias"):
            attention_forward(module, q, q, q, None, position_bias=bias)


def test_rows_that_depend_on_the_prompts_padding_are_refused():
    """M2M-100 counts positions over the ids that are not padding."""
    config = M2M100Config(
        vocab_size=VOCAB_SIZE, d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    compiled = pagebinder.compile_model(
        scale_weights(M2M100ForConditionalGeneration(config)), pagebinder.CompileConfig(executable="eager")
    )
    engine = compiled.engine(pagebinder.EngineConfig(num_kv_blocks=40))
    with pytest.raises(pagebinder.RequestError, match="padding token 1"):
        engine.add_request("a", [2], pagebinder.SamplingParams(), encoder_prompt=[5, 1, 7])
    with pytest.raises(pagebinder.RequestError, match="padding token 1"):
        engine.add_request("b", [2, 1, 5], pagebinder.SamplingParams(), encoder_prompt=[5, 7])


def tiny_whisper():
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE, d_model=64, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, max_source_positions=20, max_target_positions=64,
        num_mel_bins=8, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    return scale_weights(WhisperForConditionalGeneration(config))


def test_an_encoder_of_something_else_than_tokens_is_refused():
    with pytest.raises(CaptureError, match="takes 'input_features', not token ids"):
        graphs(tiny_whisper())


def test_its_decoder_alone_is_like_any_other():
    model = tiny_whisper()
    features, ids = torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(0)), tokens(9)
    with torch.no_grad():
        states = model.get_encoder()(features).last_hidden_state[0]
        expected = model(input_features=features, decoder_input_ids=ids[None], use_cache=False).logits[0]
        decoder, _ = capture_decoder(source_from_module(model), states)
        torch.testing.assert_close(decoder(ids, torch.arange(9), states), expected, atol=1e-5, rtol=1e-5)
    assert audit(decoder) == []
