"""Text from tokens: characters that span tokens, stop strings that span tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagebinder.runtime.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def feed(tokenizer, text: str, **options) -> Detokenizer:
    detokenizer = Detokenizer(tokenizer, **options)
    for token in tokenizer.encode(text).ids:
        if detokenizer.append(token):
            break
    return detokenizer


def test_text_comes_back(tokenizer):
    assert feed(tokenizer, "naïve, 日本 👍").text == "naïve, 日本 👍"


def test_half_a_character_is_held_back_and_shown_at_the_end(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    for token in tokenizer.encode("a日").ids[:-1]:
        detokenizer.append(token)
    assert detokenizer.visible_text == "a"
    detokenizer.finish()
    assert detokenizer.visible_text.startswith("a\ufffd")


def test_a_stop_string_across_tokens_cuts_the_text(tokenizer):
    detokenizer = feed(tokenizer, "one two three", stop=("o t",))
    assert detokenizer.stopped
    assert detokenizer.text == "one tw"


def test_the_earliest_of_several_stop_strings_counts(tokenizer):
    assert feed(tokenizer, "abcdef", stop=("cd", "bcd")).text == "a"


def test_a_possible_beginning_of_a_stop_string_is_not_shown(tokenizer):
    detokenizer = feed(tokenizer, "hello wor", stop=("world",))
    assert detokenizer.visible_text == "hello"
    detokenizer.finish()
    assert detokenizer.visible_text == "hello wor"
