"""Formats of quantised weights: numbers and scales. Plain PyTorch, on any device.

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

from pagebinder.custom_ops.cpu.huge_pages import advise_huge_pages
from pagebinder.custom_ops.latent.small_floats import from_e2m1, to_e2m1
from pagebinder.custom_ops.linear.code_order import (
    PACK,
    PANEL,
    STEP,
    UNPACK,
    pack_4,
    pack_8,
    unpack_8,
)

BLOCK = 128
E4M3_MAX, E4M3_SMALLEST_NORMAL = 448.0, 2.0**-6
SLICE_ELEMENTS = 1 << 24  # of a weight that are quantised at once: what its float32 copies may hold
# Scales tried for a group of int4, in parts of the one that reaches its largest weight.
INT4_SHRINKS = (1.0, 0.93, 0.86, 0.79)
LEVEL_SPAN = 256  # neighbours that share the upper of two levels of scales
LEVEL_OFFSETS = {4: 8, 6: 16, 8: 16}
LEAST_EXPONENT = -126  # of a scale: bf16's smallest normal number
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


def quantize(weight: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] of a float type -> (packed codes, scale).

    A weight is taken in slices of rows, so that no float32 copy of all of it is made.

    Raises:
        ValueError: unknown format, or sizes that it cannot pack.
    """
    problem = size_problem(*weight.shape, name)
    if problem is not None:
        raise ValueError(problem)
    rows = max(BLOCK, SLICE_ELEMENTS // weight.shape[1] // BLOCK * BLOCK)
    whole = _scale_to(weight.abs().amax().float(), E4M3_MAX) if name == "fp8_tensor" else None
    codes = empty_codes(packed_shapes(*weight.shape, name)[0], weight.device)
    scales = []
    for part, to in zip(weight.split(rows), codes.split(rows // PANEL)):
        packed, scale = _quantize_slice(part.float(), name, whole)
        to.copy_(packed)
        scales.append(scale)
    return codes, whole[None] if whole is not None else torch.cat(scales)


def empty_codes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Memory for codes, in huge pages where the system has them: a decode reads all of it."""
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    advise_huge_pages(codes)
    return codes


def dequantize(qweight: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    """(packed codes, scale) -> the weight [N, K] that they stand for, in float32, exactly."""
    fmt = weight_format(name)
    if fmt.has_groups:
        codes = UNPACK[fmt.bits](qweight)
        values = _numbers(codes, fmt)
        parts = plain_scale(scale, name)
        if fmt.is_shifted:
            scale, shift = (_of_groups(part, fmt.group) for part in parts.unbind(2))
            return values * scale + shift
        return values * _of_groups(parts, fmt.group)
    codes = unpack_8(qweight)
    values = codes.view(torch.int8 if name == "int8" else torch.float8_e4m3fn).float()
    return values * scale_of_each(scale, values.shape)


def pack_e4m3(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    """weight [N, K] float8_e4m3fn as others made it -> (packed codes, how many of them were subnormal).

    Subnormal codes become the nearest of 0 and 2^-6: off by 2^-7 of the scale at most, 1/57344 of the largest code.

    Raises:
        ValueError: sizes that cannot be packed.
    """
    problem = size_problem(*weight.shape, "fp8")
    if problem is not None:
        raise ValueError(problem)
    packed, num_subnormal = empty_codes(packed_shapes(*weight.shape, "fp8")[0], weight.device), 0
    rows = max(PANEL, SLICE_ELEMENTS // weight.shape[1] // PANEL * PANEL)
    for part, to in zip(weight.view(torch.uint8).split(rows), packed.split(rows // PANEL)):
        magnitude = part & 0x7F
        is_subnormal = (magnitude - 1) < 7  # 0 wraps around
        if count := int(is_subnormal.sum()):
            num_subnormal += count
            part = torch.where(is_subnormal, part & 0x80 | (magnitude & 4) << 1, part)
        to.copy_(pack_8(part))
    return packed, num_subnormal


def pack_codes(codes: torch.Tensor, name: str) -> torch.Tensor:
    """codes [N, K] as others made them -> packed: int8, or uint8 0 ... 15: integers plus 8, e2m1 or nf4 as they are.

    Raises:
        ValueError: sizes that cannot be packed.
    """
    if problem := size_problem(*codes.shape, name):
        raise ValueError(problem)
    packed = empty_codes(packed_shapes(*codes.shape, name)[0], codes.device)
    rows = max(PANEL, SLICE_ELEMENTS // codes.shape[1] // PANEL * PANEL)
    pack = PACK[weight_format(name).bits]
    for part, to in zip(codes.view(torch.uint8).split(rows), packed.split(rows // PANEL)):
        to.copy_(pack(part))
    return packed


def in_8_bits(name: str) -> str | None:
    """Of codes of 6 bits or of a table that stand for integers, the format that has these in 8 bits; else None."""
    fmt = weight_format(name)
    if fmt.bits != 6 and name != "iq4_g32":
        return None
    return name.replace("int6", "int8").replace("iq4", "int8")


def codes_of_8_bits(codes: torch.Tensor, name: str) -> torch.Tensor:
    """Packed codes of a weight, or of a stack of them, in a format of which `in_8_bits` knows another -> in that."""
    fmt = weight_format(name)
    *outer, panels, steps, halves, num_bytes = codes.shape
    wide = empty_codes((*outer, panels, steps, halves, num_bytes * 8 // fmt.bits), codes.device)
    if not codes.is_meta:
        for one, to in zip(codes.flatten(0, -4).split(BLOCK), wide.flatten(0, -4).split(BLOCK)):
            to.copy_(pack_8(_integers(UNPACK[fmt.bits](one), fmt)))
    return wide


def packed_groups(scale: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """Scales of groups [N, G], and shifts -> the scale tensor; in bf16 or float16 if that is exact, else float32."""
    parts = [_packed_groups(part.float()) for part in (scale, shift) if part is not None]
    packed = parts[0] if shift is None else torch.stack(parts, 2)
    if packed.is_meta:
        return packed.bfloat16()
    rounded = (packed.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return next((narrow for narrow in rounded if bool((narrow == packed).all())), packed)


def packed_levels(
    wide: torch.Tensor,
    narrow: torch.Tensor,
    name: str,
    other: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """d [N, K/256] and s [N, G] -> the scale tensor of two levels; `other`: m and t, of shifted formats."""
    pairs, fmt = [(wide, narrow)] + ([] if other is None else [other]), weight_format(name)
    spans = wide.shape[1]
    upper = torch.stack([_packed_groups(d.to(fmt.upper)) for d, _ in pairs], 2)  # [N/32, K/256, parts, 32]
    lower = torch.stack([_packed_groups(s.to(fmt.lower)) for _, s in pairs], 2).unflatten(1, (spans, -1))
    return torch.cat(
        (upper.view(torch.uint8).flatten(2), lower.view(torch.uint8).flatten(2)), dim=2
    ).contiguous()


def plain_scale(scale: torch.Tensor, name: str) -> torch.Tensor:
    """A scale tensor [..., N/32, ., .] of groups -> the same without levels: one of two levels becomes float32."""
    if scale.dtype is not torch.uint8:
        return scale
    fmt = weight_format(name)
    parts = 2 if fmt.is_shifted else 1
    in_front = fmt.upper.itemsize * parts * PANEL
    upper, lower = scale.split((in_front, scale.shape[-1] - in_front), dim=-1)
    wide = upper.contiguous().view(fmt.upper).float().unflatten(-1, (1, parts, PANEL))
    products = wide * lower.contiguous().view(fmt.lower).float().unflatten(-1, (-1, parts, PANEL))
    products = products.flatten(-4, -3)  # [..., N/32, K/G, parts, 32]
    if not fmt.is_shifted:
        return products.squeeze(-2).contiguous()
    scales, shifts = products.unbind(-2)
    return torch.stack((scales, LEVEL_OFFSETS[fmt.bits] * scales - shifts), dim=-2)


def scale_of_each(scale: torch.Tensor, shape) -> torch.Tensor:
    """scale [N/128, K/128], [N] or [1] of a weight [N, K] in fp8 -> something that multiplies it."""
    return _of_blocks(scale, shape) if scale.dim() == 2 else scale[:, None]


def error_bound(weight: torch.Tensor, name: str) -> torch.Tensor:
    """How far each weight [N, K] may be from its code times its scale: half a step, and what 4 bits cut off."""
    fmt, size = weight_format(name), weight.float().abs()
    if fmt.has_groups:
        groups = (weight.float() if fmt.is_shifted else size).unflatten(1, (-1, fmt.group))
        shared = groups.amax(2).repeat_interleave(fmt.group, dim=1)
        if fmt.is_shifted:  # half a step, and what rounding scale and shift to bf16 adds
            least = groups.amin(2).repeat_interleave(fmt.group, dim=1)
            step = (shared - least) / ((1 << fmt.bits) - 2)
            return step / 2 + torch.maximum(shared.abs(), least.abs()) / 60
        if fmt.bits > 4:  # half a step, and what rounding the scale cuts off
            return shared / (125 if fmt.bits == 8 else 54)
        # the largest of the other sign meets the code 7 where the largest has -8
        return shared * (0.26 if fmt.is_float else 1.01 - min(INT4_SHRINKS) * 7 / 8)
    if name == "int8":
        return size.amax(1, keepdim=True) / 253
    return size / 15.9 + size.max() * (E4M3_SMALLEST_NORMAL / E4M3_MAX)


# ---- numbers ---------------------------------------------------------------------------------------------------


def _quantize_slice(w: torch.Tensor, name: str, whole: torch.Tensor | None):
    """w [n, K] float32 -> (packed codes, scale) of these rows; `whole`: the one scale of fp8_tensor."""
    fmt = weight_format(name)
    if fmt.has_groups:
        groups, pack = w.unflatten(1, (-1, fmt.group)), PACK[fmt.bits]
        if fmt.is_shifted:
            codes, scale, shift = _shifted(groups, fmt.bits)
            return pack(codes.flatten(1)), torch.stack([_packed_groups(p) for p in (scale, shift)], 2)
        if fmt.bits > 4:
            half = 1 << (fmt.bits - 1)
            scale = _scale_to(groups.abs().amax(2), half - 1).bfloat16()
            codes = (groups / scale.float()[..., None]).round_().clamp_(-half, half - 1).to(torch.int8)
            return pack(codes.flatten(1).view(torch.uint8)), _packed_groups(scale)
        if fmt.table is not None:
            codes, scale = _nearest(groups, fmt.table)
        else:
            codes, scale = _OF_4_BITS.get(name, _int4)(groups)
        return pack_4(codes.flatten(1)), _packed_groups(scale)
    if name == "int8":
        scale = _scale_to(w.abs().amax(1), 127)
        return pack_8((w / scale[:, None]).round().to(torch.int8).view(torch.uint8)), scale
    if name == "fp8_block":
        padded = torch.nn.functional.pad(w, (0, -w.shape[1] % BLOCK, 0, -w.shape[0] % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = _scale_to(blocks.abs().amax((1, 3)), E4M3_MAX)
        return pack_8(_e4m3(w / _of_blocks(scale, w.shape))), scale
    scale = _scale_to(w.abs().amax(1), E4M3_MAX) if whole is None else whole.expand(len(w))
    return pack_8(_e4m3(w / scale[:, None])), scale


def _scale_to(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The scale with which `amax` becomes the largest code; 1 where there is nothing but zeros."""
    return torch.where(amax > 0, amax / largest, 1.0)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 -> codes that are zero or normal numbers, nearest, saturating."""
    smallest = E4M3_SMALLEST_NORMAL
    tiny = torch.where(x.abs() < smallest / 2, 0.0, smallest).copysign(x)
    x = torch.where(x.abs() < smallest, tiny, x.clamp(-E4M3_MAX, E4M3_MAX))
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """groups [n, G, g] float32 -> (codes + 8 uint8, scale [n, G] bf16) of least squared error among some scales.

    A scale may be negative: the largest weight then has the code -8, which reaches further than 7.
    """
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best_error = best_scale = None
    for shrink in INT4_SHRINKS:
        for code in (-8.0, 7.0):
            scale = (largest * shrink / code).bfloat16().float()
            scale = torch.where(scale == 0, 1.0, scale)
            error = (_int4_codes(groups, scale) * scale - groups).square_().sum(2, keepdim=True)
            if best_error is None:
                best_error, best_scale = error, scale
                continue
            better = error < best_error
            best_error, best_scale = (
                torch.where(better, error, best_error),
                torch.where(better, scale, best_scale),
            )
    codes = (_int4_codes(groups, best_scale) + 8).to(torch.uint8)
    return codes, best_scale.squeeze(2).bfloat16()


def _int4_codes(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (groups / scale).round_().clamp_(-8, 7)


def _shifted(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """groups [n, G, g] float32 -> (codes uint8, scale, shift [n, G] bf16), between the least and the largest."""
    least, largest = groups.aminmax(dim=2, keepdim=True)
    half = 1 << (bits - 1)
    scale = ((largest - least) / (2 * half - 1)).bfloat16().float()
    scale = torch.where(scale == 0, 1.0, scale)
    shift = (least + half * scale).bfloat16().float()
    codes = ((groups - shift) / scale).round_().clamp_(-half, half - 1)
    codes = (codes + half).to(torch.uint8) if bits == 4 else codes.to(torch.int8).view(torch.uint8)
    return codes, scale.squeeze(2).bfloat16(), shift.squeeze(2).bfloat16()


def _mxfp4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """groups [n, G, g] float32 -> (e2m1 codes uint8, scale [n, G] bf16, a power of two) of least squared error.

    The largest weight becomes 4 to 8 (of which 6 is the most there is), as the specification has it, or half of that.
    Numbers that are e2m1 times a power of two are met exactly.
    """
    largest = groups.abs().amax(2, keepdim=True)
    exponent = torch.frexp(largest).exponent - 3  # of 0: one that does not matter
    best_error = best = None
    for higher in (0, 1):
        scale = torch.ldexp(torch.ones_like(largest), (exponent + higher).clamp(min=LEAST_EXPONENT))
        codes = to_e2m1(groups / scale)
        error = (from_e2m1(codes) * scale - groups).square_().sum(2, keepdim=True)
        if best is None:
            best_error, best = error, (codes, scale)
            continue
        better = error < best_error
        best = tuple(torch.where(better, new, old) for new, old in zip((codes, scale), best))
    return best[0], best[1].squeeze(2).bfloat16()


def _nvfp4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """groups [n, G, g] float32 -> (e2m1 codes uint8, scale [n, G] bf16 that reaches the largest weight)."""
    scale = _scale_to(groups.abs().amax(2), 6.0).bfloat16()
    return to_e2m1(groups / scale.float()[..., None]), scale


def _nearest(groups: torch.Tensor, table: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """groups [n, G, g] float32 -> (codes uint8 of the nearest numbers of a table, scale [n, G] bf16; 0 for zeros)."""
    scale = (groups.abs().amax(2, keepdim=True) / table[-1]).bfloat16()
    values = torch.tensor(table, device=groups.device, dtype=torch.float32)
    numbers = groups / torch.where(scale == 0, 1.0, scale.float())
    return torch.bucketize(numbers, values[1:] / 2 + values[:-1] / 2).byte(), scale.squeeze(2)


_OF_4_BITS = {"mxfp4": _mxfp4, "nvfp4": _nvfp4}


def _numbers(codes: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """What unpacked codes uint8 stand for, float32."""
    if fmt.table is not None:
        return torch.tensor(fmt.table, device=codes.device, dtype=torch.float32)[codes.int()]
    if fmt.is_float:
        return from_e2m1(codes)
    return codes.view(torch.int8).float() - (8 if fmt.bits == 4 else 0)


def _integers(codes: torch.Tensor, fmt: WeightFormat) -> torch.Tensor:
    """The same as uint8 that are int8 in two's complement, of codes of 6 bits and of tables."""
    if fmt.table is None:
        return codes
    return torch.tensor(fmt.table, device=codes.device, dtype=torch.int8).view(torch.uint8)[codes.int()]


def _packed_groups(scale: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [panel, G, column]."""
    return scale.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def _of_groups(scale: torch.Tensor, group: int) -> torch.Tensor:
    """The scale of each weight [N, K], from [panel, G, column]."""
    return scale.float().transpose(1, 2).flatten(0, 1).repeat_interleave(group, dim=1)


def _of_blocks(scale: torch.Tensor, shape) -> torch.Tensor:
    """The scale of each weight [N, K], from [N/128, K/128]."""
    wide = scale.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
    return wide[: shape[0], : shape[1]]
