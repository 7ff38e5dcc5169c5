"""What kernels and the runtime ask of a layout: block sizes, runs, alignment, number of block tables.

a head's rows in a block:  |k v|k v|k v| ... |k v|      run = block_size * row bytes; long runs read fast
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv.checks import is_int
from pagebinder.runtime.kv.specs import AttentionSpec, KVCacheSpec, RecurrentSpec, RingSpec

# A head's rows in one block lie side by side. Where such a run ends, the processor's prefetchers start anew: runs
# of 4 KB cost decode attention 3 to 7 % against contiguous memory, runs of 16 to 32 KB nothing that can be measured
# (benchmarks/paged_attention.py). Larger blocks waste more at a request's end and share shorter prefixes.
MIN_RUN_BYTES = 32 * 1024
# ... and blocks beyond this are not asked for on account of runs alone, however narrow the rows are.
MAX_TOKENS_FOR_RUNS = 64
# A window's blocks are whole: blocks of up to an eighth of the window keep what that wastes small.
BLOCKS_PER_WINDOW = 8
# Blocks beyond this are a slip of the pen: each request would hold that much of every layer.
MAX_BLOCK_TOKENS = 65_536


@dataclass(frozen=True, kw_only=True)
class KernelConstraints:
    """Limits of a plan.

    Args:
        attention_blocks: tokens that a block of a layer with rows may have. Powers of two, as GPU kernels tile.
        recurrent_intervals: tokens between the checkpoints of recurrent layers.
        min_run_bytes: shortest run of a head's rows in a block; 0 = any. Not asked of blocks beyond
            `max_tokens_for_runs` tokens or an eighth of a window.
        page_alignment_bytes: pages start at multiples of it (a multiple of 16, at least a cache line for speed), so
            views of mixed dtypes are valid.
        max_groups: block tables at most (one per kind of layer at least).
        group_toll: what a further block table must save, as a share of the bytes in use. A table costs 4 us per
            request each time its manager allocates (measured, Python on one core), and a slot mapping per step:
            0.2 % of a step of 30 ms is 60 us, the cost of 15 of 64 requests being at a block boundary.
    """

    attention_blocks: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    recurrent_intervals: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    min_run_bytes: int = MIN_RUN_BYTES
    max_tokens_for_runs: int = MAX_TOKENS_FOR_RUNS
    page_alignment_bytes: int = 64
    max_groups: int = 8
    group_toll: float = 0.002

    def __post_init__(self) -> None:
        assert self.attention_blocks and self.recurrent_intervals, "some size must be allowed"
        assert all(n >= 1 for n in self.attention_blocks + self.recurrent_intervals)
        assert self.page_alignment_bytes % 16 == 0, "views of all dtypes must be aligned"
        assert self.page_alignment_bytes >= 16 and self.max_groups >= 1 and self.group_toll >= 0

    def align(self, num_bytes: int) -> int:
        """`num_bytes` rounded up to whole units of alignment."""
        unit = self.page_alignment_bytes
        return -(-num_bytes // unit) * unit

    def block_sizes(
        self, specs: tuple[KVCacheSpec, ...], fixed: int | None, longest: int | None = None
    ) -> tuple[int, ...]:
        """Block sizes that layers behind one table may have, ascending; `fixed` is the user's for layers with rows.

        `longest`: tokens that a table ever covers; of the sizes that hold them all, only the smallest is offered.
        Empty if there is none: compressed layers need whole entries in a block.
        """
        if isinstance(specs[0], RingSpec):
            return (specs[0].block_size,)
        if isinstance(specs[0], RecurrentSpec):
            return tuple(sorted(self.recurrent_intervals))
        offered = self.attention_blocks if fixed is None else (fixed,)
        whole = [b for b in sorted(offered) if all(b % spec.tokens_per_entry == 0 for spec in specs)]
        if not whole and fixed is None:  # entries of 3 tokens, say: multiples of that, about as large
            entries = math.lcm(*(spec.tokens_per_entry for spec in specs))
            whole = sorted({-(-b // entries) * entries for b in offered})
        if fixed is not None:
            return tuple(whole)
        most = next((b for b in whole if longest is not None and b >= longest), None)
        needed = whole if most is None else [b for b in whole if b <= most]
        return tuple(self._long_enough(specs, needed))

    def _long_enough(self, specs: tuple[KVCacheSpec, ...], sizes: list[int]) -> list[int]:
        """Sizes whose runs are long; where no size below the limits has them, the largest below the limits on."""
        limits = [limit for limit in (_limit(spec) for spec in specs) if limit is not None]
        most = min([self.max_tokens_for_runs, *(limit // BLOCKS_PER_WINDOW for limit in limits)])
        below = [b for b in sizes if b <= most] or sizes[:1]
        row_bytes = min(_row_bytes(spec) for spec in specs)
        enough = (b for b in below if b * row_bytes >= self.min_run_bytes)
        shortest = next(enough, below[-1] if below else 0)
        return [b for b in sizes if b >= shortest]


def check_block_size(block_size: object) -> None:
    """Raise ConfigError unless it is None (choose one) or a whole number from 1 to MAX_BLOCK_TOKENS."""
    if block_size is None:
        return
    if not is_int(block_size) or not 1 <= block_size <= MAX_BLOCK_TOKENS:
        raise ConfigError(
            f"block_size={block_size!r}: use a whole number of tokens, at least 1 and at most {MAX_BLOCK_TOKENS:,}, "
            "or None to let the planner choose."
        )


def _limit(spec: KVCacheSpec) -> int | None:
    """Tokens that a layer looks back on, if that is limited."""
    return getattr(spec, "window", None) or getattr(spec, "chunk", None)


def _row_bytes(spec: KVCacheSpec) -> float:
    """Bytes of a token in the rows of one head."""
    heads = spec.num_kv_heads if isinstance(spec, AttentionSpec) else 1
    return spec.entry_bytes / heads / spec.tokens_per_entry
