"""Chained block hashes: what makes a block findable by the prefix that it ends.

    tokens   | t0 .. t3 | t4 .. t7 | t8 .. t11 |       hash block size 4
    chain      h0         h1         h2                 h_i = H(h_{i-1}, tokens_i, extra keys_i)
    group of block size 8           block 0 is found under h1: the last hash that it covers

A hash of a block's tokens alone would find blocks whose keys and values came from another context: the parent
hash must be part of it. The encoding is written out byte by byte, so hashes are equal across processes and
Python versions, and no two different inputs share one.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

ExtraKey = str | int | bytes | tuple
DEFAULT_SEED = "pagebinder"


class HashableRequest(Protocol):
    """What the hasher reads and extends. `block_hashes` grows in place."""

    all_token_ids: list[int]
    block_hashes: list[bytes]
    cache_salt: str | None
    adapter: str | None
    encoder_hash: bytes | None
    media: tuple[tuple[str, int, int], ...]


def encode_key(value: ExtraKey) -> bytes:
    """Prefix-free encoding of an extra key: type tag, length, payload."""
    if isinstance(value, str):
        tag, payload = b"s", value.encode()
    elif isinstance(value, bytes):
        tag, payload = b"b", value
    elif isinstance(value, int):
        tag, payload = b"i", str(value).encode()
    elif isinstance(value, tuple):
        tag, payload = b"t", b"".join(map(encode_key, value))
    else:
        raise TypeError(f"an extra key is str, bytes, int or a tuple of these, not {type(value).__name__}")
    return tag + struct.pack("<Q", len(payload)) + payload


def none_hash(seed: str = DEFAULT_SEED) -> bytes:
    """The parent of every first block. Caches with different seeds share no hash."""
    return hashlib.sha256(b"none" + encode_key(seed)).digest()


def hash_block(parent: bytes, token_ids: list[int], extra_keys: tuple[ExtraKey, ...] = ()) -> bytes:
    """SHA-256 (32 bytes) of parent hash (32 bytes), token count, tokens and extra keys.

    Token ids are encoded as signed 64-bit integers.
    """
    count = len(token_ids)
    contents = parent + _packer(count)(count, *token_ids)
    if extra_keys:
        contents += encode_key(extra_keys)
    return hashlib.sha256(contents).digest()


@lru_cache(maxsize=64)
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<Q{count}q").pack


class RequestBlockHasher:
    """Extends requests' chains; holds the block size that hashes are computed at and the seed."""

    def __init__(self, hash_block_size: int, seed: str = DEFAULT_SEED) -> None:
        self.hash_block_size = hash_block_size
        self._none_hash = none_hash(seed)

    def extend(self, request: HashableRequest) -> None:
        """Append the hash of every full block that is not hashed yet. Cost: the new tokens only."""
        size, hashes, tokens = self.hash_block_size, request.block_hashes, request.all_token_ids
        if len(tokens) < (len(hashes) + 1) * size:
            return
        parent = hashes[-1] if hashes else self._none_hash
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            # Behind the first unit there is nothing besides tokens and media.
            extra = self.extra_keys(request, start) if start == 0 or request.media else ()
            parent = hash_block(parent, tokens[start : start + size], extra)
            hashes.append(parent)

    def extra_keys(self, request: HashableRequest, start: int) -> tuple[ExtraKey, ...]:
        """What else the unit at token `start` depends on, in a fixed order: adapter, media, encoder, salt.

        What concerns the whole request is needed once: the chain carries it. A media item is part of every unit
        that it overlaps, with its place in the unit: its tokens are placeholders that say nothing of it.
        """
        keys: list[ExtraKey] = []
        if start == 0 and request.adapter is not None:
            keys.append(("adapter", request.adapter))
        if request.media:
            keys.extend(self._media_keys(request.media, start))
        if start == 0 and request.encoder_hash is not None:
            keys.append(("encoder", request.encoder_hash))
        if start == 0 and request.cache_salt is not None:
            keys.append(("cache_salt", request.cache_salt))
        return tuple(keys)

    def _media_keys(self, media: tuple[tuple[str, int, int], ...], start: int) -> list[ExtraKey]:
        # Items are sorted and disjoint, so those that overlap [start, end) follow one another.
        end = start + self.hash_block_size
        first = bisect_right(media, start, key=lambda item: item[2])
        keys: list[ExtraKey] = []
        for identifier, item_start, _ in media[first:]:
            if item_start >= end:
                break
            keys.append(("media", identifier, item_start - start))
        return keys
