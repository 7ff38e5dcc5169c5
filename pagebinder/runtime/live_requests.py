"""What only the engine knows of a request, and what decides how its tokens are chosen.

Most requests are *plain*: their token is the largest logit and only an end-of-sequence token may stop them. Steps
treat them as arrays; `Request.flags` carries the bits into the running batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebinder.config import SamplingParams
from pagebinder.runtime.output_text import OutputText
from pagebinder.runtime.outputs import RequestOutput
from pagebinder.runtime.request import Request
from pagebinder.runtime.sampler import GREEDY_TEMPERATURE

PLAIN = 1  # argmax, no stop rules of its own, no log-probabilities, nothing that waits for its first token
IGNORE_EOS = 2
QUIET = 4  # nobody reads outputs before the last one


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

    def mark(self, *, quiet: bool = False) -> None:
        """Set the request's flags; before it enters the scheduler."""
        flags = IGNORE_EOS if self.params.ignore_eos else 0
        if quiet:
            flags |= QUIET
        self.request.flags = flags | (PLAIN if self._is_plain else 0)

    @property
    def _is_plain(self) -> bool:
        p = self.params
        greedy = p.temperature < GREEDY_TEMPERATURE and p.repetition_penalty == 1.0 and p.logprobs is None
        return greedy and not (p.stop or p.stop_token_ids or self.samples or self.is_beam)

    def output(self) -> RequestOutput:
        return RequestOutput(self.request, self.text, self.logprobs)

    def end_text_before_last_token(self) -> None:
        """The token that comes next ends the request and is not part of its text."""
        if self.text is not None:
            self.text.limit = self.request.num_output_tokens
