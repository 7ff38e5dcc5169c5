"""Weights of linear layers as tiles for matrix units: the same numbers in another order, no second copy of them.

    [N, K] bf16  ->  [N/32 panels, K/32 steps, 2 tiles, 16 pairs of k, 16 columns, 2]        K ->  8 4 2 ... a tile is
                                                                                                    1 KB in one piece
A line of a tile is also 16 columns of a pair of k: one vector of BF16 dots, or two floats of each. A product reads a
panel from its begin to its end: at few rows as a stream, which memory is fastest at, at many rows as operands that no
call has to put in order first. linear, linears and gated_linear take weights of either form.

A stack of weights [E, N, K], one for each expert, is packed weight by weight, with E in front.

Coded, a packed weight takes some 12 of 16 bits, without loss: signs and fractions as they are, exponents by codes of
4 bits (cpu/coded_weights.h has the layout):

    uint8 [N/32 panels, K/256 blocks, bytes of a block]      a block: 8 steps of a panel, and what its codes stand for

Those of a stack have E in front, and blocks of one length.
"""

from __future__ import annotations

import torch

PANEL = 32  # columns (N), and k of a step
DIMS = 6
STACK_DIMS = 1 + DIMS
CODED_DIMS = 3
CODED_INNER = 256  # k of a block of codes
_STEPS, _LINES = CODED_INNER // PANEL, CODED_INNER  # of a block; a line holds PANEL weights
_HEADER, _EXPONENTS = 64, 16  # bytes, exponents of a block
_BODY_END = _HEADER + _LINES // 4 * 192
_IN_BYTES = 2 * _EXPONENTS + 4  # where a header says how codes lie
# Where the elements of a line are, if codes lie so.
_PLACES = [i & 7 | (i & 8) << 1 | (i & 16) >> 1 for i in range(PANEL)]


def is_packed(weight: torch.Tensor) -> bool:
    return weight.dim() in (DIMS, STACK_DIMS)


def is_coded(weight: torch.Tensor) -> bool:
    """Codes of this file: those of weights in fewer bits (weight_formats.py) are uint8, too, in short runs."""
    return (
        weight.dim() in (CODED_DIMS, 1 + CODED_DIMS)
        and weight.dtype == torch.uint8
        and weight.shape[-1] >= _BODY_END
    )


def is_plain(weight: torch.Tensor) -> bool:
    return not is_packed(weight) and not is_coded(weight)


def dtype_of_numbers(weight: torch.Tensor) -> torch.dtype:
    """Of what the weight stands for."""
    return torch.bfloat16 if is_coded(weight) else weight.dtype


def can_be_packed(weight: torch.Tensor) -> bool:
    """Is this [N, K] or [E, N, K] of bf16, with sizes that tiles fill?"""
    return (
        weight.dim() in (2, 3)
        and weight.dtype == torch.bfloat16
        and min(weight.shape) > 0
        and not any(n % PANEL for n in weight.shape[-2:])
    )


def can_be_coded(weight: torch.Tensor) -> bool:
    """Is this [N, K] or [E, N, K] of bf16, with sizes that tiles and blocks fill?"""
    return can_be_packed(weight) and weight.shape[-1] % CODED_INNER == 0


def packed_shape(*sizes: int) -> tuple[int, ...]:
    """Of a weight of sizes (N, K) or (E, N, K)."""
    *experts, num_columns, inner = sizes
    return *experts, num_columns // PANEL, inner // PANEL, 2, PANEL // 2, PANEL // 2, 2


def plain_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """(N, K) of a weight of any form, (E, N, K) of a stack."""
    if is_plain(weight):
        return tuple(weight.shape)
    if is_coded(weight):
        *experts, panels, blocks, _ = weight.shape
        return *experts, panels * PANEL, blocks * CODED_INNER
    *experts, panels, steps = weight.shape[: 2 - DIMS]
    return *experts, panels * PANEL, steps * PANEL


def pack(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """weight [N, K] or [E, N, K] bf16 -> packed, in new memory or in `out`. Raises ValueError where the sizes do not
    fit."""
    if not can_be_packed(weight):
        raise ValueError(f"{weight.dtype} {tuple(weight.shape)}: bf16 in multiples of {PANEL} is packed")
    if out is None:
        out = torch.empty(packed_shape(*weight.shape), dtype=weight.dtype, device=weight.device)
    *experts, n, k, tiles, pairs, columns, two = out.shape
    parts = weight.detach().view(*experts, n, tiles, columns, k, pairs, two)
    return out.copy_(parts.movedim((-3, -2), (-5, -3)))


def in_place_of(weight: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The packed form as what the weight is: a parameter or a plain tensor."""
    is_parameter = isinstance(weight, torch.nn.Parameter)
    return torch.nn.Parameter(packed, requires_grad=False) if is_parameter else packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] of a packed one, or the stack [E, N, K], in new memory."""
    return packed.movedim((-5, -3), (-3, -2)).reshape(plain_shape(packed))


def decode(coded: torch.Tensor) -> torch.Tensor:
    """The packed weight of a coded one, or the packed stack, in new memory."""
    *experts, panels, blocks, _ = coded.shape
    coded = coded.reshape(-1, *coded.shape[-2:])
    exponents = coded[..., : 2 * _EXPONENTS].contiguous().view(torch.int16)
    groups = coded[..., _HEADER:_BODY_END].unflatten(-1, (_LINES // 4, 192))
    parts = groups[..., :128].unflatten(-1, (4, PANEL)).to(torch.int32)
    if bool(coded[..., _IN_BYTES].any()):
        pairs = groups[..., 128:].unflatten(-1, (2, 1, PANEL)).to(torch.int32)  # of lines
        codes = torch.cat((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)[..., _PLACES]
        parts = parts[..., _PLACES]
    else:
        words = groups[..., 128:].contiguous().view(torch.int16).to(torch.int32)
        codes = torch.stack([words >> 4 * line & 15 for line in range(4)], dim=-2)
    chosen = exponents.to(torch.int32).gather(-1, codes.flatten(2).long()).view_as(codes)
    bits = ((parts & 0x80) << 8 | chosen | parts & 0x7F).to(torch.int16).flatten(2)
    counts = coded[..., 2 * _EXPONENTS : 2 * _EXPONENTS + 4].contiguous().view(torch.int32)[..., 0]
    patches = coded[..., _BODY_END:].contiguous().view(torch.int16).unflatten(-1, (-1, 2))
    for panel, block in counts.nonzero().tolist():
        at, value = patches[panel, block, : counts[panel, block]].unbind(-1)
        bits[panel, block, at.to(torch.int64) & 0xFFFF] = value
    shape = packed_shape(*experts, panels * PANEL, blocks * CODED_INNER)
    return bits.view(torch.bfloat16).reshape(shape)


def plain(weight: torch.Tensor) -> torch.Tensor:
    """A weight of any form as [N, K], a stack as [E, N, K]."""
    if is_coded(weight):
        weight = decode(weight)
    return unpack(weight) if is_packed(weight) else weight
