"""Leaves of Inkling, Inkling 2 and the one with loops: biases by query, convolutions by taps of each token."""

from __future__ import annotations

import functools

import pytest
import torch

from pagebinder import CaptureError, CompileConfig, ConfigError, compile_model
from pagebinder.frontend.capture import capture
from pagebinder.frontend.leaves import LEAVES
from pagebinder.frontend.leaves.query_bias import QueryBias
from pagebinder.frontend.leaves.token_convolution import TokenConvolution, rows_back
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls
from tests.graphs import count
from tests.helpers import assert_serves_as_source
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import telling_weights, tiny_config, tiny_model

OPS = torch.ops.pagebinder
NAMES = ("inkling_text", "inkling2_text", "inkling2_loop_text")
# How often a layer of a window and one of all tokens run, one after the other.
PAIRS = {"inkling_text": 2, "inkling2_text": 2, "inkling2_loop_text": 2 + 3}
# Where errors grow through 10 layers instead of 4.
LONGER = {"inkling_text": 1, "inkling2_text": 1, "inkling2_loop_text": 5}
# Of such a pair; 3 for each of taps of a token's own.
CONVOLUTIONS = {"inkling_text": 8, "inkling2_text": 6 + 2 * 3, "inkling2_loop_text": 6 + 2 * 3}


def architecture(name):
    found = next((a for a in architectures("causal") if a.name == name), None)
    if found is None:
        pytest.skip(f"this release of transformers has no {name}")
    return found


@functools.cache
def built(name: str) -> torch.nn.Module:
    """A tiny model in which no parameter is left at 0, as some are where models are made."""
    model, generator = tiny_model(architecture(name)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def leaves_of(name: str) -> list:
    """That for the bias, and that for convolutions if there are any."""
    found = [leaf for leaf in LEAVES if isinstance(leaf, QueryBias | TokenConvolution)]
    return [leaf for leaf in found if leaf.applies(built(name))]


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(6, 120, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", NAMES)
def test_the_captured_graph_has_the_ops_and_equals_the_source(name):
    model = built(name)
    gm = capture(source_from_module(model))[0]
    nodes = list(calls(gm.graph, OPS.relative_attention.default))
    windows = [node.kwargs.get("window") for node in nodes]
    pairs = PAIRS[name]
    assert windows == [12, None] * pairs and not count(gm, OPS.attention.default)
    assert [node.kwargs["num_behind"] for node in nodes] == [12, 10] * pairs
    assert [len(node.args) > 4 for node in nodes] == [name != "inkling_text"] * 2 * pairs  # sinks
    assert count(gm, OPS.short_conv.default) == CONVOLUTIONS[name] * pairs
    for length in (2, 11, 47):
        ids = ids_of(length)
        with torch.no_grad():
            expected = model(input_ids=ids[None], use_cache=False).logits[0]
            got = gm(ids, torch.arange(length))
        assert float((got - expected).abs().max()) <= 1e-5 * LONGER[name]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_patched_is_put_back(name):
    before = [dict(m.__dict__) for m in built(name).modules()]
    for leaf in leaves_of(name):
        with leaf.patched(built(name)):
            pass
    assert [dict(m.__dict__) for m in built(name).modules()] == before


@pytest.mark.parametrize("executable", ["eager", "inductor"])
@pytest.mark.parametrize("name", NAMES)
def test_served_tokens_are_the_source_models(name, executable):
    assert_serves_as_source(built(name), ids_of, executable)


@pytest.mark.parametrize("name", NAMES)
def test_another_bias_or_convolution_is_refused_even_without_weights(name, monkeypatch):
    """Each leaf runs the source's own method beside its own."""
    with torch.device("meta"):
        model = architecture(name).model_class(tiny_config(architecture(name))).eval()
    attention = model.model.layers[1].self_attn  # of all tokens
    convolution = attention.k_proj.sconv if hasattr(attention.k_proj, "sconv") else attention.k_sconv
    leaves = leaves_of(name)
    parts = [getattr(attention, leaves[0].bias_module)] + [convolution] * (name != "inkling_text")
    for leaf, part in zip(leaves, parts, strict=True):
        forward = type(part).forward
        with monkeypatch.context() as patch:
            patch.setattr(type(part), "forward", lambda *args, forward=forward: 1.5 * forward(*args))
            with pytest.raises(CaptureError, match="computes something else"), leaf.patched(model):
                pass
        with leaf.patched(model):
            pass


@pytest.mark.parametrize("name", NAMES)
def test_convolutions_of_one_tap_look_nowhere(name):
    config = tiny_config(architecture(name))
    config.conv_kernel_size = 1
    model = telling_weights(architecture(name).model_class(config).eval())
    ids = ids_of(30)
    with torch.no_grad():
        got = capture(source_from_module(model))[0](ids, torch.arange(30))
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
    assert float((got - expected).abs().max()) <= 1e-4 * LONGER[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_codes_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match="a bias by distance keeps K and V"):
        compile_model(built(name), CompileConfig(executable="eager", kv_dtype="int8"))


def test_rows_back_are_exact():
    x = torch.randn(9, 5)
    for lag in range(4):
        expected = torch.cat([torch.zeros(lag, 5), x[: 9 - lag]])
        assert torch.equal(rows_back(x, lag), expected)
