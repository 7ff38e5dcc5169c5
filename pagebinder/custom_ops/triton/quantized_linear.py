"""`pagebinder_triton::quantized_linear` and `fp8_linear`: weights stay codes in memory until they are operands.

Tiles by the number of rows, in place of autotuning:

    rows       rows x columns x k, warps, stages       bound by
    <= 16      16  x 32  x 256, 4, 4                   reading the weight: a program streams one panel
               16  x 32  x 128, 4, 7                   ... with scales of 128 k
    <= 64      64  x 64  x 128, 4, 3
    beyond     128 x 128 x 64,  8, 3                   arithmetic
    float32    32  x 32  x 32,  4, 2                   arithmetic, without tensor cores

Where tiles of up to 64 rows are too few for the multiprocessors, programs take parts of k: their sums go to memory,
and a second kernel adds them in their order. One program keeps a multiprocessor busy: there are no more of them.

Where scales change with k, each sum is over the k of one scale. The smallest tile over codes of 4 bits makes several
sums at a time, one a warp, so that as many bytes are on their way from memory as without; the others make one. Of 8
bits that would be two sums, each made twice by four warps: there more stages have as many bytes on their way.

From 512 rows on, activations in e4m3 go to the library's own e4m3 product (`torch._scaled_mm`) where that takes their
scales. The weight is put in rows for each such call: a byte read and one written a weight, which by count is a tenth
of the product's time at 4096 rows, where an H200 makes 1,300 TFLOP/s of it. There one row reads 2.3 to 2.6 TB/s of
codes of 8 bits, 1.0 of 4 bits, 3.1 with x in e4m3, of 4.3 that a copy moves: tiles are as they were thought out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from pagebinder.custom_ops.fp8.linear import FORMATS as FP8_FORMATS
from pagebinder.custom_ops.fp8.quant import CODES, GROUP
from pagebinder.custom_ops.linear.weight_formats import PANEL, STEP, packed_shapes, weight_format
from pagebinder.custom_ops.triton.gpu import FP8_CAPABILITY, HOPPER, capability, has_fp8, multiprocessors
from pagebinder.custom_ops.triton.packed_kernels import packed_linear_kernel, sum_parts_kernel, unpack_kernel
from pagebinder.custom_ops.triton.rms_norm import rows_of

# (rows at most, rows, panels of 32 columns, steps of 32 k, warps, stages)
TILES = ((16, 16, 1, 8, 4, 4), (64, 64, 2, 4, 4, 3), (None, 128, 4, 2, 8, 3))
MIN_ROWS_OF_TILE = 16
STAGES_OF_SCALED_STEPS = 7  # of the smallest tile, over codes of 8 bits whose scales change with k
TILE_OF_FLOAT32 = (32, 1, 1, 4, 2)
MIN_ROWS_OF_LIBRARY = 512
MAX_ROWS_OF_PARTS = 64
MIN_TILES_OF_PART = 2  # of k
COLUMNS_OF_SUMS = 256
UNPACKED_STEPS = 4  # that a program puts in rows
# format -> what shares a scale of the weight, see packed_linear_kernel
W_SHARES = {"fp8": "row", "fp8_tensor": "tensor", "fp8_block": "block", "int8": "row"}


def quantized_linear(x, qweight, scale, bias=None, *, format):
    """See `quantized_linear_reference`."""
    check_weight(qweight, scale, bias, format)
    inner = qweight.shape[1] * STEP
    if x.shape[-1] != inner:
        raise ValueError(f"x must be [..., {inner}], not {list(x.shape)}")
    out = torch.empty((*x.shape[:-1], qweight.shape[0] * PANEL), dtype=x.dtype, device=x.device)
    if out.numel():
        _launch(rows_of(x), None, "", qweight, scale, bias, out, format)
    return out


def fp8_linear(x, x_scale, qweight, scale, bias=None, *, format, dtype):
    """See `fp8_linear_reference`."""
    if format not in FP8_FORMATS:
        raise ValueError(f"fp8_linear takes weights in {', '.join(FP8_FORMATS)}, not {format!r}")
    check_weight(qweight, scale, bias, format)
    inner = qweight.shape[1] * STEP
    if x.dtype != CODES or x.shape[-1] != inner:
        raise ValueError(f"x must be {CODES} [..., {inner}], not {x.dtype} {list(x.shape)}")
    shares = _x_shares(x_scale, x.shape)
    out = torch.empty((*x.shape[:-1], qweight.shape[0] * PANEL), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    rows, x_scale = rows_of(x.view(torch.uint8)), x_scale.contiguous()
    bias_dtype = dtype if bias is None else bias.dtype
    scales = library_scales(len(rows), shares, format, dtype, bias_dtype, capability(x.device))
    if scales is None:
        _launch(rows, x_scale, shares, qweight, scale, bias, out, format)
        return out
    return by_library(rows, x_scale, qweight, scale, bias, dtype, scales).view(out.shape)


def library_scales(
    num_rows: int, x_shares: str, format: str, dtype: torch.dtype, bias_dtype: torch.dtype, gpu: tuple[int, int]
) -> str | None:  # fmt: skip
    """The scales with which the library multiplies: "tensor" (one a side), "rows" (of rows and columns), None: not.

    Scales of rows need Hopper, and give bfloat16 alone. Of groups and blocks the library takes some as well, in
    layouts that differ between its versions: those are served by our kernel, as is float32, whose sums the tensor
    cores of e4m3 would not keep.
    """
    if num_rows < MIN_ROWS_OF_LIBRARY or gpu < FP8_CAPABILITY or bias_dtype != dtype:
        return None
    if x_shares == "group" or W_SHARES[format] == "block":
        return None
    if x_shares == W_SHARES[format] == "tensor":
        return "tensor" if dtype in (torch.bfloat16, torch.float16) else None
    return "rows" if gpu >= HOPPER and dtype == torch.bfloat16 else None


def by_library(rows, x_scale, qweight, scale, bias, dtype, scales: str) -> torch.Tensor:
    """[M, N] from code bytes [M, K] and a packed weight, with `scales` as from `library_scales`."""
    weight = unpacked(qweight).view(CODES).t()
    if scales == "rows":
        x_scale = x_scale.reshape(-1, 1).expand(len(rows), 1).contiguous()
        scale = scale.expand(weight.shape[1])[None].contiguous()
    codes = rows.contiguous().view(CODES)
    return torch._scaled_mm(codes, weight, x_scale, scale, bias, out_dtype=dtype, use_fast_accum=False)


def unpacked(qweight: torch.Tensor) -> torch.Tensor:
    """Packed codes of 8 bits -> [N, K] uint8."""
    panels, steps = qweight.shape[:2]
    codes = torch.empty((panels * PANEL, steps * STEP), dtype=torch.uint8, device=qweight.device)
    grid = (panels, triton.cdiv(steps, UNPACKED_STEPS))
    unpack_kernel[grid](qweight, codes, panels, steps, STEPS=UNPACKED_STEPS)
    return codes


class Tiling(NamedTuple):
    """How a kernel over packed weights goes through them."""

    rows: int
    panels: int
    steps: int  # of 32 k that are taken at a time
    warps: int
    stages: int
    facts: dict  # operands of the kernel that follow from the format


def tiling(num_rows: int, dtype: torch.dtype, format: str, x_shares: str, device: torch.device) -> Tiling:
    """Of a product of so many rows of x of that dtype; `x_shares`: see packed_linear_kernel."""
    fmt = weight_format(format)
    of_groups = "shifted group" if fmt.is_shifted else "group"
    w_shares = of_groups if fmt.has_groups else W_SHARES[format]
    if dtype == torch.float32:
        block, at_once, taken, warps, stages = TILE_OF_FLOAT32
    else:
        block, at_once, taken, warps, stages = next(
            t for most, *t in TILES if most is None or num_rows <= most
        )
    group_steps, sums = (fmt.group or GROUP) // STEP, 1
    changes_with_k = x_shares == "group" or w_shares in ("block", "group", "shifted group")
    if dtype != torch.float32 and changes_with_k:
        if block == MIN_ROWS_OF_TILE and fmt.bits == 8:
            stages = STAGES_OF_SCALED_STEPS
        taken = max(group_steps, taken) if block == MIN_ROWS_OF_TILE and fmt.bits == 4 else group_steps
        sums = taken // group_steps
    codes = {(4, False): "int4", (4, True): "e2m1", (8, False): "int8", (8, True): "e4m3"}[
        fmt.bits, fmt.is_float
    ]
    facts = {"SUMS": sums, "FORMAT": codes, "W_SHARES": w_shares, "GROUP_STEPS": group_steps}
    return Tiling(block, at_once, taken, warps, stages, facts | {"NATIVE": has_fp8(device)})


def _launch(rows, x_scale, x_shares, qweight, scale, bias, out, format) -> None:
    panels, steps = qweight.shape[:2]
    tile = tiling(len(rows), rows.dtype, format, x_shares, rows.device)
    row_tiles = triton.cdiv(len(rows), tile.rows)
    programs = row_tiles * triton.cdiv(panels, tile.panels)
    parts, part_tiles = parts_of(len(rows), programs, triton.cdiv(steps, tile.steps), rows.device)
    shares, target = {"X_SHARES": x_shares, "PARTS": parts}, out
    if parts > 1:
        target = torch.empty((parts, len(rows), panels * PANEL), dtype=torch.float32, device=out.device)
    packed_linear_kernel[programs, parts](
        rows, x_scale, qweight, scale, bias, target, rows.stride(0), len(rows), panels, steps,
        part_tiles * tile.steps, row_tiles, BLOCK_M=tile.rows, PANELS=tile.panels, STEPS=tile.steps, **tile.facts,
        **shares, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        columns = panels * PANEL
        operands = (target, x_scale, scale, bias, out, len(rows), columns)
        grid = (len(rows), triton.cdiv(columns, COLUMNS_OF_SUMS))
        shares["W_SHARES"] = tile.facts["W_SHARES"]
        sum_parts_kernel[grid](*operands, BLOCK_N=COLUMNS_OF_SUMS, **shares, num_warps=1)


def parts_of(num_rows: int, programs: int, tiles: int, device: torch.device) -> tuple[int, int]:
    """(parts of k, tiles of k of each) where `programs` would run without parts, each over so many tiles."""
    wanted = multiprocessors(device) // programs if num_rows <= MAX_ROWS_OF_PARTS else 1
    part_tiles = triton.cdiv(tiles, max(1, min(wanted, tiles // MIN_TILES_OF_PART)))
    return triton.cdiv(tiles, part_tiles), part_tiles


def check_weight(qweight, scale, bias, format) -> None:
    """Of one layer, or of experts, whose number stands in front of each shape. Raises ValueError."""
    if problem := weight_format(format).gpu_problem:
        raise ValueError(f"no kernel here reads {format}: {problem}")
    experts = tuple(qweight.shape[:-4])
    columns, inner = (s * m for s, m in zip(qweight.shape[-4:-2], (PANEL, STEP)))
    shapes = tuple((*experts, *shape) for shape in packed_shapes(columns, inner, format))
    if (tuple(qweight.shape), tuple(scale.shape)) != shapes or qweight.dtype != torch.uint8:
        raise ValueError(
            f"a weight {[*experts, columns, inner]} in {format} is uint8 {shapes[0]} with scales {shapes[1]}"
        )
    if not (qweight.is_contiguous() and scale.is_contiguous()):
        raise ValueError("a packed weight and its scales must be contiguous")
    if bias is not None and (bias.shape != (*experts, columns) or bias.stride(-1) != 1):
        raise ValueError(f"bias must be {[*experts, columns]}, not {list(bias.shape)}")


def _x_shares(x_scale, shape) -> str:
    rows, groups = tuple(shape[:-1]), -(-shape[-1] // GROUP)
    if x_scale.dtype == torch.float32:
        if tuple(x_scale.shape) == (1,):
            return "tensor"
        if tuple(x_scale.shape) == (*rows, 1):
            return "token"
        if tuple(x_scale.shape) == (*rows, groups):
            return "group"
    raise ValueError(
        f"x_scale must be float32 [1], {[*rows, 1]} or {[*rows, groups]}, not {list(x_scale.shape)}"
    )
