"""What observers of a pool are told: which contents became reusable, which can no longer be hit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became reusable. `block_hashes` are chain hashes, the first one's parent is `parent_hash`."""

    group_id: int
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block's contents can no longer be hit."""

    group_id: int
    block_id: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


BlockEvent = BlocksStored | BlockRemoved | AllBlocksCleared
