"""Formats of quantised weights: what their codes and scales are, and how these lie in tensors.

weight_numbers.py makes them of weights, group_scales.py has the scales of groups.

    format       code               scale of                       scale tensor            bits per weight
    fp8          e4m3               a row (output channel)         [N] float32             8
    fp8_tensor   e4m3               everything                     [1] float32             8
    fp8_block    e4m3               a block of 128 x 128           [N/128, K/128] float32  8
    int8         -127 ... 127       a row                          [N] float32             8
    int4_g64     -8 ... 7           64 neighbours of a row         [N/32, K/64, 32] bf16   4.25
    int4_g32     -8 ... 7           32 neighbours of a row         [N/32, K/32, 32] bf16   4.5
    mxfp4        e2m1               32 neighbours of a row, 2^e    [N/32, K/32, 32] bf16   4.5

Linear layers of checkpoints may have these beside them. Their scales are float16 or float32 where bf16 would round
them; float32 doubles what there is beyond the bits of codes:

    int4_gG      -8 ... 7           G = 16, 128 neighbours         [N/32, K/G, 32]         5, 4.125
    uint4_gG     -8 ... 7, shifted  G = 16, 32, 64, 128 of them    [N/32, K/G, 2, 32]      6, 5, 4.5, 4.25
    int6_gG      -32 ... 31         G = 16, 32 neighbours          [N/32, K/G, 32]         7, 6.5
    uint6_gG     the same, shifted  G = 16, 32 neighbours          [N/32, K/G, 2, 32]      8, 7
    int8_gG      -128 ... 127       G = 16, 32, 64, 128            [N/32, K/G, 32]         9, 8.5, 8.25, 8.125
    uint8_gG     the same, shifted  G = 16, 32, 64, 128            [N/32, K/G, 2, 32]      10, 9, 8.5, 8.25
    nvfp4        e2m1               16 neighbours                  [N/32, K/16, 32]        5
    nf4_g64      of a table         64 neighbours                  [N/32, K/64, 32]        4.25
    iq4_g32      of a table         32 neighbours                  [N/32, K/32, 32]        4.5

Of shifted formats a group has a scale [.., 0, :] and a shift [.., 1, :]: a weight is code * scale + shift. Codes
0 ... 15 with a zero point z, as AWQ has them, are codes less 8 with the shift (8 - z) * scale.

Scales of groups may also have two levels, as llama.cpp's K-quants have them: a number for 256 neighbours times an
integer for each group. They are bytes then, uint8 [N/32, K/256, .]; of 32 rows

    d  float16    [m  float16]     and of each group    s  int8    [t  int8]        in brackets: of shifted formats

and a scale is d s, a shift LEVEL_OFFSETS[bits] d s - m t. Those of nvfp4, d float32 and s e4m3, are what checkpoints
have: 4.6 bits a weight.

e2m1 is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6; with powers of two as scales it is OCP's MXFP4 ("OCP
Microscaling Formats (MX) Specification", version 1.0), so weights that were stored so are packed without loss. The
table of nf4 has 16 quantiles of a normal distribution (Dettmers et al. 2023, QLoRA), in the float32 of bitsandbytes,
that of iq4 16 integers (llama.cpp's IQ4_NL and IQ4_XS).

A weight [N, K] is its codes times their scales, and shifts. Only e4m3 codes that are zero or normal numbers are used:
what is below 2^-6 of the scale, 0.003 % of the largest weight, becomes 0 or 2^-6. So moving a code's bits makes it
bfloat16.

Codes are packed as [N/32 panels, K/32 steps, 2, bytes], see `code_order`; a nibble of int4 is the code + 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pagebinder.custom_ops.linear.code_order import (
    PANEL,
    STEP,
)

BLOCK = 128
LEVEL_SPAN = 256  # neighbours that share the upper of two levels of scales
LEVEL_OFFSETS = {4: 8, 6: 16, 8: 16}
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class WeightFormat:
    """`bits`: of a code. `group`: weights of a row that share a scale, None = all. `is_float`: codes are no integers.
    `is_shifted`: a group has a shift beside its scale. `upper`, `lower`: dtypes of two levels of scales."""

    name: str
    bits: int
    group: int | None = None
    is_float: bool = False
    is_shifted: bool = False
    upper: torch.dtype = torch.float16
    lower: torch.dtype = torch.int8

    @property
    def multiple_of(self) -> int:
        """What K must be a multiple of."""
        return max(self.group, STEP) if self.has_groups else STEP

    @property
    def gpu_problem(self) -> str | None:
        """Why no kernel of a GPU reads it; None: one does."""
        if self.bits == 6:
            return "codes are bytes or halves of them there"
        if self.table is not None:
            return "codes are numbers there, not places in a table"
        if (self.group or STEP) < STEP:
            return f"{self.group} weights share a scale, {STEP} are taken at a time"
        return None

    @property
    def table(self) -> tuple[float, ...] | None:
        """What the codes of 4 bits stand for, if that is in a table of its own."""
        return _TABLES.get(self.name)

    @property
    def has_groups(self) -> bool:
        """Is the scale tensor one of groups: [N/32, K/group, 32], or with shifts [N/32, K/group, 2, 32]?"""
        return self.group is not None and self.name != "fp8_block"


FORMATS = {  # that CompileConfig.quantization offers
    f.name: f
    for f in (
        WeightFormat("fp8", 8, is_float=True),
        WeightFormat("fp8_tensor", 8, is_float=True),
        WeightFormat("fp8_block", 8, BLOCK, is_float=True),
        WeightFormat("int8", 8),
        WeightFormat("int4_g64", 4, 64),
        WeightFormat("int4_g32", 4, 32),
        WeightFormat("mxfp4", 4, 32, is_float=True),
    )
}
_TABLES = {"nf4_g64": NF4_VALUES, "iq4_g32": IQ4_VALUES}
STORED_GROUPS = (128, 64, 32, 16)
STORED_FORMATS = {  # of linear layers whose checkpoint has them
    f.name: f
    for f in (
        WeightFormat("int4_g128", 4, 128),
        WeightFormat("int4_g16", 4, 16),
        WeightFormat("nvfp4", 4, 16, is_float=True, upper=torch.float32, lower=torch.float8_e4m3fn),
        WeightFormat("nf4_g64", 4, 64, is_float=True),
        WeightFormat("iq4_g32", 4, 32, is_float=True),
        *(WeightFormat(f"int6_g{group}", 6, group) for group in (32, 16)),
        *(WeightFormat(f"uint6_g{group}", 6, group, is_shifted=True) for group in (32, 16)),
        *(WeightFormat(f"uint4_g{group}", 4, group, is_shifted=True) for group in STORED_GROUPS),
        *(WeightFormat(f"int8_g{group}", 8, group) for group in STORED_GROUPS),
        *(WeightFormat(f"uint8_g{group}", 8, group, is_shifted=True) for group in STORED_GROUPS),
    )
}


def weight_format(name: str) -> WeightFormat:
    """Raises ValueError for a name that is no format."""
    if name in STORED_FORMATS:
        return STORED_FORMATS[name]
    if name not in FORMATS:
        raise ValueError(f"{name!r} is no format of weights; use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def formats_of_experts(name: str) -> tuple[str, str]:
    """The formats of `up` and `down`: "int8_g16" is that of both, "uint4_g32/int8_g16" is one for each."""
    up, slash, down = name.partition("/")
    return (up, down) if slash else (up, up)


def format_of_both(up: str, down: str) -> str:
    """The other way round."""
    return up if up == down else f"{up}/{down}"


def size_problem(num_columns: int, inner: int, name: str) -> str | None:
    """Why a weight [num_columns, inner] cannot be packed, or None."""
    multiple = weight_format(name).multiple_of
    if num_columns % PANEL or inner % multiple or not num_columns or not inner:
        return f"[{num_columns}, {inner}]: {name} packs multiples of {PANEL} rows and {multiple} columns"
    return None


def packed_shapes(num_columns: int, inner: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the packed codes (uint8) and of the scale."""
    panels, steps, fmt = num_columns // PANEL, inner // STEP, weight_format(name)
    codes = (panels, steps, 2, STEP * PANEL * fmt.bits // 16)
    if fmt.has_groups:
        return codes, (panels, inner // fmt.group, *((2,) if fmt.is_shifted else ()), PANEL)
    if name == "fp8_block":
        return codes, (-(-num_columns // BLOCK), -(-inner // BLOCK))
    return codes, ((1,) if name == "fp8_tensor" else (num_columns,))


def levels_shape(num_columns: int, inner: int, name: str) -> tuple[int, ...]:
    """Of a scale tensor of two levels, uint8."""
    fmt = weight_format(name)
    of_group = fmt.lower.itemsize * LEVEL_SPAN // fmt.group
    num_bytes = PANEL * (2 if fmt.is_shifted else 1) * (fmt.upper.itemsize + of_group)
    return num_columns // PANEL, inner // LEVEL_SPAN, num_bytes


def num_weights(codes: torch.Tensor) -> int:
    """That packed codes stand for, be they of a weight or of a stack of them."""
    return math.prod(codes.shape[:-2]) * PANEL * STEP


def scale_dtype(name: str) -> torch.dtype:
    """Of the scales that `quantize` chooses."""
    return torch.bfloat16 if weight_format(name).has_groups else torch.float32


def in_8_bits(name: str) -> str | None:
    """Of codes of 6 bits or of a table that stand for integers, the format that has these in 8 bits; else None."""
    fmt = weight_format(name)
    if fmt.bits != 6 and name != "iq4_g32":
        return None
    return name.replace("int6", "int8").replace("iq4", "int8")
