"""`export_onnx` of the Qwen3-0.6B shape (random weights): seconds, and memory beside what the compiled model holds.

    python benchmarks/onnx_export.py [--dtype float32] [--contrib] [--out FOLDER]

Goals: under 60 s on an idle machine; a peak under 1.5 times the weights, all of the process (torch, too) included.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path

from checkpoints import random_qwen3
from common import save, wide_console
from rich.table import Table

import pagebinder
from pagebinder import CompileConfig

SECONDS_GOAL, PEAK_GOAL = 60.0, 1.5


def resident_bytes(peak: bool) -> int:
    """Memory of this process now, or its peak since `forget_peak` (Linux)."""
    field = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def export(folder: Path, out: Path, dtype: str, contrib: bool) -> dict:
    config = CompileConfig(device="cpu", dtype=dtype, executable="eager")
    compiled = pagebinder.compile_model(folder, config)
    weights = {id(p): p.numel() * p.element_size() for p in compiled.graphs["semantic"].parameters()}
    weight_bytes = sum(weights.values())
    gc.collect()
    before = resident_bytes(peak=False)
    forget_peak()
    start, cpu_start = time.perf_counter(), time.process_time()
    paths = compiled.export_onnx(out, contrib=contrib)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resident_bytes(peak=True)
    return {
        "dtype": dtype,
        "contrib": contrib,
        "seconds": seconds,
        "processor_seconds": cpu_seconds,
        "weight_bytes": weight_bytes,
        "resident_bytes_before": before,
        "peak_bytes": peak,
        "extra_over_weights": (peak - before) / weight_bytes,
        "peak_over_weights": peak / weight_bytes,
        "files_bytes": sum(path.stat().st_size for path in out.iterdir()),
        "models": [path.name for path in paths],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--contrib", action="store_true", help="ONNX Runtime's GroupQueryAttention")
    parser.add_argument("--out", type=Path, help="keep the checkpoint and the export here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = args.out or Path(scratch)
        checkpoint = root / "checkpoint"
        if not (checkpoint / "config.json").exists():
            random_qwen3(checkpoint)
        gc.collect()
        result = export(checkpoint, root / "onnx", args.dtype, args.contrib)
    table = Table("", "", "goal", title="export_onnx, shape of Qwen3-0.6B")
    table.add_row("seconds", f"{result['seconds']:.1f}", f"{SECONDS_GOAL:.0f}")
    table.add_row("processor seconds", f"{result['processor_seconds']:.1f}", "")
    table.add_row("weights, GB", f"{result['weight_bytes'] / 1e9:.2f}", "")
    table.add_row("extra memory / weights", f"{result['extra_over_weights']:.2f}", "")
    table.add_row("peak memory / weights", f"{result['peak_over_weights']:.2f}", f"{PEAK_GOAL}")
    wide_console().print(table)
    print("wrote", save("onnx_export", {"export": result}))


if __name__ == "__main__":
    main()
