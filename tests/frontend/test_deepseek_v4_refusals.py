"""DeepSeek-V4 of transformers, changed: whatever the leaf does not read is refused with its reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as source_file

import pagebinder
from pagebinder import CaptureError
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.leaves import latent_ops
from pagebinder.frontend.leaves.deepseek_v4 import DEEPSEEK_V4, attention
from pagebinder.frontend.leaves.deepseek_v4_proof import Miniature, small_config
from pagebinder.frontend.source import source_from_module
from tests.frontend.test_deepseek_v4_leaf import HEAVY, SLIDING, SPARSE, tiny
from tests.graphs import captured

OPS = torch.ops.pagebinder


def layers(model):
    return model.model.layers


def with_a_weight_more(model):
    layers(model)[0].self_attn.q_scale = nn.Parameter(torch.ones(4))


def with_a_module_more(model):
    layers(model)[1].self_attn.compressor.extra = nn.Linear(4, 4)


def without_sinks(model):
    layers(model)[0].self_attn.sinks = None


def with_another_norm(model):
    layers(model)[1].self_attn.compressor.kv_norm = nn.RMSNorm(24)


def with_another_window(model):
    layers(model)[2].self_attn.sliding_window = 8


def with_another_layer_type(model):
    layers(model)[2].self_attn.layer_type = "full_attention"


def with_a_compressor_of_the_wrong_kind(model):
    layers(model)[2].self_attn.layer_type = SLIDING


def with_other_frequencies(model):
    layers(model)[1].self_attn.compressor.indexer.rotary_emb.compress_inv_freq.mul_(2)


def with_a_negative_scale(model):
    layers(model)[1].self_attn.compressor.indexer.scorer.softmax_scale = -0.25


def with_dynamic_rope(model):
    layers(model)[1].self_attn.compressor.rotary_emb.rope_type["compress"] = "dynamic"


MODELS = {
    "a weight more": (with_a_weight_more, "layers.0.self_attn has q_scale, which nobody here reads"),
    "a module more": (with_a_module_more, "self_attn.compressor has extra, which nobody here reads"),
    "no sinks": (without_sinks, "layers.0.self_attn has no sinks"),
    "another norm": (with_another_norm, "kv_norm of the class RMSNorm"),
    "another window": (with_another_window, "a window of 8 tokens, its config one of 16"),
    "another layer type": (with_another_layer_type, "the layer type 'full_attention'"),
    "the wrong compressor": (with_a_compressor_of_the_wrong_kind, "which its compressor does not fit"),
    "other frequencies": (with_other_frequencies, "other frequencies than the attention"),
    "a negative scale": (with_a_negative_scale, "after their ReLU"),
    "dynamic RoPE": (with_dynamic_rope, "RoPE of the type 'dynamic'"),
}


@pytest.mark.parametrize("change", MODELS)
def test_a_changed_model_is_refused(change):
    model, (apply, reason) = tiny(), MODELS[change]
    apply(model)
    with pytest.raises(CaptureError, match=f"(?s){reason}.*5.23"):
        capture(source_from_module(model))


def test_entries_of_very_many_tokens_are_refused():
    with pytest.raises(CaptureError, match="an entry of 4096 tokens"):
        capture(source_from_module(tiny(compress_rates={SPARSE: 4, HEAVY: 4096})))


def leading_channels(original):
    """RoPE of the first channels, as a docstring of the source says, and not of the last."""

    def changed(x, cos, sin, unsqueeze_dim=1):
        return original(x.flip(-1), cos, sin, unsqueeze_dim).flip(-1)

    return changed


def without_the_sink(original):
    def changed(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        scores = query @ key.transpose(2, 3) * scaling + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    return changed


def transposed(original):
    def changed(self, hidden_streams):
        post, comb, collapsed = original(self, hidden_streams)
        return post, comb.transpose(-1, -2), collapsed

    return changed


def earlier_entries(original):
    """Entries are visible one query late: only where (p + 1) % ratio == 0 is it another result."""

    def changed(self, hidden_states, q_residual, position_ids, past_key_values, layer_idx):
        return original(
            self, hidden_states, q_residual, (position_ids - 1).clamp(min=0), past_key_values, layer_idx
        )

    return changed


def of_reversed_streams(original):
    return lambda self, x: original(self, x.flip(2))


def louder(original):
    return lambda self, x: 1.01 * original(self, x)


# "function" or "Class.method" of the modeling file -> another version of it
VERSIONS = {
    "apply_rotary_pos_emb": leading_channels,
    "eager_attention_forward": without_the_sink,
    "DeepseekV4HyperConnection.forward": transposed,
    "DeepseekV4HyperHead.forward": of_reversed_streams,
    "DeepseekV4UnweightedRMSNorm.forward": louder,
    "DeepseekV4HCACompressor.forward": earlier_entries,
    "DeepseekV4Indexer.forward": earlier_entries,
}


@pytest.mark.parametrize("name", VERSIONS)
def test_another_version_of_the_source_is_refused(monkeypatch, name):
    model = tiny()
    owner, attribute = DEEPSEEK_V4._owner(source_file.__name__, name)
    monkeypatch.setattr(owner, attribute, VERSIONS[name](getattr(owner, attribute)))
    with pytest.raises(CaptureError, match="computes something else than is understood here"):
        capture(source_from_module(model))


def test_other_arguments_are_refused(monkeypatch):
    monkeypatch.setattr(source_file.DeepseekV4Attention, "forward", lambda self, x, cos, sin: x)
    with pytest.raises(CaptureError, match="DeepseekV4Attention.forward .* does not take hidden_states"):
        capture(source_from_module(tiny()))


def test_a_model_whose_source_fails_is_refused(monkeypatch):
    def failing(self, x):
        raise IndexError("no such row")

    monkeypatch.setattr(source_file.DeepseekV4HyperHead, "forward", failing)
    with pytest.raises(CaptureError, match="cannot be run: IndexError: no such row"):
        capture(source_from_module(tiny()))


def test_a_missing_attribute_is_refused():
    model = tiny()
    del layers(model)[1].self_attn.compressor.indexer.scorer.softmax_scale
    with pytest.raises(CaptureError, match="indexer.scorer lacks what is read of it"):
        capture(source_from_module(model))


def test_an_attention_mask_or_a_cache_is_refused():
    module, x = tiny().model.layers[0].self_attn, torch.zeros(1, 3, 32)
    with pytest.raises(CaptureError, match="is given an attention mask"):
        attention(module, x, {}, None, torch.zeros(1, 1, 3, 3))
    with pytest.raises(CaptureError, match="is given a cache"):
        attention(module, x, {}, None, None, cache=object())
    with pytest.raises(CaptureError, match="chunk_ids"):
        attention(module, x, {}, None, None, chunk_ids=torch.zeros(3))


def test_several_sequences_are_refused():
    with pytest.raises(CaptureError, match="one sequence at a time"):
        latent_ops.hyper_mix(*(torch.zeros(2, 3, 4),) * 4)


def test_the_miniature_has_a_layer_of_each_kind_and_leaves_the_random_state_alone():
    model = tiny()
    small = small_config(model.config)
    assert small.layer_types == [SLIDING, SPARSE, HEAVY] and small.mlp_layer_types == [
        "hash_moe",
        "moe",
        "hash_moe",
    ]
    assert model.config.hidden_size == 32 and model.config._attn_implementation == "eager"
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    Miniature(model)
    assert torch.equal(torch.randn(2), expected)


# ---- the audit of these ops --------------------------------------------------------------------------------------


def mixes(x, positions):
    """Streams whose tokens lie in the wrong dimension."""
    streams = x[0].unflatten(-1, (4, 4)).transpose(0, 1)
    return OPS.hyper_mix(streams, streams[..., 0], streams[..., :4], streams[:, 0])


def depends_on_tokens(x, positions):
    """A norm weight that is of the tokens."""
    frequencies = torch.ones(2)
    weight = x[0, 0]
    return OPS.compress(
        x[0], x[0], torch.zeros(4, 16), weight, frequencies, ratio=4, overlap=False, eps=1e-6
    )[None]


def plain(x, positions):
    return OPS.compress(
        x[0], x[0], torch.zeros(4, 16), torch.ones(16), torch.ones(2), ratio=4, overlap=False, eps=1e-6
    )[None]  # fmt: skip


def test_the_audit_reads_the_layout_of_operands():
    assert audit(captured(plain)) == []
    reasons = {v.op: v.reason for v in audit(captured(mixes))}
    assert "takes [tokens, ...] of every operand" in reasons["pagebinder.hyper_mix"]
    assert audit(captured(depends_on_tokens)) != []


def test_a_user_is_told(tmp_path):
    model = tiny()
    with_a_weight_more(model)
    with pytest.raises(CaptureError, match="q_scale"):
        pagebinder.compile_model(model)
