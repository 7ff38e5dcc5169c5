"""The noise of sampling: Exp(1) variables that a seed, a position and a token's number name.

    words   philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
            key (seed's low half, its high half), counter (c, position, 0, 0)
    token   v takes word (v % 64) // 16 of counter c = v // 64 * 16 + v % 16: vectors hold neighbours
    value   e = -log2(1 - t), t = (word // 2 + 1/2) / 2^31: Exp(1) in bits; its logarithm is what is used

Everything is float32, one rounding an operation, so that any processor that follows IEEE 754 makes the same
bits. Small e count (the largest p / e wins), and they are as fine as t: down to 2^-32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_TOKENS_AT_ONCE, _LANES = 64, 16
_SQRT_HALF_BITS = 0x3F3504F3
# log2(1 + r) / r for r in [sqrt(1/2) - 1, sqrt(2) - 1], relative error 3e-7, highest power first.
_LOG2_POLYNOMIAL = (
    *(-0.145811647, 0.234042346, -0.24887687, 0.287098706),
    *(-0.360239625, 0.480923235, -0.721352816, 1.4426949),
)


def philox4x32(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Ten rounds: four counters, two keys -> four words, of 32 bits in int64, of shapes that broadcast."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 64 bits; int64 wraps around, which keeps them
        c0, c2 = ((b >> 32) & _LOW) ^ c1 ^ k0, ((a >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = b & _LOW, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def log2_noise(streams_R2: torch.Tensor, vocab: int) -> torch.Tensor:
    """log2 of e: streams [R, 2] int64 (seed, position) -> [R, V] float32, -32 to 4.6."""
    num_blocks = -(-vocab // _TOKENS_AT_ONCE)
    seeds, positions = streams_R2[:, :1], streams_R2[:, 1:]
    lanes = torch.arange(num_blocks * _LANES, device=streams_R2.device)
    zero = torch.zeros_like(seeds)
    words = philox4x32((lanes, positions & _LOW, zero, zero), (seeds & _LOW, (seeds >> 32) & _LOW))
    words = torch.stack(words, dim=1).unflatten(2, (num_blocks, _LANES)).transpose(1, 2).flatten(1)[:, :vocab]
    t = (((words >> 1).float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    # Where 1 - t would lose digits of a small t, the polynomial gets -t itself.
    exponent, rest = _split(1 - t)
    is_small = t < 0.25
    e = -_log2(torch.where(is_small, 0.0, exponent), torch.where(is_small, -t, rest))
    return _log2(*_split(e))


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x = (1 + rest) * 2^exponent with 1 + rest in [sqrt(1/2), sqrt(2)), for normal x > 0."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    return exponent.float(), (bits - (exponent << 23)).view(torch.float32) - 1.0


def _log2(exponent: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    return exponent + rest * polynomial(rest, _LOG2_POLYNOMIAL)


def polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    """By Horner's rule, every product and every sum rounded to float32; the highest power comes first."""
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result
