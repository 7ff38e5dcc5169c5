"""The order of codes in memory: what `weight_formats` packs. Plain PyTorch, on any device.

Codes [N, K] are packed as [N/32 panels, K/32 steps, 2, bytes], tiles of 32 k x 16 columns in lines of 64 bytes:

    8 bits   lane n of line L (4 bytes):     k = 4L + 0, 2, 1, 3 of column n
    4 bits   lane n of line L (8 nibbles):   k = 8L + 0, 2, 4, 6, 1, 3, 5, 7 of column n
    6 bits   of each 16 k two lines of the lower 4 bits of the code + 32, as above, and one of the upper ones:
             lane n (16 times 2 bits)        k = 0, 2, ... 14, 1, 3, ... 15 of column n
"""

from __future__ import annotations

import torch

PANEL = 32  # columns; N must be a multiple of it
STEP = 32  # k; K must be a multiple of it


def _lines(words: torch.Tensor, in_step: int) -> torch.Tensor:
    """int32 [N, K / 32 * in_step], what a row has in each line of a tile -> bytes [panel, step, half, line]."""
    tiles = words.reshape(-1, 2, PANEL // 2, words.shape[1] // in_step, in_step)
    return tiles.permute(0, 3, 1, 4, 2).contiguous().view(torch.uint8).flatten(3)


def _from_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """[panel, half, column, step, ...] -> [N, K]."""
    return tiles.reshape(tiles.shape[0] * PANEL, -1)


def pack_8(codes: torch.Tensor) -> torch.Tensor:
    words = codes.contiguous().view(torch.int32)  # bytes of k = 4 line + 0, 1, 2, 3
    swapped = words >> 8 & 0xFF00 | words << 8 & 0xFF0000  # 2 and 1
    return _lines(words & ~0xFFFF00 | swapped, 8)


def unpack_8(packed: torch.Tensor) -> torch.Tensor:
    lines = packed.unflatten(3, (8, PANEL // 2, 2, 2))
    return _from_tiles(lines.permute(0, 2, 4, 1, 3, 6, 5))


def pack_4(codes: torch.Tensor) -> torch.Tensor:
    eight = codes.contiguous().view(torch.int64)  # bytes of k = 8 line + 0 ... 7
    even, odd = (
        nibbles | nibbles >> 12  # the first two in byte 0, the others in byte 4
        for nibbles in (eight & 0x000F000F000F000F, eight >> 8 & 0x000F000F000F000F)
    )
    even, odd = ((pairs & 0xFF | pairs >> 24 & 0xFF00).to(torch.int32) for pairs in (even, odd))
    return _lines(even | odd << 16, 4)


def unpack_4(packed: torch.Tensor) -> torch.Tensor:
    lines = packed.unflatten(3, (4, PANEL // 2, 2, 2))
    nibbles = torch.stack((lines & 15, lines >> 4), dim=-1).flatten(-2)
    return _from_tiles(nibbles.permute(0, 2, 4, 1, 3, 6, 5))


def pack_6(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of two's complement."""
    whole = codes.contiguous() + 32  # 0 ... 63
    lower = pack_4(whole & 15).unflatten(3, (2, -1))
    eight = (whole >> 4).view(torch.int64)  # bytes of k = 0 ... 7
    even, odd = (
        (pairs | pairs >> 14 | pairs >> 28 | pairs >> 42).to(torch.uint8)  # four pairs of bits
        for pairs in (eight & 0x0003000300030003, eight >> 8 & 0x0003000300030003)
    )
    halves = torch.stack((even.unflatten(1, (-1, 2)), odd.unflatten(1, (-1, 2))), dim=2)  # [N, K / 16, 2, 2]
    upper = _lines(halves.flatten(2).view(torch.int32).squeeze(2), 2).unflatten(3, (2, -1))
    return torch.cat((lower, upper), dim=4).flatten(3)


def unpack_6(packed: torch.Tensor) -> torch.Tensor:
    lower, upper = packed.unflatten(3, (2, -1)).split((PANEL // 2 * 8, PANEL // 2 * 4), dim=4)
    lanes = upper.unflatten(4, (PANEL // 2, 2, 2))  # [panel, step, tile, half, column, k odd, four of them]
    pairs = torch.stack([lanes >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    high = _from_tiles(pairs.permute(0, 2, 4, 1, 3, 6, 5))
    return (unpack_4(lower.flatten(3)) | high << 4) - 32


PACK = {4: pack_4, 6: pack_6, 8: pack_8}
UNPACK = {4: unpack_4, 6: unpack_6, 8: unpack_8}
