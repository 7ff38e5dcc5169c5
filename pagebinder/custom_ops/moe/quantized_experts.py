"""`quantized_moe_experts` and `quantized_moe_routed_experts`: mixtures of experts in 8, 6 or 4 bits.

    up     codes [E, J/32, C/32, 2, bytes]    up_scale [E, ...]        J = 2 I for gated experts, else I
    down   codes [E, C/32, I/32, 2, bytes]    down_scale [E, ...]      formats: `weight_formats`, experts side by side

`format` is that of both stacks, or "uint4_g32/int8_g16": of `up` and of `down`.

Otherwise `moe_experts` and `moe_routed_experts` with weights [E, N, K]. Only experts that some token chose are read.
Each product is computed in float32 and rounded once, as that of `quantized_linear`.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.linear.quantized import quantized_linear_reference
from pagebinder.custom_ops.linear.weight_formats import PANEL, STEP, formats_of_experts
from pagebinder.custom_ops.moe.experts import check_slots, mixture
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.custom_ops.moe.routed_experts import ROUTER_OPTIONS, choose


def quantized_moe_experts_reference(
    x_TC, expert_ids_TK, expert_weights_TK, up, up_scale, down, down_scale, up_bias, down_bias, *, format, **gate
):  # fmt: skip
    """See `moe_experts_reference`.

    Args:
        up, up_scale, down, down_scale: stacks in `format`, see above. up_bias [E, J], down_bias [E, C]: or None.
    Raises:
        ValueError: operands do not fit, or no such format.
    """
    check_slots(x_TC, expert_ids_TK, expert_weights_TK)
    if up.dim() != 5 or down.dim() != 5 or up.shape[0] != down.shape[0]:
        raise ValueError("quantized_moe_experts takes the codes of all experts, [E, ., ., 2, .]")
    gate = Gate(**gate)
    up_format, down_format = formats_of_experts(format)

    def project(rows, codes, scale, bias, expert, format):
        own_bias = None if bias is None else bias[expert]
        return quantized_linear_reference(rows, codes[expert], scale[expert], own_bias, format=format)

    def run_expert(expert, rows):
        hidden = gate(project(rows, up, up_scale, up_bias, expert, up_format))
        return project(hidden, down, down_scale, down_bias, expert, down_format)

    return mixture(x_TC, expert_ids_TK, expert_weights_TK, up.shape[0], run_expert)


def quantized_moe_routed_experts_reference(
    x_TC, logits_TE, choice_bias_E, up, up_scale, down, down_scale, up_bias, down_bias, **options
):
    """Choose, then compute: see `moe_routed_experts_reference` and `quantized_moe_experts_reference`."""
    ids_TK, weights_TK, options = choose(x_TC, logits_TE, choice_bias_E, up, options)
    experts = (up, up_scale, down, down_scale, up_bias, down_bias)
    return quantized_moe_experts_reference(x_TC, ids_TK, weights_TK, *experts, **options)


def _fake(x, ids, expert_weights, up, up_scale, down, down_scale, up_bias, down_bias, *, gated, **options):
    torch._check(x.dim() == 2 and ids.dim() == 2, lambda: "quantized_moe_experts takes x [T, C], ids [T, K]")
    width, inner = down.shape[1] * PANEL, down.shape[2] * STEP
    torch._check(x.shape[1] == width == up.shape[2] * STEP, lambda: "x and the experts differ in C")
    torch._check(
        up.shape[1] * PANEL == (2 if gated else 1) * inner, lambda: "up and down differ in the inner width"
    )
    return x.new_empty(x.shape)


def _routed_fake(
    x, logits, choice_bias, up, up_scale, down, down_scale, up_bias, down_bias, *, gated, **options
):
    torch._check(logits.dim() == 2, lambda: "quantized_moe_routed_experts takes logits [T, E]")
    torch._check(logits.shape[1] == up.shape[0], lambda: "logits and experts differ in E")
    return _fake(
        x, logits, logits, up, up_scale, down, down_scale, up_bias, down_bias, gated=gated, **options
    )


_STACKS = "Tensor up, Tensor up_scale, Tensor down, Tensor down_scale, Tensor? up_bias, Tensor? down_bias"
_OPTIONS = (
    "str format, str activation, bool gated, bool interleaved, float? limit, float? alpha, float up_offset, "
    "bool in_float32"
)

QUANTIZED_MOE_EXPERTS = define_op(
    "quantized_moe_experts",
    f"(Tensor x, Tensor expert_ids, Tensor expert_weights, {_STACKS}, *, {_OPTIONS}) -> Tensor",
    reference=quantized_moe_experts_reference,
    fake=_fake,
)

QUANTIZED_MOE_ROUTED_EXPERTS = define_op(
    "quantized_moe_routed_experts",
    f"(Tensor x, Tensor logits, Tensor? choice_bias, {_STACKS}, *, {ROUTER_OPTIONS}, {_OPTIONS}) -> Tensor",
    reference=quantized_moe_routed_experts_reference,
    fake=_routed_fake,
)
