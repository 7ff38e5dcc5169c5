"""Cross attention: K and V of the encoder's tokens, written in a request's first step, only read from then on.

    encoder tokens   | e0 .. e15 | e16 .. e31 | e32 .. |        all blocks at once, when the request is admitted
    table            [    4     ][     9     ][  11    ]        shared by requests with the same encoder input

They are found by the encoder input's hash, all or none: the encoder runs as a whole. They put no limit on the hit in
the decoder's own tokens: if they are gone, the encoder runs again in the step that resumes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pagebinder.errors import CacheCapacityError
from pagebinder.runtime.kv.block_table import BlockTable
from pagebinder.runtime.kv.context import GroupPrefix
from pagebinder.runtime.kv.hashing import encode_key
from pagebinder.runtime.kv.manager_base import SingleTypeManager
from pagebinder.runtime.kv.retention import NEVER
from pagebinder.runtime.kv.specs import CrossAttentionSpec, KVCacheSpec, cdiv
from pagebinder.runtime.request import Request


class CrossAttentionManager(SingleTypeManager):
    """cdiv(num_encoder_tokens, B) blocks for a request's whole life, never written again, never copied."""

    spec: CrossAttentionSpec
    grows_with_tokens = False
    forgets = False

    @staticmethod
    def granularity(spec: KVCacheSpec, hash_block_size: int) -> int:
        return 1

    def table_width(self) -> int:
        return cdiv(self.context.max_encoder_tokens, self.block_size)

    def find_encoder(self, request: Request) -> list | None:
        """The cached blocks of the request's encoder input, or None unless all are there."""
        blocks = []
        for key in self.encoder_keys(request):
            found = self.pool.get_cached_block(key, (self.group_id,))
            if found is None:
                return None
            blocks.extend(found)
        return blocks or None

    def encoder_keys(self, request: Request) -> list[bytes]:
        """What each block of the encoder's tokens is found by; empty if the input has no hash."""
        if request.encoder_hash is None:
            return []
        return [
            hashlib.sha256(
                encode_key(("encoder block", request.encoder_hash, request.num_encoder_tokens, i))
            ).digest()
            for i in range(cdiv(request.num_encoder_tokens, self.block_size))
        ]

    def cache_encoder(self, request: Request) -> None:
        """The encoder has run: its blocks can be shared from now on."""
        blocks = self.tables[request.request_id].blocks
        for block, key in zip(blocks, self.encoder_keys(request)):
            self.pool.cache_partial_block(block, [key], self.group_id, None)

    def max_admission_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        return cdiv(num_encoder_tokens, self.block_size)

    def covered_tokens(self, request_id: str) -> int:
        return NEVER

    def num_blocks_to_start(
        self, request: Request, prefix: GroupPrefix, num_tokens: int, *, capped: bool = False
    ) -> int:
        if request.num_encoder_tokens > self.context.max_encoder_tokens:
            raise CacheCapacityError(
                f"request {request.request_id!r} has {request.num_encoder_tokens} encoder tokens, but the KV cache "
                f"was planned for {self.context.max_encoder_tokens}; plan it with a larger max_encoder_tokens"
            )
        if prefix.blocks:
            return sum(block.ref_cnt == 0 for block in prefix.blocks)
        return cdiv(request.num_encoder_tokens, self.block_size)

    def num_blocks_to_copy(self, prefix: GroupPrefix) -> int:
        return 0

    def fill(self, request: Request) -> None:
        """Take the blocks that a new request's encoder writes, unless they were hit."""
        table = self.tables[request.request_id]
        if not table.blocks:
            count = cdiv(request.num_encoder_tokens, self.block_size)
            table.extend(self.pool.get_new_blocks(count))

    def num_blocks_to_grow(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> int:
        return 0

    def grow(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> None:
        pass

    def num_blocks_for(self, num_tokens: int) -> int:
        return self.table_width()

    def cache_blocks(self, request: Request, num_tokens: int) -> int:
        return NEVER

    def cache_end(self, request: Request, num_tokens: int) -> None:
        pass

    def next_cache_at(self, request_id: str) -> int:
        return NEVER

    def _must_copy(self, table: BlockTable, num_computed_tokens: int) -> bool:
        return False

    def _num_new_blocks(self, request_id: str, start: int, end: int, num_live: int) -> int:
        return 0

    def find_longest_hit(self, hashes: Sequence[bytes], max_length: int, group_ids: Sequence[int]):
        raise NotImplementedError("encoder blocks are found by `find_encoder`")
