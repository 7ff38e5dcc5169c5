"""Blocks in which a GGUF file keeps weights: their bytes, as codes of our kernels, with scales and shifts of groups.

A row of a weight [N, K] is blocks one after the other, of 32 or 256 weights. Integers q become weights by

    kind       q              of a group                      weights       format here
    Q4_0       0 ... 15       d                               d (q - 8)     int4_g32
    Q4_1       0 ... 15       d, m                            d q + m       uint4_g32
    Q5_0       0 ... 31       d                               d (q - 16)    int6_g32
    Q5_1       0 ... 31       d, m                            d q + m       uint6_g32
    Q8_0       -128 ... 127   d                               d q           int8_g32
    IQ4_NL     16 integers    d                               d q           iq4_g32
    MXFP4      e2m1           2^e                             2^e q         mxfp4

of 256 weights, whose d and m are times small integers of each group (K-quants):

    Q2_K       0 ... 3        d s, m t: 4 bits each, of 16    d s q - m t   uint4_g16
    Q3_K       -4 ... 3       d s: 6 bits, of 16              d s q         int4_g16
    Q4_K       0 ... 15       d s, m t: 6 bits each, of 32    d s q - m t   uint4_g32
    Q5_K       0 ... 31       d s, m t: 6 bits each, of 32    d s q - m t   uint6_g32
    Q6_K       -32 ... 31     d s: 8 bits, of 16              d s q         int6_g16
    IQ4_XS     16 integers    d s: 6 bits, of 32              d s q         iq4_g32

d and m are float16, s and t integers: scales of two levels in weight_formats.py, which kernels multiply. Codes are q
less 8, 16 or 32. Scales of the first table are float16; shifts there are rounded to float32. Other kinds (grids: IQ1,
IQ2, IQ3; ternary ones) have no kernel; the package `gguf` expands them. The kinds are ggml's (ggml-quants.c).

Codes of 6 bits take a quarter less memory than those of 8, and more instructions: kernels with AVX2 multiply them as
integers. Those for AVX-512 would take floats, so there these kinds have codes of 8 bits (int8_g32 and so on).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagebinder.custom_ops.cpu.compiler import cpu_features
from pagebinder.custom_ops.latent.small_floats import from_e2m1
from pagebinder.custom_ops.linear.group_scales import packed_groups, packed_levels
from pagebinder.custom_ops.linear.weight_formats import (
    FORMATS,
    LEVEL_OFFSETS,
    PANEL,
    STORED_FORMATS,
    in_8_bits,
    packed_shapes,
    weight_format,
)
from pagebinder.custom_ops.linear.weight_numbers import empty_codes, pack_codes
from pagebinder.errors import CheckpointError, ConfigError

SLICE_BYTES = 1 << 20  # of blocks that are unpacked at once: what is made of them stays in a cache
E8M0_BIAS = 127


class Unpacked(NamedTuple):
    """`codes` [M, weights of a block]: int8, or of 4 bits uint8, which are 8 too large or stand for other numbers. A
    weight is such a number times d s, of integers

        code d s,   or with m   code d s + LEVEL_OFFSETS[bits] d s - m t

    with numbers `d`, `m` float32 [M, 1] and integers `s`, `t` of each group; without them 1.
    """

    codes: torch.Tensor
    d: torch.Tensor
    s: torch.Tensor | None = None
    m: torch.Tensor | None = None
    t: torch.Tensor | None = None

    def scales(self) -> torch.Tensor:
        """[M, groups], exact."""
        return _products(self.d, self.s)

    def shifts(self, bits: int) -> torch.Tensor | None:
        """[M, groups], rounded once."""
        if self.m is None:
            return None
        return LEVEL_OFFSETS[bits] * self.scales() - _products(self.m, self.t)


def _products(wide: torch.Tensor, narrow: torch.Tensor | None) -> torch.Tensor:
    if narrow is None:
        return wide
    return (narrow.unflatten(1, (wide.shape[1], -1)) * wide[..., None]).flatten(1)


class BlockKind(NamedTuple):
    """`size`: weights of a block, `num_bytes`: its bytes. `format`: that of the kernels."""

    size: int
    num_bytes: int
    format: str
    read: Callable[[torch.Tensor], Unpacked]


def packed(
    parts: Sequence[tuple[np.ndarray, str]], format: str | None = None, order: np.ndarray | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of blocks, uint8 [N, bytes] with their kind, parts on top of each other -> (packed codes, scale) of the
    kernels; no weight changes.

    Args:
        format: one that holds more than that of a part, see `widest`; None: that of the parts.
        order: which row of the parts each row is (N may be another number then); None: they are in order.
    """
    of_parts = [BLOCK_KINDS[kind] for _, kind in parts]
    format = format or of_parts[0].format
    columns = parts[0][0].shape[1] // of_parts[0].num_bytes * of_parts[0].size
    num_rows = sum(len(data) for data, _ in parts) if order is None else len(order)
    step = max(PANEL, SLICE_BYTES // parts[0][0].shape[1] // PANEL * PANEL)
    codes, scales = empty_codes(packed_shapes(num_rows, columns, format)[0], torch.device("cpu")), []
    for first in range(0, num_rows, step):
        rows = np.arange(first, min(first + step, num_rows)) if order is None else order[first : first + step]
        wide, *numbers = _unpacked_rows(parts, rows, columns, format)
        pieces = pack_codes(wide, format)
        codes[first // PANEL : first // PANEL + len(pieces)].copy_(pieces)
        scales.append(numbers)
    whole = [None if each[0] is None else torch.cat(each) for each in zip(*scales)]
    if _is_of_one_kind(parts):
        return codes, _packed_scales(Unpacked(codes, *whole), of_parts[0].format, format)
    return codes, packed_groups(*whole)


def _is_of_one_kind(parts: Sequence[tuple[np.ndarray, str]]) -> bool:
    return len({kind for _, kind in parts}) == 1


def _unpacked_rows(
    parts: Sequence[tuple[np.ndarray, str]], rows: np.ndarray, columns: int, format: str
) -> tuple[torch.Tensor | None, ...]:
    """(codes [n, columns] of `format`, numbers of their groups) of rows of the parts: as in `Unpacked` if parts are
    of one kind, else the scales, and shifts, of that format."""
    if len(parts) == 1:
        ((data, kind),) = parts
        return _of_kind(
            data[rows[0] : rows[-1] + 1] if _are_in_order(rows) else data[rows], kind, columns, format
        )
    starts = np.cumsum([0, *(len(data) for data, _ in parts)])
    found = []  # (where these rows go, what they are)
    for (data, kind), start, end in zip(parts, starts, starts[1:]):
        own = np.flatnonzero((rows >= start) & (rows < end))
        if len(own):
            codes, *numbers = _of_kind(data[rows[own] - start], kind, columns, format)
            if not _is_of_one_kind(parts):
                numbers = _widened_scales(Unpacked(codes, *numbers), BLOCK_KINDS[kind].format, format)
            found.append((torch.from_numpy(own), codes, *numbers))
    where, *values = zip(*found)
    back = torch.cat(where).argsort()
    return tuple(None if each[0] is None else torch.cat(each)[back] for each in values)


def _are_in_order(rows: np.ndarray) -> bool:
    return bool((np.diff(rows) == 1).all())


def _of_kind(rows: np.ndarray, kind: str, columns: int, format: str) -> tuple[torch.Tensor | None, ...]:
    """Rows of one kind: codes [n, columns] in `format`, and what `Unpacked` has beside codes, [n, ...]."""
    found = _unpacked(rows, kind)
    codes = _widened(found.codes, BLOCK_KINDS[kind].format, format).reshape(len(rows), columns)
    return codes, *(part if part is None else part.reshape(len(rows), -1) for part in found[1:])


def _unpacked(rows: np.ndarray, kind: str) -> Unpacked:
    """Raises CheckpointError: a number of a block is none."""
    block = BLOCK_KINDS[kind]
    found = block.read(torch.from_numpy(np.ascontiguousarray(rows)).reshape(-1, block.num_bytes))
    for numbers in (found.d, found.m):
        if numbers is not None and not numbers.isfinite().all():
            raise CheckpointError(f"a block of {kind} has a scale that is NaN or infinity")
    return found


def _packed_scales(found: Unpacked, format: str, to: str) -> torch.Tensor:
    """Of rows [N, ...], codes of `format` that were widened to another."""
    was, wanted = weight_format(format), weight_format(to)
    if found.s is not None and was == wanted:
        return packed_levels(found.d, found.s, format, None if found.m is None else (found.m, found.t))
    return packed_groups(*_widened_scales(found, format, to))


def _widened_scales(found: Unpacked, format: str, to: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and shifts of rows, for each group of the other format."""
    was, wanted = weight_format(format), weight_format(to)
    scales, shifts = found.scales(), found.shifts(was.bits)
    if shifts is None and wanted.is_shifted:
        shifts = torch.zeros_like(scales)
    times = was.group // wanted.group
    return tuple(p if p is None else p.repeat_interleave(times, dim=1) for p in (scales, shifts))


def _widened(codes: torch.Tensor, format: str, to: str) -> torch.Tensor:
    was = weight_format(format)
    if was.bits != 4 or weight_format(to).bits == 4:
        return codes
    return _less(codes, 8) if was.table is None else _of_table(codes, was.table).to(torch.int8)


def _of_table(codes: torch.Tensor, table: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.float32)[codes.int()]


def expanded(data: np.ndarray, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Rows of blocks, or plain numbers of any shape -> weights, rounded once."""
    if kind == "BF16":
        return torch.from_numpy(np.ascontiguousarray(data)).view(torch.bfloat16).to(dtype)
    if data.dtype != np.uint8:
        return torch.from_numpy(np.ascontiguousarray(data)).to(dtype)
    values = _values if kind in BLOCK_KINDS else _values_by_gguf
    rows = max(1, SLICE_BYTES // data.shape[-1])
    flat = data.reshape(-1, data.shape[-1])
    parts = [values(flat[first : first + rows], kind).to(dtype) for first in range(0, len(flat), rows)]
    return torch.cat(parts).reshape(*data.shape[:-1], -1)


def _values(rows: np.ndarray, kind: str) -> torch.Tensor:
    """In float32, as ggml computes them."""
    found, fmt = _unpacked(rows, kind), weight_format(BLOCK_KINDS[kind].format)
    if fmt.table is not None:
        q = _of_table(found.codes, fmt.table)
    elif fmt.is_float:
        q = from_e2m1(found.codes)
    else:  # shifts are of codes that are less by an offset
        less = (8 if fmt.bits == 4 else 0) - (LEVEL_OFFSETS[fmt.bits] if fmt.is_shifted else 0)
        q = found.codes.float() - less
    values = q.unflatten(1, (-1, fmt.group)) * found.scales()[..., None]
    if found.m is not None:
        values -= _products(found.m, found.t)[..., None]
    return values.reshape(len(rows), -1)


def _values_by_gguf(rows: np.ndarray, kind: str) -> torch.Tensor:
    """Raises ConfigError: the package is missing."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ConfigError(
            f"Weights in {kind} need the package gguf: pip install 'pagebinder[gguf]'."
        ) from error
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))


def widest(formats: set[str]) -> str:
    """The format that holds weights of all of these: int4_g32 and uint8_g16 -> uint8_g16. Integers only."""
    kinds = [weight_format(in_8_bits(name) if weight_format(name).table else name) for name in formats]
    sign = "u" if any(kind.is_shifted for kind in kinds) else ""
    bits, group = max(kind.bits for kind in kinds), min(kind.group for kind in kinds)
    name = f"{sign}int{bits}_g{group}"
    return name if name in STORED_FORMATS or name in FORMATS else f"{sign}int8_g{group}"


# ---- of 32 weights -----------------------------------------------------------------------------------------------


def _halves(blocks: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """float16 at the beginning of blocks as float32 [M, 1], then bytes as `sizes` say."""
    count = (blocks.shape[1] - sum(sizes)) // 2
    numbers = blocks[:, : 2 * count].contiguous().view(torch.float16).float()
    return [*numbers.split(1, dim=1), *blocks[:, 2 * count :].split(sizes, dim=1)]


def _nibbles(qs: torch.Tensor) -> torch.Tensor:
    """Bytes [M, 16] -> the integers of their lower halves, then those of their upper ones."""
    return torch.cat((qs & 15, qs >> 4), dim=-1)


def _fifth_bits(qh: torch.Tensor) -> torch.Tensor:
    """4 bytes -> the fifth bit of 32 integers."""
    return (_shifted_down(qh, 1, *range(8)) & 1) << 4


def _q4_0(blocks: torch.Tensor) -> Unpacked:
    d, qs = _halves(blocks, 16)
    return Unpacked(_nibbles(qs), d)


def _q4_1(blocks: torch.Tensor) -> Unpacked:
    d, m, qs = _halves(blocks, 16)
    return Unpacked(_nibbles(qs), d, m=-m)


def _q5_0(blocks: torch.Tensor) -> Unpacked:
    d, qh, qs = _halves(blocks, 4, 16)
    return Unpacked(_less(_nibbles(qs) | _fifth_bits(qh), 16), d)


def _q5_1(blocks: torch.Tensor) -> Unpacked:
    d, m, qh, qs = _halves(blocks, 4, 16)
    return Unpacked(_less(_nibbles(qs) | _fifth_bits(qh), 16), d, m=-m)


def _q8_0(blocks: torch.Tensor) -> Unpacked:
    d, qs = _halves(blocks, 32)
    return Unpacked(qs.contiguous().view(torch.int8), d)


def _iq4_nl(blocks: torch.Tensor) -> Unpacked:
    d, qs = _halves(blocks, 16)
    return Unpacked(_nibbles(qs), d)


def _mxfp4(blocks: torch.Tensor) -> Unpacked:
    exponents, qs = blocks.split((1, 16), dim=1)
    return Unpacked(_nibbles(qs), torch.ldexp(torch.ones(exponents.shape), exponents.int() - E8M0_BIAS))


def _less(q: torch.Tensor, half: int) -> torch.Tensor:
    return (q.to(torch.int16) - half).to(torch.int8)


# ---- of 256 weights ----------------------------------------------------------------------------------------------


def _shifted_down(qs: torch.Tensor, run: int, *shifts: int) -> torch.Tensor:
    """Bytes [M, n] -> [M, n / run, shifts, run], each run moved down by each of the shifts, as one row."""
    runs = qs.unflatten(1, (-1, 1, run))
    return (runs >> torch.tensor(shifts, dtype=torch.uint8)[:, None]).flatten(1)


def _six_bits(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes -> 8 scales and 8 factors of m, of 6 bits: the first ones hold the upper two of the last four."""
    d, m, last = scales.unflatten(1, (3, 4)).unbind(1)
    return (
        torch.cat((d & 63, (last & 15) | (d >> 2) & 48), dim=1),
        torch.cat((m & 63, (last >> 4) | (m >> 2) & 48), dim=1),
    )


def _q2_k(blocks: torch.Tensor) -> Unpacked:
    scales, qs, numbers = blocks.split((16, 64, 4), dim=1)
    d, m = _halves(numbers)
    q = _shifted_down(qs, 32, 0, 2, 4, 6) & 3
    return Unpacked(q, d, scales & 15, m, scales >> 4)


def _q3_k(blocks: torch.Tensor) -> Unpacked:
    high, qs, scales, numbers = blocks.split((32, 64, 12, 2), dim=1)
    (d,) = _halves(numbers)
    low = _shifted_down(scales[:, :8], 8, 0, 4) & 15
    s = low | (_shifted_down(scales[:, 8:], 4, 0, 2, 4, 6) & 3) << 4
    q = _shifted_down(qs, 32, 0, 2, 4, 6) & 3
    return Unpacked(q + 4 + 4 * (_shifted_down(high, 32, *range(8)) & 1), d, _less(s, 32))


def _q4_k(blocks: torch.Tensor) -> Unpacked:
    d, m, scales, qs = _halves(blocks, 12, 128)
    s, t = _six_bits(scales)
    return Unpacked(_shifted_down(qs, 32, 0, 4) & 15, d, s, m, t)


def _q5_k(blocks: torch.Tensor) -> Unpacked:
    d, m, scales, high, qs = _halves(blocks, 12, 32, 128)
    s, t = _six_bits(scales)
    q = (_shifted_down(qs, 32, 0, 4) & 15) | (_shifted_down(high, 32, *range(8)) & 1) << 4
    return Unpacked(_less(q, 16), d, s, m, t)


def _q6_k(blocks: torch.Tensor) -> Unpacked:
    low, high, scales, numbers = blocks.split((128, 64, 16, 2), dim=1)
    (d,) = _halves(numbers)
    q = (_shifted_down(low, 64, 0, 4) & 15) | (_shifted_down(high, 32, 0, 2, 4, 6) & 3) << 4
    return Unpacked(_less(q, 32), d, scales.contiguous().view(torch.int8))


def _iq4_xs(blocks: torch.Tensor) -> Unpacked:
    d, high, low, qs = _halves(blocks, 2, 4, 128)
    s = (_shifted_down(low, 1, 0, 4) & 15) | (_shifted_down(high, 1, 0, 2, 4, 6) & 3) << 4
    return Unpacked(_shifted_down(qs, 16, 0, 4) & 15, d, _less(s, 32))


def _of_6_bits(format: str) -> str:
    """Codes of 6 bits where the machine reads them as fast as those of 8 (quant/digit_products.h); matrix tiles serve
    many rows of 8 bits, but for groups of half a step."""
    features = set(cpu_features().split())
    serves = "avx2" in features and ("avx512f" not in features or features >= {"avx512_vnni", "avx512vbmi"})
    has_tiles = "amx_tile" in features and not format.endswith("_g16")
    return format if serves and not has_tiles else format.replace("int6", "int8")


BLOCK_KINDS = {
    "Q4_0": BlockKind(32, 18, "int4_g32", _q4_0),
    "Q4_1": BlockKind(32, 20, "uint4_g32", _q4_1),
    "Q5_0": BlockKind(32, 22, _of_6_bits("int6_g32"), _q5_0),
    "Q5_1": BlockKind(32, 24, _of_6_bits("uint6_g32"), _q5_1),
    "Q8_0": BlockKind(32, 34, "int8_g32", _q8_0),
    "IQ4_NL": BlockKind(32, 18, "iq4_g32", _iq4_nl),
    "MXFP4": BlockKind(32, 17, "mxfp4", _mxfp4),
    "Q2_K": BlockKind(256, 84, "uint4_g16", _q2_k),
    "Q3_K": BlockKind(256, 110, "int4_g16", _q3_k),
    "Q4_K": BlockKind(256, 144, "uint4_g32", _q4_k),
    "Q5_K": BlockKind(256, 176, _of_6_bits("uint6_g32"), _q5_k),
    "Q6_K": BlockKind(256, 210, _of_6_bits("int6_g16"), _q6_k),
    "IQ4_XS": BlockKind(256, 136, "iq4_g32", _iq4_xs),
}
