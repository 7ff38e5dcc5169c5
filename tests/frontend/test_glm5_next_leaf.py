"""Leaf of GLM-5.3's indexer of pooled keys: what is captured and served, that it is undone, and what it refuses."""

from __future__ import annotations

import functools

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from pagebinder import CaptureError
from pagebinder.frontend.attention_interface import (
    LATENT_ATTENTIONS,
    CausalMask,
    ChosenKeys,
    attention_forward,
    attention_hook,
)
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.leaves import LEAVES, captured_leaves, patched
from pagebinder.frontend.leaves.pool_indexer import POOL_INDEXER, choose, chosen_as_mask
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls
from tests.graphs import count
from tests.helpers import assert_serves_as_source, by_day
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import telling_weights, tiny_config, tiny_model

OPS = torch.ops.pagebinder
# At 77 tokens the source's own rounding is 2.5e-5 against itself in float64.
TOLERANCE = 1e-4
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["indexed_attention"] * 2,
    "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["dense"] * 2,
}


def architecture():
    found = next((a for a in architectures("multimodal") if a.name == "glm5_next"), None)
    if found is None:
        pytest.skip("this release of transformers has no glm5_next")
    try:
        tiny_config(found)
    except StrictDataclassError as error:
        pytest.skip(f"the glm5_next of this release of transformers is another one: {error}")
    return found


@functools.cache
def built() -> torch.nn.Module:
    return tiny_model(architecture())


@functools.cache
def captured() -> torch.fx.GraphModule:
    return capture(source_from_module(built()))[0]


def attentions(model) -> list[torch.nn.Module]:
    return [m for m in model.modules() if type(m).__name__ == "Glm5NextTextAttention"]


def with_options(**options) -> torch.nn.Module:
    config = tiny_config(architecture())
    for name, value in options.items():
        setattr(config.get_text_config(), name, value)
    torch.manual_seed(0)
    return telling_weights(architecture().model_class(config).float())


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


def error(gm, model, ids) -> float:
    with torch.no_grad():
        return float((gm(ids, torch.arange(len(ids))) - logits(model, ids)).abs().max())


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(4, 120, (length,), generator=torch.Generator().manual_seed(length))


def test_the_captured_graph_has_the_ops_and_equals_the_source():
    gm, found = captured(), attentions(built())
    indexers = [a.indexer for a in found if a.indexer is not None]
    assert len(found) == 3 and len(indexers) == 2, "one layer takes what the one before it chose"
    assert count(gm, OPS.mla_attention.default) == 3 and not count(gm, OPS.attention.default)
    assert count(gm, OPS.compress.default) == count(gm, OPS.index_topk.default) == 2
    first, shared, last = (node.args[6] for node in calls(gm.graph, OPS.mla_attention.default))
    assert len({first, last}) == 2 and shared is not last
    for length in (1, 2, 3, 4, 8, 16, 77):
        assert error(gm, built(), ids_of(length)) <= TOLERANCE


def test_what_is_chosen_matters():
    """The tiny model would tell: all pools, or others, give other logits."""
    ids = ids_of(77)
    other = with_options(index_topk=80)
    other.load_state_dict(built().state_dict())
    assert float((logits(other, ids) - logits(built(), ids)).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "options", [{"index_kpool": 1, "index_topk": 3}, {"index_kpool": 8, "index_topk": 64}], ids=str
)
def test_other_sizes_of_pools(options):
    """Of single tokens, without a tail; and more than there are.

    Tokens differ: without positions, equal ones have equal keys in the first layer, and of scores that tie the source
    takes any.
    """
    model = with_options(**TWO_LAYERS, **options)
    gm = capture(source_from_module(model))[0]
    for length in (1, 9, 40):
        ids = 4 + torch.randperm(116, generator=torch.Generator().manual_seed(length))[:length]
        assert error(gm, model, ids) <= TOLERANCE


def test_the_report_names_the_layers_and_the_audit_has_nothing_against_them():
    result = captured_leaves(LEAVES, built(), captured())
    found = [(m.pattern, m.module_path.split(".layers.")[1]) for m in result.matches]
    assert found.count(("pool indexer", "1.self_attn.indexer")) == 2  # compress and index_topk
    assert ("latent attention", "2.self_attn") in found
    assert not [v for v in audit(captured()) if "self_attn" in v.module_path and "pagebinder" in v.op]


def test_everything_is_put_back():
    before = [set(m.__dict__) for m in built().modules()]
    with attention_hook(built()), patched(LEAVES, built()):
        assert LATENT_ATTENTIONS and "forward" in attentions(built())[0].indexer.__dict__
    assert [set(m.__dict__) for m in built().modules()] == before
    assert not LATENT_ATTENTIONS and not any(m._forward_pre_hooks for m in built().modules())


def test_without_our_attention_function_nothing_is_patched():
    with POOL_INDEXER.patched(built()):
        assert "forward" not in attentions(built())[0].indexer.__dict__
        assert not any(m._forward_pre_hooks for m in built().modules())


@pytest.mark.parametrize("executable", by_day(["eager", "inductor"], ["eager"]))
def test_served_tokens_are_the_source_models(executable):
    assert_serves_as_source(built(), ids_of, executable)


# ---- refusals --------------------------------------------------------------------------------------------------


def test_a_tail_that_is_not_seen_is_refused():
    with pytest.raises(CaptureError, match="index_kpool_always_select_tail=False"):
        capture(source_from_module(with_options(index_kpool_always_select_tail=False)))


def other_mean(self, packed_states):
    keys, indices, valid = self._pooled(packed_states)
    return keys + packed_states[:, : keys.shape[1], : self.head_dim], indices, valid


def fewer(self, topk_indices, visible, valid):
    return self._appended(topk_indices[..., : -self.index_kpool], visible, valid)


def no_tail(self, topk_indices, visible, valid):
    return topk_indices


@pytest.mark.parametrize(
    ("method", "kept", "other"),
    [
        ("get_pooled_states", "_pooled", other_mean),
        ("append_visible_tail", "_appended", fewer),
        ("append_visible_tail", "_appended", no_tail),
    ],
)
def test_another_indexer_is_refused(monkeypatch, method, kept, other):
    """Its own code runs beside ours."""
    owner = type(attentions(built())[0].indexer)
    monkeypatch.setattr(owner, kept, getattr(owner, method), raising=False)
    monkeypatch.setattr(owner, method, other)
    with pytest.raises(CaptureError, match="chooses other keys"):
        capture(source_from_module(built()))


def test_another_mask_of_what_is_chosen_is_refused(monkeypatch):
    def all_seen(self, topk_indices, query_states, kv_length):
        return torch.zeros(1, 1, topk_indices.shape[1], kv_length)

    monkeypatch.setattr(type(attentions(built())[0]), "build_attention_mask_from_topk", all_seen)
    with pytest.raises(CaptureError, match="chooses other keys"):
        capture(source_from_module(built()))


def test_a_method_that_takes_other_arguments_is_refused(monkeypatch):
    def positions(self, hidden_states, q_resid, position_ids):
        raise AssertionError

    monkeypatch.setattr(type(attentions(built())[0].indexer), "forward", positions)
    with pytest.raises(CaptureError, match="does not take attention_mask, cache"):
        capture(source_from_module(built()))


def test_a_mask_or_cache_or_choice_that_is_not_known_is_refused():
    attention = attentions(built())[0]
    rows = torch.randn(1, 5, 64), torch.randn(1, 5, 32)
    for mask, cache in ((torch.ones(1, 5).bool(), None), (CausalMask(), object())):
        with pytest.raises(CaptureError, match="is given a cache, or a mask"):
            choose(attention.indexer, *rows, mask, cache)
    with pytest.raises(CaptureError, match="no indexer known here"):
        chosen_as_mask(torch.zeros(1, 5, 3), *rows)


def test_a_padding_mask_given_to_the_model_reaches_no_indexer_in_silence():
    with (
        attention_hook(built()),
        patched(LEAVES, built()),
        torch.no_grad(),
        pytest.raises(CaptureError, match="is given a cache, or a mask"),
    ):
        mask = torch.tensor([[0, 1, 1, 1]])
        built()(input_ids=torch.tensor([[4, 5, 6, 7]]), attention_mask=mask, use_cache=False)


def test_chosen_latents_with_more_than_the_op_knows_are_refused():
    attention = attentions(built())[0]
    chosen = ChosenKeys(torch.zeros(1, 5, 2, dtype=torch.int32), 4)
    q, latent, k_rope = torch.randn(1, 4, 5, 16), torch.randn(1, 1, 5, 32), torch.randn(1, 1, 5, 0)
    with attention_hook(built()), patched(LEAVES, built()):
        for option, message in (
            ({"indices": torch.zeros(1, 5, 2, dtype=torch.int32)}, "a list of others"),
            ({"softcap": 3.0}, "attends to latents with a soft cap"),
            ({"is_causal": False}, "attends to latents with no causality"),
        ):
            with pytest.raises(CaptureError, match=message):
                attention_forward(attention, q, latent, k_rope, chosen, scaling=0.2, **option)
