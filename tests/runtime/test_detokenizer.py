"""Text from tokens: characters that span tokens, stop strings that span tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagebinder.runtime.detokenizer import Detokenizer
from pagebinder.runtime.output_text import OutputText


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


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Words, and a token for each byte, of which a run is read as one: as of Llama 2, Mistral and Gemma."""
    words = ["<unk>", "a", "▁b", "中", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (("<0xE4>", "<0xB8>", "<0xAD>", "a"), "中a"),
        (("<0x41>", "<0xFF>", "a", "▁b", "<0x42>"), "A\ufffda bB"),
        (("<0x41>", "<0xFF>", "▁b", "<0x41>", "<0xFF>", "<0xFF>", "a", "a"), "A\ufffd bA\ufffd\ufffdaa"),
        (("▁b", "<0x41>", "<0xE4>", "<0xB8>"), "bA\ufffd\ufffd"),
    ],
)
def test_a_byte_that_makes_an_earlier_one_invalid_takes_nothing_back(byte_fallback, tokens, text):
    detokenizer, shown = Detokenizer(byte_fallback), ""
    for token in tokens:
        detokenizer.append(byte_fallback.token_to_id(token))
        assert detokenizer.visible_text.startswith(shown)
        shown = detokenizer.visible_text
    detokenizer.finish()
    assert detokenizer.visible_text == text


@pytest.mark.parametrize("num_read", [0, 1, 2, 3])
def test_a_whole_output_is_what_the_tokenizer_decodes_unless_a_part_was_read(byte_fallback, num_read):
    tokens = [byte_fallback.token_to_id(t) for t in ("<0x41>", "<0xFF>", "▁b")]
    text = OutputText(byte_fallback, SimpleNamespace(num_prompt_tokens=1, all_token_ids=[0, *tokens]))
    read = text.after(num_read, finished=False) if num_read else ""
    assert text.after(3, finished=True) == ("A\ufffd b" if read else "\ufffd\ufffd b")
    assert text.after(num_read, finished=False) == read
    assert all(i <= 4 for i in text.offsets(3))
