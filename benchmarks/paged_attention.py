"""What paging costs: the attention kernel over shuffled blocks against the same kernel over contiguous K and V.

    python benchmarks/paged_attention.py [--threads 1 2] [--rounds 15] [--block-size N] [--only decode]
                                         [--small-pages] [--output FILE]

Every case runs three ways in turn, round after round: `paged` (blocks in random order, of --block-size tokens or
as the planner chooses), `contiguous` (the same kernel, one block per request) and `sdpa` (torch's
scaled_dot_product_attention on contiguous tensors). Ratios are medians over rounds of the ratio within a round,
so that a slow spell of the machine hits all three; `best` ratios compare the fastest samples. `sdpa` is sampled
in the first rounds only, because it is slow. Decode is limited by memory: its bandwidth (K and V bytes of the
whole context, once per call) stands beside the rate at which this machine reads a tensor far larger than its
caches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import machine

from pagebinder.custom_ops.cpu import compiler
from pagebinder.custom_ops.cpu.huge_pages import advise_huge_pages
from pagebinder.custom_ops.layer_state import AttentionState
from pagebinder.custom_ops.providers import OpNeed, select_provider
from pagebinder.runtime.kv.planner import choose_block_size

SAMPLE_SECONDS = 0.03
SDPA_ROUNDS = 5
RESULTS = Path(__file__).parent / "results" / "paged_attention_cpu.json"


@dataclass(frozen=True)
class Workload:
    """`requests` requests with `new` queries each at the end of `context` tokens."""

    name: str
    requests: int
    context: int
    new: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def kv_bytes(self) -> int:
        item = getattr(torch, self.dtype).itemsize
        return self.requests * self.context * self.num_kv_heads * 2 * self.head_dim * item

    @property
    def flops(self) -> int:
        """Multiply-adds count twice; masked scores do not count."""
        pairs = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return 4 * self.requests * self.num_heads * self.head_dim * pairs


def workloads() -> list[Workload]:
    """Decode contexts are long enough that K and V (134 to 537 MB) do not stay in any cache."""
    shapes = [("decode", 8, 8192, 1), ("decode, one request", 1, 65536, 1), ("decode, short", 64, 512, 1)]
    shapes += [("prefill", 1, 1024, 1024), ("prefill of short prompts", 8, 128, 128), ("chunk", 1, 4096, 256)]
    heads = [(32, 8, 128, "bfloat16"), (32, 8, 128, "float32"), (8, 8, 64, "bfloat16")]
    return [Workload(*shape, *head) for head in heads for shape in shapes]


def random_memory(shape: tuple[int, ...], dtype: torch.dtype, huge_pages: bool) -> torch.Tensor:
    """Random numbers; everything that is read in bulk lies on the same kind of pages."""
    memory = torch.empty(shape, dtype=dtype)
    if huge_pages:
        advise_huge_pages(memory)
    return memory.normal_()


def planned_block_size(load: Workload) -> int:
    """What the planner chooses for a layer of this shape."""
    state = AttentionState(
        layer="", index=0, dtype=load.dtype, num_kv_heads=load.num_kv_heads, head_dim=load.head_dim,
        head_dim_v=load.head_dim,
    )  # fmt: skip
    return choose_block_size([state])


def paged_call(op, load: Workload, block_size: int, huge_pages: bool):
    """A closure that runs the op on random data, with blocks of `block_size` tokens in random order."""
    dtype = getattr(torch, load.dtype)
    per_request = -(-load.context // block_size)
    num_blocks = load.requests * per_request
    cache = random_memory((num_blocks, load.num_kv_heads, block_size, 2 * load.head_dim), dtype, huge_pages)
    table = torch.randperm(num_blocks).int().view(load.requests, per_request)
    seq_lens = torch.full((load.requests,), load.context, dtype=torch.int32)
    starts = torch.arange(load.requests + 1, dtype=torch.int32) * load.new
    q = torch.randn(load.requests * load.new, load.num_heads, load.head_dim).to(dtype)
    scale = load.head_dim**-0.5
    return lambda: op(q, cache, table, seq_lens, starts, head_dim_v=load.head_dim, scale=scale)


def sdpa_call(load: Workload, huge_pages: bool):
    """torch's own attention over contiguous [R, heads, tokens, D]; the causal mask is explicit for chunks."""
    dtype = getattr(torch, load.dtype)
    q = torch.randn(load.requests, load.num_heads, load.new, load.head_dim).to(dtype)
    k, v = random_memory(
        (2, load.requests, load.num_kv_heads, load.context, load.head_dim), dtype, huge_pages
    )
    options = {"enable_gqa": load.num_heads != load.num_kv_heads}
    if load.new == load.context:
        options["is_causal"] = True
    elif load.new > 1:
        ones = torch.ones(load.new, load.context, dtype=torch.bool)
        options["attn_mask"] = ones.tril(load.context - load.new)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def seconds_per_call(call) -> float:
    """One sample: repeats the call until SAMPLE_SECONDS have passed."""
    started, calls = time.perf_counter(), 0
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - started
        if elapsed > SAMPLE_SECONDS:
            return elapsed / calls


def alternate(calls: dict, rounds: int) -> dict[str, list[float]]:
    """Samples of every call, taken in turn; the order turns round after round."""
    samples = {name: [] for name in calls}
    for call in calls.values():
        call()
    names = list(calls)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if name != "sdpa" or i < SDPA_ROUNDS:
                samples[name].append(seconds_per_call(calls[name]))
    return samples


def measure(op, load: Workload, options: argparse.Namespace, read_gb_per_s: float) -> dict:
    huge_pages = not options.small_pages
    block_size = options.block_size or planned_block_size(load)
    samples = alternate(
        {
            "paged": paged_call(op, load, block_size, huge_pages),
            "contiguous": paged_call(op, load, load.context, huge_pages),
            "sdpa": sdpa_call(load, huge_pages),
        },
        options.rounds,
    )

    def ratio(a: str, b: str) -> float:
        return round(statistics.median(x / y for x, y in zip(samples[a], samples[b])), 4)

    median = {name: statistics.median(values) for name, values in samples.items()}
    result = {
        **asdict(load),
        "block_size": block_size,
        "median_ms": {name: round(value * 1e3, 4) for name, value in median.items()},
        "best_ms": {name: round(min(values) * 1e3, 4) for name, values in samples.items()},
        "paged_over_contiguous": ratio("paged", "contiguous"),
        "best_paged_over_contiguous": round(min(samples["paged"]) / min(samples["contiguous"]), 4),
        "sdpa_over_paged": ratio("sdpa", "paged"),
        "paged_gflop_per_s": round(load.flops / median["paged"] / 1e9, 1),
    }
    if load.new == 1:
        result["paged_gb_per_s"] = round(load.kv_bytes / median["paged"] / 1e9, 2)
        result["share_of_read_bandwidth"] = round(result["paged_gb_per_s"] / read_gb_per_s, 3)
    return result


def read_bandwidth_gb_per_s(rounds: int, huge_pages: bool) -> float:
    """Median rate at which torch sums a tensor of 512 MB."""
    x = random_memory((2**27,), torch.float32, huge_pages)
    x.sum()
    return round(x.nbytes / statistics.median(seconds_per_call(x.sum) for _ in range(rounds)) / 1e9, 2)


def dispatch_microseconds(op, rounds: int) -> float:
    """One call with one token and one key: what a call costs before there is any work."""
    call = paged_call(op, Workload("", 1, 1, 1, 1, 1, 16, "float32"), 16, False)
    return round(statistics.median(seconds_per_call(call) for _ in range(rounds)) * 1e6, 2)


def run(op, threads: int, options: argparse.Namespace) -> dict:
    """All chosen workloads with a number of threads."""
    torch.set_num_threads(threads)
    read = read_bandwidth_gb_per_s(options.rounds, not options.small_pages)
    report = {"threads": threads, "load_average": round(os.getloadavg()[0], 2), "read_gb_per_s": read}
    print(f"{threads} threads: read bandwidth {read} GB/s")
    report["results"] = []
    for load in workloads():
        if options.only not in load.name:
            continue
        result = measure(op, load, options, read)
        report["results"].append(result)
        times = ", ".join(f"{name} {value} ms" for name, value in result["median_ms"].items())
        print(
            f"{load.name} R{load.requests} ctx{load.context} new{load.new} H{load.num_heads} G{load.num_kv_heads} "
            f"D{load.head_dim} {load.dtype}: {times}; paged/contiguous {result['paged_over_contiguous']} "
            f"(best {result['best_paged_over_contiguous']}), sdpa/paged {result['sdpa_over_paged']}, "
            f"{result['paged_gflop_per_s']} GFLOP/s, {result.get('paged_gb_per_s', '-')} GB/s"
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument(
        "--rounds", type=int, default=15, help=f"samples of each way (at least {SDPA_ROUNDS})"
    )
    parser.add_argument("--block-size", type=int, help="tokens; default: what the planner chooses")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--small-pages", action="store_true", help="do not ask for huge pages")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.rounds < SDPA_ROUNDS:
        parser.error(f"--rounds must be at least {SDPA_ROUNDS}")
    torch.manual_seed(0)
    op = select_provider(OpNeed(op="paged_attention"), "cpu").overload
    facts = {"compiler": compiler.version().splitlines()[0], "flags": " ".join(compiler.flags())}
    report = {"machine": machine() | facts, "huge_pages": not options.small_pages}
    report |= {"block_size": options.block_size or "planned", "rounds": options.rounds}
    report["dispatch_us"] = dispatch_microseconds(op, options.rounds)
    print(f"dispatch {report['dispatch_us']} us")
    report["runs"] = [run(op, threads, options) for threads in options.threads]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
