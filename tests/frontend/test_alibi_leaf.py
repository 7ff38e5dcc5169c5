"""BLOOM and MPT: the slopes of their written-out ALiBi are read from the bias that the source builds."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

import pagebinder
from pagebinder import CaptureError, CompileConfig
from tests.helpers import VOCAB_SIZE, scale_weights

EAGER = CompileConfig(executable="eager")


def tiny_bloom(heads: int = 6):
    config = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=96, n_layer=2, n_head=heads)
    return scale_weights(BloomForCausalLM(config))


def tiny_mpt(heads: int = 6):
    config = MptConfig(vocab_size=VOCAB_SIZE, d_model=96, n_layers=2, n_heads=heads, max_seq_len=256)
    return scale_weights(MptForCausalLM(config))


@pytest.mark.parametrize("build", [tiny_bloom, tiny_mpt])
@pytest.mark.parametrize("heads", [4, 6])  # slopes of a power of two, and the others
def test_levels_equal_the_source(build, heads):
    model = build(heads)
    compiled = pagebinder.compile_model(model, EAGER)
    ids = torch.randint(VOCAB_SIZE, (77,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    for level in ("captured", "semantic", "paged", "fused"):
        torch.testing.assert_close(compiled.run_level(level, ids), expected, atol=2e-5, rtol=2e-5)
    assert "forward" not in vars(next(m for m in model.modules() if type(m).__name__.endswith("Attention")))


@pytest.mark.parametrize(
    ("build", "function"), [(tiny_bloom, "build_alibi_tensor"), (tiny_mpt, "build_mpt_alibi_tensor")]
)
def test_a_bias_that_is_not_linear_is_refused(monkeypatch, build, function):
    model = build()
    file = sys.modules[type(model).__module__]
    original = getattr(file, function)
    monkeypatch.setattr(file, function, lambda *args, **kwargs: original(*args, **kwargs).square())
    with pytest.raises(CaptureError, match="not linear in the distance"):
        pagebinder.compile_model(model, EAGER)


@pytest.mark.parametrize("build", [tiny_bloom, tiny_mpt])
def test_an_attention_that_takes_other_arguments_is_an_error(monkeypatch, build):
    model = build()
    attention = type(next(m for m in model.modules() if type(m).__name__.endswith("Attention")))
    monkeypatch.setattr(attention, "forward", lambda self, hidden_states, temperature: (hidden_states, None))
    with pytest.raises(CaptureError, match="does not take"):
        pagebinder.compile_model(model, EAGER)
