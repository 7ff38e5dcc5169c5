"""Scales of groups and blocks, of one level and of two: as tensors of the kernels, see weight_formats.py."""

from __future__ import annotations

import torch

from pagebinder.custom_ops.linear.code_order import PANEL
from pagebinder.custom_ops.linear.weight_formats import BLOCK, LEVEL_OFFSETS, weight_format


def packed_groups(scale: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """Scales of groups [N, G], and shifts -> the scale tensor; in bf16 or float16 if that is exact, else float32."""
    parts = [in_panels(part.float()) for part in (scale, shift) if part is not None]
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
    upper = torch.stack([in_panels(d.to(fmt.upper)) for d, _ in pairs], 2)  # [N/32, K/256, parts, 32]
    lower = torch.stack([in_panels(s.to(fmt.lower)) for _, s in pairs], 2).unflatten(1, (spans, -1))
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
    return of_blocks(scale, shape) if scale.dim() == 2 else scale[:, None]


def in_panels(scale: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [panel, G, column]."""
    return scale.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def of_groups(scale: torch.Tensor, group: int) -> torch.Tensor:
    """The scale of each weight [N, K], from [panel, G, column]."""
    return scale.float().transpose(1, 2).flatten(0, 1).repeat_interleave(group, dim=1)


def of_blocks(scale: torch.Tensor, shape) -> torch.Tensor:
    """The scale of each weight [N, K], from [N/128, K/128]."""
    wide = scale.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
    return wide[: shape[0], : shape[1]]
