"""Inverse RoPE of the attention output and the grouped output projection behind it (DeepSeek-V4).

Legend: T tokens, H query heads, D head width, P pairs that turn, g groups, K = H * D / g, r rows of a group.

    x [T, H, D] -- turn the trailing 2P channels by -angle --> [T, g, K]          a group: H / g neighbouring heads
                                                                  | weight[g] [r, K], each group its own
                                                               [T, g * r]

K and V are one row per token in this model, so values carry the rotation of their position; turning the output back
at the query's position leaves what depends on relative positions only.

With fp8 the activations pass through e4m3 on their way, 128 channels to a power-of-two (UE8M0) scale:

    amax = max(|x|, 1e-4)    e = ceil(log2(amax / 448))    x -> e4m3(clamp(x * 2^-e, +-448)) * 2^e

The result has 4 significant bits and is exact in bfloat16, so the product equals that of an fp8 kernel.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.latent.small_floats import from_e4m3, power_of_two, quantise_fp8
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.norm.q_norm_rope import check_trailing_rope, rotate_trailing

QUANT_CHANNELS = 128


def inverse_rope_grouped_linear_reference(x, cos, sin, weight, *, groups, fp8=False):
    """Turn back, then multiply group by group.

    Args:
        x: [T, H, D] floating. cos, sin: [T, P] of the queries' positions (not negated). weight: [g * r, K] in x's
            dtype, the rows of a group together.
        fp8: quantise the turned activations (rounded to x's dtype) as an fp8 kernel would.
    Returns:
        [T, g * r] in x's dtype.
    Raises:
        ValueError: shapes that do not fit, or fp8 and K is not a multiple of 128.
    """
    check_operands(x, cos, sin, weight, groups, fp8)
    T, K = x.shape[0], weight.shape[1]
    rows_TGK = rotate_trailing(x, cos, -sin).reshape(T, groups, K)
    if fp8:
        rows_TGK = through_e4m3(rows_TGK)
    weight_GKr = weight.unflatten(0, (groups, len(weight) // groups)).transpose(1, 2)
    return torch.bmm(rows_TGK.transpose(0, 1), weight_GKr).transpose(0, 1).reshape(T, len(weight))


def through_e4m3(x):
    """x [..., n * 128] -> the same rounded to e4m3 with one UE8M0 scale per 128 channels, in x's dtype."""
    codes, exponents = quantise_fp8(x.float().unflatten(-1, (-1, QUANT_CHANNELS)))
    return (from_e4m3(codes) * power_of_two(exponents)[..., None]).flatten(-2).to(x.dtype)


def check_operands(x, cos, sin, weight, groups, fp8):
    check_trailing_rope(x, cos, sin, "x")
    H, D = x.shape[1:]
    if groups < 1 or H % groups:
        raise ValueError(f"{H} heads do not divide into {groups} groups")
    K = H * D // groups
    if weight.dim() != 2 or weight.shape[1] != K or weight.shape[0] % groups or weight.dtype != x.dtype:
        raise ValueError(
            f"weight must be {x.dtype} [{groups} * r, {K}], not {weight.dtype} {tuple(weight.shape)}"
        )
    if fp8 and K % QUANT_CHANNELS:
        raise ValueError(f"fp8 needs a multiple of {QUANT_CHANNELS} channels in a group, not {K}")


def _inverse_rope_grouped_linear_fake(x, cos, sin, weight, *, groups, fp8=False):
    return x.new_empty((x.shape[0], weight.shape[0]))


INVERSE_ROPE_GROUPED_LINEAR = define_op(
    "inverse_rope_grouped_linear",
    "(Tensor x, Tensor cos, Tensor sin, Tensor weight, *, int groups, bool fp8=False) -> Tensor",
    reference=inverse_rope_grouped_linear_reference,
    fake=_inverse_rope_grouped_linear_fake,
    capture="always",
)
