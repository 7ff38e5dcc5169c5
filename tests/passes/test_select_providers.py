"""Choosing who runs each stateful op: requests are obeyed or refused, and every choice says why."""

from __future__ import annotations

import pytest
import torch

from pagebinder import ConfigError, ProviderError
from pagebinder.graph_tools import calls
from pagebinder.passes.select_providers import select_providers
from tests.graphs import count
from tests.passes.test_page_attention import PAGED, WRITE, Layers, assert_close, paged

pytestmark = pytest.mark.usefixtures("captured_once")

CPU = torch.device("cpu")
REFERENCE = {"paged_attention": "reference", "kv_cache_write": "reference"}


@pytest.fixture
def model():
    return paged(Layers([None, 12, None]))


def test_the_reference_on_request(model):
    before, after, _, states, plan = model
    choices = select_providers(after, device=CPU, requested=REFERENCE)
    assert count(after, PAGED) == count(after, WRITE) == 3
    assert {c.provider for c in choices} == {"reference"}
    assert all("requested" in c.why for c in choices)
    assert_close(before, after, states, plan, 40)


def test_one_choice_for_each_distinct_need(model):
    """Full and window layers need different features; the two full layers share one choice."""
    choices = select_providers(model[1], device=CPU, requested=REFERENCE)
    assert sorted((c.op, c.num_nodes) for c in choices) == [
        ("kv_cache_write", 3),
        ("paged_attention", 1),
        ("paged_attention", 2),
    ]


def test_the_planned_choice_changes_targets_and_nothing_else(model):
    _, after, *_ = model
    arguments = {n.name: (n.args, n.kwargs) for n in after.graph.nodes}
    choices = select_providers(after, device=CPU, requested={}, prepare=False)
    assert {n.name: (n.args, n.kwargs) for n in after.graph.nodes} == arguments
    schemas = {n.target.name().split("::")[1] for n in after.graph.nodes if "pagebinder" in str(n.target)}
    assert schemas == {"paged_attention", "kv_cache_write"}
    assert all(c.why for c in choices)


def test_all_features_of_a_node_reach_the_need(model, monkeypatch):
    from pagebinder.passes import select_providers as module

    _, after, *_ = model
    node = list(calls(after.graph, PAGED))[1]
    sinks = next(n for n in after.graph.nodes if n.op == "get_attr")
    node.args = (*node.args[:5], sinks, sinks)
    node.kwargs = {**node.kwargs, "chunk": 8, "soft_cap": 2.0, "causal": False}
    needs = []
    choose = module.select_provider
    monkeypatch.setattr(
        module, "select_provider", lambda need, *a, **k: needs.append(need) or choose(need, *a, **k)
    )
    select_providers(after, device=CPU, requested=REFERENCE)
    features = {need.features for need in needs if need.op == "paged_attention"}
    assert features == {
        frozenset(),
        frozenset({"window", "chunk", "soft_cap", "sinks", "alibi", "bidirectional"}),
    }
    need = needs[0]
    assert (need.dtype, need.kv_dtype, need.head_dim, need.head_dim_v) == ("float32", "float32", 8, 8)
    assert (need.num_heads, need.num_kv_heads, need.block_size) == (4, 2, 16)


def test_an_op_without_providers_is_named(model):
    with pytest.raises(ConfigError, match=r"quantized_kv'.*paged_attention"):
        select_providers(model[1], device=CPU, requested={"quantized_kv": "cpu"})


def test_an_unknown_provider_is_named(model):
    with pytest.raises(ProviderError, match=r"nonesuch.*reference"):
        select_providers(model[1], device=CPU, requested={"paged_attention": "nonesuch"})
