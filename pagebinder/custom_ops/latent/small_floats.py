"""Number formats below 16 bits in plain PyTorch: e4m3 (fp8), e2m1 (fp4), UE8M0 (a power of two in a byte).

    e4m3   s eeee mmm   bias 7, largest 448, no infinity, 0x7f is NaN
    e2m1   s ee m       0 0.5 1 1.5 2 3 4 6
    UE8M0  eeeeeeee     2^(byte - 127), 255 is NaN

A block of channels with largest magnitude amax has the scale 2^e, e = ceil(log2(amax / 448)) for e4m3 and
ceil(log2(amax / 6)) for e2m1. e comes from the exponent bits of amax (448 = 1.75 * 2^8, 6 = 1.5 * 2^2), so that
powers of two are exact. Sources: DeepSeek's reference kernels; OCP microscaling formats (MX) 1.0.
"""

from __future__ import annotations

import math

import torch

E4M3_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6 * 2.0**-126

# e2m1 magnitudes, and the midpoints between them; at a midpoint the even code wins, which is up for odd codes.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_UP_BEYOND = (0.25, 1.25, 2.5, 5.0)
E2M1_UP_FROM = (0.75, 1.75, 3.5)


def quantise_fp8(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks [..., b] float32 -> (e4m3 codes [..., b] uint8, exponents e [...] int32 with a scale of 2^e)."""
    exponents = ue8m0_exponent(blocks.abs().amax(-1), floor=FP8_AMAX_FLOOR, top=1.75, top_exponent=8)
    return to_e4m3(blocks * power_of_two(-exponents)[..., None]), exponents


def quantise_fp4(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks [..., b] float32 -> (e2m1 codes [..., b] uint8, UE8M0 bytes [...]); a NaN makes the scale NaN."""
    amax = blocks.abs().amax(-1)
    exponents = ue8m0_exponent(amax, floor=FP4_AMAX_FLOOR, top=1.5, top_exponent=2)
    exponents = exponents.masked_fill(amax.isnan(), 0)
    scale_bytes = (exponents + 127).to(torch.uint8).masked_fill(amax.isnan(), 255)
    return to_e2m1(blocks * power_of_two(-exponents)[..., None]), scale_bytes


def ue8m0_exponent(amax: torch.Tensor, *, floor: float, top: float, top_exponent: int) -> torch.Tensor:
    """ceil(log2(max(amax, floor) / (top * 2^top_exponent))) as int32, exactly; 1 <= top < 2."""
    bits = amax.float().clamp(min=floor).view(torch.int32)
    above = (bits & 0x7FFFFF) > int((top - 1) * 2**23)
    return (bits >> 23) - 127 - top_exponent + above.int()


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^e as float32 for -127 < e < 128, from its bits."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def from_ue8m0(scale_bytes: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes -> float32; 255 is NaN."""
    scales = (scale_bytes.int() << 23).view(torch.float32)
    return scales.masked_fill(scale_bytes == 0, 2.0**-127).masked_fill(scale_bytes == 255, math.nan)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 -> e2m1 codes (sign in bit 3), nearest, ties to even, saturating at 6."""
    magnitude = x.abs()
    code = sum((magnitude > bound).to(torch.uint8) for bound in E2M1_UP_BEYOND)
    code = code + sum((magnitude >= bound).to(torch.uint8) for bound in E2M1_UP_FROM)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=codes.device)
    return table[codes.int()]


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest, ties to even, saturating; the clamp is there because a plain cast turns what is too large into NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 codes (uint8) -> float32."""
    return codes.view(torch.float8_e4m3fn).float()
