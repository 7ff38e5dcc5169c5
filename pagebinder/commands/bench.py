"""`pagebinder bench DIR`: how fast this machine serves a model, beside what the machine itself can do.

    prefill   all prompts of a batch at once, up to everybody's first token
    decode    the rest: every step gives each request one token and reads the weights once

Prompts are random tokens and share nothing. Each batch size runs once to warm up and `rounds` times after that;
medians are shown. For peers in the same run see benchmarks/ of the repository.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table

from pagebinder.commands.support import (
    ActivationQuantizationOption,
    CodedWeightsOption,
    DeviceOption,
    KvDtypeOption,
    MovedOption,
    QuantizationOption,
    checkpoint_dir,
    compile_dir,
    given_path,
    show,
    working,
)

MOST_REQUESTS = 65_536


@dataclass(frozen=True)
class BatchRates:
    """Medians of one batch size. `outside` is the share of time that was not spent in the graph."""

    requests: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    decode_step_ms: float
    outside: float


def bench_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", parser=given_path, callback=checkpoint_dir, help="A checkpoint or an artefact."
        ),
    ],
    checkpoint: MovedOption = None,
    requests: Annotated[
        list[int] | None,
        typer.Option(min=1, max=MOST_REQUESTS, help="Requests at once. May be repeated; default 1, 8, 32."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of each batch.")] = 5,
    device: DeviceOption = "auto",
    kv_dtype: KvDtypeOption = "auto",
    coded_weights: CodedWeightsOption = False,
    quantization: QuantizationOption = None,
    activation_quantization: ActivationQuantizationOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure prefill and decode of a model on this machine, for several batch sizes."""
    options = {
        "device": device, "kv_dtype": kv_dtype, "quantization": quantization,
        "activation_quantization": activation_quantization, "pack_weights": "coded" if coded_weights else None,
    }  # fmt: skip
    compiled = compile_dir(model, options, checkpoint=checkpoint)
    if hasattr(compiled, "embed") or compiled.source.encoder is not None:
        kind = "an encoder" if hasattr(compiled, "embed") else "an encoder-decoder"
        raise typer.BadParameter(f"{model} holds {kind}; decoders alone are measured.", param_hint="DIR")
    with working("measuring"):
        from pagebinder.explain_rates import measured_rates

        dtype = str(compiled.source.dtype).removeprefix("torch.")
        machine = measured_rates(compiled.source.device.type, dtype)
        rows = [measure(compiled, n, prompt_tokens, new_tokens, rounds) for n in requests or (1, 8, 32)]
    results = {
        "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "rounds": rounds,
        "executable": compiled.report.executable, "machine": asdict(machine), "batches": [asdict(r) for r in rows],
    }  # fmt: skip
    if as_json:
        print(json.dumps(results, indent=2))
        return
    table = Table(
        "requests", "prefill tokens/s", "decode tokens/s", "ms per decode step", "outside the graph"
    )
    for row in rows:
        table.add_row(
            str(row.requests), f"{row.prefill_tokens_per_second:,.0f}", f"{row.decode_tokens_per_second:,.1f}",
            f"{row.decode_step_ms:.2f}", f"{row.outside:.1%}",
        )  # fmt: skip
    about = f"prompts of {prompt_tokens} tokens, {new_tokens} new ones, median of {rounds}"
    limits = f"machine: {machine.flops / 1e9:,.0f} GFLOP/s, {machine.bytes / 1e9:,.1f} GB/s ({machine.what})"
    show(Group(table, about, limits))


def measure(compiled, requests: int, prompt_tokens: int, new_tokens: int, rounds: int) -> BatchRates:
    """Run one batch size. Raises RequestError, CacheCapacityError if the requests do not fit."""
    from pagebinder.config import EngineConfig, SamplingParams
    from pagebinder.errors import RequestError

    if prompt_tokens + new_tokens > compiled.max_model_len:
        raise RequestError(
            f"{prompt_tokens} prompt tokens and {new_tokens} new ones are more than the {compiled.max_model_len} "
            "that the model takes: lower --prompt-tokens or --new-tokens."
        )
    engine = compiled.engine(
        EngineConfig(
            max_num_seqs=requests, max_num_batched_tokens=requests * prompt_tokens, prefix_caching=False
        )
    )
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    rng = random.Random(requests)
    prefill, decode = [], []
    for _ in range(rounds + 1):
        for r in range(requests):
            tokens = rng.choices(range(1, compiled.source.vocab_size), k=prompt_tokens)
            engine.add_request(f"request-{r}", tokens, params)
        started = time.perf_counter()
        waiting = requests
        while waiting:
            waiting -= sum(len(output.token_ids) == 1 for output in engine.step())
        first = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        prefill.append(first - started)
        decode.append(time.perf_counter() - first)
    stats = engine.stats()
    seconds = statistics.median(decode[1:])
    return BatchRates(
        requests=requests,
        prefill_tokens_per_second=requests * prompt_tokens / statistics.median(prefill[1:]),
        decode_tokens_per_second=requests * (new_tokens - 1) / seconds,
        decode_step_ms=1e3 * seconds / (new_tokens - 1),
        outside=1.0 - stats.step_seconds["run"] / stats.busy_seconds,
    )
