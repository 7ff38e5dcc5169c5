"""The check of one architecture: a tiny model, compiled strictly and served, token for token the source model's.

Decoders and encoder-decoders are served three times: requests that come one by one, in chunks of prompts beside
decodes; prompts whose beginning is cached; and a cache too small for all, so that requests are preempted. Encoders
compute sequences of mixed lengths in one batch.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass

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
from pagebinder.frontend.source import source_from_module
from tests.zoo.architectures import NOT_TEXT, Architecture
from tests.zoo.reference import MIN_SPREAD, Reference, Wrong, source_logits, stop_ids, tokens
from tests.zoo.tiny_configs import tiny_model

STATUSES = ("wrong", "error", "refused", "not built", "not a decoder", "exact")
PROMPT_LENGTHS = (5, 16, 37, 1, 60, 19, 33, 48)
ENCODER_LENGTHS = (7, 30, 1, 21, 40, 3, 16, 12)
SHARED_TOKENS = 33
# Longer than any block, so that states of recurrences are cached, too.
LONG_TOKENS = 140
NEW_TOKENS = 16


@dataclass
class Record:
    """What became of one architecture. `reason` is the whole message, `details` a traceback where there is one.

    `preemptions` and `cached_tokens` say that serving did go through these paths.
    """

    name: str
    family: str
    class_name: str
    status: str = "exact"
    reason: str = ""
    details: str = ""
    state_kinds: tuple[str, ...] = ()
    preemptions: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict:
        return asdict(self)


def check(architecture: Architecture, levels: bool = False) -> Record:
    """Judge one architecture, with `levels` its graphs in bfloat16. Never raises: what goes wrong is the result."""
    record = Record(architecture.name, architecture.family, architecture.class_name)
    start = time.perf_counter()
    if reason := NOT_TEXT.get((architecture.family, architecture.name)):
        record.status, record.reason = "not a decoder", reason
    elif (model := _build(architecture, record)) is not None:
        _note_errors(_verify_levels if levels else _compile_and_serve, model, record)
    record.seconds = round(time.perf_counter() - start, 1)
    return record


def _build(architecture: Architecture, record: Record):
    """The tiny model, or None, and why, in the record."""
    try:
        model = tiny_model(architecture)
        spread = float(source_logits(model, tokens(20), encoder_ids_of(model)).std())
        if not spread >= MIN_SPREAD:
            raise ValueError(f"the tiny model's logits spread by {spread:.2g} only: errors would not show")
        return model
    except Exception as error:
        _note(record, "not built", error)
        return None


def _note_errors(judge, model, record: Record) -> None:
    try:
        judge(model, record)
    except (Wrong, VerificationError) as wrong:
        _note(record, "wrong", wrong)
    except (CaptureError, ConfigError) as error:
        _note(record, "refused", error)
    except Exception as error:
        _note(record, "error", error)


def _verify_levels(model, record: Record) -> None:
    """Whatever a rewrite may change, from the source to the last graph: most of it shows in bfloat16 only."""
    try:
        source_logits(
            source_from_module(model, dtype=torch.bfloat16).module, tokens(20), encoder_ids_of(model)
        )
    except RuntimeError as error:
        record.status, record.reason = "not built", f"transformers does not run it in bfloat16: {error}"
        return
    config = CompileConfig(executable="eager", verify="full", dtype=torch.bfloat16)
    record.state_kinds = _state_kinds(pagebinder.compile_model(model, config))


def encoder_ids_of(model) -> list[int] | None:
    return tokens(9) if model.config.is_encoder_decoder else None


def _compile_and_serve(model, record: Record) -> None:
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    record.state_kinds = _state_kinds(compiled)
    if hasattr(compiled, "encode_batch"):
        _encode(model, compiled)
    else:
        _serve(model, compiled, record)


def _state_kinds(compiled) -> tuple[str, ...]:
    if hasattr(compiled, "encode_batch"):
        return ("encoder_only",)
    return tuple(sorted({state.kind for state in compiled.states}))


def _note(record: Record, status: str, error: Exception) -> None:
    ours = (Wrong, VerificationError, CaptureError, ConfigError)
    kind = "" if isinstance(error, ours) else f"{type(error).__name__}: "
    record.status, record.reason = status, f"{kind}{error}"
    record.details = traceback.format_exc()


def _encode(model, compiled) -> None:
    sequences = [tokens(n) for n in PROMPT_LENGTHS]
    reference = Reference(model)
    for ids, rows in zip(sequences, compiled.encode_batch(sequences), strict=True):
        reference.assert_rows(ids, rows)


def _serve(model, compiled, record: Record) -> None:
    reference = Reference(model)
    requests = _requests(model)
    roomy = _engine(compiled, num_kv_blocks=240, max_num_seqs=4, max_num_batched_tokens=24)
    _run(roomy, requests, reference, every=3)
    _run_again(roomy, requests[0][1], reference)
    record.cached_tokens = roomy.stats().prefix_hit_tokens
    budget, longest = 16, max(PROMPT_LENGTHS) + NEW_TOKENS
    with_encoder = max(ENCODER_LENGTHS) if model.config.is_encoder_decoder else 0
    needed = compiled.kv_spec.min_blocks(longest, budget, with_encoder)
    # Room for one; a second encoder prompt must fit, or its request would not be let in beside the first.
    num_blocks = needed + (with_encoder > 0)
    tight = _engine(compiled, num_kv_blocks=num_blocks, max_num_seqs=8, max_num_batched_tokens=budget)
    _run(tight, requests, reference)
    record.preemptions = tight.stats().preemptions


def _engine(compiled, **options):
    return compiled.engine(EngineConfig(check_integrity=True, **options))


def _requests(model) -> list[tuple[list[int], list[int] | None]]:
    """(prompt, encoder prompt or None) of eight requests; the longer prompts begin alike."""
    shared = tokens(SHARED_TOKENS, seed=7)
    prompts = [shared + tokens(n - SHARED_TOKENS) if n > SHARED_TOKENS else tokens(n) for n in PROMPT_LENGTHS]
    encoders = [None] * len(prompts)
    if model.config.is_encoder_decoder:
        encoders = [tokens(n, seed=8) for n in ENCODER_LENGTHS]
    return list(zip(prompts, encoders, strict=True))


def _run_again(engine, encoder_ids, reference: Reference) -> None:
    """A long prompt, then one that goes on where it ended, one that parts from it inside a block, and itself."""
    long = tokens(LONG_TOKENS, seed=3)
    again = (long + tokens(9, seed=1), long[:-7] + tokens(30, seed=2), long)
    _run(engine, [(long, encoder_ids)], reference)
    _run(engine, [(ids, encoder_ids) for ids in again], reference)


def _run(engine, requests, reference: Reference, every: int = 1) -> None:
    """Serve requests that come every so many steps and judge each as it ends; every second with log-probabilities."""
    greedy = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "stop_token_ids": stop_ids(reference.model)}
    kinds = (SamplingParams(**greedy), SamplingParams(**greedy, logprobs=0))
    waiting, step = list(enumerate(requests)), 0
    while waiting or engine.has_unfinished:
        if waiting and step % every == 0:
            index, (ids, encoder_ids) = waiting.pop(0)
            with_encoder = {} if encoder_ids is None else {"encoder_prompt": encoder_ids}
            engine.add_request(str(index), ids, kinds[index % 2], **with_encoder)
        for output in engine.step():
            if output.finished:
                ids, encoder_ids = requests[int(output.request_id)]
                _judge(output, ids, encoder_ids, reference)
        step += 1


def _judge(output, ids, encoder_ids, reference: Reference) -> None:
    num_tokens = len(output.token_ids)
    if num_tokens != NEW_TOKENS and not (num_tokens and output.finish_reason == "stop"):
        raise Wrong(f"a prompt of {len(ids)} tokens ended after {num_tokens} ({output.finish_reason})")
    reference.assert_greedy(ids, output, encoder_ids)
