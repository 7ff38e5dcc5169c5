"""`pagebinder::argmax_tokens`, `pagebinder::sample_tokens`: rows of logits -> tokens.

L rows of logits, V vocabulary, R draws (of a row each; several draws may share one).

    x = logits, penalised        repetition penalty (Keskar et al., 2019)
    y = (x - max x) * scale      log2 of the probability, 0 for the likeliest token; scale = log2(e) / temperature
    ranks: y falling, then the token's number; what is kept are the first ranks:
        top-k                    k of them
        top-p                    as long as the mass before a token is below p (Holtzman et al., 2020)
        min-p                    as long as y >= log2(min_p) (Nguyen et al., 2024)
    token = argmax of y - log2(e) over the kept, e ~ Exp(1) by `noise.py`: the draw is that of argmax p / e

Mass is counted in whole units of 2^-30 of the likeliest token's, so that a sum is the same in any order. All else is
float32 with one rounding an operation: whoever computes it, a stream's token is the same.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.sampling.noise import log2_noise, polynomial

OPTIONS = ("scale", "top_k", "top_p", "min_y", "penalty")  # columns of `options`
MASS_BITS = 30
# 2^f for f in [-1/2, 1/2], relative error 1e-7, highest power first.
_EXP2_POLYNOMIAL = (
    *(1.53533572e-4, 1.33988762e-3, 9.61843739e-3, 5.55033247e-2),
    *(2.40226479e-1, 6.93147203e-1, 1.0),
)


def argmax_tokens_reference(logits_LV):
    """The first of the largest logits of each row.

    Args:
        logits_LV: [L, V], any float dtype.
    Returns:
        [L] int64; -1 for a row with a NaN.
    """
    logits = logits_LV.float()
    tokens = _argmax(logits)
    # NaN counts as the largest value, so it is enough to look at what was chosen.
    return tokens.masked_fill(logits.gather(-1, tokens[:, None])[:, 0].isnan(), -1)


def sample_tokens_reference(logits_LV, rows_R, streams_R2, options, seen, seen_starts):
    """One draw for each entry of `rows`.

    Args:
        logits_LV: [L, V], any float dtype. rows_R: [R] int64, the row of logits that a draw is from.
        streams_R2: [R, 2] int64, seed and position.
        options: [R, 5] float64, columns OPTIONS. scale > 0; top_k >= 1, beyond V for all; 0 < top_p <= 1;
            min_y = log2(min_p), -inf for all; penalty > 0.
        seen, seen_starts: [S], [R + 1] int64; the penalty of draw r is for the tokens
            seen[seen_starts[r] : seen_starts[r + 1]], each once, however often it is there.
    Returns:
        [R] int64; -1 for a row with a NaN.
    Raises:
        ValueError: operands that do not fit each other, or a row or token out of range.
    """
    _check(logits_LV, rows_R, streams_R2, options, seen, seen_starts)
    x = logits_LV[rows_R].float()
    if not x.numel():
        return torch.empty_like(rows_R)
    scale, top_k, top_p, min_y, penalty = options[:, :, None].unbind(1)
    _penalise(x, penalty.float(), seen, seen_starts)
    # Infinite logits: the largest ones stay at 0; where all are -inf, nothing is kept, and the answer is 0.
    largest = x.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    y = torch.where(x == largest, 0.0, (x - largest) * scale.float())
    dropped = ~_first_ranks(y, top_k, top_p) | (y < min_y.float())
    tokens = _argmax(y.masked_fill(dropped, float("-inf")) - log2_noise(streams_R2, y.shape[-1]))
    return tokens.masked_fill(x.isnan().any(-1), -1)


def _argmax(values):
    """On a CPU numpy finds the first largest value of float32 rows 10 to 50 times faster than torch."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


def _penalise(x, penalty, seen, seen_starts):
    """Divide positive and multiply negative logits of tokens that occurred already, in place."""
    starts = seen_starts.tolist()
    for row, one, start, stop in zip(x, penalty, starts, starts[1:]):
        tokens = seen[start:stop]
        values = row[tokens]
        row[tokens] = torch.where(values > 0, values / one, values * one)


def _first_ranks(y, top_k, top_p):
    """Which tokens top-k and top-p keep: [R, V] bool."""
    vocab = y.shape[-1]
    if bool(((top_k >= vocab) & (top_p >= 1)).all()):
        return torch.ones_like(y, dtype=torch.bool)
    ordered, order = y.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(vocab, device=y.device) < top_k
    mass = _mass(ordered) * kept
    total = mass.sum(-1, keepdim=True)
    kept &= (mass.cumsum(-1) - mass < top_p * total) | (top_p >= 1)
    return torch.empty_like(kept).scatter_(-1, order, kept)


def _mass(y):
    """2^y in whole units of 2^-MASS_BITS, rounded down, int64."""
    y = y.clamp(min=-MASS_BITS - 1.0)
    whole = y.round()
    power = ((whole.to(torch.int32) + (127 + MASS_BITS)) << 23).view(torch.float32)
    return (polynomial(y - whole, _EXP2_POLYNOMIAL) * power).long()


def _check(logits, rows, streams, options, seen, seen_starts):
    draws = len(rows)
    fits = logits.dim() == 2 and logits.is_floating_point() and rows.shape == (draws,)
    _require(fits, "logits are [L, V] of a float dtype, rows [R]")
    _require(streams.shape == (draws, 2), f"streams must be [{draws}, 2]")
    _require(options.shape == (draws, len(OPTIONS)), f"options must be [{draws}, {len(OPTIONS)}]")
    _require(options.dtype == torch.float64, "options must be float64")
    _require(seen.dim() == 1 and seen_starts.shape == (draws + 1,), f"seen is [S], seen_starts [{draws + 1}]")
    whole = all(t.dtype == torch.int64 for t in (rows, streams, seen, seen_starts))
    _require(whole, "rows, streams, seen and seen_starts must be int64")
    _require(_within(rows, len(logits)), "a row in `rows` is not in logits")
    _require(_within(seen, logits.shape[1]), "a token in `seen` is not in the vocabulary")
    rising = _within(seen_starts, len(seen) + 1) and bool((seen_starts.diff() >= 0).all())
    _require(rising, "seen_starts must rise from 0 to at most the length of seen")


def _within(numbers, stop):
    return bool(((numbers >= 0) & (numbers < stop)).all())


def _require(condition, message):
    if not condition:
        raise ValueError(message)


ARGMAX_TOKENS = define_op(
    "argmax_tokens",
    "(Tensor logits) -> Tensor",
    reference=argmax_tokens_reference,
    fake=lambda logits: logits.new_empty(logits.shape[:1], dtype=torch.int64),
)

SAMPLE_TOKENS = define_op(
    "sample_tokens",
    "(Tensor logits, Tensor rows, Tensor streams, Tensor options, Tensor seen, Tensor seen_starts) -> Tensor",
    reference=sample_tokens_reference,
    fake=lambda logits, rows, *_: torch.empty_like(rows),
)
