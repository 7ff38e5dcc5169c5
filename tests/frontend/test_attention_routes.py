"""Two routes into a transformers model, the attention hook and the recognisers, give the same semantic graph."""

from __future__ import annotations

import functools

import pytest
import torch

from pagebinder.compiler.pipeline import RECOGNISERS
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls, clone
from pagebinder.passes.manager import run_passes
from tests.graphs import run
from tests.helpers import tiny_gemma2, tiny_gemma3, tiny_gpt_oss, tiny_llama, tiny_mistral, tiny_qwen3

ATTENTION = torch.ops.pagebinder.attention.default
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "mistral": lambda: tiny_mistral(16),
    "gemma2": lambda: tiny_gemma2(**TWO_LAYERS),
    "gemma3": lambda: tiny_gemma3(**TWO_LAYERS),
    "gpt_oss": lambda: tiny_gpt_oss(**TWO_LAYERS),
}
# Neither soft caps nor sinks can be said to scaled_dot_product_attention.
ROUTES = [(name, "eager") for name in MODELS] + [
    (n, "sdpa") for n in MODELS if n not in ("gemma2", "gpt_oss")
]


@functools.cache
def source(name):
    return source_from_module(MODELS[name]())


def semantic(captured):
    gm = clone(captured, "semantic")
    return gm, run_passes(gm, RECOGNISERS)


@functools.cache
def by_the_hook(name):
    return semantic(capture(source(name))[0])[0]


def layers(gm):
    """What each attention layer is asked to compute: options, and shapes of its operands."""
    return [
        (dict(n.kwargs), [_shape(a.meta["val"]) for a in n.args if a is not None])
        for n in calls(gm.graph, ATTENTION)
    ]


def _shape(value: torch.Tensor) -> tuple[str, ...]:
    """Its one symbol, whose name is another in each trace, as T."""
    return tuple(size if size.isdigit() else "T" for size in map(str, value.shape))


@pytest.mark.parametrize(("name", "implementation"), ROUTES)
def test_both_routes_give_the_same_attention_and_outputs(name, implementation):
    model = source(name)
    model.module.set_attn_implementation(implementation)
    captured, _ = capture(model, hook=False)
    assert not list(calls(captured.graph, ATTENTION))
    recognised, results = semantic(captured)
    assert not [r for result in results for r in result.refusals if r.pattern == "attention"]
    assert not audit(recognised)
    assert layers(recognised) == layers(by_the_hook(name))
    for num_tokens in (2, 40, 70):
        expected = run(captured, num_tokens)
        torch.testing.assert_close(run(recognised, num_tokens), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(
            run(recognised, num_tokens), run(by_the_hook(name), num_tokens), atol=1e-5, rtol=1e-5
        )


def test_the_source_keeps_its_implementation():
    model = source("llama")
    model.module.set_attn_implementation("eager")
    capture(model, hook=False)
    assert model.module.config._attn_implementation == "eager"
