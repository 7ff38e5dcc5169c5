"""Leaves of Qwen4: its indexer of means and its n-gram embeddings, what is captured, and what they refuse."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from pagebinder import CaptureError, CompileConfig, ConfigError, compile_model
from pagebinder.frontend.capture import capture
from pagebinder.frontend.leaves.ngram_embedding import NGRAM_EMBEDDING, PLE_CONVOLUTION, earlier_tokens
from pagebinder.frontend.leaves.qsa_indexer import QSA_INDEXER, pairs_last
from pagebinder.frontend.source import source_from_config, source_from_module
from tests.graphs import count
from tests.helpers import assert_serves_as_source
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import tiny_config, tiny_model

OPS = torch.ops.pagebinder
NAME = "qwen4_exp_text"
LEAVES = (QSA_INDEXER, NGRAM_EMBEDDING, PLE_CONVOLUTION)


def architecture():
    found = next((a for a in architectures("causal") if a.name == NAME), None)
    if found is None:
        pytest.skip(f"this release of transformers has no {NAME}")
    return found


@functools.cache
def built() -> torch.nn.Module:
    return tiny_model(architecture())


def ids_with_ends(length: int) -> torch.Tensor:
    """Token ids with ends of text first, alone and side by side."""
    ids = torch.randint(6, 120, (length,), generator=torch.Generator().manual_seed(length))
    ids[[i for i in (0, 7, 8, 30, 32) if i < length]] = built().config.eos_token_id
    return ids


def test_the_captured_graph_has_the_ops_and_equals_the_source():
    gm = capture(source_from_module(built()))[0]
    layers, ple = built().config.layer_types, len(built().config.ple_layer_ids)
    indexed = len(QSA_INDEXER.modules(built()))  # whatever a release calls such layers
    assert count(gm, OPS.indexed_attention.default) == indexed == count(gm, OPS.index_topk.default)
    assert count(gm, OPS.compress.default) == indexed and not count(gm, OPS.attention.default)
    assert count(gm, OPS.short_conv.default) == 2 * ple + layers.count("linear_attention")
    for length in (2, 16, 77):
        ids = ids_with_ends(length)
        with torch.no_grad():
            expected = built()(input_ids=ids[None], use_cache=False).logits[0]
        assert float((gm(ids, torch.arange(length)) - expected).abs().max()) <= 1e-5


def test_what_is_patched_is_put_back():
    before = [dict(m.__dict__) for m in built().modules()]
    for leaf in LEAVES:
        with leaf.patched(built()):
            pass
    assert [dict(m.__dict__) for m in built().modules()] == before
    assert "modeling_qwen4_exp" in type(built().model.layers[0].ple)._short_conv.__module__


@pytest.mark.parametrize("executable", ["eager", "inductor"])
def test_served_tokens_are_the_source_models(executable):
    """Of prompts with ends of text."""
    assert_serves_as_source(built(), ids_with_ends, executable)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_earlier_tokens_are_those_of_the_source(size):
    module = copy.copy(built().model.layers[0].ple.ple_embedding)
    end = module.eos_token_id
    ids = torch.randint(4, 8, (80,), generator=torch.Generator().manual_seed(size))  # many ends
    history = torch.cat([torch.full((size - 1,), end), ids])[None]
    for shift, ours in enumerate(earlier_tokens(ids, size, end)):
        assert torch.equal(ours, module._shift_right_ignore_eos(history, shift)[0, size - 1 :])


def test_rotated_channels_go_last_in_pairs():
    assert pairs_last(torch.arange(7), 4).tolist() == [4, 5, 6, 0, 2, 1, 3]


def with_option(**options) -> torch.nn.Module:
    config = tiny_config(architecture())
    for name, value in options.items():
        setattr(config, name, value)
    return architecture().model_class(config).eval()


@pytest.mark.parametrize("ratio", [1, 2, 5])
def test_groups_of_any_size_are_proven(ratio):
    model = with_option(indexer_compress_ratio=ratio, indexer_budget=4 * ratio)
    with QSA_INDEXER.patched(model):
        pass


def test_frequencies_that_depend_on_the_length_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(CaptureError, match="depend on the length"):
        compile_model(with_option(rope_parameters=rope))


def with_one_group_less(forward):
    def chooses_fewer(self, hidden_states, position_embeddings, attention_mask, past_key_values):
        self.block_topk -= 1
        mask = forward(self, hidden_states, position_embeddings, attention_mask, past_key_values)
        self.block_topk += 1
        return mask

    return chooses_fewer


def of_reversed_rows(forward):
    def chooses_others(self, hidden_states, position_embeddings, attention_mask, past_key_values):
        return forward(self, hidden_states.flip(1), position_embeddings, attention_mask, past_key_values)

    return chooses_others


def without_rotation(forward):
    def chooses_others(self, hidden_states, position_embeddings, attention_mask, past_key_values):
        cos, sin = position_embeddings
        angles = torch.ones_like(cos), torch.zeros_like(sin)
        return forward(self, hidden_states, angles, attention_mask, past_key_values)

    return chooses_others


def test_the_indexers_of_a_model_without_weights_are_proven():
    model = source_from_config(tiny_config(architecture())).module
    with QSA_INDEXER.patched(model):
        indexers = list(QSA_INDEXER.modules(model).values())
        assert indexers and all(m.index_qk_proj.weight.is_meta and "forward" in m.__dict__ for m in indexers)


@pytest.mark.parametrize("other", [with_one_group_less, of_reversed_rows, without_rotation])
def test_another_indexer_is_refused_for_a_model_without_weights(monkeypatch, other):
    """The proof needs none of them."""
    owner = type(built().model.layers[1].self_attn.indexer)
    monkeypatch.setattr(owner, "forward", other(owner.forward))
    with pytest.raises(CaptureError, match="chooses other keys"):
        capture(source_from_config(tiny_config(architecture())))


def test_the_proof_takes_no_random_numbers_of_others():
    before = torch.get_rng_state()
    with QSA_INDEXER.patched(built()):
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_another_indexer_convolution_or_embedding_is_refused(monkeypatch):
    """Each leaf runs the source's own method beside its own."""
    indexer, ple = built().model.layers[1].self_attn.indexer, built().model.layers[0].ple

    def twice(self, x, past_key_values):
        return 2 * convolve(self, x, past_key_values)

    def shifted(self, ids, past_key_values):
        return embed(self, ids + 1, past_key_values)

    convolve, embed = type(ple)._short_conv, type(ple.ple_embedding).forward
    for owner, name, other, message in (
        (type(indexer), "forward", with_one_group_less(type(indexer).forward), "chooses other keys"),
        (type(ple), "_short_conv", twice, "computes something else"),
        (type(ple.ple_embedding), "forward", shifted, "computes something else"),
    ):
        with monkeypatch.context() as patch, pytest.raises(CaptureError, match=message):
            patch.setattr(owner, name, other)
            capture(source_from_module(built()))


def test_a_bf16_model_is_no_other_model():
    """Its own roundings, of large values here, are not taken for another formula."""
    model = copy.deepcopy(built())
    with torch.no_grad():
        model.model.layers[0].ple.conv1d.weight.mul_(30.0)
    for leaf in LEAVES:
        with leaf.patched(model.bfloat16()):
            pass


def test_more_tokens_than_float32_tells_apart_are_refused():
    module = copy.copy(built().model.layers[0].ple.ple_embedding)
    module.unigram_vocab_size = (1 << 24) + 1
    with pytest.raises(CaptureError, match="more than float32 tells apart"):
        NGRAM_EMBEDDING.probe(module)


def test_codes_for_k_and_v_are_refused():
    with pytest.raises(ConfigError, match="K and V can be kept in codes"):
        compile_model(built(), CompileConfig(executable="eager", kv_dtype="int8"))
