"""Synthetic traffic for the KV cache: seeded, with scripted answers, so that a replay needs no model.

    chats       [ system prompt ][ message ][ answer ][ message ][ answer ] ...   turn k + 1 contains turn k
    documents   [ long document ][ question ]                                     several questions to each
    samples     [ prompt ]                                                        n answers to one prompt

Conversations begin in bursts; a turn follows some steps after the one before has ended. Token ids are random, so
nothing is shared but what the shapes above share.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCAB_SIZE = 32_000
SYSTEM_PROMPT_TOKENS = 500  # as in the published measurements


@dataclass(frozen=True)
class TraceRequest:
    """A prompt and its scripted answers, one per sample.

    It arrives `delay_steps` steps after the beginning of the trace, or after request `after` has ended.
    """

    name: str
    kind: str
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    delay_steps: int
    after: str | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the longest sample when it has ended."""
        return len(self.prompt) + max(map(len, self.answers))


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """How much of what. Ranges are inclusive; lengths in tokens, pauses in steps."""

    num_chats: int = 48
    num_system_prompts: int = 4
    turns: tuple[int, int] = (2, 6)
    message: tuple[int, int] = (20, 200)
    answer: tuple[int, int] = (30, 200)
    num_documents: int = 8
    document: tuple[int, int] = (2_000, 6_000)
    questions: tuple[int, int] = (2, 5)
    num_sampled: int = 12
    samples: tuple[int, int] = (2, 6)
    sampled_prompt: tuple[int, int] = (100, 800)
    pause: tuple[int, int] = (5, 120)
    burst: tuple[int, int] = (1, 6)
    mean_gap: float = 25.0

    def scaled(self, factor: float) -> TraceShape:
        """The same traffic, more or less of it."""
        counts = {
            name: max(1, round(getattr(self, name) * factor))
            for name in ("num_chats", "num_documents", "num_sampled")
        }
        return TraceShape(**{**self.__dict__, **counts})


def generate_trace(seed: int, shape: TraceShape | None = None) -> list[TraceRequest]:
    """All requests of a trace, roughly in order of arrival. The same seed and shape give the same trace."""
    rng, shape = random.Random(seed), shape or TraceShape()
    systems = [_tokens(rng, SYSTEM_PROMPT_TOKENS) for _ in range(shape.num_system_prompts)]
    starts = [_chat] * shape.num_chats + [_document] * shape.num_documents + [_sampled] * shape.num_sampled
    rng.shuffle(starts)
    requests: list[TraceRequest] = []
    step, left = 0, 0
    for number, start in enumerate(starts):
        if not left:
            left = rng.randint(*shape.burst)
            step += round(rng.expovariate(1 / shape.mean_gap))
        left -= 1
        requests += start(rng, shape, number, step, systems)
    return requests


def longest(trace: list[TraceRequest]) -> int:
    """Tokens of the longest request when it has ended."""
    return max(request.num_tokens for request in trace)


def _chat(rng: random.Random, shape: TraceShape, number: int, step: int, systems: list) -> list[TraceRequest]:
    history, turns = rng.choice(systems), []
    for turn in range(rng.randint(*shape.turns)):
        prompt = history + _tokens(rng, rng.randint(*shape.message))
        answer = _tokens(rng, rng.randint(*shape.answer))
        before = f"chat-{number}-{turn - 1}" if turn else None
        delay = rng.randint(*shape.pause) if turn else step
        turns.append(TraceRequest(f"chat-{number}-{turn}", "chat", prompt, (answer,), delay, before))
        history = prompt + answer
    return turns


def _document(rng: random.Random, shape: TraceShape, number: int, step: int, systems) -> list[TraceRequest]:
    document = _tokens(rng, rng.randint(*shape.document))
    requests = []
    for i in range(rng.randint(*shape.questions)):
        question = _tokens(rng, rng.randint(*shape.message))
        answer = _tokens(rng, rng.randint(*shape.answer))
        requests.append(
            TraceRequest(f"document-{number}-{i}", "document", document + question, (answer,), step)
        )
        step += rng.randint(*shape.pause)
    return requests


def _sampled(rng: random.Random, shape: TraceShape, number: int, step: int, systems) -> list[TraceRequest]:
    prompt = _tokens(rng, rng.randint(*shape.sampled_prompt))
    answers = tuple(_tokens(rng, rng.randint(*shape.answer)) for _ in range(rng.randint(*shape.samples)))
    return [TraceRequest(f"samples-{number}", "samples", prompt, answers, step)]


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCAB_SIZE), k=count))
