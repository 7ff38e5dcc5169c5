"""The hash chain: what it depends on, that it is stable, and that it grows incrementally."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebinder.errors import RequestError
from pagebinder.runtime.kv import RequestBlockHasher, hash_block, none_hash
from pagebinder.runtime.kv.hashing import encode_key
from pagebinder.runtime.request import Request


def hashed(tokens, size=4, salt=None, seed="s", **options):
    request = Request("r", tokens, max_tokens=4, cache_salt=salt, **options)
    RequestBlockHasher(size, seed).extend(request)
    return request.block_hashes


def test_only_full_blocks_are_hashed_and_each_follows_its_parent():
    tokens = list(range(11))
    h0 = hash_block(none_hash("s"), tokens[:4])
    assert hashed(tokens) == [h0, hash_block(h0, tokens[4:8])]
    assert len(h0) == 32


def test_equal_tokens_after_another_parent_do_not_match():
    a, b = hashed([1, 2, 3, 4, 9, 9, 9, 9]), hashed([1, 2, 3, 5, 9, 9, 9, 9])
    assert a[1] != b[1]
    # A block's tokens repeated later in the same request are another block, too.
    repeated = hashed([7] * 12)
    assert len(set(repeated)) == 3


def test_salt_and_seed_separate_whole_chains():
    tokens = list(range(8))
    chains = [hashed(tokens), hashed(tokens, salt="a"), hashed(tokens, salt="b"), hashed(tokens, seed="t")]
    assert len({chain[0] for chain in chains}) == len({chain[1] for chain in chains}) == 4
    assert hashed(tokens, salt="a") == chains[1]


def test_the_salt_is_encoded_in_block_0_only():
    tokens = list(range(8))
    first, second = hashed(tokens, salt="a")
    assert first == hash_block(none_hash("s"), tokens[:4], (("cache_salt", "a"),))
    assert second == hash_block(first, tokens[4:])


def test_adapter_and_encoder_are_carried_by_the_chain():
    first, second = hashed(list(range(8)), adapter="x", encoder_hash=b"e", salt="a")
    keys = (("adapter", "x"), ("encoder", b"e"), ("cache_salt", "a"))
    assert first == hash_block(none_hash("s"), [0, 1, 2, 3], keys)
    assert second == hash_block(first, [4, 5, 6, 7])


def test_media_are_keys_of_every_unit_that_they_overlap():
    media = (("cat", 2, 6), ("dog", 6, 7), ("fox", 14, 16))
    chain = hashed(list(range(16)), media=media)
    keys = [
        (("media", "cat", 2),),
        (("media", "cat", -2), ("media", "dog", 2)),
        (),
        (("media", "fox", 2),),
    ]
    parent = none_hash("s")
    for i, (found, extra) in enumerate(zip(chain, keys, strict=True)):
        assert found == hash_block(parent, list(range(4 * i, 4 * i + 4)), extra)
        parent = found


@pytest.mark.parametrize("media", [(("a", 3, 3),), (("a", 0, 4), ("b", 3, 5)), (("a", -1, 2),)])
def test_media_ranges_that_make_no_sense_are_refused(media):
    with pytest.raises(RequestError, match="media"):
        Request("r", [1], max_tokens=1, media=media)


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), st.integers(1, 39))
def test_growing_token_by_token_gives_the_same_chain(tokens, cut):
    prompt, output = tokens[:cut], tokens[cut:]
    request = Request("r", prompt, max_tokens=100)
    hasher = RequestBlockHasher(4, "s")
    hasher.extend(request)
    for token in output:
        request.append_output(token)
        hasher.extend(request)
    assert request.block_hashes == hashed(tokens)


keys = st.recursive(
    st.text(max_size=3) | st.binary(max_size=3) | st.integers(), lambda k: st.lists(k, max_size=3).map(tuple)
)


@given(keys, keys)
def test_extra_keys_are_encoded_without_collisions(a, b):
    assert (encode_key(a) == encode_key(b)) == (a == b)


def test_unknown_extra_keys_are_refused():
    with pytest.raises(TypeError, match="float"):
        encode_key(1.5)


def test_hashes_are_equal_in_another_process():
    code = (
        "from pagebinder.runtime.kv.hashing import hash_block, none_hash;"
        "print(hash_block(none_hash(), [1, 2, 3], (('lora', 'x', 7),)).hex())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == hash_block(none_hash(), [1, 2, 3], (("lora", "x", 7),)).hex()
