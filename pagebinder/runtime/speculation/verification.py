"""Logits of a step with guessed tokens -> those that stand, and the token behind them.

    guessed          d   e   f
    logits of    c   d   e   f       row j + 1 holds if token j is the one that row j chooses
    chosen       d   e   x   -       d, e stand; x is what the model says after e

Each row is drawn as a step without guesses would have drawn it: same logits, same place in the request's random
stream, same tokens before. So what comes out is what would have come out one by one, at any temperature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from pagebinder.runtime.live_requests import GREEDY, LiveRequest
from pagebinder.runtime.sampler import SamplingRow, draw, greedy, logprobs
from pagebinder.runtime.scheduler_output import SchedulerOutput
from pagebinder.runtime.step_tokens import StepTokens, ask_guide, choose_tokens, end_of


class _Guessed(NamedTuple):
    """A request with guesses. place: among the rows that sample. first_row: has the logits behind its first guess."""

    place: int
    live: LiveRequest
    first_row: int
    tokens: list[int]


def choose_verified(
    logits_LV: torch.Tensor, output: SchedulerOutput, live: Mapping[str, LiveRequest], eos: Collection[int]
) -> StepTokens:
    """`choose_tokens` for a step with guesses: `StepTokens.further` has what comes behind the first new token."""
    first_rows = output.first_logits
    guessed = [
        _Guessed(i, live[output.requests[row].request_id], int(first_rows[i]) + 1, output.drafts[row])
        for i, row in enumerate(output.sampling.tolist())
        if row in output.drafts
    ]
    # All that may raise comes before anything is written down, so that the step can be repeated.
    try:
        drawn = _draw(logits_LV, guessed)
        for one, tokens in zip(guessed, drawn):
            _ask_guide(one, tokens, eos)
    except FloatingPointError:  # behind a token that may be wrong: if it is right, the next step says so
        guessed, drawn = [], []
    chosen = choose_tokens(logits_LV[torch.from_numpy(first_rows).to(logits_LV.device)], output, live, eos)
    for one, tokens in zip(guessed, drawn):
        request_id = one.live.request.request_id
        if one.tokens[0] != chosen.tokens[one.place] or request_id in chosen.stopped:
            continue
        chosen.further[request_id], reason = _stand(one, tokens, logits_LV, eos)
        if reason is not None:
            chosen.stopped[request_id] = reason
    return chosen


def _draw(logits_LV: torch.Tensor, guessed: list[_Guessed]) -> list[list[int]]:
    """What the rows behind every guess choose, if all guesses before stand."""
    rows = [one.first_row + j for one in guessed for j in range(len(one.tokens))]
    if not rows:
        return []
    if all(one.live.request.flags & GREEDY for one in guessed):
        drawn = greedy(logits_LV[torch.tensor(rows, device=logits_LV.device)])
    else:
        drawn = draw(logits_LV, rows, [
            _sampling_row(one, j + 1) for one in guessed for j in range(len(one.tokens))
        ])  # fmt: skip
    ends = np.cumsum([len(one.tokens) for one in guessed])
    return [part.tolist() for part in np.split(drawn, ends[:-1])]


def _sampling_row(one: _Guessed, ahead: int) -> SamplingRow:
    """As the request would be drawn for, had it `ahead` of the guessed tokens already."""
    row = one.live.sampling_row(ahead)
    if not row.needs_tokens:
        return row
    return dataclasses.replace(row, all_token_ids=[*row.all_token_ids, *one.tokens[:ahead]])


def _ask_guide(one: _Guessed, drawn: list[int], eos: Collection[int]) -> None:
    """The first guess may end the text, too: what is drawn behind it says nothing then."""
    is_over = ask_guide(one.live, one.tokens[0], eos)
    for j, token in enumerate(drawn):
        if is_over:
            break
        is_over = ask_guide(one.live, token, eos, before=one.tokens[: j + 1])
        is_over |= one.tokens[j + 1 : j + 2] != [token]


def _stand(
    one: _Guessed, drawn: list[int], logits_LV: torch.Tensor, eos: Collection[int]
) -> tuple[list[int], str | None]:
    """The tokens behind the first one, up to one that was not guessed; why the last one ends the request, if so."""
    live, further = one.live, []
    for j, token in enumerate(drawn):
        further.append(token)
        if live.logprobs is not None:
            live.logprobs.append(logprobs(logits_LV[one.first_row + j], token, live.params.logprobs))
        reason = end_of(live, token, eos, before=one.tokens[: j + 1])
        if reason is not None:
            return further, reason
        if one.tokens[j + 1 : j + 2] != [token]:
            break
    return further, None
