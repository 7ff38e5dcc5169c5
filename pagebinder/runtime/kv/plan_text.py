"""A plan in text lines: groups, waste by cause, whose block is padded for whom, formulas, what fits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pagebinder.runtime.kv.counts import blocks_held
from pagebinder.runtime.kv.specs import CrossAttentionSpec, KVCacheGroup, RingSpec

if TYPE_CHECKING:
    from pagebinder.runtime.kv.alternatives import NextBest
    from pagebinder.runtime.kv.plan import KVPlan

GIB = 1 << 30
CONTEXTS = (2_048, 8_192, 32_768, 131_072)
MEMORY = (8 * GIB, 20 * GIB, 80 * GIB, 141 * GIB)


def describe_plan(
    plan: KVPlan,
    contexts: Sequence[int] | None = None,
    memory_bytes: Sequence[int] | None = None,
    stateless: Sequence[str] = (),
) -> list[str]:
    """Defaults: CONTEXTS below the model's length and that length; MEMORY. `stateless`: more layers without state."""
    if not contexts:
        contexts = [*[t for t in CONTEXTS if t < plan.max_model_len][:3], plan.max_model_len]
    stateless = [*stateless, *(page.layer for page in plan.layers if page.group < 0)]
    num_layers = sum(len(group.layers) for group in plan.groups)
    return [
        f"KV cache: {num_layers} layers in {len(plan.groups)} group(s), {plan.bytes_per_block:,} bytes per block",
        *_sizes(plan),
        *_nothing(stateless),
        *_groups(plan, contexts),
        *_padding(plan),
        *_waste(plan),
        *_fits(plan, contexts, memory_bytes or MEMORY),
    ]


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Columns as wide as needed, the first left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def longest_encoder(plan: KVPlan) -> int:
    """Tokens of the workload's longest encoder prompt; 0 for a model without cross attention."""
    return max((tokens for tokens, _ in plan.workload.encoders), default=0) if _has_encoder(plan) else 0


def kind_name(group: KVCacheGroup) -> str:
    """ "sliding_window 1,024", "full_attention"."""
    limit = getattr(group.spec, "window", None) or getattr(group.spec, "chunk", None)
    kinds = list(dict.fromkeys(spec.kind for spec in group.layer_specs))
    return "+".join(kinds) + (f" {limit:,}" if limit else "")


def _sizes(plan: KVPlan) -> list[str]:
    encoder = f"   per encoder token: {plan.bytes_per_encoder_token:,.0f}" if _has_encoder(plan) else ""
    hits = "never" if plan.granularity is None else f"at multiples of {plan.granularity:,} tokens"
    return [
        f"  bytes per token: {plan.bytes_per_token:,.0f}   fixed per request: "
        f"{plan.fixed_bytes_per_request:,}{encoder}   prefixes are resumed {hits}",
        f"  bytes held at T tokens: {plan.request_bytes_formula}",
        f"  bytes in use at T tokens: {plan.used_formula}",
    ]


def _nothing(layers: Sequence[str]) -> list[str]:
    if not layers:
        return []
    others = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return [f"  keeps nothing between steps (encoder only): {layers[0]}{others}"]


def _runs(plan: KVPlan) -> list[list[int]]:
    """Numbers of groups, those that are alike and follow each other together."""

    def look(i: int) -> tuple:
        group = plan.groups[i]
        return kind_name(group), group.spec.table_key, len(group.layers), group.page_bytes

    return [list(run) for _, run in groupby(range(len(plan.groups)), key=look)]


def _name(run: Sequence[int]) -> str:
    return f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _groups(plan: KVPlan, contexts: Sequence[int]) -> list[str]:
    """One row for each run of equal groups; figures are those of one group."""
    encoder = longest_encoder(plan)
    rows = [["group", "layers", "block size", "bytes used", "wasted", "%", *(f"at {t:,}" for t in contexts)]]
    for run in _runs(plan):
        group, unused = plan.groups[run[0]], plan.padding_bytes_per_block[run[0]]
        size = "request" if isinstance(group.spec, RingSpec) else f"{group.block_size:,}"
        blocks = (f"{blocks_held(group.spec, t, encoder):,}" for t in contexts)
        rows.append(
            [f"{_name(run)}: {kind_name(group)}", f"{len(group.layers)}", size, f"{group.page_bytes:,}",
             f"{unused:,}", f"{100 * unused / plan.bytes_per_block:.1f}", *blocks]
        )  # fmt: skip
    note = f", of an encoder of {encoder:,}" if _has_encoder(plan) else ""
    return [
        f"  Per group: bytes of a block, used and wasted; blocks of a request at so many tokens{note}:",
        *table(rows),
    ]


def _padding(plan: KVPlan) -> list[str]:
    """Nothing is inflated in silence: which group needs the bytes that another leaves empty."""
    taken = [plan.bytes_per_block - split.padding - split.empty_slots for split in plan.splits]
    largest = taken.index(max(taken))
    return [
        f"  group {_name(run)}: {empty:,} bytes of each block stay empty, because group {largest} "
        f"({kind_name(plan.groups[largest])}) needs {taken[largest]:,}"
        for run in _runs(plan)
        if (empty := plan.bytes_per_block - taken[run[0]])
    ]


def _waste(plan: KVPlan) -> list[str]:
    load = plan.workload
    lines = [
        f"  waste over the workload: {plan.wasted_bytes:,.0f} bytes per request ({plan.wasted_percent:.1f} %)",
        f"    workload: {load.concurrency} requests of {load.mean_tokens:,.0f} tokens on average, "
        f"{100 * load.prefix_share:.0f} % of them a prefix that all share",
    ]
    for run in _runs(plan):
        waste = plan.group_waste[run[0]]
        causes = ", ".join(f"{cause} {size:,.0f}" for cause, size in waste.by_cause.items() if size >= 0.5)
        each = " each" if len(run) > 1 else ""
        lines.append(
            f"    group {_name(run)}{each}: {waste.bytes:,.0f} of {waste.bytes + waste.used_bytes:,.0f} "
            f"({waste.percent:.1f} %): {causes or 'none'}"
        )
    at_most = plan.waste(encoder_tokens=longest_encoder(plan))
    lines.append(
        f"  waste of one request of {at_most.num_tokens:,} tokens: {at_most.percent:.1f} % of "
        f"{at_most.held_bytes:,} bytes (padding {at_most.padding_bytes:,}, rounding {at_most.rounding_bytes:,})"
    )
    lines += _constraint(plan)
    if plan.next_best:
        lines += [
            f"  next best under the constraints costs {_extra(plan.next_best)}, "
            f"{plan.next_best.bytes_per_block:,} bytes per block:",
            *(f"    {kind}" for kind in plan.next_best.kinds),
        ]
    return lines


def _extra(other: NextBest) -> str:
    if other.extra_bytes < 0.5:
        return "the same"
    return f"{other.extra_bytes:,.0f} bytes per request more ({other.extra_percent:.2f} %)"


def _constraint(plan: KVPlan) -> list[str]:
    """What long runs cost in memory, and how to do without them."""
    cost = plan.constraint_cost
    if cost is None:
        return []
    sizes = (
        "KernelConstraints(min_run_bytes=0)" if cost.block_size is None else f"block_size={cost.block_size}"
    )
    return [
        f"  kernel constraint: a head's rows in one block form runs of at least {cost.min_run_bytes:,} bytes, "
        f"as far as {cost.max_tokens_for_runs:,} tokens",
        f"    and short windows allow (runs of 4 KB cost decode attention 3 to 7 %); {sizes} does without it:",
        f"    {', '.join(cost.blocks)}, waste {cost.wasted_percent:.1f} %, "
        f"{cost.saved_bytes:,.0f} bytes per request less",
    ]


def format_bytes(num_bytes: int) -> str:
    """ "20 GiB", "3 MiB", "100 bytes": in the largest unit of which there is one."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):,.6g} {unit}"
    return f"{num_bytes:,} bytes"


def _fits(plan: KVPlan, contexts: Sequence[int], memory_bytes: Sequence[int]) -> list[str]:
    load = plan.workload
    encoder = longest_encoder(plan)
    note = f", of an encoder of {encoder:,}" if encoder else ""
    rows = [[f"requests that fit{note}"] + [f"of {t:,}" for t in contexts] + ["longest request"]]
    for memory in memory_bytes:
        fits = [plan.capacity(memory, t, encoder_tokens=encoder) for t in contexts]
        longest = plan.max_model_len_for(memory, load.chunk_tokens, encoder)
        rows.append([f"in {format_bytes(memory)}"] + [f"{n:,}" for n in fits] + [f"{longest:,}"])
    smallest = plan.min_bytes(None, load.chunk_tokens, encoder)
    return [
        *table(rows),
        f"  smallest memory for one request of {plan.max_model_len:,} tokens, {load.chunk_tokens:,} of them in one "
        f"step{f', and an encoder of {encoder:,}' if encoder else ''}: {smallest:,} bytes",
        *_retained(plan, min(8_192, plan.max_model_len)),
    ]


def _retained(plan: KVPlan, prefix_tokens: int) -> list[str]:
    """What a resume needs: everything of full attention, a window's end, one checkpoint."""
    kept = plan.retained_bytes(prefix_tokens)
    each = ", ".join(
        f"group {_name(run)}{' each' if len(run) > 1 else ''} {kept[run[0]]:,}" for run in _runs(plan)
    )
    return [
        f"  bytes that a cached prefix of {prefix_tokens:,} tokens keeps (sparse retention): {sum(kept):,}",
        f"    {each}",
    ]


def _has_encoder(plan: KVPlan) -> bool:
    return any(isinstance(group.spec, CrossAttentionSpec) for group in plan.groups)
