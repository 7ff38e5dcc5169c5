"""Guessed tokens: what a step that checks them costs, how often they are right, and what they gain then.

    python benchmarks/speculation.py [--rounds 7] [--threads 2]

1. One request of a random Qwen3-0.6B in bf16: time of a step by its guesses, and tokens/s by the share of right
   guesses, against no guesses in turns. Random weights cannot be guessed, so the tokens are foretold with errors,
   which costs nothing, as a prompt lookup does.
2. The shipped models, which can be: prompts of the project's own documentation, one at a time, against no guesses and
   against transformers' generate with and without prompt lookup.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from checkpoints import random_qwen3
from common import median, save, wide_console
from rich.table import Table
from transformers import AutoModelForCausalLM

import pagebinder
from pagebinder import CompileConfig, EngineConfig, ModelDrafter, SamplingParams
from pagebinder.models import tiny_path

PROMPT, NEW_TOKENS = list(range(10, 138)), 96
GUESSES = (0, 1, 2, 3, 5, 7, 11, 15)
RATES = (0.5, 0.7, 0.8, 0.9, 1.0)
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
DOCUMENTS = Path(__file__).parents[1] / "docs"


class Foretold:
    """Guesses the tokens of `text`, each right with a probability."""

    def __init__(self, text: list[int], rate: float) -> None:
        self.text, self.rate, self.rng = text, rate, random.Random(0)

    def propose(self, requests):
        return [self._one(len(request.token_ids), request.most) for request in requests]

    def forget(self, key: str) -> None:
        pass

    def _one(self, known: int, most: int) -> list[int]:
        guesses = self.text[known : known + most]
        return [token if self.rng.random() < self.rate else token ^ 1 for token in guesses]


class AsMany(Foretold):
    """As many wrong guesses as it is told to make."""

    def __init__(self) -> None:
        super().__init__([], 0.0)
        self.count = 0

    def propose(self, requests):
        return [[0] * self.count for _ in requests]


def engine_of(compiled, drafter=None, **options):
    return compiled.engine(
        EngineConfig(num_kv_blocks=64, max_num_seqs=1, prefix_caching=False, drafter=drafter, **options)
    )


def seconds_per_token(engine, prompt) -> float:
    """Of one request, behind its prompt's step."""
    engine.add_request("measured", prompt, GREEDY)
    engine.step()
    start, tokens = time.perf_counter(), 0
    while engine.has_unfinished:
        for output in engine.step():
            tokens = output.num_tokens
    return (time.perf_counter() - start) / (tokens - 1)


def cost_of_guesses(compiled, rounds: int) -> dict[int, float]:
    """Milliseconds of a step of one request by the guesses in it."""
    drafter = AsMany()
    engine = engine_of(compiled, drafter, draft_budget=64, max_draft_tokens=32)
    engine.loop.speculator.first_guesses = 32
    engine.loop.speculator.note = lambda *_: None  # as many again, though they fail
    engine.add_request("measured", PROMPT, SamplingParams(max_tokens=512, temperature=0.0, ignore_eos=True))
    for _ in range(3):
        engine.step()
    seconds: dict[int, list[float]] = {count: [] for count in GUESSES}
    for _ in range(rounds):
        for count, found in seconds.items():
            drafter.count = count
            start = time.perf_counter()
            for _ in range(2):
                engine.step()
            found.append((time.perf_counter() - start) / 2)
    return {count: median(found) * 1e3 for count, found in seconds.items()}


def in_turns(cases: dict[str, Callable[[], float]], rounds: int) -> list[dict[str, float]]:
    for run in cases.values():
        run()
    return [{name: run() for name, run in cases.items()} for _ in range(rounds)]


def ratios(runs: list[dict[str, float]], base: str) -> dict[str, dict[str, float]]:
    return {
        name: {
            "tokens_per_second": median(1 / run[name] for run in runs),
            "over_none": median(run[base] / run[name] for run in runs),
        }
        for name in runs[0]
    }


def foretold(model: Path, rounds: int) -> dict:
    compiled = pagebinder.compile_model(model)
    costs = cost_of_guesses(compiled, rounds)
    plain = engine_of(compiled)
    text = PROMPT + plain.generate([PROMPT], GREEDY)[0].token_ids
    engines = {"none": plain}
    for rate in RATES:
        engines[f"foretold {rate:.1f}"] = engine_of(compiled, Foretold(text, rate))
    cases = {name: lambda e=engine: seconds_per_token(e, PROMPT) for name, engine in engines.items()}
    return {"step_ms_by_guesses": costs, "one_request": ratios(in_turns(cases, rounds), "none")}


def prompts_of(tokenizer, count: int = 8, num_tokens: int = 192) -> list[list[int]]:
    ids = [i for path in sorted(DOCUMENTS.glob("*.md")) for i in tokenizer.encode(path.read_text())]
    rng = random.Random(0)
    return [ids[at : at + num_tokens] for at in rng.sample(range(len(ids) - num_tokens), count)]


def shipped(rounds: int) -> dict:
    compiled = pagebinder.compile_model(tiny_path())
    cheap = pagebinder.compile_model(tiny_path(), CompileConfig(quantization="int4_g32"))
    prompts = prompts_of(compiled.source.tokenizer())
    options = {"draft_budget": 16}
    engines = {
        "none": engine_of(compiled),
        "ngram": engine_of(compiled, "ngram", **options),
        "int4_g32": engine_of(
            compiled, ModelDrafter(cheap, EngineConfig(num_kv_blocks=64, prefix_caching=False)), **options
        ),
    }
    cases = {
        name: lambda e=engine: sum(seconds_per_token(e, p) for p in prompts) / len(prompts)
        for name, engine in engines.items()
    }
    source = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.bfloat16).eval()
    cases["transformers"] = lambda: transformers_seconds(source, prompts)
    cases["transformers, prompt lookup"] = lambda: transformers_seconds(
        source, prompts, prompt_lookup_num_tokens=8
    )
    found = ratios(in_turns(cases, rounds), "none")
    for name, engine in engines.items():
        stats = engine.stats()
        if stats.drafted_tokens:
            found[name] |= {
                "right": stats.accepted_tokens / stats.drafted_tokens,
                "tokens_per_step": stats.generated_tokens / stats.steps,
            }
    return found


def transformers_seconds(model, prompts: list[list[int]], **options) -> float:
    total = 0.0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            do_sample=False, **options,
        )  # fmt: skip
        total += (time.perf_counter() - start) / (out.shape[1] - len(prompt))
    return total / len(prompts)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of all cases in turn.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Of ours and of torch's.")] = 2,
) -> None:
    """Print tables and keep the figures in results/speculation.json."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        random_qwen3(Path(folder))
        results = {"qwen3-0.6b": foretold(Path(folder), rounds), "shipped": shipped(rounds)}
    console = wide_console()
    costs = results["qwen3-0.6b"]["step_ms_by_guesses"]
    table = Table("guesses", "ms a step", "of a step without", title="Qwen3-0.6B's shape, one request")
    for count, ms in costs.items():
        table.add_row(str(count), f"{ms:.1f}", f"{ms / costs[0]:.2f}")
    console.print(table)
    for title, rows in (("Qwen3-0.6B's shape, one request", results["qwen3-0.6b"]["one_request"]),
                        ("the shipped model, one request", results["shipped"])):  # fmt: skip
        table = Table("guesses", "tokens/s", "over none", "right", "tokens a step", title=title)
        for name, row in rows.items():
            more = [f"{row[key]:.2f}" if key in row else "" for key in ("right", "tokens_per_step")]
            table.add_row(name, f"{row['tokens_per_second']:.1f}", f"{row['over_none']:.2f}", *more)
        console.print(table)
    save("speculation", results)


if __name__ == "__main__":
    typer.run(main)
