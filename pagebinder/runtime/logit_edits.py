"""What some requests change in their logits before the sampling ops see them: guides, biases, penalties by count.

    logits [L, V] of a step, bf16    plain   plain   edited   plain
                                       |       |        | copied to float32, changed there
                                       sample_tokens    sample_tokens

Few requests have any, so it is plain torch on copies of their rows; the others' logits stay as they are. Changes are
whole float32 operations, one rounding each: the tokens are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from pagebinder.runtime.device_copies import to_device
from pagebinder.runtime.guides import Guide
from pagebinder.sampling_params import SamplingParams

_DROPPED = float("-inf")
_INFINITY_BITS = 0x7F800000  # of float32; the highest bit is the sign


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """Of one request. `ends`: tokens that do not come before `params.min_tokens` others; `never`: those that do not
    come at all; [n] int64 each."""

    params: SamplingParams
    ends: np.ndarray
    never: np.ndarray
    guide: Guide | None = None

    @classmethod
    def of(cls, params: SamplingParams, eos: Collection[int], guide: Guide | None) -> LogitEdits | None:
        """None: the request takes its logits as they are (a repetition penalty is the op's business)."""
        p = params
        biases = p.frequency_penalty or p.presence_penalty or p.logit_bias or p.suppress_tokens
        if guide is None and not (biases or p.min_tokens):
            return None
        ends = {*p.stop_token_ids, *(() if p.ignore_eos else eos)} if p.min_tokens else ()
        never = np.unique(np.array(p.suppress_tokens, np.int64))
        return cls(params, np.array(sorted(ends), np.int64), never, guide)

    def apply(self, x_V: torch.Tensor, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Change the logits [V] float32 of the token behind `token_ids` (prompt and output) in place."""
        output = token_ids[num_prompt_tokens:]
        self._drop(x_V, output)
        if bias := self.params.logit_bias:
            _add(x_V, np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float64))
        if self.params.repetition_penalty != 1.0:
            seen = np.unique(np.asarray(token_ids, np.int64))
            tokens = to_device(seen[seen < len(x_V)], x_V.device)
            values, penalty = x_V[tokens], self.params.repetition_penalty
            penalty = torch.tensor(penalty, dtype=torch.float32, device=x_V.device)
            x_V[tokens] = torch.where(values > 0, values / penalty, values * penalty)
        if output and (self.params.frequency_penalty or self.params.presence_penalty):
            tokens, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
            _add(x_V, tokens, -(counts * self.params.frequency_penalty + self.params.presence_penalty))

    def _drop(self, x_V: torch.Tensor, output: list[int]) -> None:
        """What the guide does not allow, tokens that never come, and ends that would come too early; not all that the
        guide allows."""
        allowed = None if self.guide is None else self.guide.allowed(output)
        early = self.ends if len(output) < self.params.min_tokens else self.ends[:0]
        if allowed is None:
            x_V[to_device(np.concatenate((self.never, early)), x_V.device)] = _DROPPED
            return
        dropped = np.ones(len(x_V), bool)
        np.logical_not(allowed[: len(x_V)], out=dropped[: len(allowed)])
        for others in (self.never, early):
            if len(others):
                more = dropped.copy()
                more[others] = True
                dropped = dropped if more.all() else more
        # As upper limits, -inf or inf: a tenth of the time that filling by a mask takes.
        limits = dropped.astype(np.uint32)
        limits <<= 31
        limits |= _INFINITY_BITS
        torch.minimum(x_V, to_device(limits.view(np.float32), x_V.device), out=x_V)


def _add(x_V: torch.Tensor, tokens: np.ndarray, amounts: np.ndarray) -> None:
    x_V[to_device(tokens, x_V.device)] += to_device(amounts.astype(np.float32), x_V.device)
