"""Plans that were not chosen: the second best one, and the one that kernels' wish for long runs rules out.

all layouts      |------------------------------------------------|   free: what ConstraintCost tells of
long runs only   |.........|--------------------------------------|   chosen, next best
                 few wasted bytes                            many
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagebinder.runtime.kv.kinds import LayerKind
from pagebinder.runtime.kv.optimise import Layout
from pagebinder.runtime.kv.plan_text import kind_name
from pagebinder.runtime.kv.specs import RecurrentSpec, RingSpec

if TYPE_CHECKING:
    from pagebinder.runtime.kv.constraints import KernelConstraints
    from pagebinder.runtime.kv.plan import KVPlan

# A difference below this many bytes is that of sums of floats in another order.
NOISE_BYTES = 0.5


@dataclass(frozen=True, kw_only=True)
class NextBest:
    """The plan that came second: its groups in words, a line per kind, and what it wastes beyond the chosen one.

    `extra_bytes`: mean bytes per request, the toll of more or fewer block tables included; never negative.
    """

    kinds: tuple[str, ...]
    bytes_per_block: int
    extra_bytes: float
    extra_percent: float


@dataclass(frozen=True, kw_only=True)
class ConstraintCost:
    """The plan without `KernelConstraints.min_run_bytes`, where that is another one that wastes less.

    `blocks`: its block sizes in words, by kind. `block_size`: the option that chooses it; None: no single size does.
    `wasted_percent`: of the workload. `saved_bytes`: mean bytes per request that it wastes less.
    """

    min_run_bytes: int
    max_tokens_for_runs: int
    blocks: tuple[str, ...]
    block_size: int | None
    wasted_percent: float
    saved_bytes: float


def next_best(best: Layout, kinds: Sequence[LayerKind], other: Layout) -> NextBest:
    """The second layout, of `kinds`, against the chosen one."""
    words = (
        f"{kind.specs[0].kind}: {len(kind.layers)} layers in {n} group(s)"
        + ("" if isinstance(kind.specs[0], RingSpec) else f", blocks of {size:,} tokens")
        for kind, (size, n) in zip(kinds, other.choices, strict=True)
    )
    extra = max(other.cost - best.cost, 0.0)
    return NextBest(
        kinds=tuple(words),
        bytes_per_block=other.bytes_per_block,
        extra_bytes=extra,
        extra_percent=100 * extra / best.used_bytes if best.used_bytes else 0.0,
    )


def constraint_cost(plan: KVPlan, free: KVPlan, constraints: KernelConstraints) -> ConstraintCost | None:
    """What `constraints` cost `plan` against `free`, planned without them; None if that is nothing."""
    saved = plan.wasted_bytes - free.wasted_bytes
    if saved < NOISE_BYTES:
        return None
    with_blocks = [g for g in free.groups if not isinstance(g.spec, RingSpec)]
    sizes = {g.block_size for g in with_blocks if not isinstance(g.spec, RecurrentSpec)}
    return ConstraintCost(
        min_run_bytes=constraints.min_run_bytes,
        max_tokens_for_runs=constraints.max_tokens_for_runs,
        blocks=tuple(dict.fromkeys(f"{kind_name(g)} blocks of {g.block_size:,}" for g in with_blocks)),
        block_size=sizes.pop() if len(sizes) == 1 else None,
        wasted_percent=free.wasted_percent,
        saved_bytes=saved,
    )
