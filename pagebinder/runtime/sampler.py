"""Logits -> tokens, by the ops of `custom_ops/sampling`: kernels where they can be built, else references.

Order of the steps: edits of single requests (`logit_edits.py`), repetition penalty (Keskar et al., 2019),
temperature, top-k, top-p (Holtzman et al., 2020), min-p (Nguyen et al., 2024), one draw. The draw is an argmax of
p / e with e ~ Exp(1), from a stream that (request seed, token position) alone name: it does not depend on the batch,
on chunking, or on preemption, nor on who computes it.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.config import SamplingParams
from pagebinder.custom_ops.providers import OpNeed, select_provider
from pagebinder.runtime.device_copies import to_device
from pagebinder.runtime.logit_edits import LogitEdits

logger = logging.getLogger("pagebinder")

# Below this, the second best of two float32 logits that differ has no chance: it is greedy.
GREEDY_TEMPERATURE = 1e-6
_SEEDS = 1 << 64
_EVERY_TOKEN = 1 << 40  # more than a vocabulary has
_NO_TOKENS = np.empty(0, np.int64)
_MIN_SCALE = 1e-30  # of float32, which -inf can be multiplied with


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler needs of one request: its parameters, its seed, and the tokens it has (`num_output_tokens`
    may count one that is still being chosen; a repetition penalty and edits have to know them all)."""

    params: SamplingParams
    seed: int
    all_token_ids: Sequence[int]
    num_output_tokens: int
    edits: LogitEdits | None = None

    @property
    def needs_tokens(self) -> bool:
        return self.edits is not None or self.params.repetition_penalty != 1.0


def prepare(device: torch.device) -> list[str]:
    """Load the kernels, so that no step waits for them, and return the ops' names ("pagebinder_cpu::sample_tokens").

    It may take seconds where they must be built first. On a CPU those that draw tokens are built and loaded in the
    background, so that greedy requests begin without them; the first step that draws waits for the rest.
    """
    drawing = OpNeed(op="sample_tokens", device=device.type)
    if device.type == "cpu":
        threading.Thread(target=_overload, args=(drawing.op, device.type), daemon=True).start()
    else:
        _overload(drawing.op, device.type)
    greedy_op = _overload("argmax_tokens", device.type)
    return [greedy_op.name(), select_provider(drawing, prepare=False).overload.name()]


def greedy(logits_LV: torch.Tensor) -> np.ndarray:
    """The most likely token of each row of logits [L, V] (any float dtype) as [L] int64; ties go to the lowest.

    Raises:
        FloatingPointError: a row holds NaN, which a model with broken weights produces.
    """
    return checked_tokens(greedy_on_device(logits_LV))


def greedy_on_device(logits_LV: torch.Tensor) -> torch.Tensor:
    """`greedy` as [L] int64 on the logits' device, which nobody waits for; negative: a row of NaN."""
    return _overload("argmax_tokens", logits_LV.device.type)(_served(logits_LV))


def draw(logits_LV: torch.Tensor, indices: Sequence[int], rows: Sequence[SamplingRow]) -> np.ndarray:
    """Choose a token for each of R rows, from the row of logits [L, V] (any float dtype) that its index names: [R].

    Raises:
        FloatingPointError: a row holds NaN, which a model with broken weights produces.
    """
    return checked_tokens(draw_on_device(logits_LV, indices, rows))


def draw_on_device(
    logits_LV: torch.Tensor, indices: Sequence[int], rows: Sequence[SamplingRow]
) -> torch.Tensor:
    """`draw` as [R] int64 on the logits' device, which nobody waits for; negative: a row of NaN."""
    edited = [i for i, row in enumerate(rows) if row.edits is not None]
    if not edited:
        return _sample(logits_LV, indices, rows)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits_LV.device)
    own = [rows[i] for i in edited]
    tokens[edited] = _sample(
        _edited_logits(logits_LV, [indices[i] for i in edited], own), range(len(own)), own
    )
    rest = [i for i, row in enumerate(rows) if row.edits is None]
    if rest:
        tokens[rest] = _sample(logits_LV, [indices[i] for i in rest], [rows[i] for i in rest])
    return tokens


def _edited_logits(
    logits_LV: torch.Tensor, indices: Sequence[int], rows: Sequence[SamplingRow]
) -> torch.Tensor:
    """A row of float32 logits for each request, as its edits leave them."""
    x_RV = logits_LV[torch.as_tensor(indices, device=logits_LV.device)].float()
    for x_V, row in zip(x_RV, rows):
        tokens = row.all_token_ids
        row.edits.apply(x_V, tokens, len(tokens) - row.num_output_tokens)
    return x_RV


def _sample(logits_LV: torch.Tensor, indices: Sequence[int], rows: Sequence[SamplingRow]) -> torch.Tensor:
    penalised = [_penalised(row, logits_LV.shape[1]) for row in rows]
    operands = (
        np.asarray(indices, np.int64),
        np.array([(r.seed % _SEEDS, r.num_output_tokens) for r in rows], np.uint64).view(np.int64),
        np.array([_options(r.params) for r in rows], np.float64),
        np.concatenate([_NO_TOKENS, *penalised]),
        np.cumsum([0, *map(len, penalised)]),
    )
    device = logits_LV.device
    tensors = (to_device(operand, device) for operand in operands)
    return _overload("sample_tokens", device.type)(_served(logits_LV), *tensors)


def _penalised(row: SamplingRow, vocab_size: int) -> np.ndarray:
    """The tokens that a request has, but for those of a prompt that have no logit (of images, where they are not
    written), [S] int64; none without a penalty, or where it is one of the edits."""
    if row.params.repetition_penalty == 1.0 or row.edits is not None:
        return _NO_TOKENS
    tokens = np.asarray(row.all_token_ids, np.int64)
    return tokens[tokens < vocab_size]


@functools.cache
def _overload(op: str, device: str) -> torch._ops.OpOverload:
    selection = select_provider(OpNeed(op=op, device=device))
    logger.info("%s: %s", op, selection.why)
    return selection.overload


def _served(logits: torch.Tensor) -> torch.Tensor:
    """In a dtype that kernels have."""
    return logits.float() if logits.dtype is torch.float64 else logits


def checked_tokens(chosen: torch.Tensor) -> np.ndarray:
    """Chosen tokens on the host. Raises FloatingPointError where a row of logits was NaN."""
    tokens = chosen.cpu().numpy()
    if (tokens < 0).any():
        raise FloatingPointError("the model returned NaN logits: check its weights and dtype")
    return tokens


def _options(params: SamplingParams) -> tuple[float, ...]:
    """A row of the op's options: scale, top_k, top_p, min_y, penalty. Greedy is the best one of the ranks."""
    if params.temperature < GREEDY_TEMPERATURE:
        return 1.0, 1, 1.0, -math.inf, params.repetition_penalty
    return (
        max(math.log2(math.e) / params.temperature, _MIN_SCALE),
        min(params.top_k, _EVERY_TOKEN) or _EVERY_TOKEN,
        params.top_p,
        math.log2(params.min_p) if params.min_p else -math.inf,
        params.repetition_penalty,
    )


def logprobs(logits_V: torch.Tensor, token: int, count: int | None) -> dict[int, float] | None:
    """Of the `count` likeliest tokens and the chosen one, by id; None if nobody asks."""
    if count is None:
        return None
    all_logprobs = logits_V.float().log_softmax(-1)
    values, ids = all_logprobs.topk(min(count, all_logprobs.numel()))
    found = dict(zip(ids.tolist(), values.tolist()))
    found.setdefault(token, float(all_logprobs[token]))
    return found
