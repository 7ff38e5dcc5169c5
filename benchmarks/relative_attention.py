"""Attention with a bias of every query's own (Inkling) beside the same attention without one, and beside PyTorch's.

    python benchmarks/relative_attention.py [--threads 2] [--rounds 15]

16 query heads over 4 KV heads of 128 in bf16, biases for distances below 1,024. In turns: `by query`, `of weights`
(T5's form: one bias for all queries), `plain` (paged attention without a bias) and, for one request, `dense` (what
PyTorch can do: the bias of every query and key is looked up, as the source's code does, and given to its own
attention). Ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from common import alternate, machine, median, save, wide_console
from rich.table import Table

from pagebinder.custom_ops.attention.paged import PAGED_ATTENTION
from pagebinder.custom_ops.attention.relative import PAGED_RELATIVE_ATTENTION
from pagebinder.custom_ops.providers import OpNeed, select_provider

HEADS, KV_HEADS, WIDTH, EXTENT, BLOCK = 16, 4, 128, 1024, 64
CASES = {  # requests, new tokens of each, context before them
    "decode, 1 request": (1, 1, 8192),
    "decode, 8 requests": (8, 1, 4096),
    "prompt of 512": (1, 512, 0),
    "chunk of 512 behind 3,584": (1, 512, 3584),
}


def kernel(op):
    return select_provider(OpNeed(op=op.name, device="cpu", dtype="bfloat16")).overload


def calls_of(requests: int, new: int, context: int) -> dict:
    """Name -> call without arguments."""
    length = context + new
    blocks = -(-length // BLOCK)
    cache = torch.randn(requests * blocks, KV_HEADS, BLOCK, 2 * WIDTH, dtype=torch.bfloat16)
    table = torch.randperm(requests * blocks).int().view(requests, blocks)
    lens = torch.full((requests,), length, dtype=torch.int32)
    starts = torch.arange(requests + 1, dtype=torch.int32) * new
    q = torch.randn(requests * new, HEADS, WIDTH, dtype=torch.bfloat16)
    bias = torch.randn(len(q), HEADS, EXTENT + 1, dtype=torch.bfloat16)
    step, options = (q, cache, table, lens, starts), {"head_dim_v": WIDTH, "scale": 1 / WIDTH}
    relative, plain = kernel(PAGED_RELATIVE_ATTENTION), kernel(PAGED_ATTENTION)
    calls = {
        "by query": lambda: relative(*step, bias, **options, num_behind=EXTENT),
        "of weights": lambda: relative(*step, bias[0], **options, num_behind=EXTENT),
        "plain": lambda: plain(*step, **options),
    }
    if requests == 1:
        j = torch.arange(length)
        rows = cache[table[0, j // BLOCK].long(), :, j % BLOCK].transpose(0, 1)
        k, v = (x.contiguous() for x in rows.split(WIDTH, dim=-1))
        calls["dense"] = lambda: dense(q, k, v, bias, j[context:])
    return calls


def dense(q, k, v, bias, positions) -> torch.Tensor:
    distance = positions[:, None] - torch.arange(k.shape[1])
    column = (EXTENT - distance).clamp(0, EXTENT).expand(HEADS, -1, -1)
    mask = bias.transpose(0, 1).gather(2, column).masked_fill(distance < 0, float("-inf"))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q.transpose(0, 1)[None], k[None], v[None], mask[None], scale=1 / WIDTH, enable_gqa=True)


def measure(name: str, rounds: int) -> dict:
    seconds = alternate(calls_of(*CASES[name]), rounds=rounds, warmups=2)
    own = seconds["by query"]
    over = {
        other: median(b / a for a, b in zip(own, values))
        for other, values in seconds.items()
        if other != "by query"
    }
    milliseconds = {call: 1e3 * median(values) for call, values in seconds.items()}
    return {"case": name, "ms": milliseconds, "times_as_long_as_by_query": over}


def main(
    threads: Annotated[int, typer.Option(help="of ours and of torch's")] = 2,
    rounds: Annotated[int, typer.Option(help="of all calls in turn")] = 15,
) -> None:
    """Print a table and keep the figures in results/relative_attention_cpu.json."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    results = [measure(name, rounds) for name in CASES]
    table = Table("case", "by query, ms", "of weights, times as long", "plain", "PyTorch, dense")
    for r in results:
        over = r["times_as_long_as_by_query"]
        figures = (f"{over[name]:.2f}" if name in over else "" for name in ("of weights", "plain", "dense"))
        table.add_row(r["case"], f"{r['ms']['by query']:.2f}", *figures)
    wide_console().print(table)
    save("relative_attention_cpu", {"machine": machine(), "threads": threads, "results": results})


if __name__ == "__main__":
    typer.run(main)
