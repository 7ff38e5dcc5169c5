"""Encoder prompts: what becomes of text, how prompts pair up, what hashes part."""

from __future__ import annotations

import types

import pytest

from pagebinder.errors import RequestError
from pagebinder.runtime.encoder_prompts import (
    decoder_prompt_ids,
    encoder_fields,
    encoder_hash,
    pair_prompts,
)

END = 9


def tokenizer(text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
    """A letter is its place in the alphabet; texts end with a token of their own."""
    return {"input_ids": [ord(c) - ord("a") for c in text] + [END] * add_special_tokens}


def model(start: int | None = 7, encoder: bool = True):
    facts = types.SimpleNamespace(vocab_size=30, max_len=6, decoder_start_token_id=start)
    return types.SimpleNamespace(
        tokenizer=tokenizer, vocab_size=20, uncounted_id=None, encoder=facts if encoder else None,
        num_prompt_rows=0,
    )  # fmt: skip


def test_text_of_an_encoder_ends_with_special_tokens_and_a_decoders_begins_with_its_start():
    assert encoder_fields("abc", model(), 6)["encoder_token_ids"] == (0, 1, 2, END)
    assert decoder_prompt_ids("abc", model()) == [7, 0, 1, 2]
    assert decoder_prompt_ids("abc", model(encoder=False)) == [0, 1, 2, END]


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_decoder_prompt_is_the_start_token_by_default(nothing):
    assert decoder_prompt_ids(nothing, model()) == [7]


def test_a_given_decoder_prompt_is_used_as_it_is():
    assert decoder_prompt_ids([3, 4], model()) == [3, 4]
    assert decoder_prompt_ids([3, 4], model(start=None)) == [3, 4]
    with pytest.raises(RequestError, match="out of range"):
        decoder_prompt_ids([20], model())
    with pytest.raises(RequestError, match="prompt is empty"):
        decoder_prompt_ids([], model())
    for text in (None, "abc"):
        with pytest.raises(RequestError, match="decoder_start_token_id"):
            decoder_prompt_ids(text, model(start=None))
        with pytest.raises(RequestError, match="decoder_start_token_id=20 .* the decoder has 20 tokens"):
            decoder_prompt_ids(text, model(start=20))


def test_the_encoder_has_its_own_vocabulary_and_length():
    fields = encoder_fields([29, 1], model(), 6)
    assert fields["encoder_token_ids"] == (29, 1) and fields["num_encoder_tokens"] == 2
    with pytest.raises(RequestError, match="Token id 30 is out of range"):
        encoder_fields([30], model(), 6)
    with pytest.raises(RequestError, match="7 tokens, but at most 6 .* set a larger max_source_positions"):
        encoder_fields([1] * 7, model(), 6)
    with pytest.raises(RequestError, match="7 tokens, but at most 5 .*max_encoder_tokens .*limit is 6"):
        encoder_fields([1] * 7, model(), 5)


def test_a_model_without_an_encoder_takes_none():
    assert encoder_fields(None, model(encoder=False), 0) == {}
    with pytest.raises(RequestError, match="no encoder"):
        encoder_fields([1], model(encoder=False), 0)
    with pytest.raises(RequestError, match="give encoder_prompt"):
        encoder_fields(None, model(), 6)


def test_prompts_pair_up():
    assert pair_prompts([[1], [2]], None) == [([1], None), ([2], None)]
    assert pair_prompts("a", "b") == [("a", "b")]
    assert pair_prompts(None, [1, 2]) == [(None, [1, 2])]
    assert pair_prompts([None, [3]], [[1], "b"]) == [(None, [1]), ([3], "b")]
    assert pair_prompts([], None) == pair_prompts(None, []) == []
    with pytest.raises(RequestError, match="1 encoder prompts but 2 decoder prompts"):
        pair_prompts([[1], [2]], [[1]])
    with pytest.raises(RequestError, match="not int"):
        pair_prompts(None, 5)


def test_hashes_part_tokens_and_salts():
    hashes = [encoder_hash([1, 2], salt) for salt in (None, "", "a", "b")]
    hashes += [encoder_hash(ids, None) for ids in ([1], [2, 1], [1, 2, 0])]
    assert len(set(hashes)) == len(hashes)
    assert encoder_hash([1, 2], "a") == encoder_hash((1, 2), "a")
