"""What captured steps gain on a GPU: a decode step replayed against the same step launched op by op.

Without a GPU, `python benchmarks/gpu_captured.py --cpu` runs the same code over recorded calls: it shows that the
benchmark works, and says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from gpu_isolated import row_text
from gpu_timing import attempted, kernel_us
from transformers import Qwen3Config, Qwen3ForCausalLM

import pagebinder
from pagebinder import CompileConfig
from pagebinder.runtime.graphs import StepGraphs, StepSequence
from pagebinder.runtime.graphs.predict import predict_graphs

CONTEXT = 1024
REQUESTS = (1, 8, 64)
STEPS = 50
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL = {**SHAPE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}


def captured_steps(device: str = "cuda", shape: dict = SHAPE, steps: int = STEPS) -> list[dict]:
    """Rows for Qwen3-0.6B's shape, where launches are what costs at batch 1."""
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).to(torch.bfloat16).eval()
    return captured_rows(model, REQUESTS, CONTEXT, steps, "captured decode step")


def captured_rows(model, all_requests: tuple[int, ...], context: int, steps: int, case: str) -> list[dict]:
    """One row for each number of requests: median milliseconds of a step replayed and uncaptured; and the memory."""
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=64))
    blocks = context // 64 + 1
    graphs = compiled.capture(
        num_kv_blocks=max(all_requests) * blocks + 1, max_num_seqs=max(all_requests), max_model_len=blocks * 64,
        decode_sizes=all_requests, token_sizes=[256],
    )  # fmt: skip
    predicted = predict_graphs(
        compiled.graphs["fused"], compiled.kv_spec, compiled.states, graphs.buckets, device=compiled.device,
        max_model_len=blocks * 64,
    ).memory  # fmt: skip
    rows = [_step_row(graphs, n, context, steps, case) for n in all_requests]
    are_equal = all(row["bit_equal"] for row in rows)
    if graphs.device.type == "cuda":
        rows.append(attempted(f"kernels of {case}", lambda: _kernels_row(graphs, context, case)))
    rows.append(
        {
            "case": f"memory of {case}",
            "predicted_bytes": predicted.total,
            "reserved_bytes": graphs.memory.total,
            "capture_seconds": graphs.capture_seconds,
        }
    )
    if not are_equal:
        rows.append({"case": case, "error": "a replay differs from the same step without its graph"})
    return rows


def _inputs(graphs: StepGraphs, num_requests: int, context: int) -> dict:
    blocks = context // 64 + 1
    sequences = [
        StepSequence(tokens=[i + 1], start=context - 1, blocks=[range(1 + i * blocks, 1 + (i + 1) * blocks)])
        for i in range(num_requests)
    ]
    return graphs.pack(sequences)


def _kernels_row(graphs: StepGraphs, context: int, case: str) -> dict:
    """Where the time of a replayed step of one request goes."""
    inputs = _inputs(graphs, 1, context)
    return {"case": f"kernels of {case}", "kernels": kernel_us(lambda: graphs.replay(inputs, check=False))}


def _step_row(graphs: StepGraphs, num_requests: int, context: int, steps: int, case: str) -> dict:
    inputs = _inputs(graphs, num_requests, context)
    expected = graphs.replay(inputs, captured=False).clone()
    is_equal = torch.equal(graphs.replay(inputs), expected)
    eager, replay = (_median_ms(graphs, inputs, captured, steps) for captured in (False, True))
    on_gpu = {"gpu_ms": _gpu_ms(graphs, inputs, steps)} if graphs.device.type == "cuda" else {}
    return {
        "case": case, "requests": num_requests, "context": context, "replay_ms": replay, **on_gpu,
        "uncaptured_ms": eager, "gain": eager / replay, "bit_equal": is_equal,
    }  # fmt: skip


def _median_ms(graphs: StepGraphs, inputs: dict, captured: bool, steps: int) -> float:
    """Of a whole step, metadata and the wait for its logits included, as a loop that is known to be right has it."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        graphs.replay(inputs, captured=captured, check=False)
        if graphs.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _gpu_ms(graphs: StepGraphs, inputs: dict, steps: int) -> float:
    """Of a replay on the GPU alone, from the copy of its metadata to its logits: what a host that is ahead awaits."""
    times = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host is ahead
        start.record()
        graphs.replay(inputs, check=False)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    for row in captured_steps("cpu", SMALL, 3) if options.cpu else captured_steps():
        print(row_text(row))
