"""What only the engine knows of a request, and what decides how its tokens are chosen.

Most requests are *plain*: only an end-of-sequence token may stop them, and nothing but their token is asked
for. Steps treat them as arrays; `Request.flags` carries the bits into the running batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebinder.config import SamplingParams
from pagebinder.runtime.engine_setup import EngineModel
from pagebinder.runtime.guides import FunctionGuide, Guide
from pagebinder.runtime.logit_edits import LogitEdits
from pagebinder.runtime.output_text import OutputText
from pagebinder.runtime.outputs import RequestOutput
from pagebinder.runtime.request import Request, RequestStatus
from pagebinder.runtime.sampler import GREEDY_TEMPERATURE, SamplingRow

PLAIN = 1  # no stop rules of its own, no log-probabilities, nothing that waits for its first token
IGNORE_EOS = 2
QUIET = 4  # nobody reads outputs before the last one
GREEDY = 8  # its token is the largest logit, as the logits are
AHEAD = 16  # plain, and its next step can be prepared before its token is known: all it takes of it is the id


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request the engine works on.

    `edits`: what it changes in its logits before a token is chosen; None: nothing.
    `samples`: the requests of one prompt (n > 1), the first one computes it; None once each goes its own way.
    `held_logits`: for a beam, which takes its next token from outside: [V] logits of the token to come.
    """

    request: Request
    params: SamplingParams
    seed: int
    text: OutputText | None = None
    logprobs: list[dict[int, float]] | None = None
    edits: LogitEdits | None = None
    samples: list[LiveRequest] | None = None
    is_beam: bool = False
    held_logits: torch.Tensor | None = None

    @classmethod
    def of(cls, request: Request, seed: int, guide: Guide | None, model: EngineModel) -> LiveRequest:
        """One that samples; `guide`: its own, as its parameters want it."""
        params, tokenizer = request.params, model.tokenizer
        text = None if tokenizer is None else OutputText(tokenizer.backend_tokenizer, request, params.stop)
        logprobs = [] if params.logprobs is not None else None
        if isinstance(guide, FunctionGuide):
            guide.owner = request.request_id
        return cls(request, params, seed, text, logprobs, LogitEdits.of(params, model.eos_token_ids, guide))

    @classmethod
    def held(cls, request: Request, params: SamplingParams) -> LiveRequest:
        """One that nobody reads and that is given each of its tokens by who drives it (`Scheduler.append_token`)."""
        request.flags = QUIET
        return cls(request, params, 0, is_beam=True)

    @property
    def guide(self) -> Guide | None:
        return None if self.edits is None else self.edits.guide

    def mark(self, *, quiet: bool = False) -> None:
        """Set the request's flags; before it enters the scheduler."""
        flags = IGNORE_EOS if self.params.ignore_eos else 0
        if quiet:
            flags |= QUIET
        p, needs_tokens = self.params, self.sampling_row().needs_tokens
        if p.temperature < GREEDY_TEMPERATURE and not needs_tokens:
            flags |= GREEDY
        has_stops = p.stop or p.stop_token_ids or self.guide is not None
        if not (has_stops or self.samples or self.is_beam) and p.logprobs is None:
            flags |= PLAIN if needs_tokens else PLAIN | AHEAD
        self.request.flags = flags

    def sampling_row(self, awaited: int = 0) -> SamplingRow:
        """`awaited`: 1 while a step in flight chooses the token before."""
        request = self.request
        num_output_tokens = request.num_output_tokens + awaited
        return SamplingRow(self.params, self.seed, request.all_token_ids, num_output_tokens, self.edits)

    def output(self) -> RequestOutput:
        return RequestOutput(self.request, self.text, self.logprobs)

    def aborted_output(self) -> RequestOutput:
        """What an abort returns that is carried out later: the request as it is now."""
        text = None if self.text is None else self.text.anew()
        return RequestOutput(self.request, text, self.logprobs, RequestStatus.FINISHED_ABORTED.value)

    def end_text_before_last_token(self, num_before: int = 0) -> None:
        """The token that comes `num_before` tokens from now ends the request and is not part of its text."""
        if self.text is not None:
            self.text.limit = self.request.num_output_tokens + num_before
