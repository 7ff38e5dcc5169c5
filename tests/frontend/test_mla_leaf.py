"""Leaves of latent attention and of its indexers: what is captured, that it is undone, and what they refuse."""

from __future__ import annotations

import functools

import pytest
import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.attention_interface import LATENT_ATTENTIONS, CausalMask, attention_hook
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.leaves import LEAVES, captured_leaves, patched
from pagebinder.frontend.leaves.latent_attention import latent_attention
from pagebinder.frontend.leaves.sparse_indexer import SPARSE_INDEXER, KeyTaker, Scores
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls, skip_casts
from tests.graphs import count
from tests.helpers import by_day
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import telling_weights, tiny_config, tiny_model

OPS = torch.ops.pagebinder
# family -> (latent attentions, indexers); GLM's and HYV4's "shared" layers take what an earlier one chose.
FAMILIES = {
    "deepseek_v2": (2, 0),
    "deepseek_v3": (2, 0),
    "minicpm3": (2, 0),
    "longcat_flash": (4, 0),
    "deepseek_v32": (2, 2),
    "glm_moe_dsa": (4, 2),
    "axk2": (4, 4),
    "dots3_note_text": (4, 2),
    "hy_v4": (4, 2),
}
TOLERANCE = 1e-5


@functools.cache
def built(family: str) -> torch.nn.Module:
    architecture = next(a for a in architectures("causal") if a.name == family)
    if family not in ("deepseek_v32", "glm_moe_dsa"):
        return tiny_model(architecture)
    config = tiny_config(architecture)
    if family == "deepseek_v32":
        config.num_hidden_layers = 2  # one dense, one of experts
    else:
        config.indexer_types = ["full", "shared"] * 2
    torch.manual_seed(0)
    return telling_weights(architecture.model_class(config).float())


@functools.cache
def captured(family: str):
    return capture(source_from_module(built(family)))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_captured_graph_has_the_ops_and_equals_the_source(family):
    model, gm = built(family), captured(family)
    found = tuple(count(gm, op.default) for op in (OPS.mla_attention, OPS.index_topk))
    assert found == FAMILIES[family]
    assert not count(gm, OPS.attention.default)
    for length in (1, 2, 16, 77):
        ids = torch.randint(4, 120, (length,), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            expected = model(input_ids=ids[None], use_cache=False).logits[0]
        assert float((gm(ids, torch.arange(length)) - expected).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("family", by_day(["deepseek_v3", "deepseek_v32"], ["deepseek_v3"]))
def test_the_report_names_the_layers_and_the_audit_has_nothing_against_them(family):
    result = captured_leaves(LEAVES, built(family), captured(family))
    details = [(m.pattern, m.module_path) for m in result.matches if "expert" not in m.pattern]
    assert ("latent attention", "model.layers.1.self_attn") in details
    assert (("sparse indexer", "model.layers.1.self_attn.indexer") in details) == (family == "deepseek_v32")
    of_attention = [v for v in audit(captured(family)) if "self_attn" in v.module_path]
    assert not [v for v in of_attention if "pagebinder" in v.op]


def test_weights_are_views_of_the_projection():
    gm = captured("deepseek_v3")
    weight = gm.get_parameter("model.layers.0.self_attn.kv_b_proj.weight")
    seen = []

    class Watch(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is OPS.mla_attention.default:
                seen.append([w.untyped_storage().data_ptr() for w in args[4:6]])
            return super().call_function(target, args, kwargs)

    with torch.no_grad():
        Watch(gm).run(torch.arange(5), torch.arange(5))
    assert seen[0] == [weight.untyped_storage().data_ptr()] * 2


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_everything_is_put_back(family):
    model = built(family)
    before = [set(m.__dict__) for m in model.modules()]
    with attention_hook(model), patched(LEAVES, model):
        assert LATENT_ATTENTIONS
    assert [set(m.__dict__) for m in model.modules()] == before
    assert not LATENT_ATTENTIONS and not any(m._forward_pre_hooks for m in model.modules())


def test_without_our_attention_function_the_expanded_form_is_traced():
    model = built("deepseek_v3")
    with patched(LEAVES, model), torch.no_grad():
        key, value = model.model.layers[0].self_attn.expand_kv(
            torch.randn(1, 1, 3, 32), torch.randn(1, 1, 3, 8)
        )
    assert key.shape == (1, 4, 3, 24) and value.shape == (1, 4, 3, 16)


def test_a_projection_with_a_bias_is_cached_expanded_and_said():
    model = tiny_model(next(a for a in architectures("causal") if a.name == "deepseek_v3"))
    attention = model.model.layers[0].self_attn
    biased = torch.nn.Linear(32, attention.kv_b_proj.out_features)
    biased.weight = attention.kv_b_proj.weight
    attention.kv_b_proj = biased
    gm, _ = capture(source_from_module(model))
    assert [count(gm, op.default) for op in (OPS.mla_attention, OPS.attention)] == [1, 1]
    (refusal,) = captured_leaves(LEAVES, model, gm).refusals
    assert refusal.module_path == "model.layers.0.self_attn"
    assert "has a bias" in refusal.reason and "expanded" in refusal.reason
    ids = torch.arange(5, 35)
    with torch.no_grad():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
    assert float((gm(ids, torch.arange(30)) - expected).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("option", [{"chunk": 8}, {"soft_cap": 5.0}, {"causal": False}])
def test_attention_with_more_than_the_op_knows_is_refused(option):
    module = built("deepseek_v3").model.layers[0].self_attn
    plain = {"sinks": None, "scale": 1.0, "window": None, "chunk": None, "soft_cap": None, "causal": True}
    operands = (torch.randn(3, 4, 24), torch.randn(3, 1, 32), torch.randn(3, 1, 8))
    with pytest.raises(CaptureError, match="attends to latents with"):
        latent_attention(module, *operands, **{**plain, **option})


def scores() -> Scores:
    return Scores(SPARSE_INDEXER, torch.randn(1, 5, 16, 8), torch.randn(1, 5, 8))


def test_scores_go_through_the_known_steps_only():
    weights = torch.randn(1, 5, 1, 16)
    known = torch.matmul(weights, torch.nn.functional.relu(scores() * 0.3)).squeeze(-2)
    chosen = known.masked_fill(~CausalMask(), float("-inf")).topk(min(3, known.shape[-1]), dim=-1).indices
    assert chosen.shape == (1, 5, 3) and chosen.dtype == torch.int32
    with pytest.raises(CaptureError, match="its scores go through"):
        torch.sigmoid(scores())
    with pytest.raises(CaptureError, match="its scores go through relu"):
        torch.nn.functional.relu(scores()).topk(3, dim=-1)
    with pytest.raises(CaptureError, match="masked by something else"):
        scores().masked_fill(torch.ones(5, 5, dtype=torch.bool), float("-inf"))


def test_a_first_product_of_something_else_is_told():
    leaf_call = SPARSE_INDEXER._index

    def forward(hidden_states, past_key_values):
        keys = past_key_values.update_indexer(hidden_states, 0)
        assert isinstance(past_key_values, KeyTaker)
        return torch.matmul(hidden_states, keys)

    with pytest.raises(CaptureError, match="its first product is not that of queries and keys"):
        leaf_call(forward, torch.randn(1, 5, 5))


def test_other_indexers_are_refused(monkeypatch):
    model = built("glm_moe_dsa")
    attention = model.model.layers[0].self_attn
    monkeypatch.setattr(attention, "__class__", type("OtherAttention", (type(attention),), {}))
    with pytest.raises(CaptureError, match="OtherAttention .* learned index"):
        capture(source_from_module(model))


def test_every_layer_has_its_own_sinks_and_the_keys_of_its_own_or_an_earlier_indexer():
    gm = captured("hy_v4")
    attentions, indexers = (list(calls(gm.graph, op.default)) for op in (OPS.mla_attention, OPS.index_topk))
    chosen = [_made_of(node.args[6]) for node in attentions]
    assert chosen == [indexers[0], indexers[0], indexers[1], indexers[1]]
    for i, node in enumerate(attentions):
        sinks = gm.get_parameter(f"model.layers.{i}.self_attn.sinks")
        operand = skip_casts(node.args[7])
        assert operand.op == "get_attr" and torch.equal(gm.get_parameter(operand.target), sinks)
        assert operand.meta["val"].dtype == torch.float32


def _made_of(indices: torch.fx.Node) -> torch.fx.Node:
    """The indexer whose list this is, through views and casts."""
    while indices.target is not OPS.index_topk.default:
        (indices,) = indices.all_input_nodes
    return indices


def test_index_options_are_those_of_the_model():
    model = built("deepseek_v32")
    for node in calls(captured("deepseek_v32").graph, OPS.index_topk.default):
        assert node.kwargs["topk"] == model.config.index_topk and node.kwargs["ratio"] == 1
        assert node.kwargs["scale"] == pytest.approx(model.config.index_head_dim**-0.5)
