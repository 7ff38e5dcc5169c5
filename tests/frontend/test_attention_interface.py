"""The hook into transformers' attention: only what is understood passes, and everything is put back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig
from pagebinder.custom_ops.attention.semantic import attention_reference
from pagebinder.frontend import attention_interface
from pagebinder.frontend.attention_interface import (
    attention_forward,
    attention_hook,
    has_functions_of_its_own,
)
from pagebinder.frontend.capture import capture
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls
from tests.helpers import tiny_llama, tiny_mistral, tiny_qwen3


class Layer(nn.Module):
    def __init__(self, **traits):
        super().__init__()
        self.config = SimpleNamespace(**traits.pop("config", {}))
        self.is_causal = True
        for name, value in traits.items():
            setattr(self, name, value)
        self.eval()


def qkv(num_tokens=6, num_keys=6):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, num_tokens, 8), (1, 2, num_keys, 8), (1, 2, num_keys, 8))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def flat(x):
    return x[0].transpose(0, 1)


def test_every_understood_argument_reaches_the_op():
    q, k, v = qkv()
    options = {"sliding_window": 3, "softcap": 5.0, "s_aux": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    out, weights = attention_forward(
        Layer(), q, k, v, None, scaling=0.7, position_ids=torch.arange(6), **options
    )
    expected = attention_reference(
        flat(q), flat(k), flat(v), options["s_aux"], scale=0.7, window=3, soft_cap=5.0, causal=True
    )
    assert weights is None
    assert out.shape == (1, 6, 4, 8)
    torch.testing.assert_close(out[0], expected)


def test_the_default_scale_is_the_root_of_the_width():
    q, k, v = qkv()
    out, _ = attention_forward(Layer(), q, k, v, None)
    torch.testing.assert_close(out[0], attention_reference(flat(q), flat(k), flat(v), scale=8**-0.5))


@pytest.mark.parametrize("causal", [True, False])
def test_causality_of_the_call_wins_over_the_module(causal):
    q, k, v = qkv()
    out, _ = attention_forward(Layer(is_causal=not causal), q, k, v, None, is_causal=causal)
    torch.testing.assert_close(
        out[0], attention_reference(flat(q), flat(k), flat(v), scale=8**-0.5, causal=causal)
    )


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
CHUNKED = {"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 4}


class Llama4TextAttention(Layer):
    """Named as the one module whose chunks are understood."""


REFUSED = {
    "a mask": (Layer(), {"attention_mask": torch.ones(6, 6)}, "mask of its own"),
    "an unknown argument": (Layer(), {"position_bias": torch.ones(6, 6)}, r"\['position_bias'\]"),
    "an unknown flag": (Layer(), {"tree_attention": True}, "tree_attention"),
    "chunks": (Layer(config={"attention_chunk_size": 16}), {}, "attention_chunk_size"),
    "chunks of layers that are typed": (Layer(config=CHUNKED, layer_idx=1), {}, "not known here"),
    "a full layer beside chunked ones": (Layer(config=CHUNKED, layer_idx=0), {}, "not known here"),
    "a chunked layer without a size": (
        Layer(config={"layer_types": ["chunked_attention"]}, layer_idx=0),
        {},
        "attention_chunk_size=None",
    ),
    "a known module without layer types": (
        Llama4TextAttention(config={"attention_chunk_size": 4}, layer_idx=0),
        {},
        "layer type None",
    ),
    "a known module with another layer type": (
        Llama4TextAttention(config=SLIDING | {"attention_chunk_size": 4}, layer_idx=1),
        {},
        "layer type 'sliding_attention'",
    ),
    "a chunk that is no number of tokens": (
        Llama4TextAttention(config=CHUNKED | {"attention_chunk_size": 0}, layer_idx=1),
        {},
        "attention_chunk_size=0",
    ),
    "unknown causality": (Layer(is_causal=None), {}, "is_causal"),
    "dropout in training": (Layer().train(), {"dropout": 0.1}, "eval"),
    "a window that is not passed": (Layer(config=SLIDING, layer_idx=1), {}, "sliding window"),
    "a window of all layers that is not passed": (Layer(config={"sliding_window": 8}), {}, "sliding window"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_an_error(name):
    layer, options, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=reason) as error:
        attention_forward(layer, *qkv(), **{"attention_mask": None, **options})
    assert type(layer).__name__ in str(error.value)


@pytest.mark.parametrize(("index", "chunk"), [(0, None), (1, 4)])
def test_chunks_of_a_known_module_reach_the_op(index, chunk):
    q, k, v = qkv()
    out, _ = attention_forward(Llama4TextAttention(config=CHUNKED, layer_idx=index), q, k, v, None)
    expected = attention_reference(flat(q), flat(k), flat(v), scale=8**-0.5, chunk=chunk)
    torch.testing.assert_close(out[0], expected)


def test_sinks_of_a_half_precision_model_are_widened():
    q, k, v = qkv()
    sinks = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.bfloat16)
    out, _ = attention_forward(Layer(), q, k, v, None, s_aux=sinks)
    expected = attention_reference(flat(q), flat(k), flat(v), sinks.float(), scale=8**-0.5)
    torch.testing.assert_close(out[0], expected)


def test_other_keys_than_queries_are_an_error():
    with pytest.raises(CaptureError, match="9 keys from 6 queries"):
        attention_forward(Layer(), *qkv(6, 9), None)


ACCEPTED = {
    "dropout in evaluation": (Layer(), {"dropout": 0.1}),
    "arguments that are None or False": (
        Layer(),
        {"position_bias": None, "output_attentions": False, "flag": False},
    ),
    "a full layer beside window layers": (Layer(config=SLIDING, layer_idx=0), {}),
    "a window that is switched off": (Layer(config={"sliding_window": 8, "use_sliding_window": False}), {}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_changes_nothing_is_accepted(name):
    layer, options = ACCEPTED[name]
    attention_forward(layer, *qkv(), None, **options)


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_hook_puts_the_implementation_back(before):
    model = tiny_llama()
    model.set_attn_implementation(before)
    with attention_hook(model):
        assert model.config._attn_implementation == attention_interface.IMPLEMENTATION
    assert model.config._attn_implementation == before


def test_the_hook_puts_the_implementation_back_after_an_error():
    model = tiny_llama()
    before = model.config._attn_implementation
    with pytest.raises(KeyError), attention_hook(model):
        raise KeyError("in between")
    assert model.config._attn_implementation == before


def test_a_half_way_change_is_undone(monkeypatch):
    """set_attn_implementation may change the outer config and then fail at an inner one."""
    model = tiny_llama()
    before = model.config._attn_implementation

    def fail(implementation):
        model.config._attn_implementation_internal = implementation
        raise ValueError("an inner model does not take it")

    monkeypatch.setattr(model, "set_attn_implementation", fail)
    with pytest.raises(CaptureError, match="inner model"):
        capture(source_from_module(model))
    assert model.config._attn_implementation == before


def test_a_failing_capture_puts_everything_back():
    model = tiny_llama().train()
    model.config.attention_chunk_size = 16
    before = model.config._attn_implementation
    with pytest.raises(CaptureError, match="attention_chunk_size"):
        capture(source_from_module(model))
    assert model.config._attn_implementation == before
    assert all(m.training for m in model.modules())


def test_every_config_of_a_model_is_remembered():
    """Sub-configs that no module holds are switched by transformers as well."""
    unused = SimpleNamespace(_attn_implementation_internal="eager", sub_configs={})
    inner = SimpleNamespace(_attn_implementation_internal="sdpa", sub_configs={"deep": None}, deep=unused)
    outer = SimpleNamespace(_attn_implementation_internal="sdpa", sub_configs={"text": None}, text=inner)
    model = Layer()
    model.config, model.child = outer, Layer()
    model.child.config = inner
    assert [id(c) for c in attention_interface._configs(model)] == [id(c) for c in (inner, unused, outer)]


@pytest.mark.parametrize(
    ("build", "windows"),
    [
        (tiny_llama, [None, None]),
        (lambda: tiny_mistral(12), [12, 12]),
        (lambda: tiny_qwen3(use_sliding_window=True, sliding_window=9, max_window_layers=1), [None, 9]),
    ],
    ids=["llama", "mistral", "qwen3 with one window layer"],
)
def test_each_layer_becomes_one_op_with_its_window(build, windows):
    gm, _ = capture(source_from_module(build()))
    nodes = list(calls(gm.graph, torch.ops.pagebinder.attention.default))
    assert [n.kwargs.get("window") for n in nodes] == windows
    assert all(n.kwargs.get("causal", True) for n in nodes)


WINDOW = 5


def own_mask(*, q_length=None, kv_length, **_):
    distance = torch.arange(kv_length)[:, None] - torch.arange(kv_length)[None]
    return ((distance >= 0) & (distance < WINDOW))[None, None]


def own_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """A soft cap and a window, whatever the mask."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = 2 * torch.tanh(query @ key.mT * module.scaling / 2)
    visible = own_mask(kv_length=query.shape[2])
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value).transpose(1, 2), None


torchs_sdpa = torch.nn.functional.scaled_dot_product_attention


def own_sdpa(query, key, value, attn_mask=None, *, enable_gqa=False, scale=None, **_):
    """A window, whatever the mask."""
    options = {"enable_gqa": enable_gqa, "scale": scale}
    return torchs_sdpa(query, key, value, own_mask(kv_length=query.shape[2]), **options)


def replaced_function(kind, monkeypatch) -> str:
    """Puts a function of our own where transformers looks for one; the implementation that leads to it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    if kind == "torch's sdpa":  # as faster attention is put into place for all models at once
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", own_sdpa)
        return "sdpa"
    if kind == "eager":
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", own_attention)
    elif kind == "model's mask":
        monkeypatch.setattr(
            modeling_llama, "create_causal_mask", lambda **k: own_mask(kv_length=k["inputs_embeds"].shape[1])
        )
        return "sdpa"
    elif kind == "sdpa":
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", own_attention)
    elif kind == "registered mask":
        AttentionInterface.register("of_a_test", ALL_ATTENTION_FUNCTIONS["sdpa"])
        AttentionMaskInterface.register("of_a_test", own_mask)
        return "of_a_test"
    else:
        AttentionInterface.register("of_a_test", own_attention)
        AttentionMaskInterface.register("of_a_test", lambda **_: None)
        return "of_a_test"
    return kind


@pytest.mark.parametrize(
    "kind", ["registered", "registered mask", "sdpa", "torch's sdpa", "eager", "model's mask"]
)
def test_functions_that_are_not_of_transformers_are_traced(kind, monkeypatch):
    model = tiny_llama()
    assert not has_functions_of_its_own(model)
    implementation = replaced_function(kind, monkeypatch)
    model.config._attn_implementation = implementation
    assert has_functions_of_its_own(model)
    gm = pagebinder.compile_model(model, CompileConfig(executable="eager")).graphs["semantic"]
    layers = calls(gm.graph, torch.ops.pagebinder.attention.default)
    assert {node.kwargs.get("window") for node in layers} == {WINDOW}
    ids = torch.arange(1, 24)
    with torch.no_grad():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(gm(ids, torch.arange(len(ids))), expected, atol=1e-4, rtol=1e-4)
