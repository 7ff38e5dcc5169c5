"""Whom to guess for, how many tokens, and what came of it.

    known tokens  a b c        one step computes c ( | d e f )      guesses: d e f
    logits of         c d e f                                       chosen:  d e x  ->  a b c d e x

A step of few tokens waits for memory, not for arithmetic, so a few more tokens cost little: `budget` says up to how
many tokens of a step guesses are added. What a request's guide forces (the keys of a JSON object, say) is guessed
first; a drafter is asked where it forces nothing. A request whose guesses all stood is given twice as many in its
next step, one whose guesses failed one more than stood.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagebinder.config import EngineConfig
from pagebinder.config_checks import short_repr
from pagebinder.custom_ops.prompt_rows import FIRST_ROW_ID
from pagebinder.errors import ConfigError
from pagebinder.runtime.live_requests import LiveRequest
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler
from pagebinder.runtime.speculation.drafter import Drafter, DraftRequest, NoDrafter
from pagebinder.runtime.speculation.ngram import NgramDrafter

BY_NAME = {"ngram": NgramDrafter, "guide": NoDrafter}  # those of config.DRAFTERS
# Tokens of a step up to which guesses are added: see docs/measurements.md. That of a GPU has not been measured.
CPU_BUDGET, GPU_BUDGET = 8, 64
FIRST_GUESSES = 2


_numbers = itertools.count()  # of engines, so that those that share a drafter are told apart


@dataclass(slots=True)
class SpeculationStats:
    """`drafted`: tokens that were guessed and checked; `accepted`: those of them that stood."""

    drafted: int = 0
    accepted: int = 0


def make_drafter(choice: str | Drafter) -> Drafter:
    """`EngineConfig.drafter` as an object."""
    return BY_NAME[choice]() if isinstance(choice, str) else choice


class Speculator:
    """Asks a drafter for guesses before a step is scheduled.

    Raises:
        ConfigError: the drafter's vocabulary is another one.
    """

    def __init__(
        self, config: EngineConfig, scheduler: Scheduler, live: Mapping[str, LiveRequest], *, vocab_size: int,
        device_type: str,
    ) -> None:  # fmt: skip
        self.drafter = make_drafter(config.drafter)
        if getattr(self.drafter, "vocab_size", vocab_size) != vocab_size:
            raise ConfigError(
                f"the drafter's model has {self.drafter.vocab_size} tokens, this one {vocab_size}: they must mean "
                "the same."
            )
        budget = config.draft_budget or (GPU_BUDGET if device_type == "cuda" else CPU_BUDGET)
        self.budget = min(budget, config.max_num_batched_tokens)
        self.most, self.first_guesses = config.max_draft_tokens, FIRST_GUESSES
        self.stats = SpeculationStats()
        self._scheduler, self._live, self._vocab_size = scheduler, live, vocab_size
        self._lengths: dict[str, int] = {}
        self._number = next(_numbers)

    def drafts(self) -> dict[str, list[int]]:
        """Guesses for the next step by request id, best request first."""
        all_asks = self._asks()
        forced = {ask.request_id: self._forced(ask) for ask in all_asks}
        asks = [ask for ask in all_asks if not forced[ask.request_id] and ask.request_id in self._live]
        proposals = self.drafter.propose(asks) if asks else []
        if not hasattr(proposals, "__len__") or len(proposals) != len(asks):
            raise ValueError(
                f"the drafter was asked for {len(asks)} requests and answered {short_repr(proposals)}: a list of "
                "token ids for each is wanted"
            )
        guesses = forced | {
            ask.request_id: self._checked(ask, tokens) for ask, tokens in zip(asks, proposals)
        }
        return {request_id: tokens for request_id, tokens in guesses.items() if tokens}

    def _checked(self, ask: DraftRequest, answer: Sequence[int]) -> list[int]:
        """The guesses that are used: those before what stands for an embedding of the prompt, which none chooses.
        Raises ValueError where they are no token ids."""
        try:
            tokens = [operator.index(token) for token in itertools.islice(answer, ask.most)]
        except TypeError:
            tokens = [-1]
        tokens = list(itertools.takewhile(lambda token: token < FIRST_ROW_ID, tokens))
        if not all(0 <= token < self._vocab_size for token in tokens):
            raise ValueError(
                f"the drafter guessed {short_repr(answer)} for {ask.request_id!r}: token ids are wanted, whole "
                f"numbers from 0 to {self._vocab_size - 1}"
            )
        return self._admitted(ask.request_id, tokens)

    def _forced(self, ask: DraftRequest) -> list[int]:
        """What the request's guide says will follow: nobody needs to guess it."""
        live = self._live.get(ask.request_id)  # a guide's function may have aborted it
        if live is None or live.guide is None:
            return []
        return live.guide.forced(live.request.output_token_ids, ask.most)

    def _admitted(self, request_id: str, tokens: list[int]) -> list[int]:
        """Guesses up to the first one that the request's guide does not allow, which could not stand."""
        live = self._live.get(request_id)  # a drafter may have aborted it
        if live is None or live.guide is None:
            return tokens
        return tokens[: live.guide.num_allowed(live.request.output_token_ids, tokens)]

    def note(self, request_id: str, drafted: int, accepted: int) -> None:
        """What came of a request's guesses."""
        self.stats.drafted += drafted
        self.stats.accepted += accepted
        wanted = 2 * drafted if accepted == drafted else accepted + 1
        self._lengths[request_id] = min(wanted, self.most)

    def forget(self, request_id: str) -> None:
        """The request is over. Raises what the drafter raises."""
        self._lengths.pop(request_id, None)
        self.drafter.forget(self._key(request_id))

    def _key(self, request_id: str) -> str:
        return f"{self._number}/{request_id}"

    def _asks(self) -> list[DraftRequest]:
        """Requests that compute their newest token in the next step, and little else, as long as the step has room.

        Where a recurrent state was taken back the tokens of that step are computed again with the next guesses; when
        they have become many, without."""
        batch = self._scheduler.batch
        want, now = batch.wanted(), batch.now()
        room = self.budget - int(want.sum())
        rows = [
            row for row in self._scheduler.running_rows
            if 0 < want[row] <= self.most and self._takes_guesses(now.by_row[row])
        ]  # fmt: skip
        asks = []
        for number, row in enumerate(rows):
            share = -(-room // (len(rows) - number))
            request_id = now.by_row[row].request_id
            # The step itself gives one more token than it is given guesses.
            left = int(now.limit[row] - now.known[row]) - 1
            fitting = self.most + 1 - int(want[row])
            most = min(self._lengths.get(request_id, self.first_guesses), fitting, share, left)
            if most > 0:
                key, limit = self._key(request_id), int(now.limit[row])
                asks.append(DraftRequest(key, request_id, now.token_lists[row], most, limit))
                room -= most
        return asks

    def _takes_guesses(self, request: Request) -> bool:
        live = self._live.get(request.request_id)
        return (
            live is not None and not live.is_beam and live.samples is None and request.num_output_tokens > 0
        )
