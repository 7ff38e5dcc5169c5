"""Logits -> tokens. Greedy rows take one argmax for the whole batch; the others are processed together.

Order of the steps: repetition penalty (Keskar et al., 2019), temperature, top-k, top-p (Holtzman et al., 2020),
min-p (Nguyen et al., 2024), one draw. The draw is an argmax of p / e with e ~ Exp(1), seeded by
(request seed, token position) alone: it does not depend on the batch, on chunking, or on preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagebinder.config import SamplingParams

# Below this, the second best of two float32 logits that differ has no chance: it is greedy.
GREEDY_TEMPERATURE = 1e-6
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler needs of one request: its parameters, its seed, and the tokens it has."""

    params: SamplingParams
    seed: int
    all_token_ids: Sequence[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The chosen token and, if asked for, log-probabilities (of the unmodified logits) by token id."""

    token_id: int
    logprobs: dict[int, float] | None = None


def greedy(logits_LV: torch.Tensor) -> np.ndarray:
    """The most likely token of each row of logits [L, V] (any float dtype) as [L] int64; ties go to the lowest.

    Raises:
        FloatingPointError: a row holds NaN, which a model with broken weights produces.
    """
    tokens = _argmax(logits_LV.float())
    # NaN counts as the largest value, so it is enough to look at what was chosen.
    chosen = torch.from_numpy(tokens).to(logits_LV.device)
    _refuse_nan(logits_LV.gather(-1, chosen[:, None]))
    return tokens


def sample(logits_LV: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Choose one token for each row of logits [L, V] (any float dtype).

    Raises:
        FloatingPointError: a row holds NaN, which a model with broken weights produces.
    """
    if not rows:
        return []
    logits = logits_LV.float()
    _refuse_nan(logits)
    tokens = _choose(logits, rows)
    return [
        SampledToken(token, _logprobs(logits[i], token, row.params.logprobs))
        for i, (token, row) in enumerate(zip(tokens, rows))
    ]


def _argmax(values: torch.Tensor) -> np.ndarray:
    """Index of the first largest value of each row of float32 [L, V]. On a CPU numpy finds it 10 to 50 times
    faster than torch."""
    if values.device.type == "cpu":
        return values.numpy().argmax(axis=-1)
    return values.argmax(dim=-1).cpu().numpy()


def _refuse_nan(values: torch.Tensor) -> None:
    if bool(values.isnan().any()):
        raise FloatingPointError("the model returned NaN logits: check its weights and dtype")


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    penalised = _penalise(logits, rows)
    tokens = _argmax(penalised).tolist()
    drawn = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_TEMPERATURE]
    if drawn:
        probabilities = _filter(penalised[drawn], [rows[i].params for i in drawn])
        noise = torch.stack([_exponential(rows[i], logits.shape[-1]) for i in drawn]).to(logits.device)
        for i, token in zip(drawn, _argmax(probabilities / noise).tolist()):
            tokens[i] = token
    return tokens


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Divide positive and multiply negative logits of tokens that already occurred by the penalty."""
    if all(row.params.repetition_penalty == 1.0 for row in rows):
        return logits
    logits = logits.clone()
    for i, row in enumerate(rows):
        penalty = row.params.repetition_penalty
        if penalty != 1.0:
            seen = torch.tensor(sorted(set(row.all_token_ids)), device=logits.device)
            values = logits[i, seen]
            logits[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def _filter(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k, top-p and min-p: unnormalised probabilities [L, V], zero where dropped."""
    vocab = logits.shape[-1]

    def column(values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    # Subtracting the largest logit first keeps tiny temperatures finite.
    logits = (logits - logits.amax(-1, keepdim=True)) / column([p.temperature for p in params])
    if any(p.top_k or p.top_p < 1.0 for p in params):
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(vocab, device=logits.device)
        top_k = column([min(p.top_k or vocab, vocab) for p in params], torch.int64)
        ordered = ordered.masked_fill(ranks >= top_k, float("-inf"))
        mass = ordered.softmax(-1)
        top_p = column([p.top_p for p in params])
        # A token stays if the mass before it is below top_p, so the first one always stays.
        dropped = (mass.cumsum(-1) - mass >= top_p) & (top_p < 1.0)
        ordered = ordered.masked_fill(dropped, float("-inf"))
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    probabilities = logits.softmax(-1)
    floor = column([p.min_p for p in params]) * probabilities.amax(-1, keepdim=True)
    return probabilities.masked_fill(probabilities < floor, 0.0)


def _exponential(row: SamplingRow, vocab: int) -> torch.Tensor:
    """Exp(1) noise [V] from a stream that belongs to this request and this position."""
    generator = torch.Generator()
    generator.manual_seed((row.seed * _MIX + row.num_output_tokens * 0x632BE59BD9B4E019) & _MASK)
    return torch.empty(vocab).exponential_(generator=generator).clamp_min_(1e-20)


def _logprobs(logits: torch.Tensor, token: int, count: int | None) -> dict[int, float] | None:
    if count is None:
        return None
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(count, logprobs.numel()))
    found = dict(zip(ids.tolist(), values.tolist()))
    found.setdefault(token, float(logprobs[token]))
    return found
