"""A synthetic trace on the real scheduler and KV-cache manager: hit rate, memory, waste, preemptions. No model.

python benchmarks/trace_replay.py [--seed 0] [--scale 1.0] [--only MIX] [--picture DIR]

Every layer mix runs with pools of several sizes, without prefix caching and with dense and sparse retention. Steps
are logical: a request arrives after so many steps, so results do not depend on the machine, but for
`schedule_us_per_step` (schedule and update together).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer
from common import save, wide_console
from kv_targets import goal, paging_against_preallocation, retained_per_prefix, window_against_full
from layer_mixes import MIXES
from replay import STEP_TOKENS, CacheSetup, Replay
from rich.console import Console
from rich.table import Table
from traces import TraceRequest, TraceShape, generate_trace, longest

from pagebinder.runtime.kv import KVCacheManager, plan_kv_cache
from pagebinder.runtime.kv.picture import draw_pool
from pagebinder.runtime.kv.retention import PrefixRetention

# Pools hold so many requests of the trace's greatest length.
POOLS = {"tight": 2, "medium": 6, "ample": 40}
CACHING = {"off": None, "dense": PrefixRetention.dense(), "sparse": PrefixRetention.sparse()}


def plan_of(mix: str, max_model_len: int):
    """The planner's choice; the purely full mix in blocks of 16 tokens, for which the goal is stated."""
    return plan_kv_cache(MIXES[mix](), block_size=16 if mix == "full" else None, max_model_len=max_model_len)


def pool_blocks(plan, max_model_len: int, num_requests: int) -> int:
    """Blocks, null block included, for `num_requests` of the longest requests at once."""
    kv = KVCacheManager(plan.groups, 2, max_model_len=max_model_len, max_in_flight_tokens=STEP_TOKENS)
    return 1 + num_requests * kv.max_blocks_for(max_model_len)


def measure(mix: str, pool: str, caching: str, trace: list[TraceRequest], pictures: Path | None) -> dict:
    """One replay, as a row of results."""
    max_model_len = -(-longest(trace) // 1024) * 1024
    plan = plan_of(mix, max_model_len)
    setup = CacheSetup(plan=plan, num_blocks=pool_blocks(plan, max_model_len, POOLS[pool]),
                       max_model_len=max_model_len, retention=CACHING[caching])  # fmt: skip
    replay = Replay(setup)
    log = replay.run(trace)
    replay.scheduler.check_integrity()
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        draw_pool(log, pictures / f"{mix.replace(' + ', '_')}_{pool}_{caching}.png")
    in_use = [step.num_blocks_in_use for step in log.steps]
    held = [sum(column) for column in zip(*(step.in_use for step in log.steps))]
    padding = sum(n * (plan.bytes_per_block - group.page_bytes) for n, group in zip(held, plan.groups))
    gib = plan.bytes_per_block / 2**30
    return {
        "mix": mix, "pool": pool, "caching": caching, "groups": len(plan.groups),
        "block_sizes": sorted({group.block_size for group in plan.groups}),
        "bytes_per_block": plan.bytes_per_block, "num_blocks": setup.num_blocks,
        "pool_gib": round(setup.num_blocks * gib, 3), "steps": len(log.steps),
        "computed_tokens": log.total("scheduled_tokens"), "hit_rate": round(log.hit_rate, 4),
        "mean_in_use_gib": round(sum(in_use) / len(in_use) * gib, 3),
        "peak_in_use_gib": round(max(in_use) * gib, 3),
        "waste": round(log.mean_waste, 5),
        "padding": round(padding / (sum(held) * plan.bytes_per_block), 5),
        "preemptions": log.total("preemptions"), "evictions": log.total("evictions"),
        "allocations": log.total("allocations"),
        "schedule_us_per_step": round(1e6 * replay.busy_seconds / len(log.steps), 1),
    }  # fmt: skip


def show(console: Console, rows: list[dict]) -> None:
    table = Table("mix", "pool", "caching", "GiB", "in use", "peak", "hits", "waste", "padding", "preempted",
                  "evicted", "tokens", "us/step")  # fmt: skip
    for r in rows:
        table.add_row(
            r["mix"], r["pool"], r["caching"], f"{r['pool_gib']:.1f}", f"{r['mean_in_use_gib']:.2f}",
            f"{r['peak_in_use_gib']:.2f}", f"{r['hit_rate']:.1%}", f"{r['waste']:.2%}", f"{r['padding']:.2%}",
            str(r["preemptions"]), f"{r['evictions']:,}", f"{r['computed_tokens']:,}",
            f"{r['schedule_us_per_step']:.0f}",
        )  # fmt: skip
    console.print(table)


def show_retained(console: Console, rows: list[dict]) -> None:
    table = Table("mix", "MiB per cached prefix: dense", "sparse", "bounded layers, dense / sparse",
                  "hit when sent again: dense", "sparse")  # fmt: skip
    for r in rows:
        ratio = r.get("dense_over_sparse_in_bounded_layers")
        table.add_row(
            r["mix"], *(f"{r[name]['bytes_per_prefix'] / 2**20:.1f}" for name in ("dense", "sparse")),
            f"{ratio:.1f}x" if ratio else "-",
            *(f"{r[name]['hit_tokens_when_sent_again']:,.0f}" for name in ("dense", "sparse")),
        )  # fmt: skip
    console.print(table)


def main(
    seed: int = 0,
    scale: Annotated[float, typer.Option(help="How much traffic.")] = 1.0,
    only: Annotated[str, typer.Option(help="Layer mixes whose name contains this.")] = "",
    picture: Annotated[Path | None, typer.Option(help="Directory for a picture of every replay.")] = None,
) -> None:
    """Run everything, print tables, write benchmarks/results/trace_replay.json."""
    console = wide_console()
    trace = generate_trace(seed, TraceShape().scaled(scale))
    mixes = [mix for mix in MIXES if only in mix]
    rows = [
        measure(mix, pool, caching, trace, picture)
        for mix, pool, caching in itertools.product(mixes, POOLS, CACHING)
    ]
    show(console, rows)
    goals = []
    if full := [row for row in rows if row["mix"] == "full"]:
        worst = max(full, key=lambda row: row["waste"])
        where = {name: worst[name] for name in ("pool", "caching")}
        goals.append(goal("waste in allocated memory, full attention, block 16, worst of all pools and caching",
                          worst["waste"], 0.04, at_most=True, **where))  # fmt: skip
    goals += window_against_full() + paging_against_preallocation()
    for g in goals:
        verdict = "[green]pass[/]" if g["pass"] else "[red]FAIL[/]"
        console.print(f"{verdict} {g['name']}: {g['value']:g} ({g['is']} {g['target']:g})")
    retained = [retained_per_prefix(mix) for mix in mixes]
    show_retained(console, retained)
    facts = {"seed": seed, "scale": scale, "requests": len(trace), "longest_request_tokens": longest(trace)}
    path = save("trace_replay", {"trace": facts, "replays": rows, "goals": goals, "retained": retained})
    console.print(f"wrote {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
