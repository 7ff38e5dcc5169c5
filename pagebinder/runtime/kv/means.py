"""Averages over a workload: blocks and bytes that a request holds, tokens that it shares or computes again.

context   [ common prefix ............|xxxxxx]  own tokens ... ]
          held once by all requests   ^ x: behind the last multiple of the granularity, so computed again
"""

from __future__ import annotations

from pagebinder.runtime.kv.counts import blocks_in_prefill, blocks_now, bytes_now, bytes_used
from pagebinder.runtime.kv.specs import KVCacheSpec
from pagebinder.runtime.kv.workload import Workload


def mean_blocks(spec: KVCacheSpec, load: Workload) -> float:
    """Blocks of one group that a request of the workload holds on average, shared prefixes counted in full."""
    encoders, p = load.encoders or ((0, 1.0),), load.prefill_share
    total = 0.0
    for tokens, weight in load.contexts:
        for encoder_tokens, encoder_weight in encoders if _has_encoder(spec) else ((0, 1.0),):
            blocks = (1 - p) * blocks_now(spec, tokens, encoder_tokens)
            if p:
                blocks += p * blocks_in_prefill(
                    spec, tokens, load.chunk_tokens, encoder_tokens, sparse=load.sparse_retention
                )
            total += weight * encoder_weight * blocks
    return total


def mean_used(spec: KVCacheSpec, load: Workload) -> float:
    """Bytes of one layer that a request has in use on average, shared prefixes counted in full."""
    encoders, p = load.encoders or ((0, 1.0),), load.prefill_share
    total = 0.0
    for tokens, weight in load.contexts:
        for encoder_tokens, encoder_weight in encoders if _has_encoder(spec) else ((0, 1.0),):
            used = (1 - p) * bytes_now(spec, tokens, encoder_tokens)
            if p:
                used += p * bytes_used(spec, tokens, encoder_tokens, in_flight=load.chunk_tokens)
            total += weight * encoder_weight * used
    return total


def mean_shared_tokens(load: Workload, granularity: int | None, block_size: int = 1) -> float:
    """Tokens in whole blocks of a request's prefix that it does not hold itself.

    Hits end at multiples of `granularity`; the block in which one ends is copied, so it is not shared.
    """
    if granularity is None:
        return 0.0
    hits = ((load.prefix_tokens(t) // granularity * granularity, weight) for t, weight in load.contexts)
    return load.sharers * sum(hit // block_size * block_size * weight for hit, weight in hits)


def mean_recomputed(spec: KVCacheSpec, load: Workload, granularity: int | None) -> float:
    """Bytes that a layer which does not grow holds for tokens that are computed again, as a share of its use.

    A token that no hit covers lengthens a request by a T-th of its life, so it costs a T-th of the bytes held. (For
    a layer that grows it is stored again, which comes to the same.)
    """
    if granularity is None:
        return 0.0
    lost = sum(w * (load.prefix_tokens(t) % granularity) / t * bytes_now(spec, t) for t, w in load.contexts)
    return load.sharers * lost


def _has_encoder(spec: KVCacheSpec) -> bool:
    return spec.kind == "cross_attention"
