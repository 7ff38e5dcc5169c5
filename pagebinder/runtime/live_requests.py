"""What only the engine knows of a request, and what decides how its tokens are chosen.

Most requests are *plain*: only an end-of-sequence token may stop them, and nothing but their token is asked
for. Steps treat them as arrays; `Request.flags` carries the bits into the running batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebinder.config import SamplingParams
from pagebinder.runtime.output_text import OutputText
from pagebinder.runtime.outputs import RequestOutput
from pagebinder.runtime.request import Request
from pagebinder.runtime.sampler import GREEDY_TEMPERATURE, SamplingRow

PLAIN = 1  # no stop rules of its own, no log-probabilities, nothing that waits for its first token
IGNORE_EOS = 2
QUIET = 4  # nobody reads outputs before the last one
GREEDY = 8  # its token is the largest logit, as the logits are
AHEAD = 16  # plain, and its next step can be prepared before its token is known: all it takes of it is the id


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request the engine works on.

    `samples`: the requests of one prompt (n > 1), the first one computes it; None once each goes its own way.
    `held_logits`: for a beam, which takes its next token from outside: [V] logits of the token to come.
    """

    request: Request
    params: SamplingParams
    seed: int
    text: OutputText | None = None
    logprobs: list[dict[int, float]] | None = None
    samples: list[LiveRequest] | None = None
    is_beam: bool = False
    held_logits: torch.Tensor | None = None

    @classmethod
    def held(cls, request: Request, params: SamplingParams) -> LiveRequest:
        """One that nobody reads and that is given each of its tokens by who drives it (`Scheduler.append_token`)."""
        request.flags = QUIET
        return cls(request, params, 0, is_beam=True)

    def mark(self, *, quiet: bool = False) -> None:
        """Set the request's flags; before it enters the scheduler."""
        flags = IGNORE_EOS if self.params.ignore_eos else 0
        if quiet:
            flags |= QUIET
        p = self.params
        if p.temperature < GREEDY_TEMPERATURE and p.repetition_penalty == 1.0:
            flags |= GREEDY
        if not (p.stop or p.stop_token_ids or self.samples or self.is_beam) and p.logprobs is None:
            flags |= PLAIN if p.repetition_penalty != 1.0 else PLAIN | AHEAD
        self.request.flags = flags

    def sampling_row(self, awaited: int = 0) -> SamplingRow:
        """`awaited`: 1 while a step in flight chooses the token before."""
        request = self.request
        return SamplingRow(self.params, self.seed, request.all_token_ids, request.num_output_tokens + awaited)

    def output(self) -> RequestOutput:
        return RequestOutput(self.request, self.text, self.logprobs)

    def end_text_before_last_token(self, num_before: int = 0) -> None:
        """The token that comes `num_before` tokens from now ends the request and is not part of its text."""
        if self.text is not None:
            self.text.limit = self.request.num_output_tokens + num_before
