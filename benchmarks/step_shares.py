"""Where a step of the shipped model goes: schedule, plan, run, sample, publish, with many requests decoding.

python benchmarks/step_shares.py [--requests 64] [--rounds 5]

Counted are only steps in which all requests decode; prompts are computed before. `schedule` is all that scheduler and
managers do: choosing tokens, blocks, taking the results. The goal: under 3 % of a step with 64 running requests
(benchmarks/scheduler.py measures the same code alone).
"""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer
from common import median, save, wide_console
from kv_targets import goal
from rich.table import Table

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model
from pagebinder.models import tiny_path

PROMPT_TOKENS = 64
DECODE_STEPS = 128
WARM_UP_STEPS = 8


def _tokens_of_a_step(engine) -> int:
    before = engine.stats().scheduled_tokens
    engine.step()
    return engine.stats().scheduled_tokens - before


def one_round(engine, prompts: list[list[int]], greedy: bool) -> dict[str, float]:
    """Seconds of each part of a step, summed over DECODE_STEPS steps in which everybody decodes."""
    params = SamplingParams(
        max_tokens=DECODE_STEPS + WARM_UP_STEPS + 16,
        temperature=0.0 if greedy else 0.7,
        seed=0,
        ignore_eos=True,
    )
    ids = [i for n, prompt in enumerate(prompts) for i in engine.add_request(f"r{n}", prompt, params)]
    while _tokens_of_a_step(engine) != len(prompts) or engine.stats().waiting:
        pass  # prompts are being computed
    for _ in range(WARM_UP_STEPS):
        engine.step()
    before = engine.stats()
    for _ in range(DECODE_STEPS):
        engine.step()
    after = engine.stats()
    assert after.generated_tokens - before.generated_tokens == DECODE_STEPS * len(prompts), "someone waited"
    for request_id in ids:
        engine.abort(request_id)
    return {part: after.step_seconds[part] - before.step_seconds[part] for part in after.step_seconds}


def measure(compiled, requests: int, rounds: int, greedy: bool) -> dict:
    engine = compiled.engine(EngineConfig(max_num_seqs=requests, prefix_caching=True))
    generator = torch.Generator().manual_seed(0)
    shape = (requests, PROMPT_TOKENS)
    prompts = torch.randint(1, compiled.source.vocab_size, shape, generator=generator).tolist()
    samples = [one_round(engine, prompts, greedy) for _ in range(rounds + 1)][1:]
    totals = [sum(sample.values()) for sample in samples]
    shares = {
        part: median([sample[part] / total for sample, total in zip(samples, totals)]) for part in samples[0]
    }
    return {
        "requests": requests,
        "sampling": "greedy" if greedy else "temperature 0.7",
        "step_ms": round(1e3 * median(totals) / DECODE_STEPS, 4),
        "share": {part: round(share, 5) for part, share in shares.items()},
        "us": {
            part: round(1e6 * median([sample[part] for sample in samples]) / DECODE_STEPS, 2)
            for part in shares
        },
        "load_average": round(os.getloadavg()[0], 2),
    }


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    executable: Annotated[str, typer.Option(help="auto, eager, native or inductor.")] = "auto",
) -> None:
    """Run everything, print a table, write benchmarks/results/step_shares.json."""
    console = wide_console()
    compiled = compile_model(tiny_path(), CompileConfig(executable=executable))
    rows = [measure(compiled, requests, rounds, greedy) for greedy in (True, False)]
    parts = list(rows[0]["share"])
    table = Table("sampling", "requests", "step ms", *parts)
    for r in rows:
        cells = (f"{r['share'][part]:.1%} ({r['us'][part]:.0f} us)" for part in parts)
        table.add_row(r["sampling"], str(r["requests"]), f"{r['step_ms']:.2f}", *cells)
    console.print(table)
    goals = [
        goal(f"scheduler and managers, share of a step, {r['requests']} requests, {r['sampling']}",
             r["share"]["schedule"], 0.03, at_most=True)
        for r in rows
    ]  # fmt: skip
    for g in goals:
        console.print(
            f"{'pass' if g['pass'] else 'FAIL'} {g['name']}: {g['value']:g} (at most {g['target']:g})"
        )
    path = save("step_shares", {"rounds": rounds, "results": rows, "goals": goals})
    console.print(f"wrote {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
