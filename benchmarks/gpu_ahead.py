"""Compiles on a CPU what `make gpu` would compile first on a Hopper: most of the time of its tests and benchmarks.

    TRITON_CACHE_DIR=DIR python benchmarks/gpu_ahead.py [--tests-only | --benchmarks-only] [--jobs 2]

Take DIR along, to the same path, with the same version of Triton and the same sources, and set TRITON_CACHE_DIR
there: what is found in it is not compiled again. It holds what a GPU needs, no listings. Tests run once in the
interpreter (5 minutes on 2 cores), compiling 1,700 kernels takes 6.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent
TESTS = ("tests/custom_ops/triton", "--ignore=tests/custom_ops/triton/test_compiled_for.py")
LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
LARGE = 1 << 22  # values that nobody needs to draw
NEEDED = (".json", ".cubin")


def record(folder: Path, jobs: int, tests: bool, benchmarks: bool) -> list[str]:
    """Distinct launches, as lines of `gpu_recorder`."""
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PAGEBINDER_NIGHTLY": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}", "RECORD_FILE": str(folder / "launches"),
    }  # fmt: skip
    if benchmarks:
        command = [sys.executable, __file__, "--record-benchmarks"]
        subprocess.run(command, check=True, cwd=ROOT, env={**environment, "RECORD_ONLY": "1"})
    if tests:
        command = [sys.executable, "-m", "pytest", "-p", "gpu_recorder", "-p", "no:cacheprovider", *TESTS]
        command += ["-n", str(jobs)] if jobs > 1 else []
        subprocess.run(command, cwd=ROOT, env=environment)
    return sorted({line for file in folder.glob("launches.*") for line in file.read_text().splitlines()})


def record_benchmarks() -> None:
    """Each case once, with tensors of the CPU in place of the GPU's."""
    import gpu_recorder  # noqa: F401  (first: it makes Triton interpret)
    import gpu_timing
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")) == "cuda":
                kwargs["device"] = "cpu"
            if function in (torch.randn, torch.rand, torch.randint):
                made = torch.empty(0).new_empty
                size = args[2] if function is torch.randint else args
                size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
                if torch.Size(size).numel() > LARGE:
                    return made(size, dtype=kwargs.get("dtype") or torch.float32)
            return function(*args, **kwargs)

    def not_on_cpu(*operands, **options):
        raise RuntimeError("the library's product takes minutes on a CPU")

    def once(calls) -> float:
        calls[0]()
        return 1.0

    with (
        mock.patch.object(gpu_timing, "median_ms", once),
        mock.patch.object(gpu_timing, "num_copies", lambda num_bytes, most=9: 1),
        mock.patch.object(torch, "_scaled_mm", not_on_cpu),
    ):
        import gpu_attention_forms
        import gpu_cases
        import gpu_latent
        import gpu_product_cases
        import gpu_recurrent

        gpu_cases._sdpa_ms = lambda requests, tokens: {}
        gpu_attention_forms.sdpa = lambda *operands, **options: None
        for module in (gpu_cases, gpu_latent, gpu_attention_forms, gpu_recurrent, gpu_product_cases):
            for name, run in module.cases(1.0):
                try:
                    with OnCpu():
                        run()
                except Exception as error:  # what torch itself does not do on a CPU
                    print(f"{name} is not recorded: {str(error).splitlines()[0][:120]}")


def prepare_compiler() -> None:
    """In a process that compiles: a driver that is for a Hopper and loads nothing."""
    os.environ.pop("TRITON_INTERPRET", None)
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class NoDriver(DriverBase):
        def __init__(self) -> None:
            self.launcher_cls = lambda source, metadata: None
            self.utils = mock.Mock(load_binary=lambda *operands: (1, 1, 32, 0, 1024))
            self.utils.get_device_properties = lambda device: {"max_shared_mem": 227 << 10, "warpSize": 32}

        is_active = staticmethod(lambda: True)
        get_current_target = lambda self: GPUTarget("cuda", 90, 32)  # noqa: E731
        get_current_device = get_current_stream = lambda self, device=0: 0
        get_active_torch_device = lambda self: torch.device("cuda", 0)  # noqa: E731
        map_python_to_cpp_type = lambda self, name: name  # noqa: E731
        get_benchmarker = get_empty_cache_for_benchmark = clear_cache = lambda self, *operands: None

    driver.set_active(NoDriver())


class Pointer:
    """Stands for a tensor on the GPU."""

    def __init__(self, dtype, is_aligned: bool) -> None:
        self.dtype, self._address = dtype, 0 if is_aligned else 1

    def data_ptr(self) -> int:
        return self._address


def operand(kind: str, *value):
    """What stands for an operand that `gpu_recorder.described` describes."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    if kind == "value":
        return value[0]
    dtype = getattr(torch, value[0])
    if kind == "tensor":
        return Pointer(dtype, value[1])
    strides = [16] * (len(value[1]) - 1) + [1]
    return TensorDescriptor(Pointer(dtype, True), value[1], strides, value[1])


def compile_one(line: str) -> str | None:
    """The error, or None."""
    from pagebinder.custom_ops.triton.gpu import settle_key

    module, name, known, options = json.loads(line)
    operands = {n: operand(*described) for n, described in known.items()}
    options = {n: v for n, v in options.items() if n in LAUNCH_OPTIONS}
    try:
        kernel = getattr(importlib.import_module(module), name)
        settle_key(kernel)
        kernel.warmup(grid=(1,), **operands, **options)
    except Exception as error:
        return f"{name}: {type(error).__name__}: {str(error)[:300]}"
    return None


def drop_listings(cache: Path) -> None:
    """Leaves what is loaded on a GPU."""
    for group in cache.glob("*/__grp__*.json"):
        found = json.loads(group.read_text())
        found["child_paths"] = {n: p for n, p in found["child_paths"].items() if n.endswith(NEEDED)}
        group.write_text(json.dumps(found))
    for file in cache.glob("*/*"):
        if file.is_file() and not file.name.endswith((*NEEDED, ".so")):
            file.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--tests-only", action="store_true")
    only.add_argument("--benchmarks-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record-benchmarks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record_benchmarks:
        record_benchmarks()
        return 0
    if "TRITON_CACHE_DIR" not in os.environ:
        parser.error("set TRITON_CACHE_DIR to the folder that you will take along")
    sys.path.insert(0, str(ROOT))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines = record(Path(folder), options.jobs, not options.benchmarks_only, not options.tests_only)
    print(f"{len(lines)} launches recorded after {time.monotonic() - started:.0f} s", flush=True)
    with ProcessPoolExecutor(options.jobs, initializer=prepare_compiler) as pool:
        errors = [error for error in pool.map(compile_one, lines, chunksize=4) if error is not None]
    drop_listings(Path(os.environ["TRITON_CACHE_DIR"]))
    print(*sorted(set(errors)), sep="\n")
    print(f"compiled after {time.monotonic() - started:.0f} s, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
