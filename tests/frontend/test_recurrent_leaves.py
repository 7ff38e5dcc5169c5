"""Leaves of recurrent families: what they emit and count, that they are undone, and what they refuse."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from transformers.models.mamba import modeling_mamba

import pagebinder
from pagebinder import CompileConfig
from pagebinder.errors import CaptureError
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.leaves import LEAVES, captured_leaves, functions, minimax, patched, recurrent_gemma
from pagebinder.frontend.leaves.children import causal_convolution, time_shift
from pagebinder.frontend.source import source_from_module
from tests import recurrent_models
from tests.graphs import count

OPS = torch.ops.pagebinder
FAMILIES = {
    "zamba": {"short_conv": 3, "selective_scan": 6, "attention": 2},
    "falcon_mamba": {"short_conv": 2, "selective_scan": 2},
    "kimi_linear": {"short_conv": 1, "gated_delta_rule": 1, "mla_attention": 1},
    "rwkv": {"short_conv": 6, "wkv": 3},
}
# "Class.method" of the modeling file of a family -> swapped while it is captured.
METHODS = {
    "minimax": ["MiniMaxLightningAttention.forward"],
    "recurrent_gemma": ["RecurrentGemmaRglru._rnn_scan"],
    "xlstm": ["xLSTMBackend.forward"],
    "rwkv": ["rwkv_linear_attention"],
    "mamba": ["mamba_selective_scan", "causal_conv1d_fn"],
}


def built(family):
    return getattr(recurrent_models, family)()


def swapped(family, model):
    """The functions and methods of a family as they are now, and the forward of children that have one."""
    found = []
    for name in METHODS[family]:
        owner = sys.modules[type(model).__module__]
        for part in name.split("."):
            owner = getattr(owner, part)
        found.append(owner)
    return found + [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_captured_graph_has_the_ops_and_equals_the_source(family):
    """RWKV is captured before its source has run, which is when the source rescales its weights."""
    model = built(family)
    gm, _ = capture(source_from_module(model))
    assert {name: count(gm, getattr(OPS, name).default) for name in FAMILIES[family]} == FAMILIES[family]
    assert audit(gm) == []
    captured_leaves(LEAVES, model, gm)
    for num_tokens in (1, 2, 40, 77):
        ids = torch.randint(128, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
        with torch.no_grad():
            expected, got = model(ids[None], use_cache=False).logits[0], gm(ids, torch.arange(num_tokens))
        assert num_tokens == 1 or expected.std() > 0.3
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", METHODS)
def test_everything_is_put_back_after_an_error(family):
    model = built(family)
    before = swapped(family, model)
    with pytest.raises(ZeroDivisionError), patched(LEAVES, model):
        assert swapped(family, model) != before
        raise ZeroDivisionError
    assert swapped(family, model) == before
    assert getattr(model.config, "max_inference_chunksize", 0) < 1 << 20


def test_a_method_that_is_gone_or_changed_is_an_error(monkeypatch):
    model = built("xlstm")
    backend = type(model.backbone.blocks[0].mlstm_layer.mlstm_backend)
    monkeypatch.setattr(backend, "forward", lambda self, query, key: None)
    with pytest.raises(CaptureError, match=r"xLSTMBackend.forward in .* does not take value, igate"):
        capture(source_from_module(model))
    monkeypatch.delattr(backend, "forward")
    monkeypatch.setattr(backend, "forward", None, raising=False)
    with pytest.raises(CaptureError, match="has no function xLSTMBackend.forward"):
        capture(source_from_module(model))


def test_a_child_that_is_gone_is_an_error():
    model = built("recurrent_gemma")
    del model.model.layers[0].temporal_block.conv_1d
    with (
        pytest.raises(CaptureError, match=r"layers\.0\.temporal_block has no conv_1d"),
        patched(LEAVES, model),
    ):
        pass


@pytest.mark.parametrize(
    "pad",
    [nn.ZeroPad2d((0, 0, -1, 1)), nn.ZeroPad2d((0, 0, 2, -2)), nn.ReplicationPad2d((0, 0, 1, -1))],
    ids=str,
)
def test_another_shift_is_refused(pad):
    with pytest.raises(CaptureError, match="does not shift the tokens"):
        time_shift(pad, torch.randn(1, 5, 4))


@pytest.mark.parametrize(
    "options",
    [{"padding": 2}, {"groups": 2}, {"dilation": 2}, {"stride": 2}, {"padding_mode": "circular"}],
    ids=str,
)
def test_another_convolution_is_refused(options):
    conv = nn.Conv1d(4, 4, 4, **{"groups": 4, "padding": 3, **options})
    with pytest.raises(CaptureError, match="not a causal depthwise convolution"):
        causal_convolution(conv, torch.randn(1, 4, 5))


X, K = torch.randn(1, 3, 9), torch.randn(1, 9, 2, 4)
A, B = -torch.rand(3, 2), torch.randn(1, 2, 9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: functions.mamba_selective_scan(X, X, A, B, B, return_last_state=True), "given a cache"),
        (lambda: functions.mamba_selective_scan(X, X, A, B, B, position_indices=X), "position_indices"),
        (
            lambda: functions.chunk_kimi_delta_attention(K, K, K, -K, K[..., 0], initial_state=X),
            "given a cache",
        ),
        (lambda: functions.chunk_kimi_delta_attention(K, K, K, -K, K[..., 0], cu_seqlens=X), "cu_seqlens"),
        (lambda: minimax.lightning_attention(None, X, None, X > 0), "attention_mask"),
        (lambda: recurrent_gemma._rnn_scan(None, X, X, X > 0, recurrent_states=X), "given a cache"),
        (lambda: recurrent_gemma._rnn_scan(None, X, X, X > 0, None, torch.float64), "accumulates in"),
    ],
)
def test_what_is_not_understood_is_an_error(call, message):
    with pytest.raises(CaptureError, match=message):
        call()


@pytest.mark.parametrize("gated", [False, True])
def test_the_scan_equals_transformers(gated):
    D, bias, z = torch.randn(3), torch.randn(3), X if gated else None
    options = {"D": D, "z": z, "delta_bias": bias, "delta_softplus": True}
    expected = modeling_mamba.mamba_selective_scan(X, X, A, B, B, **options)
    torch.testing.assert_close(functions.mamba_selective_scan(X, X, A, B, B, **options), expected)


@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("falcon_h1", (2, 2)),
        ("nemotron_h", (1, 2)),
        ("zamba2", (2, 4)),
        ("recurrent_gemma", (1, 2)),
        ("rwkv", (0, 3)),
        ("xlstm", (0, 2)),
    ],
)
def test_layers_are_counted_by_their_config(family, counts):
    source = source_from_module(built(family))
    assert (source.num_attention_layers, source.num_recurrent_layers) == counts


def test_a_recurrence_more_or_less_than_the_config_says_is_refused():
    model = built("mamba")
    model.backbone.layers[1].mixer = nn.Sequential()
    model.backbone.layers[1].forward = lambda hidden_states, **kwargs: hidden_states
    with pytest.raises(CaptureError, match="1 recurrent layers were found, but the config says 2"):
        pagebinder.compile_model(model, CompileConfig(executable="eager"))
