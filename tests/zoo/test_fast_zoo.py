"""A few architectures of the zoo that differ most from each other; `make zoo` checks all of them."""

from __future__ import annotations

import pytest

from tests.helpers import by_day
from tests.zoo.architectures import FAMILIES, NOT_TEXT, architectures
from tests.zoo.serving import Record, check
from tests.zoo.table import MAX_REASON, page, short
from tests.zoo.tiny_configs import tiny_config

EXACT = {
    ("causal", "gpt2"): {"full_attention"},
    ("causal", "gpt_neox"): {"full_attention"},
    ("causal", "gemma3_text"): {"full_attention", "sliding_window"},
    ("causal", "llama4_text"): {"full_attention", "chunked_local"},
    ("causal", "starcoder2"): {"sliding_window"},
    ("causal", "mixtral"): {"sliding_window"},
    ("causal", "lfm2"): {"full_attention", "short_conv"},
    ("causal", "mamba2"): {"recurrent", "short_conv"},
    ("causal", "qwen3_5_text"): {"full_attention", "recurrent", "short_conv"},
    ("seq2seq", "marian"): {"full_attention", "cross_attention"},
    ("seq2seq", "t5"): {"full_attention", "cross_attention"},
    ("encoder", "bert"): {"encoder_only"},
}


def architecture(family: str, name: str):
    return next(a for a in architectures(family) if a.name == name)


# Encoder-decoders have tests of their own by day.
@pytest.mark.parametrize(("family", "name"), by_day(EXACT, [pair for pair in EXACT if pair[0] != "seq2seq"]))
def test_served_tokens_are_the_source_models(family, name):
    record = check(architecture(family, name))
    assert record.status == "exact", record.details
    assert set(record.state_kinds) == EXACT[family, name]
    if family != "encoder":
        assert record.cached_tokens and record.preemptions, "a path of serving was not taken"


def test_kinds_of_layers_are_mixed():
    assert set(tiny_config(architecture("causal", "gemma3_text")).layer_types) == {
        "sliding_attention",
        "full_attention",
    }
    assert set(tiny_config(architecture("causal", "jamba")).layers_block_type) == {"mamba", "attention"}


def test_what_is_left_out_is_in_the_lists():
    assert all(name in FAMILIES[family] for family, name in NOT_TEXT)


def test_what_cannot_be_built_is_no_success():
    class Unbuildable:
        family, name, class_name = "causal", "nobody", "NobodyForCausalLM"

    record = check(Unbuildable())
    assert record.status == "not built" and "AttributeError" in record.reason


def test_the_page_names_every_result_once():
    findings = "M relates tokens in 3 way(s) that are not explained:\n  - aten.sort | x\n  - b\n  - c"
    records = [
        Record("b", "causal", "B", status="exact", state_kinds=("full_attention",)),
        Record("a", "causal", "A", status="refused", reason=findings),
        Record("z", "causal", "Z", status="wrong", reason="long " * 100),
    ]
    text = page(records)
    assert text.index("| z |") < text.index("| a |") < text.index("| b |"), "bugs come first"
    assert "| a | A | refused |  | aten.sort \\| x (and 2 more) |" in text
    assert "| b | B | exact | full attention |  |" in text
    assert len(short(records[2])) <= MAX_REASON
