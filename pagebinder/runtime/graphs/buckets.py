"""Which shapes of a step are captured, and the table that finds one.

    decode   every request computes one token          T = R = L = size
    mixed    anything else of up to `num_tokens`       T = size, R = L = max_num_seqs

A step is padded to the smallest bucket that holds it: `table[size]`, one lookup. A decode step beyond the largest
decode bucket may still fit a mixed one; what fits none runs as it is, uncaptured, and is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagebinder.config_checks import is_int, plain_value
from pagebinder.errors import ConfigError

DECODE, MIXED = "decode", "mixed"
# Default sizes: powers of two, then steps of this many requests; mixed steps beyond so many tokens keep a GPU busy
# longer than their launches take.
DECODE_STEP = 16
FIRST_MIXED_TOKENS = 16
MAX_MIXED_TOKENS = 512
MOST_CAPTURED_SEQS = 1 << 16


class Bucket(NamedTuple):
    """A captured shape: T tokens, R requests, L rows of logits."""

    kind: str
    num_tokens: int
    num_reqs: int
    num_logits: int

    def __str__(self) -> str:
        return f"{self.kind} {self.num_tokens}"


def default_decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 32, 48, ... and max_num_seqs itself."""
    sizes = [1, 2, 4, 8, *range(DECODE_STEP, max_num_seqs, DECODE_STEP), max_num_seqs]
    return tuple(sorted({size for size in sizes if size <= max_num_seqs}))


def default_token_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """16, 32, ... 512: what prompts add to a step is padded by less than half."""
    most, sizes = min(MAX_MIXED_TOKENS, max_num_batched_tokens), []
    size = FIRST_MIXED_TOKENS
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


@dataclass(frozen=True)
class BucketTable:
    """Buckets by size. Build it with `of`."""

    buckets: tuple[Bucket, ...]  # largest first: the order of capture
    _decode: tuple[Bucket | None, ...]  # by number of requests
    _mixed: tuple[Bucket | None, ...]  # by number of tokens

    @classmethod
    def of(
        cls, *, max_num_seqs: int, max_num_batched_tokens: int, decode_sizes: Sequence[int] | None = None,
        token_sizes: Sequence[int] | None = None,
    ) -> BucketTable:  # fmt: skip
        """Sizes of decode and of mixed buckets; None: the defaults, (): none of the kind.

        Raises:
            ConfigError: a size is not a whole number from 1 to max_num_seqs (max_num_batched_tokens), there is no
                bucket at all, or max_num_seqs is more than MOST_CAPTURED_SEQS.
        """
        if max_num_seqs > MOST_CAPTURED_SEQS:
            raise ConfigError(
                f"max_num_seqs={max_num_seqs:,}: captured steps have {MOST_CAPTURED_SEQS:,} sequences at most."
            )
        decode = _checked("decode sizes", decode_sizes, max_num_seqs, "max_num_seqs")
        mixed = _checked("token sizes", token_sizes, max_num_batched_tokens, "max_num_batched_tokens")
        decode = default_decode_sizes(max_num_seqs) if decode is None else decode
        mixed = default_token_sizes(max_num_batched_tokens) if mixed is None else mixed
        if not decode and not mixed:
            raise ConfigError(
                "No sizes of steps to capture: give decode sizes or token sizes, or capture nothing."
            )
        decodes = [Bucket(DECODE, n, n, n) for n in decode]
        mixes = [Bucket(MIXED, n, max_num_seqs, max_num_seqs) for n in mixed]
        by_tokens = _smallest_fit(mixes)
        by_reqs = _smallest_fit(decodes)
        by_reqs += by_tokens[len(by_reqs) : max_num_seqs + 1]
        ordered = sorted(decodes + mixes, key=lambda b: (b.num_tokens, b.num_reqs), reverse=True)
        return cls(tuple(ordered), tuple(by_reqs), tuple(by_tokens))

    def find(self, num_tokens: int, num_reqs: int, *, is_decode: bool) -> Bucket | None:
        """The smallest bucket that holds such a step; `is_decode`: every request has exactly one token."""
        if is_decode:
            return self._decode[num_reqs] if num_reqs < len(self._decode) else None
        bucket = self._mixed[num_tokens] if num_tokens < len(self._mixed) else None
        return bucket if bucket is not None and num_reqs <= bucket.num_reqs else None


def _smallest_fit(buckets: Sequence[Bucket]) -> list[Bucket | None]:
    table: list[Bucket | None] = [None] if not buckets else []
    for bucket in sorted(buckets, key=lambda b: b.num_tokens):
        table += [bucket] * (bucket.num_tokens + 1 - len(table))
    return table


def _checked(what: str, sizes: Sequence[int] | None, most: int, limit: str) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    sizes = plain_value(sizes)
    if isinstance(sizes, (str, bytes, Mapping)) or not isinstance(sizes, Iterable):
        raise ConfigError(f"{what} {sizes!r}: use a list of whole numbers, for example [1, 2, 4].")
    sizes = list(sizes)
    for size in sizes:
        if not is_int(size) or not 1 <= size <= most:
            raise ConfigError(f"{what}: {size!r} is not a whole number from 1 to {limit}={most}.")
    return tuple(sorted(set(sizes)))
