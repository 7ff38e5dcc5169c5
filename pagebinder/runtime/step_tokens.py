"""Logits of a step -> the new token of every row that samples, who stops, and who forks.

rows that sample   plain  plain  n = 3  beam  plain        plain rows: one op chooses, one comparison with EOS
new tokens          17     4      9     -1     30          n = 3: two more draws from the same logits
                                  +- fork: 12, 51          beam: held (-1), its logits are kept
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pagebinder.runtime.live_requests import GREEDY, IGNORE_EOS, PLAIN, LiveRequest
from pagebinder.runtime.sampler import draw, draw_on_device, greedy, greedy_on_device, logprobs
from pagebinder.runtime.scheduler_output import SchedulerOutput
from pagebinder.runtime.step_results import HELD


@dataclass(slots=True)
class StepTokens:
    """tokens: [S] int64, -1 for requests that are held. stopped: why a token ended which request. forks: (parent id,
    new request), the new request's own first token is appended already. further: request id -> tokens behind its
    first new one, of guesses that stood and the one behind them."""

    tokens: np.ndarray
    stopped: dict[str, str] = field(default_factory=dict)
    forks: list[tuple[str, LiveRequest]] = field(default_factory=list)
    further: dict[str, list[int]] = field(default_factory=dict)


def choose_tokens(
    logits_LV: torch.Tensor, output: SchedulerOutput, live: Mapping[str, LiveRequest], eos: Collection[int],
    gone: np.ndarray | None = None,
) -> StepTokens:  # fmt: skip
    """Choose every sampling row's token. `gone`: [L] bool, requests that have ended since the step was launched, who
    get nothing; None: nobody. Raises FloatingPointError for NaN logits."""
    flags = output.flags[output.sampling]
    here = np.ones(len(flags), bool) if gone is None else ~gone
    plain = here & ((flags & PLAIN) != 0)

    def owners(mask: np.ndarray) -> dict[int, LiveRequest]:
        """By the number of their row."""
        rows = output.sampling[mask].tolist()
        return {i: live[output.requests[r].request_id] for i, r in zip(np.flatnonzero(mask).tolist(), rows)}

    if (here & ((flags & (PLAIN | GREEDY)) == PLAIN | GREEDY)).all():
        chosen = StepTokens(greedy(logits_LV))
    else:
        chosen = StepTokens(np.full(len(flags), HELD, np.int64))
        if plain.any():
            drawing = owners(plain)
            chosen.tokens[plain] = draw(
                logits_LV, list(drawing), [x.sampling_row() for x in drawing.values()]
            )
    _end_at(chosen, plain & ((flags & IGNORE_EOS) == 0), output, live, eos)
    others = here & ~plain
    if others.any():
        _choose_others(logits_LV, owners(others), eos, chosen)
    return chosen


def choose_ahead(
    logits_LV: torch.Tensor, output: SchedulerOutput, live: Mapping[str, LiveRequest]
) -> torch.Tensor:
    """Tokens [L] int64 of a step whose sampling rows are all AHEAD, on the logits' device; for `take_tokens`."""
    if ((output.flags[output.sampling] & GREEDY) != 0).all():
        return greedy_on_device(logits_LV)
    awaited = np.isin(output.sampling, output.awaited).tolist()
    owners = [live[request_id] for request_id in output.sampling_ids]
    rows = [owner.sampling_row(int(waits)) for owner, waits in zip(owners, awaited)]
    return draw_on_device(logits_LV, range(len(rows)), rows)


def take_tokens(
    tokens: np.ndarray, gone: np.ndarray | None, output: SchedulerOutput, live: Mapping[str, LiveRequest],
    eos: Collection[int],
) -> StepTokens:  # fmt: skip
    """What `choose_ahead` chose, once it is here. `gone`: as for `choose_tokens`."""
    mask = (output.flags[output.sampling] & IGNORE_EOS) == 0
    if gone is not None:
        tokens, mask = np.where(gone, HELD, tokens), mask & ~gone
    chosen = StepTokens(tokens)
    _end_at(chosen, mask, output, live, eos)
    return chosen


def _end_at(
    chosen: StepTokens, mask: np.ndarray, output: SchedulerOutput, live: Mapping[str, LiveRequest],
    eos: Collection[int],
) -> None:  # fmt: skip
    """Mark the rows of `mask` whose token is an end of sequence."""
    if not mask.any():
        return
    ended = mask & np.logical_or.reduce([chosen.tokens == token for token in eos], initial=False)
    for row in output.sampling[ended].tolist():
        owner = live[output.requests[row].request_id]
        owner.end_text_before_last_token()
        chosen.stopped[owner.request.request_id] = "stop"


def _choose_others(
    logits: torch.Tensor, owners: Mapping[int, LiveRequest], eos: Collection[int], chosen: StepTokens
) -> None:
    picks: list[tuple[int, LiveRequest, LiveRequest]] = []
    for i, owner in owners.items():
        if owner.is_beam:
            # A copy: the next replay of a graph writes over them.
            owner.held_logits = logits[i].to(torch.float32, copy=True)
        else:
            picks += [(i, owner, one) for one in owner.samples or (owner,)]
    if not picks:
        return
    tokens = draw(logits, [i for i, *_ in picks], [one.sampling_row() for *_, one in picks]).tolist()
    for (*_, one), token in zip(picks, tokens):
        ask_guide(one, token, eos)
    for (i, owner, one), token in zip(picks, tokens):
        if one.logprobs is not None:
            one.logprobs.append(logprobs(logits[i], token, one.params.logprobs))
        if (reason := end_of(one, token, eos)) is not None:
            chosen.stopped[one.request.request_id] = reason
        if one is owner:
            chosen.tokens[i] = token
        else:
            one.request.append_output(token)
            chosen.forks.append((owner.request.request_id, one))
        owner.samples = None


def end_of(live: LiveRequest, token: int, eos: Collection[int], before: Sequence[int] = ()) -> str | None:
    """Why a new token ends the request, if it does. (Length limits are the scheduler's business.) `before`: new
    tokens that come before it and that the request does not have yet."""
    guide = live.guide
    if guide is not None and guide.error:
        return "error"
    if _is_end(live, token, eos):
        live.end_text_before_last_token(len(before))
        return "stop"
    # Only stop strings need the text at once.
    if live.params.stop and live.text.append(token):
        return "stop"
    if guide is not None and guide.ends_after([*live.request.output_token_ids, *before, token]):
        return "error" if guide.error else "stop"
    return None


def ask_guide(live: LiveRequest, token: int, eos: Collection[int], before: Sequence[int] = ()) -> bool:
    """What `end_of` will ask, while nothing is written down: a user's function may raise. Is it the last one?"""
    if live.guide is None:
        return False
    return _is_end(live, token, eos) or live.guide.ends_after(
        [*live.request.output_token_ids, *before, token]
    )


def _is_end(live: LiveRequest, token: int, eos: Collection[int]) -> bool:
    return token in live.params.stop_token_ids or (token in eos and not live.params.ignore_eos)
