"""What the managers of all groups share, and how they speak of prefix hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagebinder.runtime.kv.blocks import BlockPool, KVCacheBlock
from pagebinder.runtime.kv.copies import PendingCopies
from pagebinder.runtime.kv.fence import StepFence
from pagebinder.runtime.kv.retention import Boundaries, PrefixRetention
from pagebinder.runtime.kv.rows import RequestRows

HitBlocks = list[list[KVCacheBlock]]


@dataclass(kw_only=True)
class CacheContext:
    """What the managers of all groups share. Sizes in tokens.

    `hash_block_size`: what request hashes are computed at; divides the block size of every attention group.
    `alignment`: hits and cached lengths are multiples of it. `can_resume`: whether the decoder's own tokens are
    cached at all. `boundaries`: per request, what is retained.
    """

    pool: BlockPool
    max_model_len: int
    max_in_flight_tokens: int
    hash_block_size: int
    alignment: int
    can_resume: bool = True
    max_encoder_tokens: int = 0
    retention: PrefixRetention = field(default_factory=PrefixRetention.dense)
    rows: RequestRows = field(default_factory=RequestRows)
    copies: PendingCopies = field(default_factory=PendingCopies)
    boundaries: dict[str, Boundaries] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fence = StepFence(self.pool, self.copies)


@dataclass(frozen=True, slots=True)
class GroupHit:
    """A cached prefix of `num_tokens` tokens, per group: its whole blocks and the block it ends inside, if any.

    Blocks that a resume does not need are null, or None for the last one.
    """

    num_tokens: int
    blocks: HitBlocks
    tails: list[KVCacheBlock | None]


@dataclass(frozen=True, slots=True)
class GroupPrefix:
    """One group's part of a hit of `num_tokens` tokens: num_tokens // B whole blocks and perhaps a tail."""

    num_tokens: int = 0
    blocks: Sequence[KVCacheBlock] = ()
    tail: KVCacheBlock | None = None
