"""Linear layers with weights of 8 and 4 bits against our own bf16 ones: time of a call, its ratio, bytes per second.

    OMP_NUM_THREADS=2 python benchmarks/quantized_linear.py [--rows 1 --rows 32] [--json]

Shapes of Qwen3-0.6B. Calls of all formats take turns, each on the next of many copies of its weight, so that no
weight is in a cache when it is needed again; the figure is the median of single calls.
"""

from __future__ import annotations

import random
import time
from typing import Annotated

import torch
import typer
from common import median, save, wide_console
from rich.table import Table

from pagebinder.custom_ops.cpu.huge_pages import move_to_huge_pages
from pagebinder.custom_ops.linear.weight_formats import FORMATS
from pagebinder.custom_ops.linear.weight_numbers import quantize
from pagebinder.custom_ops.providers import registered_providers

SHAPES = ((3072, 1024), (1024, 3072), (4096, 1024), (151936, 1024))  # rows and columns of the weight
BF16 = "bf16"


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """In huge pages, as codes and the weights of a checkpoint are."""
    copy = tensor.clone()
    move_to_huge_pages([copy])
    return copy


def calls_of(columns: int, inner: int, rows: int, megabytes: int) -> dict[str, tuple[list, int]]:
    """Format -> (one function for each copy of the weight, bytes of one)."""
    provider = registered_providers()["cpu"]
    for op in ("linear", "quantized_linear"):
        provider.prepare(op)
    linear, quantized = provider.overload("linear"), provider.overload("quantized_linear")
    weight = torch.randn(columns, inner).mul_(inner**-0.5).bfloat16()
    x = torch.randn(rows, inner).bfloat16()
    calls = {}
    for name in (BF16, *FORMATS):
        tensors = (weight,) if name == BF16 else quantize(weight, name)
        num_bytes = sum(t.nbytes for t in tensors)
        copies = [tuple(map(copy_of, tensors)) for _ in range(max(2, (megabytes << 20) // num_bytes))]
        if name == BF16:
            runs = [lambda c=c: linear(x, *c) for c in copies]
        else:
            runs = [lambda c=c, f=name: quantized(x, *c, format=f) for c in copies]
        calls[name] = (runs, num_bytes)
    return calls


def measure(calls: dict[str, tuple[list, int]], num_calls: int) -> dict[str, float]:
    """Median seconds of a call of each format; who follows whom changes from round to round."""
    seconds = {name: [] for name in calls}
    for i in range(num_calls):
        for name in random.sample(list(calls), len(calls)):
            runs = calls[name][0]
            run = runs[i % len(runs)]
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def main(
    rows: Annotated[list[int], typer.Option(help="Rows of x.")] = [1],  # noqa: B006
    calls: Annotated[int, typer.Option(help="Calls of each format, of the smaller shapes.")] = 300,
    megabytes: Annotated[int, typer.Option(help="Copies of a weight, together.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Keep the figures in benchmarks/results.")] = False,
) -> None:
    torch.manual_seed(0)
    random.seed(0)
    results = []
    for num_rows in rows:
        table = Table(title=f"{num_rows} row(s), {torch.get_num_threads()} thread(s)")
        for name in ("shape", "format", "us", "x bf16", "GB/s"):
            table.add_column(name, justify="left" if name in ("shape", "format") else "right")
        for columns, inner in SHAPES:
            cases = calls_of(columns, inner, num_rows, megabytes)
            num_calls = max(8, calls * 4096 * 1024 // max(columns * inner, 4096 * 1024))
            times = measure(cases, num_calls)
            for name, seconds in times.items():
                ratio, rate = times[BF16] / seconds, cases[name][1] / seconds / 1e9
                shape = f"{inner} -> {columns}"
                table.add_row(shape, name, f"{seconds * 1e6:.0f}", f"{ratio:.2f}", f"{rate:.1f}")
                results.append({"rows": num_rows, "shape": shape, "format": name, "us": round(seconds * 1e6, 1),
                                "speed_up": round(ratio, 2), "gb_per_s": round(rate, 1)})  # fmt: skip
        wide_console().print(table)
    if as_json:
        print(f"wrote {save('quantized_linear', {'results': results})}")


if __name__ == "__main__":
    typer.run(main)
