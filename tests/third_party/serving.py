"""The check of one case: the model as published, compiled and served, token for token what it says itself.

Prompts of several lengths come at once, are cut into chunks beside each other's decodes, and some begin alike, so
that their beginning is cached. Each token is judged by a run of the model over the whole sequence up to it; a second
model, made alike, says it, so that nothing that compiling does to the first could hide.
"""

from __future__ import annotations

import importlib.util
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import pagebinder
from pagebinder import (
    CaptureError,
    CompileConfig,
    ConfigError,
    EngineConfig,
    SamplingParams,
    VerificationError,
)
from tests.third_party.case import MAX_TOKENS, VOCAB_SIZE, Built, Case
from tests.third_party.checkouts import checkout_of

STATUSES = ("WRONG", "error", "not run", "refused", "exact")
PROMPT_LENGTHS = (1, 2, 4, 5, 37, 60, 100)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, logprobs=0)
MIN_SPREAD = 0.3
# How far below the best logit a chosen one may be: rounding decides between two that are as close as this. How far
# log-probabilities may be apart. Both in units of the logits' spread, at least 1.
TIE = 1e-4
ROW_TOLERANCE = 5e-4


class Wrong(Exception):
    """A token that the model itself would not have chosen."""


@dataclass
class Record:
    """What became of one case; `reason` is the whole message, `details` a traceback."""

    name: str
    status: str = "exact"
    reason: str = ""
    details: str = ""
    state_kinds: tuple[str, ...] = ()
    cached_tokens: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict:
        return asdict(self)


def check(case: Case, folder: Path) -> Record:
    """Judge one case. Never raises: what goes wrong is the result."""
    record, start = Record(case.name), time.perf_counter()
    if missing := [name for name in case.needs if importlib.util.find_spec(name) is None]:
        record.status, record.reason = "not run", f"it needs {', '.join(missing)}"
        return record
    try:
        _compile_and_serve(case, folder, record)
    except (Wrong, VerificationError) as wrong:
        _note(record, "WRONG", wrong)
    except (CaptureError, ConfigError) as error:
        _note(record, "refused", error)
    except Exception as error:
        _note(record, "error", error)
    record.seconds = round(time.perf_counter() - start, 1)
    return record


def _note(record: Record, status: str, error: Exception) -> None:
    kind = f"{type(error).__name__}: " if status == "error" else ""
    record.status, record.reason, record.details = status, f"{kind}{error}", traceback.format_exc()


def _compile_and_serve(case: Case, folder: Path, record: Record) -> None:
    checkout = checkout_of(case.repository, folder)
    model, source = case.built(checkout).model, case.built(checkout)
    _expect_spread(source)
    config = CompileConfig(executable="eager", max_model_len=MAX_TOKENS, **case.options)
    compiled = pagebinder.compile_model(model, config)
    record.state_kinds = tuple(sorted({state.kind for state in compiled.states}))
    options = EngineConfig(num_kv_blocks=240, max_num_seqs=4, max_num_batched_tokens=24, check_integrity=True)
    engine = compiled.engine(options)
    shared = prompt(75)
    first = [*(prompt(n) for n in PROMPT_LENGTHS), shared]
    later = [shared[:70] + prompt(9, seed=1), shared, prompt(100)[:50], prompt(100) + prompt(20, seed=2)]
    for prompts in (first, later):
        for ids, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            judge(source, ids, output)
            record.cached_tokens += output.num_cached_tokens


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Random ids; the lowest may mean padding or an end."""
    generator = torch.Generator().manual_seed(seed * 1000 + num_tokens)
    return torch.randint(4, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def _expect_spread(source: Built) -> None:
    """The weights are good for a check: errors would show, and what is said is said again."""
    logits, again = source.logits_of(prompt(20)), source.logits_of(prompt(20))
    if not (logits.isfinite().all() and logits.std() >= MIN_SPREAD):
        raise ValueError(
            f"the tiny model's logits spread by {float(logits.std()):.2g}: errors would not show"
        )
    if not torch.equal(logits, again):
        raise ValueError("the tiny model says other logits when it is called again")


def rows(source: Built, ids: list[int], start: int) -> torch.Tensor:
    """The model's own logits [N, V] of the tokens from `start` on, each of a run that ends with it.

    A model that takes no sequence as short as that says it in a longer one.
    """
    found = []
    for end in range(start + 1, len(ids) + 1):
        try:
            found.append(source.logits_of(ids[:end])[-1])
        except Exception:
            found.append(source.logits_of(ids)[end - 1])
    return torch.stack(found)


def judge(source: Built, ids: list[int], output) -> None:
    """Every token has the model's largest logit, given all tokens before it, and its log-probability."""
    continuation = list(output.token_ids)
    if len(continuation) != GREEDY.max_tokens:
        raise Wrong(f"a prompt of {len(ids)} tokens ended after {len(continuation)} ({output.finish_reason})")
    logits = rows(source, (ids + continuation)[:-1], len(ids) - 1)
    chosen, spread = torch.tensor(continuation)[:, None], max(1.0, float(logits.std()))
    gaps = (logits.amax(1) - logits.gather(1, chosen)[:, 0]) / spread
    served = torch.tensor([row[token] for row, token in zip(output.logprobs, continuation, strict=True)])
    errors = (logits.log_softmax(1).gather(1, chosen)[:, 0] - served).abs() / spread
    for values, limit, what in (
        (gaps, TIE, "is below the best logit"),
        (errors, ROW_TOLERANCE, "has another log-probability"),
    ):
        bad = ~(values <= limit)  # a NaN is bad as well
        if bad.any():
            first = int(bad.nonzero()[0, 0])
            raise Wrong(
                f"token {first} after a prompt of {len(ids)} {what}, by {float(values[first]):.3g} "
                f"({int(bad.sum())} of {len(values)} tokens)"
            )
