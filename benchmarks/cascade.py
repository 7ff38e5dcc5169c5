"""Decode attention of requests that share a prefix: read once for all of them, against once for each.

    python benchmarks/cascade.py [--threads 2] [--rounds 15] [--unique 128] [--dtype bfloat16 float32]
                                 [--shapes 32x8x128 16x2x128] [--output FILE]

One call of attention as a decode step of one layer makes it: R requests with one new token each, whose first S
tokens lie in the same blocks, and `--unique` tokens more each. `plain` is paged_attention, `cascade` is
unified_attention with the prefix as its shared part; they take turns, and `ratio` is the median over rounds of the
ratio within a round.
`model` is the ratio that the runtime's cost model predicts with its rates: it decides by it whether to cascade.
A figure says nothing about whole steps, which have linear layers, too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from common import alternate, machine, median

from pagebinder.custom_ops.cpu.huge_pages import advise_huge_pages
from pagebinder.custom_ops.providers import OpNeed, select_provider
from pagebinder.runtime.cascade_costs import CascadeCosts, CascadeShape, measure_rates
from pagebinder.runtime.shared_prefixes import order_shared_tokens

RESULTS = Path(__file__).parent / "results" / "cascade_cpu.json"
BLOCK_SIZE = 64
REQUESTS, SHARED = (8, 32), (2048, 8192)


def operands(requests: int, shared: int, unique: int, heads: tuple[int, int, int], dtype: torch.dtype):
    """(operands of paged attention, those of the shared part) of a decode step; blocks in random order."""
    num_heads, num_kv_heads, head_dim = heads
    of_prefix, of_each = shared // BLOCK_SIZE, -(-(unique + 1) // BLOCK_SIZE)
    num_blocks = of_prefix + requests * of_each
    cache = torch.empty((num_blocks, num_kv_heads, BLOCK_SIZE, 2 * head_dim), dtype=dtype)
    advise_huge_pages(cache)
    cache.normal_()
    order = torch.randperm(num_blocks).int()
    own = order[of_prefix:].view(requests, of_each)
    table = torch.cat([order[:of_prefix].expand(requests, -1), own], dim=1).contiguous()
    seq_lens = torch.full((requests,), shared + unique + 1, dtype=torch.int32)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    lens, leaders = (
        torch.full((requests,), shared, dtype=torch.int32),
        torch.zeros(requests, dtype=torch.int32),
    )
    tokens = torch.empty(requests, dtype=torch.int32)
    order_shared_tokens(lens.numpy(), leaders.numpy(), starts.numpy(), tokens.numpy())
    q = torch.randn(requests, num_heads, head_dim).to(dtype)
    return (q, cache, table, seq_lens, starts), (lens, leaders, tokens)


def measure(requests: int, shared: int, heads, dtype: str, costs: CascadeCosts, args) -> dict:
    plain_operands, sharing = operands(requests, shared, args.unique, heads, getattr(torch, dtype))
    options = {"head_dim_v": heads[2], "scale": heads[2] ** -0.5}
    plain_op, cascade_op = (
        select_provider(OpNeed(op=op, dtype=dtype)).overload
        for op in ("paged_attention", "unified_attention")
    )

    def plain():
        return plain_op(*plain_operands, **options)

    def cascade():
        return cascade_op(*plain_operands, *sharing, phases="-su", **options)

    difference = float((plain().float() - cascade().float()).abs().max())
    seconds = alternate({"plain": plain, "cascade": cascade}, rounds=args.rounds, warmups=2)
    ones = np.ones(requests, np.int64)
    return {
        "requests": requests,
        "shared_tokens": shared,
        "unique_tokens": args.unique,
        "heads": list(heads),
        "dtype": dtype,
        "plain_ms": 1e3 * median(seconds["plain"]),
        "cascade_ms": 1e3 * median(seconds["cascade"]),
        "ratio": median([p / c for p, c in zip(seconds["plain"], seconds["cascade"])]),
        "model": costs.predicted_ratio(ones, shared, args.unique + 1),
        "cascades": costs.gain(ones, shared) > 0,
        "largest_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--unique", type=int, default=128)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--shared", type=int, nargs="+", default=SHARED)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument(
        "--shapes", nargs="+", default=["32x8x128", "16x2x128"], help="heads x KV heads x width"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cases = []
    titles = ("plain ms", "cascade", "ratio", "model")
    print(
        f"{'heads':>12} {'dtype':>9} {'R':>3} {'shared':>6} {{:>9}} {{:>9}} {{:>6}} {{:>6}}".format(*titles)
    )
    for shape in args.shapes:
        heads = tuple(map(int, shape.split("x")))
        for dtype in args.dtype:
            num_heads, num_kv_heads, width = heads
            layer = CascadeShape(
                num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=width, head_dim_v=width, dtype=dtype
            )
            costs = CascadeCosts(layer, measure_rates(layer, torch.device("cpu")))
            for requests in args.requests:
                for shared in args.shared:
                    case = measure(requests, shared, heads, dtype, costs, args)
                    cases.append(case)
                    print(
                        f"{shape:>12} {dtype:>9} {requests:>3} {shared:>6} {case['plain_ms']:>9.2f} "
                        f"{case['cascade_ms']:>9.2f} {case['ratio']:>6.2f} {case['model']:>6.2f}",
                        flush=True,
                    )
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
