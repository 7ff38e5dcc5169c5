"""`pagebinder::scaled_fp8_quant`: activations as e4m3 codes and float32 scales.

    x [..., K]  ->  codes [..., K] float8_e4m3fn, scale float32                 x is about codes * scale

    granularity   what shares a scale                       scale tensor
    "tensor"      everything, or a given scale (static)     [1]
    "token"       a row                                     [..., 1]
    "group"       128 neighbours of a row                   [..., ceil(K / 128)]

A dynamic scale is amax / 448, so nothing saturates. A static one costs no search for the largest value, and what lies
beyond 448 of it saturates. Scales of rows and groups depend on a token alone; a dynamic scale of a tensor depends on
all tokens of the step, so a request's numbers then depend on its company. NaN and infinity make NaNs of what shares
their scale; with a static scale a NaN stays alone and an infinity saturates.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op

GRANULARITIES = ("tensor", "token", "group")
GROUP = 128
E4M3_MAX = 448.0
MIN_SCALE = 2.0**-126
CODES = torch.float8_e4m3fn


def scaled_fp8_quant_reference(x, scale=None, *, granularity):
    """Quantise activations: nearest code of x / scale, ties to even.

    Args:
        x: [..., K] floating. scale: [1] float32, a static scale of the tensor; None: dynamic.
        granularity: one of GRANULARITIES.
    Returns:
        (codes [..., K] float8_e4m3fn, scale float32 as in the table above).
    Raises:
        ValueError: an unknown granularity, or a static scale that is not [1] float32 or not of a tensor.
    """
    check_quant(scale, granularity)
    wide = x.float().contiguous()
    scale = dynamic_scale(wide, granularity) if scale is None else scale.clone()
    codes = (wide / of_values(scale, x.shape[-1])).clamp(-E4M3_MAX, E4M3_MAX).to(CODES)
    return codes, scale


def dynamic_scale(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """x [..., K] float32 -> the scales with which the largest value of each becomes the largest code."""
    magnitude = x.abs()
    if granularity == "tensor":
        amax = magnitude.amax().reshape(1) if x.numel() else x.new_zeros(1)
    elif granularity == "token":
        amax = magnitude.amax(-1, keepdim=True)
    else:
        padded = torch.nn.functional.pad(magnitude, (0, -x.shape[-1] % GROUP))
        amax = padded.unflatten(-1, (-1, GROUP)).amax(-1)
    return (amax / E4M3_MAX).clamp(min=MIN_SCALE)


def of_values(scale: torch.Tensor, width: int) -> torch.Tensor:
    """A scale as it multiplies values [..., width]: broadcast, or one for each value."""
    if scale.shape[-1] == 1:
        return scale
    return scale.repeat_interleave(GROUP, dim=-1)[..., :width]


def dequantise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(codes [..., K], scale) -> values [..., K] float32."""
    return codes.float() * of_values(scale, codes.shape[-1])


def check_quant(scale, granularity):
    """Raises ValueError, see `scaled_fp8_quant_reference`."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, not {granularity!r}")
    if scale is None:
        return
    if granularity != "tensor":
        raise ValueError(f"a static scale is one of the whole tensor, not of a {granularity}")
    if tuple(scale.shape) != (1,) or scale.dtype != torch.float32:
        raise ValueError(f"a static scale must be [1] float32, not {list(scale.shape)} {scale.dtype}")


def empty_quantised(x, granularity, shape=None):
    """(codes, scale) as fake kernels return them, for values of `shape` (that of x)."""
    shape = tuple(x.shape if shape is None else shape)
    columns = {"tensor": (1,), "token": (*shape[:-1], 1), "group": (*shape[:-1], -(-shape[-1] // GROUP))}
    return x.new_empty(shape, dtype=CODES), x.new_empty(columns[granularity], dtype=torch.float32)


def _scaled_fp8_quant_fake(x, scale=None, *, granularity):
    check_quant(scale, granularity)
    return empty_quantised(x, granularity)


SCALED_FP8_QUANT = define_op(
    "scaled_fp8_quant",
    "(Tensor x, Tensor? scale=None, *, str granularity) -> (Tensor, Tensor)",
    reference=scaled_fp8_quant_reference,
    fake=_scaled_fp8_quant_fake,
    capture="always",
)
