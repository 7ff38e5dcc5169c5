"""Numbers of microscaled formats (OCP MX 1.0), as checkpoints store them: a scale for 32 columns of a row.

    e2m1    4 bits, two a byte, the lower column in the low bits    0, 0.5, 1, 1.5, 2, 3, 4, 6 and minus them
    e4m3    a byte, float8_e4m3fn
    ue8m0   a byte, float8_e8m0fnu or uint8                         2 ** (byte - 127); 255 is NaN

A code times its scale is exact in float32 and in bfloat16, down to bfloat16's least step of 2 ** -133.
"""

from __future__ import annotations

import functools

import torch

from pagebinder.custom_ops.latent.small_floats import from_e2m1
from pagebinder.errors import CheckpointError

GROUP = 32
# What holds two codes of e2m1, and what holds bits of ue8m0.
PAIR_DTYPES = (torch.int8, torch.uint8)
SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8)


def num_groups(columns: int) -> int:
    """Raises CheckpointError: a row of them is not made of whole groups."""
    if columns % GROUP:
        raise CheckpointError(
            f"rows of {columns} weights have no scale for each {GROUP}: the config does not fit the model."
        )
    return columns // GROUP


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """A scale as stored, in ue8m0 or a float type -> float32; NaN of ue8m0 stays NaN."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).float()


def are_powers_of_two(scale: torch.Tensor) -> bool:
    """Are all scales (float32) such as ue8m0 can say? NaN and zero are none."""
    return bool((torch.frexp(scale).mantissa == 0.5).all())


def powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    """A scale as stored -> float32. Raises CheckpointError: one is NaN, or no power of two."""
    values = scale_values(scale)
    if not are_powers_of_two(values):
        raise CheckpointError("a scale is NaN (the byte 255 of ue8m0), or no power of two.")
    return values


def times_scale(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes [N, K] e4m3, or [N, K/2] bytes of e2m1; scale [N, K/32] -> weights [N, K] of `dtype`.

    Raises:
        CheckpointError: other shapes or dtypes, scales that are no powers of two, weights beyond the dtype, NaN.
    """
    computed = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32  # both are exact, see above
    is_e2m1 = codes.dtype in PAIR_DTYPES
    if not is_e2m1 and codes.dtype is not torch.float8_e4m3fn:
        raise CheckpointError(f"codes are {codes.dtype}; e4m3, and bytes of e2m1, are read.")
    values = _values(codes, computed) if is_e2m1 else codes
    expected = (values.shape[0], num_groups(values.shape[1]))
    if scale.shape != torch.Size(expected):
        raise CheckpointError(
            f"the scale of {list(values.shape)} weights is {list(scale.shape)}, not {list(expected)}."
        )
    scale = powers_of_two(scale)
    groups = values.to(computed).unflatten(1, (-1, GROUP)) * scale.to(computed)[..., None]
    weight = groups.flatten(1).to(dtype)
    if not all(extreme.isfinite() for extreme in weight.aminmax()):  # NaN is both
        raise CheckpointError(f"a weight is NaN, or too large for {dtype}.")
    return weight


def _values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [N, K/2] -> the numbers [N, K]. A pair of numbers is moved as one integer: five times as fast."""
    pairs = _pairs(dtype).index_select(0, codes.reshape(-1).view(torch.uint8).int())
    return pairs.view(dtype).view(codes.shape[0], -1)


@functools.cache
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """[256]: the two numbers in a byte, as the bits of an integer."""
    byte = torch.arange(256, device="cpu")
    pairs = from_e2m1(torch.stack((byte & 15, byte >> 4), dim=1)).to(dtype)
    return pairs.view(torch.int32 if dtype is torch.bfloat16 else torch.int64).flatten()
