"""`pagebinder_triton::quantized_moe_experts`: launches, see `packed_kernels` and `moe`.

Tiles are those of `quantized_linear` by the mean number of rows of an expert. A gate makes two sums: where a tile is
wider than a panel, of half as many columns each, so that they stay in registers.
"""

from __future__ import annotations

import torch
import triton

from pagebinder.custom_ops.linear.weight_formats import PANEL, STEP, formats_of_experts
from pagebinder.custom_ops.moe.experts import check_slots
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.custom_ops.triton.moe import combine, sorted_slots
from pagebinder.custom_ops.triton.packed_kernels import packed_expert_kernel
from pagebinder.custom_ops.triton.quantized_linear import check_weight, tiling
from pagebinder.custom_ops.triton.rms_norm import rows_of


def quantized_moe_experts(
    x, expert_ids, expert_weights, up, up_scale, down, down_scale, up_bias, down_bias, *, format, **gate
):  # fmt: skip
    """See `quantized_moe_experts_reference`; gates are computed in float32 and rounded once."""
    check_slots(x, expert_ids, expert_weights)
    if up.dim() != 5 or down.dim() != 5 or up.shape[0] != down.shape[0]:
        raise ValueError("quantized_moe_experts takes the codes of all experts, [E, ., ., 2, .]")
    up_format, down_format = formats_of_experts(format)
    check_weight(up, up_scale, up_bias, up_format)
    check_weight(down, down_scale, down_bias, down_format)
    gate = Gate(**gate)
    num_experts, width, inner = up.shape[0], down.shape[1] * PANEL, down.shape[2] * STEP
    fits = up.shape[1] * PANEL == inner * (2 if gate.gated else 1) and up.shape[2] * STEP == width
    if not fits or x.shape[1] != width:
        raise ValueError(
            f"x {list(x.shape)}, up {list(up.shape)} and down {list(down.shape)} do not fit each other"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    ids = expert_ids.contiguous()
    if ids.numel() == 0:
        return out.zero_()
    slots, starts = sorted_slots(ids, num_experts)
    h, rows = x.new_empty((len(slots), inner)), x.new_empty((len(slots), width))
    first = (up, up_scale, up_bias, h)
    _project(rows_of(x), slots, starts, *first, up_format, slots_per_row=ids.shape[1], gate=gate)
    _project(h, slots, starts, down, down_scale, down_bias, rows, down_format)
    combine(rows, ids, expert_weights, num_experts, out)
    return out


def _project(x, slots, starts, codes, scale, bias, out, format, *, slots_per_row=0, gate=None) -> None:
    """Rows of x by slot // slots_per_row, results in sorted order if there is a gate, else by slot."""
    num_experts, panels, steps = codes.shape[:3]
    is_gated = gate is not None and gate.gated
    tile = tiling(len(slots) / num_experts, x.dtype, format, "", x.device)
    at_once = max(tile.panels // 2, 1) if is_gated else tile.panels
    results = panels // (2 if is_gated else 1)
    grid = (len(slots) // tile.rows + num_experts, triton.cdiv(results, at_once))
    packed_expert_kernel[grid](
        x, slots, starts, codes, scale, None if bias is None else bias.contiguous(), out, x.stride(0),
        scale[0].numel(), num_experts, slots_per_row, panels, steps, None if gate is None else gate.limit,
        None if gate is None else gate.alpha, 0.0 if gate is None else gate.up_offset, BLOCK_M=tile.rows,
        PANELS=at_once, STEPS=tile.steps, **tile.facts, GATHER=slots_per_row > 0, SCATTER=gate is None,
        ACTIVATION="" if gate is None else gate.activation, GATED=is_gated,
        INTERLEAVED=is_gated and gate.interleaved, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
