"""Beam search on forks: every beam is a request, and beams share the blocks of what they have in common.

    step        beam 0 "a b"       beam 1 "a c"            a beam that has computed its last token is held
    candidates  x -1.2  y -1.3     z -2.5  ...             until all of them have; then the best go on:
    next        "a b x" (same request)   "a b y" (fork of beam 0: copy on write)   beam 1 has no successor: dropped

Of each beam's next tokens the best 2 * width are candidates: if the end-of-sequence tokens among them end beams,
enough others are left (at most one per beam is taken for each end token, so more end tokens widen the list). Walking
the candidates from the best, those that end are finished beams, until `width` others are found. (Those of them
that are not among the best `width` are dropped by transformers' generate.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from pagebinder.config import SamplingParams
from pagebinder.runtime.live_requests import LiveRequest
from pagebinder.runtime.outputs import Beam
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler


@dataclass(slots=True)
class _OpenBeam:
    live: LiveRequest
    logprob: float

    @property
    def request(self) -> Request:
        return self.live.request


class BeamSearch:
    """One search. `start`, then `advance` after every step of the engine until `done`, then `best`; `close` always.

    `live` is the engine's table of requests, where beams appear under "<name>/<number>".
    """

    def __init__(
        self, scheduler: Scheduler, live: dict[str, LiveRequest], name: str, *, width: int, max_tokens: int,
        length_penalty: float, eos: Collection[int],
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.live = live
        self.name = name
        self.width = width
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.eos = frozenset(eos)
        self._open: list[_OpenBeam] = []
        self._finished: list[Beam] = []
        self._num_beams = 0

    @property
    def done(self) -> bool:
        return not self._open

    def start(self, prompt: list[int], params: SamplingParams, **fields) -> None:
        """Queue the prompt, with these further fields of its request. Raises what `Scheduler.add_request` raises."""
        request = Request(self._next_id(), prompt, max_tokens=self.max_tokens, params=params, **fields)
        beam = self._beam(request, params, 0.0)
        self.scheduler.add_request(request)
        self._admit(beam)
        self._open = [beam]

    def advance(self) -> None:
        """Extend all beams by a token, if the logits of all of them are there."""
        self._open = [beam for beam in self._open if not beam.request.is_finished]  # the others were aborted
        if not self._open or any(beam.live.held_logits is None for beam in self._open):
            return
        successors = self._choose()
        length = self._open[0].request.num_output_tokens + 1
        if length >= self.max_tokens:
            self._finish([self._ended(b, token, logprob, False) for b, token, logprob in successors])
        elif self._cannot_improve(successors, length):
            self._finish([])
        else:
            self._extend(successors)

    def best(self) -> list[Beam]:
        """The finished beams, best first."""
        return self._finished

    def close(self) -> None:
        """Take all beams out of the engine."""
        for beam in self._open:
            self._drop(beam)
        self._open = []

    def _choose(self) -> list[tuple[_OpenBeam, int, float]]:
        """The best `width` (beam, token, log-probability) that go on; those that end are noted."""
        logprobs = torch.stack([beam.live.held_logits for beam in self._open]).log_softmax(-1)
        count = min((1 + max(1, len(self.eos))) * self.width, logprobs.shape[-1])
        values, tokens = logprobs.topk(count, dim=-1)
        before = torch.tensor([[beam.logprob] for beam in self._open], dtype=torch.float64, device="cpu")
        scores, order = (before + values.double().cpu()).flatten().sort(descending=True, stable=True)
        most = (1 + len(self.eos)) * self.width  # no more end before as many others are found
        places = order[:most].tolist()
        tokens = tokens.flatten().cpu()[order[:most]].tolist()
        chosen: list[tuple[_OpenBeam, int, float]] = []
        for logprob, place, token in zip(scores[:most].tolist(), places, tokens):
            beam = self._open[place // count]
            if token in self.eos:
                self._keep([self._ended(beam, token, logprob, True)])
            else:
                chosen.append((beam, token, logprob))
            if len(chosen) == self.width:
                break
        return chosen

    def _extend(self, successors: list[tuple[_OpenBeam, int, float]]) -> None:
        first: dict[int, tuple[_OpenBeam, int, float]] = {}
        forks = [s for s in successors if first.setdefault(id(s[0]), s) is not s]
        # Seats of beams that end here are free for the forks.
        for beam in self._open:
            if id(beam) not in first:
                self._drop(beam)
        children = [self._fork(*successor) for successor in forks]
        for beam, token, logprob in first.values():
            beam.live.held_logits, beam.logprob = None, logprob
            self.scheduler.append_token(beam.request.request_id, token)
        self._open = [beam for beam, *_ in first.values()] + children

    def _fork(self, beam: _OpenBeam, token: int, logprob: float) -> _OpenBeam:
        parent = beam.request
        child = parent.child(
            self._next_id(), parent.num_tokens, max_tokens=self.max_tokens, params=parent.params
        )
        child.append_output(token)
        forked = self._beam(child, beam.live.params, logprob)
        self.scheduler.fork(parent.request_id, child)
        self._admit(forked)
        return forked

    def _cannot_improve(self, successors: list[tuple[_OpenBeam, int, float]], length: int) -> bool:
        """No beam that goes on can reach the worst one that is finished: log-probabilities only fall."""
        if not successors:
            return True
        if len(self._finished) < self.width:
            return False
        best = max(logprob for *_, logprob in successors)
        reachable = max(self._score(best, length), self._score(best, self.max_tokens))
        return reachable <= self._finished[-1].score

    def _ended(self, beam: _OpenBeam, token: int, logprob: float, finished: bool) -> Beam:
        tokens = [*beam.request.output_token_ids, token]
        return Beam(
            token_ids=tokens, logprob=logprob, score=self._score(logprob, len(tokens)), finished=finished
        )

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self.length_penalty

    def _keep(self, beams: list[Beam]) -> None:
        self._finished = sorted([*self._finished, *beams], key=lambda beam: -beam.score)[: self.width]

    def _finish(self, beams: list[Beam]) -> None:
        self._keep(beams)
        self.close()

    def _beam(self, request: Request, params: SamplingParams, logprob: float) -> _OpenBeam:
        return _OpenBeam(LiveRequest.held(request, params), logprob)

    def _admit(self, beam: _OpenBeam) -> None:
        self.live[beam.request.request_id] = beam.live

    def _drop(self, beam: _OpenBeam) -> None:
        self.live.pop(beam.request.request_id, None)
        self.scheduler.abort(beam.request.request_id)

    def _next_id(self) -> str:
        self._num_beams += 1
        return f"{self.name}/{self._num_beams - 1}"
