"""The leaf for Llama 4's query temperature: positions reach it, nothing stays behind, surprises are errors."""

from __future__ import annotations

import pytest
import torch

from pagebinder import CaptureError
from pagebinder.frontend.capture import capture
from pagebinder.frontend.leaves.llama4 import QUERY_TEMPERATURE
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls
from tests.helpers import tiny_llama, tiny_llama4


def aranges(gm):
    return list(calls(gm.graph, torch.ops.aten.arange.default))


def test_it_applies_to_tuned_layers_without_rope_only():
    assert list(QUERY_TEMPERATURE.modules(tiny_llama4())) == ["model.layers.3.self_attn"]
    assert not QUERY_TEMPERATURE.applies(tiny_llama4(attn_temperature_tuning=False))
    assert not QUERY_TEMPERATURE.applies(tiny_llama4(no_rope_layers=[1, 1, 1, 1]))
    assert not QUERY_TEMPERATURE.applies(tiny_llama())


def test_positions_replace_row_numbers():
    """The temperature steps up every 8 positions: the same tokens later in a sequence get other logits."""
    model = tiny_llama4(no_rope_layers=[0, 0, 0, 0], layer_types=["full_attention"] * 4)
    gm, _ = capture(source_from_module(model))
    assert not aranges(gm)
    ids, start = torch.arange(20), 45
    with torch.no_grad():
        first, later = (gm(ids, torch.arange(begin, begin + 20)) for begin in (0, start))
        expected = model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    assert (later - first).abs().max() > 0.1


def test_everything_is_put_back():
    model = tiny_llama4()
    layer = model.model.layers[3]
    with QUERY_TEMPERATURE.patched(model):
        assert "forward" in layer.self_attn.__dict__ and layer._forward_pre_hooks
    assert "forward" not in layer.self_attn.__dict__ and not layer._forward_pre_hooks
    ids = torch.arange(20)[None]
    expected = tiny_llama4()(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)


def test_everything_is_put_back_after_an_error():
    model = tiny_llama4()
    with pytest.raises(KeyError), QUERY_TEMPERATURE.patched(model):
        raise KeyError("in between")
    assert "forward" not in model.model.layers[3].self_attn.__dict__


def test_a_forward_of_ones_own_is_put_back():
    model = tiny_llama4()
    attention = model.model.layers[3].self_attn
    own = attention.forward
    attention.forward = own
    with QUERY_TEMPERATURE.patched(model):
        assert attention.forward is not own
    assert attention.__dict__["forward"] is own


def numbered_twice(attention):
    forward = attention.forward

    def changed(hidden_states, *args, **kwargs):
        torch.arange(hidden_states.shape[1])
        return forward(hidden_states, *args, **kwargs)

    attention.forward = changed


def numbers_something_else(attention):
    forward = attention.forward

    def changed(hidden_states, *args, **kwargs):
        torch.arange(hidden_states.shape[-1])
        return forward(hidden_states, *args, **kwargs)

    attention.forward = changed


def never_numbered(attention):
    attention.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)


def without_the_trait(attention):
    del attention.attn_temperature_tuning


CHANGES = {
    "numbered twice": (numbered_twice, "2 times"),
    "numbers something else": (numbers_something_else, "does not number the rows"),
    "never numbered": (never_numbered, "0 times"),
    "without the trait": (without_the_trait, "attn_temperature_tuning"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_version_of_the_source_is_an_error(change):
    apply, reason = CHANGES[change]
    model = tiny_llama4()
    apply(model.model.layers[3].self_attn)
    with pytest.raises(CaptureError, match=f"(?s){reason}.*5.23"):
        capture(source_from_module(model))


def test_a_layer_that_is_not_told_its_positions_is_an_error():
    model = tiny_llama4()
    layer = model.model.layers[3]
    with QUERY_TEMPERATURE.patched(model), pytest.raises(CaptureError, match="not told the positions"):
        layer(torch.zeros(1, 5, 64), attention_mask=None, position_embeddings=None)
