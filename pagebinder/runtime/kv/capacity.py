"""What fits: blocks a request needs, requests a pool holds, the longest request, what a cached prefix pins.

pool of N blocks   [ null ][ shared prefix ][ request 0 ][ request 1 ] ... [ rest: less than one request ]
"""

from __future__ import annotations

from collections.abc import Sequence

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv.counts import blocks_held, blocks_retained
from pagebinder.runtime.kv.specs import KVCacheGroup


def min_blocks(
    groups: Sequence[KVCacheGroup], max_model_len: int, max_in_flight_tokens: int, max_encoder_tokens: int
) -> int:
    """Smallest pool, null block included, in which one request of `max_model_len` tokens can run."""
    return 1 + sum(
        g.spec.max_blocks_per_request(max_model_len, max_in_flight_tokens, max_encoder_tokens) for g in groups
    )


def requests_that_fit(
    groups: Sequence[KVCacheGroup], num_blocks: int, tokens: int, encoder_tokens: int, prefix_tokens: int
) -> int:
    """Decoding requests that a pool holds at once. The first `prefix_tokens` (whole blocks) are common to all.

    Raises ConfigError for a context without tokens, or one that is all prefix.
    """
    if tokens < 1 or not 0 <= prefix_tokens < tokens:
        raise ConfigError(
            f"a context of {tokens} tokens, {prefix_tokens} of them a common prefix: use at least 1 token, and a "
            "prefix that is shorter than the context."
        )
    shared = sum(prefix_tokens // g.block_size for g in groups if g.spec.grows)
    own = sum(blocks_held(g.spec, tokens, encoder_tokens) for g in groups) - shared
    return max(num_blocks - 1 - shared, 0) // own


def longest_request(
    groups: Sequence[KVCacheGroup], num_blocks: int, limit: int, in_flight: int, encoder_tokens: int
) -> int:
    """Most tokens, at most `limit`, of a request that can run alone in `num_blocks` blocks; 0: none can.

    Longer requests never need fewer blocks, so the search halves the range.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if min_blocks(groups, middle, in_flight, encoder_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def retained_blocks(
    groups: Sequence[KVCacheGroup], prefix_tokens: int, granularity: int | None
) -> tuple[int, ...]:
    """Per group: blocks that a cached prefix pins, of which hits can use whole units of `granularity`."""
    usable = 0 if granularity is None else prefix_tokens // granularity * granularity
    return tuple(blocks_retained(g.spec, usable) for g in groups)
