"""What a layout of one kind of layers costs a workload, in bytes per request.

    cost = n * S * blocks held  -  bytes in use  +  bytes of tokens computed again  +  n * toll

S: bytes of a block. Blocks of a common prefix count once for all requests that share it, bytes in use likewise.
"""

from __future__ import annotations

from collections import Counter

from pagebinder.runtime.kv.constraints import KernelConstraints
from pagebinder.runtime.kv.kinds import LayerKind, at, granularities
from pagebinder.runtime.kv.means import mean_blocks, mean_recomputed, mean_shared_tokens, mean_used
from pagebinder.runtime.kv.workload import Workload


class Costs:
    """Costs of each kind; everything that depends on the workload is computed once."""

    def __init__(self, kinds: list[LayerKind], load: Workload, constraints: KernelConstraints) -> None:
        self.kinds, self.load = kinds, load
        self.granularities = granularities(kinds)
        # A prefix that can never be resumed is not shared, whatever the layout.
        shared = mean_shared_tokens(load, None if self.granularities == [None] else 1)
        self.blocks = [{b: mean_blocks(at(k.specs[0], b), load) for b in k.block_sizes} for k in kinds]
        used = [_over(kind, lambda spec: mean_used(spec, load)) for kind in kinds]
        self.toll = constraints.group_toll * sum(used)
        self.ideal = [
            all_tokens - (_over(kind, _bytes_per_token) * shared if kind.grows else 0.0)
            for kind, all_tokens in zip(kinds, used, strict=True)
        ]

    def again(self, granularity: int | None) -> list[float]:
        """Per kind, the bytes of tokens that are computed again because hits end at multiples of `granularity`."""
        return [
            0.0 if kind.grows else _over(kind, lambda spec: mean_recomputed(spec, self.load, granularity))
            for kind in self.kinds
        ]

    def own_blocks(self, k: int, size: int, granularity: int | None) -> float:
        """Blocks of one group that a request holds on average, its share of a common prefix's included."""
        shared = mean_shared_tokens(self.load, granularity, size) if self.kinds[k].grows else 0.0
        return self.blocks[k][size] - shared / size

    def total(self, choices, bytes_per_block: int, granularity: int | None) -> float:
        """Cost of a whole layout."""
        again = self.again(granularity)
        return sum(
            n * (bytes_per_block * self.own_blocks(k, size, granularity) + self.toll)
            - self.ideal[k]
            + again[k]
            for k, (size, n) in enumerate(choices)
        )


def _over(kind: LayerKind, value) -> float:
    """Sum of a value of a spec over a kind's layers."""
    return sum(count * value(spec) for spec, count in Counter(kind.specs).items())


def _bytes_per_token(spec) -> float:
    return spec.entry_bytes / spec.tokens_per_entry
