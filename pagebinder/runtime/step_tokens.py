"""Logits of a step -> the new token of every row that samples, who stops, and who forks.

rows that sample   plain  plain  n = 3  beam  plain        plain rows: one argmax, one comparison with EOS
new tokens          17     4      9     -1     30          n = 3: two more draws from the same logits
                                  +- fork: 12, 51          beam: held (-1), its logits are kept
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from pagebinder.runtime.live_requests import IGNORE_EOS, PLAIN, LiveRequest
from pagebinder.runtime.sampler import SampledToken, SamplingRow, greedy, sample
from pagebinder.runtime.scheduler_output import SchedulerOutput
from pagebinder.runtime.step_results import HELD


@dataclass(slots=True)
class StepTokens:
    """tokens: [L] int64, -1 for requests that are held. stopped: ids that a token ended. forks: (parent id, new
    request), the new request's own first token is appended already."""

    tokens: np.ndarray
    stopped: dict[str, str] = field(default_factory=dict)
    forks: list[tuple[str, LiveRequest]] = field(default_factory=list)


def choose_tokens(
    logits_LV: torch.Tensor, output: SchedulerOutput, live: Mapping[str, LiveRequest], eos: Collection[int]
) -> StepTokens:
    """Choose every sampling row's token. Raises FloatingPointError for NaN logits."""
    flags = output.flags[output.sampling]
    plain = (flags & PLAIN) != 0
    all_plain = bool(plain.all())
    if all_plain:
        chosen = StepTokens(greedy(logits_LV))
    else:
        chosen = StepTokens(np.full(len(flags), HELD, np.int64))
        if plain.any():
            chosen.tokens[plain] = greedy(logits_LV[torch.from_numpy(plain).to(logits_LV.device)])
    ended = plain & ((flags & IGNORE_EOS) == 0)
    if ended.any():
        ended &= np.logical_or.reduce([chosen.tokens == token for token in eos], initial=False)
    for i in np.flatnonzero(ended).tolist():
        request_id = output.requests[output.sampling[i]].request_id
        live[request_id].end_text_before_last_token()
        chosen.stopped[request_id] = "stop"
    if not all_plain:
        others = np.flatnonzero(~plain).tolist()
        owners = [live[output.requests[output.sampling[i]].request_id] for i in others]
        _choose_others(logits_LV, others, owners, eos, chosen)
    return chosen


def _choose_others(
    logits: torch.Tensor, indices: list[int], owners: list[LiveRequest], eos: Collection[int], chosen: StepTokens
) -> None:  # fmt: skip
    picks: list[tuple[int, LiveRequest, LiveRequest]] = []
    for i, owner in zip(indices, owners):
        if owner.is_beam:
            owner.held_logits = logits[i].float()
        else:
            picks += [(i, owner, one) for one in owner.samples or (owner,)]
    rows = [
        SamplingRow(x.params, x.seed, x.request.all_token_ids, x.request.num_output_tokens) for *_, x in picks
    ]
    for (i, owner, one), token in zip(picks, sample(logits[[i for i, *_ in picks]], rows)):
        if _take(one, token, eos):
            chosen.stopped[one.request.request_id] = "stop"
        if one is owner:
            chosen.tokens[i] = token.token_id
        else:
            one.request.append_output(token.token_id)
            chosen.forks.append((owner.request.request_id, one))
    for owner in owners:
        owner.samples = None


def _take(live: LiveRequest, token: SampledToken, eos: Collection[int]) -> bool:
    """Note a new token; True if it ends the request (length limits are the scheduler's business)."""
    params = live.params
    if live.logprobs is not None:
        live.logprobs.append(token.logprobs)
    if token.token_id in params.stop_token_ids or (token.token_id in eos and not params.ignore_eos):
        live.end_text_before_last_token()
        return True
    # Only stop strings need the text at once.
    return bool(params.stop) and live.text.append(token.token_id)
