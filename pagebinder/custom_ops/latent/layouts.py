"""Byte layouts of latent caches: one row (entry) per token, or per several tokens that were compressed into one.

T rows, D width of a row, of which the trailing `rope_dim` channels are kept in bfloat16 and the leading nope = D -
rope_dim are quantised; N blocks (pages), n entries per page.

    layout       bytes of an entry (DeepSeek's sizes)                   page
    "plain"      D elements                                             [n, D] float32, bfloat16 or float16
    "fp8_v4"     nope e4m3, rope bf16, scales    448 + 128 + 8 = 584    rows, then scales, then padding
    "fp8_v32"    nope e4m3, scales, rope bf16    512 + 16 + 128 = 656   entry after entry
    "fp8_index"  D e4m3, one fp32 scale          128 + 4 = 132          rows, then scales
    "fp4_index"  D / 2 nibbles, scales           64 + 4 = 68            rows, then scales

    page of "fp8_v4", n = 2     | e4m3 448 | bf16 64 | e4m3 448 | bf16 64 | 7 UE8M0, 0 | 7 UE8M0, 0 | padding |
                                0                    576                  1152         1160         1168      1728

Blocks of 64 channels ("fp8_v4"), 32 ("fp4_index") or a whole row ("fp8_index") share a scale that is a power of two,
see `small_floats`; "fp8_v32" scales blocks of 128 by amax / 448. Rows are rounded to bfloat16 before. Sources: the
reference kernels of DeepSeek-V4 and V3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebinder.custom_ops.latent import small_floats
from pagebinder.custom_ops.latent.small_floats import E4M3_MAX

LAYOUTS = ("plain", "fp8_v4", "fp8_v32", "fp8_index", "fp4_index")
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_SCALE = 2.0**-126


@dataclass(frozen=True)
class RowLayout:
    """One entry of a quantised layout; all sizes in bytes but width, rope_dim and block (channels)."""

    name: str
    width: int
    rope_dim: int
    block: int
    row_bytes: int
    scale_bytes: int

    @property
    def nope(self) -> int:
        return self.width - self.rope_dim

    @property
    def entry_bytes(self) -> int:
        return self.row_bytes + self.scale_bytes

    def page_bytes(self, entries: int, *, padded: bool = False) -> int:
        """Bytes of a page; `padded`: up to a multiple of row_bytes, 576 in DeepSeek-V4, as its kernels want it."""
        size = entries * self.entry_bytes
        return -(-size // self.row_bytes) * self.row_bytes if padded else size

    def entries(self, page_bytes: int) -> int:
        """Entries of a page, padded or not: padding is always smaller than an entry."""
        return page_bytes // self.entry_bytes


def row_layout(name: str, width: int, rope_dim: int) -> RowLayout:
    """The quantised layout `name` for rows of `width` channels.

    Raises:
        ValueError: unknown name, or sizes that the layout cannot hold.
    """
    nope = width - rope_dim
    require(rope_dim >= 0 and nope > 0 and rope_dim % 2 == 0, "rope_dim must be even and less than the width")
    if name == "fp8_v4":
        require(nope % 64 == 0, "fp8_v4 needs width - rope_dim in multiples of 64")
        return RowLayout(name, width, rope_dim, 64, nope + 2 * rope_dim, -(-nope // 512) * 8)
    if name == "fp8_v32":
        require(nope % 128 == 0, "fp8_v32 needs width - rope_dim in multiples of 128")
        return RowLayout(name, width, rope_dim, 128, nope + nope // 32 + 2 * rope_dim, 0)
    if name == "fp8_index":
        require(
            rope_dim == 0 and width % 16 == 0, "fp8_index needs a width in multiples of 16 and rope_dim 0"
        )
        return RowLayout(name, width, 0, width, width, 4)
    if name == "fp4_index":
        require(
            rope_dim == 0 and width % 32 == 0, "fp4_index needs a width in multiples of 32 and rope_dim 0"
        )
        return RowLayout(name, width, 0, 32, width // 2, width // 32)
    raise ValueError(f"unknown layout {name!r}; one of {LAYOUTS}")


def row_bytes(name: str, *, width: int, rope_dim: int = 0) -> int:
    """Bytes of one entry with its scales, without a page's padding. Raises ValueError as `row_layout`."""
    return row_layout(name, width, rope_dim).entry_bytes


def rows_per_block(cache: torch.Tensor, layout: str, width: int, rope_dim: int = 0) -> int:
    """Entries per page (n) of a cache whose rows are `width` wide.

    Raises:
        ValueError: the cache's shape, strides or dtype are not those of the layout.
    """
    if layout == "plain":
        require(
            cache.dim() == 3 and cache.dtype in PLAIN_DTYPES, "a plain cache is [N, n, D] of a float type"
        )
        require(cache.shape[2] == width, f"a cache row is {cache.shape[2]} wide, not {width}")
        require(width == 1 or cache.stride(2) == 1, "the last stride of cache must be 1")
        return cache.shape[1]
    spec = row_layout(layout, width, rope_dim)
    require(cache.dim() == 2 and cache.dtype == torch.uint8, f"an {layout} cache is [N, page bytes] uint8")
    require(cache.stride(1) == 1, "the last stride of cache must be 1")
    entries = spec.entries(cache.shape[1])
    require(entries > 0, "a page must hold at least one entry")
    return entries


def pack_pages(
    rows_NnD: torch.Tensor, layout: str, rope_dim: int = 0, *, padded: bool = False
) -> torch.Tensor:
    """Whole pages: rows [N, n, D] -> [N, page bytes] uint8, zeros as padding; plain rows stay as they are."""
    if layout == "plain":
        return rows_NnD
    num_blocks, entries, width = rows_NnD.shape
    size = row_layout(layout, width, rope_dim).page_bytes(entries, padded=padded)
    cache = torch.zeros((num_blocks, size), dtype=torch.uint8, device=rows_NnD.device)
    slots = torch.arange(num_blocks * entries, device=rows_NnD.device)
    store_rows(rows_NnD.flatten(0, 1), cache, slots, layout, rope_dim)
    return cache


def unpack_pages(cache: torch.Tensor, layout: str, width: int, rope_dim: int = 0) -> torch.Tensor:
    """Whole pages: cache -> rows [N, n, width] float32. Raises ValueError as `rows_per_block`."""
    entries = rows_per_block(cache, layout, width, rope_dim)
    slots = torch.arange(len(cache) * entries, device=cache.device)
    return load_rows(cache, slots, layout, width, rope_dim).unflatten(0, (len(cache), entries))


def store_rows(
    rows_TD: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor, layout: str, rope_dim: int = 0
) -> None:
    """Store rows [T, D] at valid slots [T] (block * n + entry), in place. Raises ValueError as `rows_per_block`."""
    entries = rows_per_block(cache, layout, rows_TD.shape[1], rope_dim)
    slots = slots_T.long()
    if layout == "plain":
        cache[slots // entries, slots % entries] = rows_TD.to(cache.dtype)
        return
    spec = row_layout(layout, rows_TD.shape[1], rope_dim)
    data, scales = quantise_rows(rows_TD, spec)
    block, row_at, scale_at = _addresses(spec, slots, entries)
    cache[block, row_at] = data
    cache[block, scale_at] = scales


def load_rows(
    cache: torch.Tensor, slots: torch.Tensor, layout: str, width: int, rope_dim: int = 0
) -> torch.Tensor:
    """Rows at valid slots [...] as float32 [..., width]. Raises ValueError as `rows_per_block`."""
    entries = rows_per_block(cache, layout, width, rope_dim)
    slots = slots.long()
    if layout == "plain":
        return cache[slots // entries, slots % entries].float()
    spec = row_layout(layout, width, rope_dim)
    block, row_at, scale_at = _addresses(spec, slots, entries)
    return dequantise_rows(cache[block, row_at], cache[block, scale_at], spec)


def quantise_rows(rows: torch.Tensor, spec: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., D] -> (row bytes [..., row_bytes], bytes of scales behind the rows [..., scale_bytes]), uint8."""
    rounded = rows.to(torch.bfloat16)
    nope, rope = rounded[..., : spec.nope].float(), _bytes(rounded[..., spec.nope :])
    blocks = nope.unflatten(-1, (-1, spec.block))
    if spec.name == "fp4_index":
        codes, scale_bytes = small_floats.quantise_fp4(blocks)
        return (codes[..., ::2] | codes[..., 1::2] << 4).flatten(-2), scale_bytes
    if spec.name == "fp8_v32":
        scales = (blocks.abs().amax(-1) / E4M3_MAX).clamp(min=MIN_SCALE)
        codes = small_floats.to_e4m3(blocks / scales[..., None])
        return torch.cat([codes.flatten(-2), _bytes(scales), rope], -1), rope[..., :0]
    codes, exponents = small_floats.quantise_fp8(blocks)
    if spec.name == "fp8_index":
        return codes.flatten(-2), _bytes(small_floats.power_of_two(exponents))
    scale_bytes = (exponents + 127).to(torch.uint8)
    scale_bytes = torch.nn.functional.pad(scale_bytes, (0, spec.scale_bytes - scale_bytes.shape[-1]))
    return torch.cat([codes.flatten(-2), rope], -1), scale_bytes


def dequantise_rows(data: torch.Tensor, scales: torch.Tensor, spec: RowLayout) -> torch.Tensor:
    """The reverse of `quantise_rows`, float32 [..., D]."""
    if spec.name == "fp4_index":
        codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
        values = small_floats.from_e2m1(codes)
    else:
        values = small_floats.from_e4m3(data[..., : spec.nope])
    num_blocks = spec.nope // spec.block
    if spec.name == "fp8_v32":
        factors = _of_bytes(data[..., spec.nope : spec.nope + 4 * num_blocks], torch.float32)
    elif spec.name == "fp8_index":
        factors = _of_bytes(scales, torch.float32)
    else:
        factors = small_floats.from_ue8m0(scales[..., :num_blocks])
    values = (values.unflatten(-1, (-1, spec.block)) * factors[..., None]).flatten(-2)
    if spec.rope_dim == 0:
        return values
    rope = _of_bytes(data[..., spec.row_bytes - 2 * spec.rope_dim :], torch.bfloat16)
    return torch.cat([values, rope.float()], -1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _of_bytes(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.clone(memory_format=torch.contiguous_format).view(dtype)


def _addresses(
    spec: RowLayout, slots: torch.Tensor, entries: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block [..., 1], and where the bytes of rows [..., row_bytes] and scales [..., scale_bytes] lie in its page."""
    block, entry = (slots // entries)[..., None], (slots % entries)[..., None]
    row_at = entry * spec.row_bytes + torch.arange(spec.row_bytes, device=slots.device)
    scales_at = entries * spec.row_bytes + entry * spec.scale_bytes
    return block, row_at, scales_at + torch.arange(spec.scale_bytes, device=slots.device)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
