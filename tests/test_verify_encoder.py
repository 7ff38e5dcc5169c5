"""verify="full" on an encoder alone: every level, alone and packed; a wrong mask between sequences is found."""

from __future__ import annotations

import functools

import pytest
from transformers import BertConfig, BertModel

import pagebinder
import pagebinder.compiler.encoder as compiler
from pagebinder import CompileConfig, ConfigError, VerificationError
from tests.broken_passes import broken
from tests.helpers import VOCAB_SIZE, scale_weights


@functools.cache
def bert():
    config = BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=64,
    )  # fmt: skip
    return scale_weights(BertModel(config))


def compiled(verify):
    return pagebinder.compile_model(bert(), CompileConfig(executable="eager", verify=verify))


def test_every_level_is_run():
    steps = compiled("full").report.verified
    assert [s.level for s in steps if s.name in ("capture", "pack_attention")] == ["captured", "packed"] * 2
    assert {s.chain for s in steps} == {"encoder"} and {s.weights for s in steps} == {"model", "rescaled"}
    assert max(s.max_rel_error for s in steps) < 1e-4


def test_a_wrong_pass_is_named(monkeypatch):
    def scaled(gm):
        node = next(n for n in gm.graph.nodes if "attention" in str(n.target) and "scale" in n.kwargs)
        node.kwargs = {**node.kwargs, "scale": 0.2}

    monkeypatch.setattr(compiler, "pack_attention", broken(compiler.pack_attention, scaled))
    monkeypatch.setattr(compiler, "_prove", lambda *args: None)
    for verify in ("sample", "full"):
        with pytest.raises(VerificationError) as caught:
            compiled(verify)
        assert caught.value.level == "packed"


def test_bisect_is_for_decoders():
    with pytest.raises(ConfigError, match="decoders"):
        pagebinder.bisect(bert())
