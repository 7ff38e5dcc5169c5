"""`pagebinder_triton::moe_experts` and `expert_linear`: launches, see `moe_kernels`.

    ids [T, K] --sort--> slots by expert, where each begins       on the device: no launch depends on what is in ids
    x --up, gate--> h [S, I], in sorted order --down--> rows [S, C], in the order of slots --combine--> out [T, C]

Tiles by the mean number of rows of an expert, in place of autotuning:

    rows       rows x columns x k, warps, stages
    <= 16      16  x 64  x 128, 4, 3                   bound by reading weights
    <= 64      64  x 64  x 64,  4, 3
    beyond     128 x 64  x 64,  8, 3                   up: 128 columns of its weight, as it makes two sums
    float32    32  x 32  x 32,  4, 2                   without tensor cores
"""

from __future__ import annotations

import torch
import triton

from pagebinder.custom_ops.moe.experts import check_experts
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.custom_ops.triton.moe_kernels import combine_kernel, expert_kernel
from pagebinder.custom_ops.triton.rms_norm import rows_of, warps_of

# (mean rows of an expert at most, rows, columns, k, warps, stages)
TILES = ((16, 16, 64, 128, 4, 3), (64, 64, 64, 64, 4, 3), (None, 128, 64, 64, 8, 3))
TILE_OF_FLOAT32 = (32, 32, 32, 4, 2)
MAX_BLOCK = 1024  # columns that a program adds up


def moe_experts(x, expert_ids, expert_weights, up, down, up_bias, down_bias, *, transposed, **gate):
    """See `moe_experts_reference`; gates are computed in float32 and rounded once."""
    check_experts(x, expert_ids, expert_weights, up, down)
    gate = Gate(**gate)
    num_experts, width, inner = up.shape[0], x.shape[1], down.shape[1 if transposed else 2]
    fits = _sizes(up, transposed) == (inner * (2 if gate.gated else 1), width)
    if not fits or _sizes(down, transposed)[0] != width:
        raise ValueError(
            f"x [T, {width}], up {list(up.shape)} and down {list(down.shape)} do not fit each other"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    num_slots, ids = expert_ids.shape[1], expert_ids.contiguous()
    if ids.numel() == 0:
        return out.zero_()
    slots, starts = sorted_slots(ids, num_experts)
    h = x.new_empty((len(slots), inner))
    _project(rows_of(x), slots, starts, up, up_bias, h, transposed, slots_per_row=num_slots, gate=gate)
    rows = x.new_empty((len(slots), width))
    _project(h, slots, starts, down, down_bias, rows, transposed)
    combine(rows, ids, expert_weights, num_experts, out)
    return out


def combine(rows, ids, expert_weights, num_experts: int, out) -> None:
    """rows [S, C] of slots -> out [T, C], the weighted sum over each token's slots."""
    (num_tokens, width), num_slots = out.shape, ids.shape[1]
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    combine_kernel[num_tokens, triton.cdiv(width, block)](
        rows, ids, expert_weights.contiguous(), out, num_experts, num_slots, width, BLOCK=block,
        num_warps=warps_of(block),
    )  # fmt: skip


def expert_linear(x, expert_ids, weight, bias, *, transposed):
    """See `expert_linear_reference`."""
    if x.dim() not in (2, 3) or expert_ids.dim() != 2 or x.shape[:-1] != expert_ids.shape[: x.dim() - 1]:
        raise ValueError("expert_linear takes x [T, C] or [T, K, C] and ids [T, K]")
    if weight.dim() != 3 or _sizes(weight, transposed)[1] != x.shape[-1] or weight.dtype != x.dtype:
        raise ValueError(
            f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype} do not fit"
        )
    out = x.new_zeros((*expert_ids.shape, _sizes(weight, transposed)[0]))
    if out.numel():
        slots, starts = sorted_slots(expert_ids.contiguous(), weight.shape[0])
        slots_per_row = expert_ids.shape[1] if x.dim() == 2 else 1
        _project(rows_of(x), slots, starts, weight, bias, out, transposed, slots_per_row=slots_per_row)
    return out


def _sizes(weight, transposed: bool) -> tuple[int, int]:
    """(columns of the result, width of x) of weights of experts."""
    return (weight.shape[2], weight.shape[1]) if transposed else (weight.shape[1], weight.shape[2])


def sorted_slots(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots in the order of their experts, where each expert's begin [E + 1] int32)."""
    # A radix sort takes a pass a byte.
    narrow = torch.int16 if num_experts < 1 << 15 else torch.int32
    experts, slots = ids.flatten().clamp(-1, num_experts).to(narrow).sort(stable=True)
    every = torch.arange(num_experts + 1, dtype=narrow, device=ids.device)
    return slots, torch.searchsorted(experts, every, out_int32=True)


def _project(x, slots, starts, weight, bias, out, transposed, *, slots_per_row=0, gate=None) -> None:
    """Rows of x by slot // slots_per_row, results in sorted order if there is a gate, else by slot."""
    num_experts, (columns, width) = weight.shape[0], _sizes(weight, transposed)
    by_column, by_k = (weight.stride(2), weight.stride(1)) if transposed else weight.stride()[1:]
    is_gated = gate is not None and gate.gated
    columns //= 2 if is_gated else 1
    mean_rows = len(slots) / num_experts
    if x.dtype == torch.float32:
        block, at_once, taken, warps, stages = TILE_OF_FLOAT32
    else:
        block, at_once, taken, warps, stages = next(
            t for most, *t in TILES if most is None or mean_rows <= most
        )
    grid = (len(slots) // block + num_experts, triton.cdiv(columns, at_once))
    expert_kernel[grid](
        x, slots, starts, weight, None if bias is None else bias.contiguous(), out, x.stride(0), weight.stride(0),
        by_column, by_k, num_experts, slots_per_row, width, columns, None if gate is None else gate.limit,
        None if gate is None else gate.alpha, 0.0 if gate is None else gate.up_offset, BLOCK_M=block,
        BLOCK_N=at_once, BLOCK_K=taken, GATHER=slots_per_row > 0, SCATTER=gate is None,
        ACTIVATION="" if gate is None else gate.activation, GATED=is_gated,
        INTERLEAVED=is_gated and gate.interleaved, num_warps=warps, num_stages=stages,
    )  # fmt: skip
