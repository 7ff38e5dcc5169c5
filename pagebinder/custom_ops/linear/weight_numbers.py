"""Weights -> codes and scales of a format (weight_formats.py), and back. Plain PyTorch, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from pagebinder.custom_ops.cpu.huge_pages import advise_huge_pages
from pagebinder.custom_ops.latent.small_floats import from_e2m1, to_e2m1
from pagebinder.custom_ops.linear.code_order import PACK, PANEL, UNPACK, pack_4, pack_8, unpack_8
from pagebinder.custom_ops.linear.group_scales import (
    in_panels,
    of_blocks,
    of_groups,
    plain_scale,
    scale_of_each,
)
from pagebinder.custom_ops.linear.weight_formats import (
    BLOCK,
    WeightFormat,
    packed_shapes,
    size_problem,
    weight_format,
)

E4M3_MAX, E4M3_SMALLEST_NORMAL = 448.0, 2.0**-6
REMEMBERED_BYTES = 1 << 28
SLICE_ELEMENTS = 1 << 24  # of a weight that are quantised at once: what its float32 copies may hold
# Scales tried for a group of int4, in parts of the one that reaches its largest weight.
INT4_SHRINKS = (1.0, 0.93, 0.86, 0.79)
LEAST_EXPONENT = -126  # of a scale: bf16's smallest normal number

_remembered: ContextVar[dict[tuple, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None] = ContextVar(
    "remembered", default=None
)


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


@contextlib.contextmanager
def remembering_weights() -> Iterator[None]:
    """What `dequantize` makes within is made once, as long as all of it is no more than REMEMBERED_BYTES: graphs that
    are run again and again, as in verification, compute with the same codes. Nobody may change these or the weights.
    """
    token = _remembered.set({})
    try:
        yield
    finally:
        _remembered.reset(token)


def dequantize(qweight: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    """(packed codes, scale) -> the weight [N, K] that they stand for, in float32, exactly."""
    known = _remembered.get()
    if known is None or qweight.is_meta:
        return _dequantized(qweight, scale, name)
    key = qweight.data_ptr(), scale.data_ptr(), qweight.shape, name
    if key not in known:
        weight = _dequantized(qweight, scale, name)
        if sum(other.nbytes for *_, other in known.values()) + weight.nbytes > REMEMBERED_BYTES:
            return weight
        known[key] = qweight, scale, weight  # which keeps their memory theirs
    return known[key][-1]


def _dequantized(qweight: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    fmt = weight_format(name)
    if fmt.has_groups:
        codes = UNPACK[fmt.bits](qweight)
        values = _numbers(codes, fmt)
        parts = plain_scale(scale, name)
        if fmt.is_shifted:
            scale, shift = (of_groups(part, fmt.group) for part in parts.unbind(2))
            return values * scale + shift
        return values * of_groups(parts, fmt.group)
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


def codes_of_8_bits(codes: torch.Tensor, name: str) -> torch.Tensor:
    """Packed codes of a weight, or of a stack of them, in a format of which `in_8_bits` knows another -> in that."""
    fmt = weight_format(name)
    *outer, panels, steps, halves, num_bytes = codes.shape
    wide = empty_codes((*outer, panels, steps, halves, num_bytes * 8 // fmt.bits), codes.device)
    if not codes.is_meta:
        for one, to in zip(codes.flatten(0, -4).split(BLOCK), wide.flatten(0, -4).split(BLOCK)):
            to.copy_(pack_8(_integers(UNPACK[fmt.bits](one), fmt)))
    return wide


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


def _quantize_slice(w: torch.Tensor, name: str, whole: torch.Tensor | None):
    """w [n, K] float32 -> (packed codes, scale) of these rows; `whole`: the one scale of fp8_tensor."""
    fmt = weight_format(name)
    if fmt.has_groups:
        groups, pack = w.unflatten(1, (-1, fmt.group)), PACK[fmt.bits]
        if fmt.is_shifted:
            codes, scale, shift = _shifted(groups, fmt.bits)
            return pack(codes.flatten(1)), torch.stack([in_panels(p) for p in (scale, shift)], 2)
        if fmt.bits > 4:
            half = 1 << (fmt.bits - 1)
            scale = _scale_to(groups.abs().amax(2), half - 1).bfloat16()
            codes = (groups / scale.float()[..., None]).round_().clamp_(-half, half - 1).to(torch.int8)
            return pack(codes.flatten(1).view(torch.uint8)), in_panels(scale)
        if fmt.table is not None:
            codes, scale = _nearest(groups, fmt.table)
        else:
            codes, scale = _OF_4_BITS.get(name, _int4)(groups)
        return pack_4(codes.flatten(1)), in_panels(scale)
    if name == "int8":
        scale = _scale_to(w.abs().amax(1), 127)
        return pack_8((w / scale[:, None]).round().to(torch.int8).view(torch.uint8)), scale
    if name == "fp8_block":
        padded = torch.nn.functional.pad(w, (0, -w.shape[1] % BLOCK, 0, -w.shape[0] % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = _scale_to(blocks.abs().amax((1, 3)), E4M3_MAX)
        return pack_8(_e4m3(w / of_blocks(scale, w.shape))), scale
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


_OF_4_BITS = {"mxfp4": _mxfp4, "nvfp4": _nvfp4}
