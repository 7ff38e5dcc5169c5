"""Mixtures of experts: the C++ kernel against the reference and a plain loop, by layer and number of tokens.

    python benchmarks/moe.py [--threads 1 2] [--tokens 1 8 32 512] [--formats int8 int4_g64] [--rounds 9]
                             [--only olmoe] [--output FILE]

One layer with the sizes of a known model; experts are drawn at random for every call, so that their weights come
from memory. Every case runs in turn, round after round: `cpu`; `reference`, the op in PyTorch; `loop`, what a model
does without us: for each chosen expert its tokens, two linears and an index_add; `cpu int8`, ..., the C++ kernel on
weights in fewer bits. Ratios are medians over rounds of the ratio within a round. Bytes are those of the distinct
experts that a call of `cpu` needs; beside them stands the rate at which torch sums a tensor of 512 MB.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from common import alternate, machine, median

from pagebinder.custom_ops.cpu import compiler
from pagebinder.custom_ops.linear.weight_formats import FORMATS
from pagebinder.custom_ops.linear.weight_numbers import quantize
from pagebinder.custom_ops.moe.experts import MOE_EXPERTS
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.custom_ops.providers import OpNeed, select_provider

RESULTS = Path(__file__).parent / "results" / "moe_cpu.json"


@dataclass(frozen=True)
class Layer:
    """E experts of width C and inner width I, of which a token chooses K."""

    experts: int
    chosen: int
    width: int
    inner: int
    gate: Gate = field(default_factory=Gate)
    transposed: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def products(self) -> int:
        """Multiplications of one token and expert."""
        return 3 * self.width * self.inner


GPT_OSS = Gate(activation="swish", alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)
LAYERS = {
    "qwen3-30b-a3b": Layer(128, 8, 2048, 768),
    "olmoe": Layer(64, 8, 2048, 1024),
    "olmoe, float32": Layer(64, 8, 2048, 1024, dtype=torch.float32),
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, GPT_OSS, transposed=True, bias=True),
}


def operands(layer: Layer) -> list[torch.Tensor | None]:
    """up, down, up_bias, down_bias; experts differ by a rotation of the same numbers, which is quick to make."""
    shapes = [(2 * layer.inner, layer.width), (layer.width, layer.inner)]
    stacks = []
    for rows, columns in shapes:
        one = (torch.randn(rows * columns) * columns**-0.5).to(layer.dtype)
        shape = (columns, rows) if layer.transposed else (rows, columns)
        stack = torch.empty(layer.experts, *shape, dtype=layer.dtype)
        for e in range(layer.experts):
            stack[e] = one.roll(97 * e).view(shape)
        stacks.append(stack)
    biases = [torch.randn(layer.experts, rows).to(layer.dtype) if layer.bias else None for rows, _ in shapes]
    return stacks + biases


def loop(layer: Layer, x, ids, weights, up, down, up_bias, down_bias):
    """What models in transformers do without an experts function."""
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        tokens, slots = torch.where(ids == expert)
        turn = (lambda w: w.t()) if layer.transposed else (lambda w: w)
        h = F.linear(x[tokens], turn(up[expert]), None if up_bias is None else up_bias[expert])
        h = F.linear(layer.gate(h), turn(down[expert]), None if down_bias is None else down_bias[expert])
        out.index_add_(0, tokens, (h * weights[tokens, slots, None]).to(out.dtype))
    return out


def coded(layer: Layer, weights: list, name: str) -> list[torch.Tensor | None]:
    """Codes and scales of both stacks, those of the first expert for each, and biases."""
    found = []
    for stack in weights[:2]:
        own = quantize(stack[0].mT.contiguous() if layer.transposed else stack[0], name)
        found += [t[None].expand(layer.experts, *t.shape).clone() for t in own]
    return found + weights[2:]


def kernel_of(op: str, layer: Layer):
    need = OpNeed(op=op, dtype=str(layer.dtype).removeprefix("torch."))
    return select_provider(need, "cpu").overload


def measure(layer: Layer, weights: list, codes: dict[str, list], num_tokens: int, rounds: int) -> dict:
    kernel = kernel_of("moe_experts", layer)
    options = {"transposed": layer.transposed, **layer.gate.as_options()}
    x = torch.randn(num_tokens, layer.width).to(layer.dtype)
    routing = [torch.rand(num_tokens, layer.experts).topk(layer.chosen) for _ in range(rounds + 1)]
    calls = {
        "cpu": lambda ids, w: kernel(x, ids, w, *weights, **options),
        "reference": lambda ids, w: MOE_EXPERTS.overload(x, ids, w, *weights, **options),
        "loop": lambda ids, w: loop(layer, x, ids, w, *weights),
    }
    of_codes, gate = kernel_of("quantized_moe_experts", layer) if codes else None, layer.gate.as_options()
    for name, given in codes.items():
        calls[f"cpu {name}"] = functools.partial(
            lambda given, name, ids, w: of_codes(x, ids, w, *given, format=name, **gate), given, name
        )

    def in_turns(call):
        given = iter(routing)

        def run():
            chosen, ids = next(given)
            return call(ids, chosen.softmax(1))

        return run

    seconds = alternate({name: in_turns(call) for name, call in calls.items()}, rounds=rounds)
    num_bytes = 0
    for stack in weights:
        num_bytes += 0 if stack is None else stack[0].nbytes
    reached = [ids.unique().numel() for _, ids in routing[1:]]
    rates = [num_bytes * n / s / 1e9 for n, s in zip(reached, seconds["cpu"])]
    flops = 2 * num_tokens * layer.chosen * layer.products
    return {
        "tokens": num_tokens,
        "experts_read": statistics.mean(reached),
        "median_ms": {name: round(median(values) * 1e3, 3) for name, values in seconds.items()},
        **{
            f"{name}_over_cpu": round(median([a / b for a, b in zip(seconds[name], seconds["cpu"])]), 2)
            for name in calls
            if name != "cpu"
        },
        "gb_per_s": round(median(rates), 1),
        "best_gb_per_s": round(max(rates), 1),
        "gflop_per_s": round(flops / median(seconds["cpu"]) / 1e9, 1),
        "best_gflop_per_s": round(flops / min(seconds["cpu"]) / 1e9, 1),
    }


def read_gb_per_s() -> float:
    """The best of ten sums over 512 MB."""
    x = torch.randn(2**27)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - started)
    return round(x.nbytes / best / 1e9, 1)


def run(name: str, layer: Layer, options: argparse.Namespace) -> list[dict]:
    weights, results = operands(layer), []
    codes = {format_: coded(layer, weights, format_) for format_ in options.formats}
    for threads in options.threads:
        torch.set_num_threads(threads)
        for tokens in options.tokens:
            result = {"layer": name, "threads": threads, "read_gb_per_s": read_gb_per_s()}
            result |= {"load_average": round(os.getloadavg()[0], 2)}
            result |= measure(layer, weights, codes, tokens, options.rounds)
            print(", ".join(f"{key} {value}" for key, value in result.items()), flush=True)
            results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--formats", nargs="*", default=["int8", "int4_g64"], choices=FORMATS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    facts = {"compiler": compiler.version().splitlines()[0], "flags": " ".join(compiler.flags())}
    results = []
    with torch.inference_mode():
        for name, layer in LAYERS.items():
            if options.only in name:
                results += run(name, layer, options)
    report = {"machine": machine() | facts, "rounds": options.rounds, "results": results}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
