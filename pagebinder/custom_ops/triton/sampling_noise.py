"""Device functions of sampling: the noise of a stream, in the bits of the reference (`sampling/noise.py`).

Kernels that use them are compiled without fused multiply-adds: every product and every sum is rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(x):
    """(exponent, rest): x = (1 + rest) * 2^exponent with 1 + rest in [sqrt(1/2), sqrt(2)), for normal x > 0."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return exponent.to(tl.float32), (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def log2_of(exponent, rest):
    y = rest * -0.145811647 + 0.234042346
    y = y * rest + -0.24887687
    y = y * rest + 0.287098706
    y = y * rest + -0.360239625
    y = y * rest + 0.480923235
    y = y * rest + -0.721352816
    y = y * rest + 1.4426949
    return exponent + rest * y


@triton.jit
def log2_noise(words):
    """uint32 words -> log2 of e ~ Exp(1)."""
    t = ((words >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    t = tl.minimum(t, 0.999999940395355224609375)
    exponent, rest = split(1.0 - t)
    is_small = t < 0.25  # there 1 - t would lose digits of t
    e = 0.0 - log2_of(tl.where(is_small, 0.0, exponent), tl.where(is_small, 0.0 - t, rest))
    exponent, rest = split(e)
    return log2_of(exponent, rest)
