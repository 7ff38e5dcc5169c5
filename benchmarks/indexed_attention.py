"""Attention to chosen groups of keys beside attention to all keys, by context.

    python benchmarks/indexed_attention.py [--threads 2] [--contexts 8192 --contexts 65536] [--rounds 9]

The sizes are those of a Qwen4 layer: 16 query heads over 2 KV heads of 256 in bf16, groups of 16 keys, 2,048 keys of
a budget. A decode of one and of eight requests, and a chunk of 256 prompt tokens. In turns: `chosen`, `all` (plain
paged attention over the whole context) and, for a decode of one request, `gathered` (what PyTorch can do: fetch the
chosen rows, then its own attention). Ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from common import machine, median, save, wide_console
from rich.table import Table

from pagebinder.custom_ops.attention.indexed import PAGED_INDEXED_ATTENTION
from pagebinder.custom_ops.attention.paged import PAGED_ATTENTION
from pagebinder.custom_ops.providers import OpNeed, select_provider

HEADS, KV_HEADS, WIDTH, RATIO, BUDGET, BLOCK = 16, 2, 256, 16, 2048, 64
CASES = {"decode, 1 request": (1, 1), "decode, 8 requests": (8, 1), "chunk of 256": (1, 256)}
SAMPLE_SECONDS = 0.05


def kernel(op, dtype: str):
    return select_provider(OpNeed(op=op.name, device="cpu", dtype=dtype)).overload


def calls_of(requests: int, new: int, context: int) -> dict:
    """Name -> call without arguments."""
    blocks = -(-context // BLOCK)
    cache = torch.randn(requests * blocks, KV_HEADS, BLOCK, 2 * WIDTH, dtype=torch.bfloat16)
    table = torch.randperm(requests * blocks).int().view(requests, blocks)
    lens = torch.full((requests,), context, dtype=torch.int32)
    starts = torch.arange(requests + 1, dtype=torch.int32) * new
    q = torch.randn(requests * new, HEADS, WIDTH, dtype=torch.bfloat16)
    visible, topk = (context - new) // RATIO, BUDGET // RATIO
    lists = [torch.randperm(visible)[:topk].sort().values for _ in range(requests * new)]
    indices, options = torch.stack(lists).int(), {"head_dim_v": WIDTH, "scale": WIDTH**-0.5}
    step = (q, cache, table, lens, starts)
    chosen, plain = kernel(PAGED_INDEXED_ATTENTION, "bfloat16"), kernel(PAGED_ATTENTION, "bfloat16")
    calls = {
        "chosen": lambda: chosen(*step, indices, **options, ratio=RATIO),
        "all": lambda: plain(*step, **options),
    }
    if requests == new == 1:
        calls["gathered"] = lambda: gathered(q, cache, table[0], indices[0], context)
    return calls


def gathered(q, cache, blocks, chosen, context: int) -> torch.Tensor:
    listed = (chosen[:, None].long() * RATIO + torch.arange(RATIO)).flatten()
    j = torch.cat([listed, torch.arange(context // RATIO * RATIO, context)])
    k, v = cache[blocks[j // BLOCK].long(), :, j % BLOCK].transpose(0, 1).split(WIDTH, dim=-1)
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q.transpose(0, 1)[None], k[None], v[None], enable_gqa=True)


def seconds_per_call(call) -> float:
    started, calls = time.perf_counter(), 0
    while True:
        call()
        calls += 1
        if (elapsed := time.perf_counter() - started) > SAMPLE_SECONDS:
            return elapsed / calls


def measure(name: str, context: int, rounds: int) -> dict:
    calls = calls_of(*CASES[name], context)
    for call in calls.values():
        call()
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name_of_call, call in calls.items():
            samples[name_of_call].append(seconds_per_call(call))
    over = {
        other: median(b / a for a, b in zip(samples["chosen"], samples[other]))
        for other in samples
        if other != "chosen"
    }
    milliseconds = {name: 1e3 * median(values) for name, values in samples.items()}
    return {"case": name, "context": context, "ms": milliseconds, "times_as_long_as_chosen": over}


def main(
    threads: Annotated[int, typer.Option(help="of ours and of torch's")] = 2,
    contexts: Annotated[list[int], typer.Option(help="tokens of each request")] = (8192, 32768, 65536),
    rounds: Annotated[int, typer.Option(help="of all calls in turn")] = 9,
) -> None:
    """Print a table and keep the figures in results/indexed_attention_cpu.json."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    results = [measure(name, context, rounds) for name in CASES for context in contexts]
    table = Table("case", "context", "chosen, ms", "all, times as long", "gathered, times as long")
    for r in results:
        over = r["times_as_long_as_chosen"]
        gathered_over = f"{over['gathered']:.2f}" if "gathered" in over else ""
        table.add_row(
            r["case"], f"{r['context']:,}", f"{r['ms']['chosen']:.2f}", f"{over['all']:.2f}", gathered_over
        )
    wide_console().print(table)
    save("indexed_attention_cpu", {"machine": machine(), "threads": threads, "results": results})


if __name__ == "__main__":
    typer.run(main)
