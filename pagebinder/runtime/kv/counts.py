"""The formulas of `specs`, counted in integers: an optimiser asks thousands of times, sympy would take seconds.

    blocks_held = spec.blocks_formula, bytes_used = spec.used_formula: the most at T tokens        (capacity)
    blocks_now, bytes_now: what is held and used in the very step that computes token T            (averages)

    window of 6, B = 4, T = 11:  [....][.xxx][xxx ]   now 2 blocks; with other T of that size 3, which is the most

A spec class that is not known here is counted by its formulas.
"""

from __future__ import annotations

from pagebinder.runtime.kv.specs import (
    BLOCK_SIZE,
    ENCODER_TOKENS,
    TOKENS,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentSpec,
    RingSpec,
    SlidingWindowSpec,
    cdiv,
)


def blocks_held(spec: KVCacheSpec, tokens: int, encoder_tokens: int = 0) -> int:
    """Most blocks that a decoding request of `tokens` tokens holds."""
    size = spec.block_size
    match spec:
        case FullAttentionSpec():
            return cdiv(tokens, size)
        case SlidingWindowSpec():
            return min(cdiv(tokens, size), cdiv(spec.window - 1, size) + 1)
        case ChunkedLocalSpec():
            return min(cdiv(tokens, size), cdiv(spec.chunk, size) + spec.straddle)
        case CrossAttentionSpec():
            return cdiv(encoder_tokens, size)
        case RecurrentSpec():
            return min(cdiv(tokens, size), 2)
        case RingSpec():
            return 1
    values = {TOKENS: tokens, ENCODER_TOKENS: encoder_tokens, BLOCK_SIZE: size}
    return int(spec.blocks_formula.subs(values))


def blocks_now(spec: KVCacheSpec, tokens: int, encoder_tokens: int = 0) -> int:
    """Blocks that a request holds while it computes its token number `tokens` (the last of its context)."""
    blocks = cdiv(tokens, spec.block_size)
    match spec:
        case SlidingWindowSpec():
            return blocks - max(0, tokens - spec.window) // spec.block_size
        case ChunkedLocalSpec():
            return blocks - _chunk_start(spec, tokens) // spec.block_size
        case RecurrentSpec():
            # The state of the token before is read; it lies in the same block unless this one begins a new block.
            return blocks - max(0, tokens - 2) // spec.block_size
    return blocks_held(spec, tokens, encoder_tokens)


def bytes_now(spec: KVCacheSpec, tokens: int, encoder_tokens: int = 0) -> float:
    """Bytes of one layer that such a request has in use."""
    if isinstance(spec, ChunkedLocalSpec):
        return spec.entry_bytes * (tokens - _chunk_start(spec, tokens))
    return bytes_used(spec, tokens, encoder_tokens)


def _chunk_start(spec: ChunkedLocalSpec, tokens: int) -> int:
    return (tokens - 1) // spec.chunk * spec.chunk


def blocks_in_prefill(
    spec: KVCacheSpec, tokens: int, chunk_tokens: int, encoder_tokens: int = 0, *, sparse: bool
) -> int:
    """Most blocks while `chunk_tokens` of a context of `tokens` are computed in one step.

    `sparse`: recurrent layers keep one checkpoint besides the state that is read and the one that is written.
    """
    held = blocks_held(spec, tokens, encoder_tokens)
    most = max(spec.max_blocks_per_request(tokens, chunk_tokens, encoder_tokens), held)
    return min(most, 3) if sparse and isinstance(spec, RecurrentSpec) else most


def bytes_used(spec: KVCacheSpec, tokens: int, encoder_tokens: int = 0, *, in_flight: int = 1) -> float:
    """Bytes of one layer that such a request has in use, without rounding to blocks."""
    match spec:
        case FullAttentionSpec():
            rows = tokens
        case SlidingWindowSpec():
            rows = min(tokens, spec.window - 1 + in_flight)
        case ChunkedLocalSpec():
            rows = min(tokens, spec.chunk - 1 + in_flight)
        case CrossAttentionSpec():
            rows = encoder_tokens
        case RecurrentSpec() | RingSpec():
            return spec.entry_bytes
        case _:
            return float(spec.used_formula.subs({TOKENS: tokens, ENCODER_TOKENS: encoder_tokens}))
    whole, rest = divmod(spec.entry_bytes * rows, spec.tokens_per_entry)
    return whole if rest == 0 else spec.entry_bytes * rows / spec.tokens_per_entry


def blocks_retained(spec: KVCacheSpec, prefix_tokens: int) -> int:
    """Blocks that a cached prefix pins so that it can be resumed from (sparse retention)."""
    blocks = cdiv(prefix_tokens, spec.block_size)
    match spec:
        case FullAttentionSpec():
            return blocks
        case SlidingWindowSpec():
            return blocks - max(0, prefix_tokens - spec.window + 1) // spec.block_size
        case ChunkedLocalSpec():
            return blocks - prefix_tokens // spec.chunk * spec.chunk // spec.block_size
        case RecurrentSpec():
            return min(blocks, 1)
    return (
        0  # a ring needs nothing where it can be resumed; the encoder's K and V do not depend on the prefix
    )
