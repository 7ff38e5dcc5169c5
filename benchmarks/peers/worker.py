"""The side of a benchmark that runs in an engine's own environment: one process, one engine, commands on stdin.

    -> {"batch": {"prompts": [[...]], "max_tokens": 64}}
    <- {"prefill": s, "decode": s, "decoded": n, "tokens": [[...]]}
    -> {"arrivals": [[at, prompt, max_tokens], ...]}
    <- {"seconds": s, "times": [[s, ...], ...]}

One JSON object a line. The first line that a worker writes is {"ready": seconds since its process was started}: one
short request has been served by then. Time is measured here, so that pipes do not count. Prefill ends when every
request has its first token; the `decoded` tokens came after that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Protocol


class StepEngine(Protocol):
    """An engine that a loop steps. `step` returns the new tokens of each request, by the id given to `add`."""

    def add(self, request: int, prompt: list[int], max_tokens: int) -> None: ...
    def step(self) -> dict[int, list[int]]: ...
    def busy(self) -> bool: ...


class BatchEngine(Protocol):
    """An engine that only takes whole batches; `batch` answers that command."""

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict: ...


def summary(times: list[list[float]], tokens: list[list[int]]) -> dict:
    """The answer to a batch. `times`: when each token of each request was there, in seconds from the start."""
    first = max(ts[0] for ts in times)
    decoded = sum(t > first for ts in times for t in ts)
    return {
        "prefill": first,
        "decode": max(ts[-1] for ts in times) - first,
        "decoded": decoded,
        "tokens": tokens,
    }


def run_batch(engine: StepEngine | BatchEngine, prompts: list[list[int]], max_tokens: int) -> dict:
    if hasattr(engine, "batch"):
        return engine.batch(prompts, max_tokens)
    times: list[list[float]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    start = time.perf_counter()
    for request, prompt in enumerate(prompts):
        engine.add(request, prompt, max_tokens)
    while engine.busy():
        new = engine.step()
        now = time.perf_counter() - start
        for request, ids in new.items():
            tokens[request] += ids
            times[request] += [now] * len(ids)
    return summary(times, tokens)


def run_arrivals(engine: StepEngine, arrivals: list) -> dict:
    """`times`: for every request, when each of its tokens was there, in seconds after its arrival."""
    times: list[list[float]] = [[] for _ in arrivals]
    start, coming = time.perf_counter(), 0
    while coming < len(arrivals) or engine.busy():
        now = time.perf_counter() - start
        while coming < len(arrivals) and arrivals[coming][0] <= now:
            engine.add(coming, arrivals[coming][1], arrivals[coming][2])
            coming += 1
        if not engine.busy():
            time.sleep(max(0.0, arrivals[coming][0] - now))
            continue
        new = engine.step()
        now = time.perf_counter() - start
        for request, ids in new.items():
            times[request] += [now - arrivals[request][0]] * len(ids)
    return {"seconds": time.perf_counter() - start, "times": times}


def serve(engine: StepEngine | BatchEngine) -> None:
    """Answer commands until stdin ends. What the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict) -> None:
        print(json.dumps(value), file=answers, flush=True)

    run_batch(engine, [[1, 2, 3]], 2)
    answer({"ready": time.time() - float(os.environ["WORKER_STARTED"])})
    for line in sys.stdin:
        command = json.loads(line)
        if "batch" in command:
            answer(run_batch(engine, **command["batch"]))
        else:
            answer(run_arrivals(engine, command["arrivals"]))


def options() -> dict:
    """What the parent asks for: model, max_num_seqs, max_num_batched_tokens, max_model_len, kv_bytes, threads."""
    return json.loads(sys.argv[1])
