"""Leaves: what they emit, that they are undone, and that they never miss in silence."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from torch import nn
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from pagebinder.errors import CaptureError
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.leaves import LEAVES, captured_leaves, functions, patched
from pagebinder.frontend.leaves.gated_delta_net import GATED_DELTA_NET
from pagebinder.frontend.leaves.mamba2 import MAMBA2
from pagebinder.frontend.source import source_from_module
from tests.graphs import count
from tests.helpers import tiny_lfm2, tiny_llama, tiny_mamba2, tiny_qwen3_next

OPS = torch.ops.pagebinder
FAMILIES = {
    "qwen3-next": (tiny_qwen3_next, {"short_conv": 3, "gated_delta_rule": 3, "ssd": 0, "attention": 1}),
    "mamba2": (tiny_mamba2, {"short_conv": 2, "gated_delta_rule": 0, "ssd": 2, "attention": 0}),
    "lfm2": (tiny_lfm2, {"short_conv": 3, "gated_delta_rule": 0, "ssd": 0, "attention": 1}),
}
PATCHED = {
    modeling_qwen3_next: ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    modeling_mamba2: ("causal_conv1d_fn", "mamba2_chunk_scan"),
}


def captured(model):
    return capture(source_from_module(model))[0]


@functools.cache
def captured_family(family):
    model = FAMILIES[family][0]()
    return model, captured(model)


def functions_of_transformers():
    return [getattr(module, name) for module, names in PATCHED.items() for name in names]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_mixer_becomes_its_ops_and_nothing_else_mixes_tokens(family):
    build, expected = FAMILIES[family]
    model, before = build(), functions_of_transformers()
    gm = captured(model)
    assert {name: count(gm, getattr(OPS, name).default) for name in expected} == expected
    assert audit(gm) == []
    assert functions_of_transformers() == before
    result = captured_leaves(LEAVES, model, gm)
    assert len(result.matches) == sum(n for name, n in expected.items() if name != "attention")
    assert all(match.module_path and match.detail for match in result.matches)


@pytest.mark.parametrize("num_tokens", [1, 2, 40, 77])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_captured_graph_equals_the_source(family, num_tokens):
    model, gm = captured_family(family)
    ids = torch.randint(128, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    with torch.no_grad():
        expected, got = model(ids[None]).logits[0], gm(ids, torch.arange(num_tokens))
    assert expected.std() > 0.3
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_model_without_such_modules_has_no_leaf():
    model = tiny_llama()
    assert captured_leaves(LEAVES, model, captured(model)).matches == []


def test_the_functions_are_put_back_after_an_error():
    before = functions_of_transformers()
    with pytest.raises(ZeroDivisionError), patched(LEAVES, tiny_mamba2()):
        assert functions_of_transformers() != before
        raise ZeroDivisionError
    assert functions_of_transformers() == before


@pytest.mark.parametrize("family", ["mamba2", "lfm2"])  # the delta rule unrolled takes a minute to trace
def test_without_its_leaf_the_model_is_refused(family, monkeypatch):
    monkeypatch.setattr("pagebinder.frontend.capture.LEAVES", ())
    try:
        violations = audit(captured(FAMILIES[family][0]()))
    except CaptureError:
        return  # the source's own chunks cannot be traced for every length
    assert violations


def test_a_function_that_is_gone_is_an_error(monkeypatch):
    monkeypatch.delattr(modeling_mamba2, "mamba2_chunk_scan")
    with pytest.raises(
        CaptureError, match=r"mamba2 of this version.*has no function mamba2_chunk_scan.*5\.23"
    ):
        captured(tiny_mamba2())


def test_a_function_with_other_arguments_is_an_error(monkeypatch):
    def changed(query, key, value, decay, beta, **kwargs):
        raise AssertionError("never called")

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", changed)
    with pytest.raises(CaptureError, match=r"does not take g, initial_state"):
        captured(tiny_qwen3_next())


def test_a_module_that_does_not_call_the_function_is_an_error():
    """As if a new version called another function under the same class name."""
    model = tiny_mamba2()
    gm = captured(model)
    for node in list(gm.graph.nodes):
        if node.target is OPS.ssd.default and "layers.1" in str(node.meta["nn_module_stack"]):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    with pytest.raises(CaptureError, match=r"backbone\.layers\.1\.mixer emitted 0 calls of pagebinder\.ssd"):
        captured_leaves(LEAVES, model, gm)


def test_a_module_of_that_name_from_elsewhere_is_left_alone():
    Mamba2Mixer = type("Mamba2Mixer", (nn.Identity,), {})
    assert not MAMBA2.applies(nn.Sequential(Mamba2Mixer()))
    assert MAMBA2.applies(tiny_mamba2())
    assert not GATED_DELTA_NET.applies(tiny_mamba2())


def test_leaves_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MAMBA2.name = "x"


X, W = torch.randn(1, 6, 9), torch.randn(6, 4)
Q, V, G = torch.randn(1, 9, 2, 4), torch.randn(1, 9, 2, 5), -torch.rand(1, 9, 2)
B = torch.randn(1, 9, 1, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: functions.causal_conv1d_fn(X, W, seq_idx=torch.zeros(9)), "passed \\['seq_idx'\\]"),
        (lambda: functions.causal_conv1d_fn(X, W, activation="gelu"), "activation 'gelu'"),
        (lambda: functions.causal_conv1d_fn(X.repeat(2, 1, 1), W), "2 sequences"),
        (lambda: functions.torch_chunk_gated_delta_rule(Q, Q, V, G, G, cu_seqlens=W), "cu_seqlens"),
        (lambda: functions.torch_chunk_gated_delta_rule(Q, Q, V, G, G, initial_state=W), "given a cache"),
        (lambda: functions.torch_chunk_gated_delta_rule(Q, Q, V, G, G, output_final_state=True), "a cache"),
        (lambda: functions.mamba2_chunk_scan(V, G, G[0, 0], B, B, chunk_size=4, z=V), "passed \\['z'\\]"),
        (lambda: functions.mamba2_chunk_scan(V, G, G[0, 0], B, B, initial_states=W), "given a cache"),
    ],
)
def test_what_is_not_understood_is_an_error(call, message):
    with pytest.raises(CaptureError, match=message):
        call()


def test_arguments_reach_the_op():
    """Limits of the time step, no bias, no skip connection: as transformers' own function."""
    limits, A = (0.1, 0.6), G[0, 0]
    options = {"chunk_size": 4, "dt_softplus": True, "dt_limit": limits}
    expected = modeling_mamba2.mamba2_chunk_scan(V, G, A, B, B, **options)
    torch.testing.assert_close(functions.mamba2_chunk_scan(V, G, A, B, B, **options), expected)
    options["dt_limit"] = (0.0, math.inf)
    expected = modeling_mamba2.mamba2_chunk_scan(V, G, A, B, B, **options)
    torch.testing.assert_close(functions.mamba2_chunk_scan(V, G, A, B, B, **options), expected)
    plain = functions.torch_chunk_gated_delta_rule(Q / 4, Q / 4, V, G, -G, use_qk_l2norm_in_kernel=False)[0]
    expected = modeling_qwen3_next.torch_chunk_gated_delta_rule(Q / 4, Q / 4, V, G, -G)[0]
    torch.testing.assert_close(plain, expected)
