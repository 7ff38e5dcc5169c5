"""The scheduler and the KV-cache managers: microseconds a step alone, their share of a step of the shipped model, and
a pool of a million blocks.

python benchmarks/scheduler.py [--steps 256]

A step is `schedule()` + `update()` of requests that all decode, without plan, graph or sampling. The same number of
requests at a context of 1k and of 32k must cost the same.
"""

from __future__ import annotations

import gc
import random
import time

import numpy as np
import typer
from common import median, save
from rich.console import Console
from rich.table import Table

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model
from pagebinder.models import tiny_path
from pagebinder.runtime.kv import (
    BlockPool,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheManager,
    SlidingWindowSpec,
)
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
BUDGET_TOKENS = 1 << 16
WINDOW = 512


def layout(kind: str, block_size: int) -> list[KVCacheGroup]:
    groups = [KVCacheGroup(FullAttentionSpec(block_size=block_size, **DIMS), ("full",))]
    if kind == "full + window":
        spec = SlidingWindowSpec(block_size=block_size, window=WINDOW, **DIMS)
        groups.append(KVCacheGroup(spec, ("window",)))
    return groups


def decoding(num_requests: int, context: int, kind: str, block_size: int, steps: int) -> Scheduler:
    """A scheduler whose requests all decode, at different places in their blocks."""
    groups = layout(kind, block_size)
    length = context + block_size + 2 * steps + 2
    per_request = sum(g.spec.max_blocks_per_request(length, BUDGET_TOKENS) for g in groups)
    kv = KVCacheManager(
        groups, num_requests * per_request + 1, max_model_len=length, max_in_flight_tokens=BUDGET_TOKENS
    )
    scheduler = Scheduler(
        kv, max_num_seqs=num_requests, max_num_batched_tokens=BUDGET_TOKENS, max_model_len=length
    )
    for i in range(num_requests):
        scheduler.add_request(Request(f"r{i}", [i] * (context + i % block_size), max_tokens=2 * steps + 2))
    while scheduler.num_waiting or any(r.num_output_tokens == 0 for r in scheduler.running):
        output = scheduler.schedule()
        scheduler.update(output, np.full(len(output.sampling), 7))
    return scheduler


def step_us(num_requests: int, context: int, kind: str, block_size: int, steps: int) -> dict:
    """Microseconds of `schedule` and of `update` over many decode steps."""
    scheduler = decoding(num_requests, context, kind, block_size, steps)
    tokens = np.full(num_requests, 7)
    schedule, update = [], []
    gc.collect()
    gc.freeze()  # what was built before the measurement is not scanned in it
    for _ in range(steps):
        start = time.perf_counter()
        output = scheduler.schedule()
        middle = time.perf_counter()
        scheduler.update(output, tokens)
        end = time.perf_counter()
        schedule.append(middle - start)
        update.append(end - middle)
    gc.unfreeze()
    total = [1e6 * (a + b) for a, b in zip(schedule, update)]
    return {
        "requests": num_requests,
        "context_tokens": context,
        "groups": kind,
        "block_size": block_size,
        "median_us": median(total),
        "quartiles_us": np.percentile(total, (25, 75)).tolist(),
        "schedule_us": 1e6 * median(schedule),
        "update_us": 1e6 * median(update),
    }


def pool_us(num_blocks: int, rounds: int = 200, batch: int = 256) -> dict:
    """Start-up of a pool, and one block's way out of it and back, in the middle of random traffic."""
    gc.collect()
    start = time.perf_counter()
    pool = BlockPool(num_blocks)
    startup = time.perf_counter() - start
    rng, held, seconds = random.Random(0), [], []
    for _ in range(rounds):
        start = time.perf_counter()
        held.append(pool.get_new_blocks(batch))
        out = held.pop(rng.randrange(len(held))) if len(held) > 3 else None
        if out is not None:
            pool.free_blocks(reversed(out))
            seconds.append(time.perf_counter() - start)
    return {
        "num_blocks": num_blocks,
        "startup_seconds": startup,
        "allocate_and_free_us_per_block": 1e6 * median(seconds) / batch,
    }


def engine_shares(num_requests: int = 64, prompt_tokens: int = 64, new_tokens: int = 128) -> dict:
    """Where a step of the shipped model goes, with that many requests: through `generate`, and through `step`."""
    compiled = compile_model(tiny_path(), CompileConfig())
    engine = compiled.engine(EngineConfig(max_num_seqs=num_requests))
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(0)

    def prompts() -> list[list[int]]:
        return rng.integers(1, compiled.source.vocab_size, (num_requests, prompt_tokens)).tolist()

    def by_steps() -> None:
        for i, prompt in enumerate(prompts()):
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished:
            engine.step()

    engine.generate(prompts(), params)
    shares = {}
    for name, run in (("generate", lambda: engine.generate(prompts(), params)), ("step", by_steps)):
        before = engine.stats()
        run()
        after = engine.stats()
        busy, steps = after.busy_seconds - before.busy_seconds, after.steps - before.steps
        parts = {k: v - before.step_seconds[k] for k, v in after.step_seconds.items()}
        shares[name] = {k: {"share": v / busy, "us": 1e6 * v / steps} for k, v in parts.items()}
    return {"requests": num_requests, **shares}


def main(steps: int = 256) -> None:
    """Run everything, print a table, write benchmarks/results/scheduler.json."""
    console, rows = Console(), []
    cases = [
        (requests, context, kind, size)
        for kind, size in (("full", 16), ("full", 64), ("full + window", 64))
        for requests in (64, 256, 1024)
        for context in (1024, 32768)
        if requests * context <= 256 * 32768
    ]
    table = Table("groups", "block", "requests", "context", "us a step", "schedule", "update")
    for requests, context, kind, size in cases:
        row = step_us(requests, context, kind, size, steps)
        rows.append(row)
        table.add_row(kind, str(size), str(requests), str(context), f"{row['median_us']:.0f}",
                      f"{row['schedule_us']:.0f}", f"{row['update_us']:.0f}")  # fmt: skip
    pools = [pool_us(n) for n in (10_000, 1_000_000)]
    console.print(table)
    for pool in pools:
        console.print(f"{pool['num_blocks']:,} blocks: {pool['startup_seconds']:.3f} s to start, "
                      f"{pool['allocate_and_free_us_per_block']:.2f} us to take and return a block")  # fmt: skip
    engine = engine_shares()
    for name in ("generate", "step"):
        parts = ", ".join(f"{k} {v['share']:.1%} ({v['us']:.0f} us)" for k, v in engine[name].items())
        console.print(f"shipped model, {engine['requests']} requests, {name}: {parts}")
    path = save("scheduler", {"decode_step": rows, "pool": pools, "engine": engine})
    console.print(f"wrote {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
