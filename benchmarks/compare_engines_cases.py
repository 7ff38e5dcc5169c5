"""What is asked of the engines. Each case asks them in turns, round by round, and answers with samples and medians.

batch       requests that begin together: prefill and decode
mixed       requests that arrive over time, prompts and answers of mixed lengths
contention  decode of one request, alone and while another process takes half of one core
context     decode of one request with a long context
start       from starting a process with empty caches to its first answer
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
from common import median
from compare_engines_workers import PEERS, Engine, Pool, Worker

PATIENCE_SECONDS = 90  # whose first run takes longer is not asked again in that case
PROMPT_LENGTHS, ANSWER_LENGTHS = (64, 1024), (16, 256)  # of the mixed load, both ends included

Samples = dict[str, list[dict]]


def in_turns(names: Sequence[str], ask: Callable[[str, int], dict], rounds: int) -> Samples:
    """Answers of each engine, one a round. Round -1 warms up; of a slow engine it is all."""
    samples: Samples = {name: [] for name in names}
    slow = set()
    for number in range(-1, rounds):
        for name in names:
            if name in slow:
                continue
            started = time.perf_counter()
            answer = ask(name, number)
            if number < 0 and time.perf_counter() - started > PATIENCE_SECONDS:
                slow.add(name)
            if number >= 0 or name in slow:
                samples[name].append(answer)
    return samples


def medians(samples: Samples, figures: Callable[[dict], dict[str, float]]) -> dict[str, dict]:
    """Each engine's figures: median over its rounds, and the values of all rounds under "rounds"."""
    result = {}
    for name, answers in samples.items():
        rows = [figures(answer) for answer in answers]
        result[name] = {key: median([row[key] for row in rows]) for key in rows[0]} | {"rounds": rows}
    return result


def ask_batch(pool: Pool, name: str, prompts: list[list[int]], new_tokens: int) -> dict:
    """An engine's answer, and how fast memory was right before and after it: neighbours take of it what they like."""
    worker, before = pool[name], pool.read_rate()
    answer = worker.ask({"batch": {"prompts": prompts, "max_tokens": new_tokens}})
    return answer | {"read": (before + pool.read_rate()) / 2}


def batch_rates(answer: dict, prompt_tokens: int) -> dict[str, float]:
    return {
        "prefill_tokens_per_second": prompt_tokens / answer["prefill"],
        "decode_tokens_per_second": answer["decoded"] / answer["decode"],
        "read_bytes_per_second": answer["read"],
    }


def random_prompts(seed: str, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(1, vocab_size), k=length) for length in lengths]


def equal_tokens(samples: Samples, base: str) -> dict[str, float]:
    """Share of positions where an engine chose the token that `base` chose. After one difference all may differ."""
    answers = {name: np.array([row["tokens"] for row in rows][-1]) for name, rows in samples.items()}
    of_base = answers.pop(base, None)
    return {} if of_base is None else {name: float((a == of_base).mean()) for name, a in answers.items()}


def batch(pool: Pool, names: Sequence[str], vocab: int, requests: int, lengths: tuple[int, int], rounds: int):
    """`requests` prompts at once. `lengths`: of prompts and answers."""
    prompt_tokens, new_tokens = lengths
    pool.start(names)

    def ask(name: str, number: int) -> dict:
        # the last round's prompts are those that a slow engine had: equal_tokens compares equal work
        prompts = random_prompts(f"batch {requests} {number % rounds}", vocab, [prompt_tokens] * requests)
        return ask_batch(pool, name, prompts, new_tokens)

    samples = in_turns(names, ask, rounds)
    engines = medians(samples, lambda answer: batch_rates(answer, requests * prompt_tokens))
    return {"engines": engines, "equal_tokens": equal_tokens(samples, "pagebinder")}


def arrivals(vocab: int, requests: int, gap_seconds: float, seed: int = 0) -> list[list]:
    """[at, prompt, new tokens] of each request: exponential gaps, lengths drawn evenly from their ranges."""
    rng = random.Random(seed)
    at, trace = 0.0, []
    for _ in range(requests):
        prompt = rng.choices(range(1, vocab), k=rng.randint(*PROMPT_LENGTHS))
        trace.append([at, prompt, rng.randint(*ANSWER_LENGTHS)])
        at += rng.expovariate(1 / gap_seconds)
    return trace


def mixed(pool: Pool, names: Sequence[str], trace: list[list], rounds: int) -> dict:
    pool.start(names)

    def figures(answer: dict) -> dict[str, float]:
        times = answer["times"]
        firsts = [ts[0] for ts in times]
        gaps = np.concatenate([np.diff(ts) for ts in times])
        row = {"tokens_per_second": sum(map(len, times)) / answer["seconds"], "seconds": answer["seconds"]}
        for percent in (50, 99):
            row[f"first_token_p{percent}"] = float(np.percentile(firsts, percent))
            row[f"between_tokens_p{percent}"] = float(np.percentile(gaps, percent))
        return row

    def ask(name: str, number: int) -> dict:
        short = [[0.0, prompt, 4] for _, prompt, _ in trace[:4]]
        return pool[name].ask({"arrivals": trace if number >= 0 else short})

    return {"engines": medians(in_turns(names, ask, rounds), figures)}


class HalfCore:
    """While it is entered, another process takes half of a core. `taken`: the share of it that it got."""

    def __enter__(self) -> HalfCore:
        self.process = subprocess.Popen([sys.executable, str(PEERS / "half_core.py"), "0"])
        self.started = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        used = psutil.Process(self.process.pid).cpu_times()
        self.taken = (used.user + used.system) / (time.perf_counter() - self.started)
        self.process.kill()
        self.process.wait()


def contention(pool: Pool, names: Sequence[str], vocab: int, lengths: tuple[int, int], rounds: int) -> dict:
    """`kept`: the rate under contention over the rate alone, both of the same round."""
    pool.start(names)

    def ask(name: str, number: int) -> dict:
        prompts = random_prompts(f"contention {number}", vocab, [lengths[0]])
        command = {"batch": {"prompts": prompts, "max_tokens": lengths[1]}}
        alone = pool[name].ask(command)
        with HalfCore() as other:
            shared = pool[name].ask(command)
        return {"alone": alone["decoded"] / alone["decode"], "shared": shared["decoded"] / shared["decode"],
                "taken": other.taken}  # fmt: skip

    samples = in_turns(names, ask, rounds)
    return {"engines": medians(samples, lambda row: {**row, "kept": row["shared"] / row["alone"]})}


def context(pool: Pool, names: Sequence[str], vocab: int, lengths: tuple[int, int], rounds: int) -> dict:
    """Its first run counts: nothing is left to be warmed up after a prompt that long."""

    def ask(name: str, number: int) -> dict:
        prompts = random_prompts(f"context {number}", vocab, [lengths[0]])
        return ask_batch(pool, name, prompts, lengths[1])

    samples = {name: [ask(name, number) for number in range(rounds)] for name in names}
    return {"engines": medians(samples, lambda answer: batch_rates(answer, lengths[0]))}


def cold_start(engine: Engine, options: dict, folder: Path, rounds: int) -> dict:
    """Seconds to a first short answer with empty caches of graphs and kernels; files come from the page cache."""
    seconds = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder, prefix="caches-") as caches:
            worker = Worker(engine.with_caches_in(Path(caches)), options, folder / "cold_start.log")
            seconds.append(worker.ready_seconds)
            worker.close()
    return {"ready_seconds": median(seconds), "rounds": seconds}
