"""All groups together: one pool, one hit length, one answer to "does it fit".

    request --> [ group 0: full    ][ group 1: window  ][ group 2: recurrent ]   one block table each
                       \\                   |                   /
                        +---- one BlockPool: a block belongs to one group at a time

Allocation has two phases: first every group takes hold of its prefix hits, only then does any group allocate.
The other order would let one group evict the blocks that another is about to reuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from pagebinder.runtime.kv.batched_growth import BatchedGrowth
from pagebinder.runtime.kv.blocks import BlockPool, KVCacheBlock, require
from pagebinder.runtime.kv.context import CacheContext
from pagebinder.runtime.kv.copies import BlockCopy, SwapCopy
from pagebinder.runtime.kv.hashing import DEFAULT_SEED, RequestBlockHasher
from pagebinder.runtime.kv.host_blocks import HostBlocks, SwapImage
from pagebinder.runtime.kv.manager_base import SingleTypeManager
from pagebinder.runtime.kv.managers import make_manager
from pagebinder.runtime.kv.prefix_search import PrefixHit, PrefixSearch, resolve_alignment, resolve_match_unit
from pagebinder.runtime.kv.retention import NEVER, PrefixRetention
from pagebinder.runtime.kv.specs import KVCacheGroup
from pagebinder.runtime.kv.swapping import Swapper
from pagebinder.runtime.request import Request

KeptStates = list[tuple[SingleTypeManager, int, KVCacheBlock]]  # manager, logical block, what it was before


class KVCacheManager:
    """Block tables of all requests in all groups, over one pool of `num_blocks` blocks.

    `max_in_flight_tokens`: most tokens of one request that are computed between two calls of
    `allocate_slots` for it; windows must hold them besides what they look back on.
    `prefix_match_unit`: tokens; prefixes match in steps of it (None: 16 or what divides all block sizes).
    `retention`: which resume points stay cached. `host_blocks`: where to swap preempted requests to.
    Raises CacheCapacityError for fewer than 2 blocks, ValueError for a match unit that does not fit.
    """

    def __init__(
        self, plan_groups: Sequence[KVCacheGroup], num_blocks: int, *, max_model_len: int,
        max_in_flight_tokens: int, enable_caching: bool = True, hash_seed: str = DEFAULT_SEED,
        prefix_match_unit: int | None = None, retention: PrefixRetention | None = None,
        max_encoder_tokens: int = 0, host_blocks: HostBlocks | None = None,
    ) -> None:  # fmt: skip
        self.groups = tuple(plan_groups)
        self.smallest_block = min(group.block_size for group in self.groups)
        self.max_model_len = max_model_len
        self.max_in_flight_tokens = max_in_flight_tokens
        self.max_encoder_tokens = max_encoder_tokens
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks, enable_caching)
        match_unit = resolve_match_unit(self.groups, prefix_match_unit)
        alignment = resolve_alignment(self.groups, match_unit)
        self.hasher = RequestBlockHasher(match_unit, hash_seed)
        # A group that can never be resumed makes the decoder's prefix cache useless; encoder blocks still match.
        self._can_resume = enable_caching and alignment is not None
        self.alignment = alignment or match_unit
        self.context = CacheContext(
            pool=self.pool, max_model_len=max_model_len, max_in_flight_tokens=max_in_flight_tokens,
            hash_block_size=match_unit, alignment=self.alignment, can_resume=self._can_resume,
            max_encoder_tokens=max_encoder_tokens, retention=retention or PrefixRetention.dense(),
        )  # fmt: skip
        self.rows = self.context.rows
        self.managers = tuple(
            make_manager(group.spec, self.context, i) for i, group in enumerate(self.groups)
        )
        self.tables = tuple(manager.array for manager in self.managers)
        self.batched = BatchedGrowth(self.managers, self.context)
        self.search = PrefixSearch(self.managers, self.alignment)
        self.swapper = Swapper(host_blocks, self.managers, self.context) if host_blocks is not None else None
        self._forgetful = tuple(manager for manager in self.managers if manager.forgets)
        self._replacing = tuple(manager for manager in self.managers if manager.replaces_ahead)
        self._caching = tuple(manager for manager in self.managers if manager.grows_with_tokens)
        self._needs_encoder: set[str] = set()
        # Requests that were forked and have not been given blocks since: their next token may need a copy.
        self._forked_at: dict[str, int] = {}

    # Prefix cache

    def extend_hashes(self, request: Request) -> None:
        """Hash the request's newly full units. `find_prefix`, `cache_blocks` and `free` do it themselves."""
        if self._can_resume:
            self.hasher.extend(request)

    def find_prefix(self, request: Request) -> PrefixHit:
        """Longest prefix that every group can resume from: at most num_tokens - 1, as the last token must
        be computed to get logits. Blocks of the encoder's tokens are looked up besides."""
        if not self.enable_caching:
            return self.search.nothing()
        self.extend_hashes(request)
        return self.search.find(request, request.num_tokens - 1 if self._can_resume else 0)

    def prefix_may_grow(self, request: Request, num_hit_tokens: int) -> bool:
        """Whether `find_prefix` might now find more than `num_hit_tokens`. O(groups); False is certain."""
        return self._can_resume and self.search.may_grow(request, num_hit_tokens)

    def cache_blocks(self, request: Request) -> None:
        """Make what the request has computed so far reusable. Call when the step's results are in."""
        self.cache_batch((request,), (request.num_computed_tokens,))

    def cache_batch(self, requests: Sequence[Request], computed: Sequence[int]) -> list[int]:
        """`cache_blocks` for several requests, of which so many tokens are computed; `next_cache_at` of each."""
        if self._needs_encoder:
            self._cache_encoders(requests)
        unit, next_at = self.hasher.hash_block_size, []
        for request in requests if self._can_resume else ():
            self.hasher.extend(request)
        for request, now in zip(requests, computed):
            request.num_computed_tokens = now
            first, num_tokens = NEVER, min(now, len(request.block_hashes) * unit)
            for manager in self._caching if self._can_resume else ():
                first = min(first, manager.cache_blocks(request, num_tokens))
            next_at.append(max(first, now + 1))
        return next_at

    def next_cache_at(self, request: Request) -> int:
        """Smallest number of computed tokens above the present one at which `cache_blocks` would store something;
        a huge number if it never would."""
        request_id, now = request.request_id, request.num_computed_tokens
        if request_id in self._needs_encoder:
            return now + 1
        if not self._can_resume:
            return NEVER
        first = NEVER
        for manager in self._caching:
            first = min(first, manager.next_cache_at(request_id))
        return max(first, now + 1)

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes; False (and nothing done) while blocks are held, also by steps in flight."""
        return self.pool.reset_prefix_cache()

    # Allocation

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: PrefixHit | None = None, *,
        num_lookahead_tokens: int = 0, full_sequence_must_fit: bool = False, watermark_blocks: int = 0,
    ) -> bool:  # fmt: skip
        """Give the request blocks for its next `num_new_tokens` tokens. False: not enough, none taken.

        A request without blocks starts from `hit`; its `num_computed_tokens` does not count the hit yet.
        Blocks behind the windows are given back either way. `full_sequence_must_fit`: refuse to start a
        request whose known tokens would not fit as a whole. `watermark_blocks` must stay free.
        Blocks that the new tokens are written into and that others use are replaced: see `take_copies`.
        """
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens must be at least 1, not {num_new_tokens}")
        request_id = request.request_id
        computed = request.num_computed_tokens + (hit.num_tokens if hit else 0)
        end = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        if request_id not in self.rows:
            hit = hit or self.search.nothing()
            return self._start(request, hit, end, full_sequence_must_fit, watermark_blocks)
        self.remove_skipped_blocks(request, computed)
        needed = sum(manager.num_blocks_to_grow(request_id, computed, end) for manager in self.managers)
        if needed > self.pool.num_free_blocks - watermark_blocks:
            return False
        for manager in self.managers:
            manager.grow(request_id, computed, end)
        self._forked_at.pop(request_id, None)
        return True

    def allocate_batch(
        self, requests: Sequence[Request], starts: Sequence[int], ends: Sequence[int],
        planned: Sequence[int] | None = None,
    ) -> list[int]:  # fmt: skip
        """`allocate_slots` for running requests, one after the other: tokens [start, end) of each, of which the first
        `start` are computed, and with steps in flight the first `planned` will be. Returns what each one's blocks
        cover then; a shorter list if the next one was refused.

        All of them give back what lies behind their windows first.
        """
        for manager in self._replacing:
            for request, tokens in zip(requests, starts if planned is None else planned):
                manager.tables[request.request_id].planned_tokens = tokens
        for request, start in zip(requests, starts) if self._forgetful else ():
            self.remove_skipped_blocks(request, start)
        covered = None
        request_ids = [request.request_id for request in requests]
        # A request without computed tokens may still lack the blocks that do not grow with tokens (rings).
        plain = min(starts) > 0 and max(ends) <= self.max_model_len
        if plain and self._forked_at.keys().isdisjoint(request_ids):
            covered = self.batched.try_grow(request_ids, starts, ends)
        return self._allocate_one_by_one(requests, starts, ends) if covered is None else covered

    def remove_skipped_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Give back what nobody needs behind so many computed tokens: a prefill chunk leaves more than a decode."""
        for manager in self._forgetful:
            manager.remove_skipped_blocks(request.request_id, num_computed_tokens)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` continue from the parent's computed tokens, sharing all blocks that hold them.

        Takes no free block: whoever writes first gets a copy of the last block. The child's tokens equal the
        parent's up to parent.num_computed_tokens, and its `num_computed_tokens` says so. No token of the parent
        beyond those may be in flight. Raises ValueError if the parent holds no blocks, the child does, or the
        parent's encoder has not run yet.
        """
        num_tokens = parent.num_computed_tokens
        if parent.request_id not in self.rows or child.request_id in self.rows:
            raise ValueError(f"cannot fork {parent!r} to {child!r}: the one must hold blocks, the other none")
        if parent.request_id in self._needs_encoder:
            raise ValueError(
                f"cannot fork {parent!r} before its first step's results are in: its encoder runs then"
            )
        if child.num_computed_tokens != num_tokens:
            raise ValueError(f"{child!r} must start with the {num_tokens} computed tokens of {parent!r}")
        self.rows.assign(child.request_id)
        self.context.boundaries[child.request_id] = self.context.boundaries[parent.request_id]
        for manager in self.managers:
            manager.share(parent.request_id, child.request_id, num_tokens)
        if not child.block_hashes:
            child.block_hashes.extend(parent.block_hashes[: num_tokens // self.hasher.hash_block_size])
        for request in (parent, child):
            self._forked_at[request.request_id] = num_tokens

    def keep_states(self, request_id: str, num_computed_tokens: int) -> KeptStates | None:
        """Before a step behind so many tokens whose results may not stand: keep what it replaces, for `take_back`.
        None (and nothing done) where free blocks are short."""
        places = [(m, m.state_block(num_computed_tokens)) for m in self.managers]
        places = [(manager, index) for manager, index in places if index is not None]
        if len(places) > self.pool.num_free_blocks:
            return None
        return [(manager, index, manager.keep_state(request_id, index)) for manager, index in places]

    def take_back(self, request_id: str, kept: KeptStates) -> None:
        """Bring back the states of before a step; before `step_finished` is called for it."""
        for manager, index, block in kept:
            manager.take_back(request_id, index, block)

    @property
    def takes_back(self) -> bool:
        """Whether tokens can be computed again as others with no more done than that."""
        return all(manager.takes_back for manager in self.managers)

    def free(self, request: Request, *, cache_tail: bool = True) -> None:
        """Give back all blocks and the row of a request; unknown requests are fine.

        Hashed blocks stay reusable. `cache_tail`: make the end of what was computed reusable, too; pass False
        if the computed tokens cannot be trusted.
        """
        request_id = request.request_id
        if request_id not in self.rows:
            return
        num_tokens = 0
        if cache_tail and not self._awaits_copies(request_id):
            num_tokens = self._cacheable_tokens(request) // self.alignment * self.alignment
        for manager in self.managers:
            if num_tokens:
                manager.cache_end(request, num_tokens)
            manager.free(request_id)
        self.rows.release(request_id)
        del self.context.boundaries[request_id]
        self._needs_encoder.discard(request_id)
        self._forked_at.pop(request_id, None)

    def max_blocks_for(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Most blocks that a request of at most `num_tokens` tokens holds at any time, over all groups."""
        return sum(manager.max_admission_blocks(num_tokens, num_encoder_tokens) for manager in self.managers)

    # Steps and copies

    def step_started(self) -> int:
        """A step was handed over; until `step_finished` its blocks are not reused. Returns its number."""
        return self.context.fence.step_started()

    def step_finished(self, number: int) -> None:
        """A step's results are in, or it failed. Raises ValueError for a step that is not in flight."""
        self.context.fence.step_finished(number)

    def take_copies(self) -> list[BlockCopy]:
        """Copies to run, in this order, before the graph of the step started last. Each is handed out once: who takes
        them makes them, even if the step fails then."""
        self.context.fence.copies_are_taken()
        return self.context.copies.take_copies()

    def take_swaps(self) -> list[SwapCopy]:
        """Copies to and from the host to run, in this order, before `take_copies`. Each is handed out once."""
        self.context.fence.copies_are_taken()
        return self.context.copies.take_swaps()

    def swap_out(self, request: Request) -> SwapImage | None:
        """Save the request's state to host slots and free its blocks. None (and nothing done): not possible."""
        self.remove_skipped_blocks(request, request.num_computed_tokens)
        image = self._swapper().save(request, self.needs_encoder(request.request_id))
        if image is not None:
            self.free(request)
        return image

    def swap_in(self, request: Request, image: SwapImage, *, watermark_blocks: int = 0) -> bool:
        """Bring a saved request back. False (and nothing done) if free blocks are short."""
        swapper = self._swapper()
        if image.num_blocks > self.pool.num_free_blocks - watermark_blocks:
            return False
        self.rows.assign(request.request_id)
        self.context.boundaries[request.request_id] = image.boundaries
        swapper.restore(request, image)
        if image.needs_encoder:
            self._needs_encoder.add(request.request_id)
        return True

    def drop_image(self, image: SwapImage) -> None:
        """Give up a saved state. Raises ValueError if it was restored or dropped already."""
        self._swapper().drop(image)

    # Views

    def block_ids(self, request_id: str) -> tuple:
        """Per group, the live block table of a running request, int32 (0 = null block). Read, do not change.

        Raises KeyError for a request that holds no blocks.
        """
        if request_id not in self.rows:
            raise KeyError(f"request {request_id!r} holds no blocks: it has not been given any, or was freed")
        return tuple(manager.block_ids(request_id) for manager in self.managers)

    def covered_tokens(self, request_id: str) -> int:
        """Leading tokens that the request's blocks cover in all groups and that may be written without another
        `allocate_slots`."""
        if request_id in self._forked_at:
            return self._forked_at[request_id]
        return min(manager.covered_tokens(request_id) for manager in self.managers)

    def overwrites_state_at(self, num_computed_tokens: int) -> bool:
        """Whether a step that starts behind so many tokens replaces state that it reads, in some group."""
        return any(manager.overwrites_state_at(num_computed_tokens) for manager in self.managers)

    def needs_encoder(self, request_id: str) -> bool:
        """Whether the request's next step must run the encoder and write its blocks."""
        return request_id in self._needs_encoder

    @property
    def awaiting_encoder(self) -> Collection[str]:
        """Ids of all requests of which `needs_encoder` is true. Read, do not change."""
        return self._needs_encoder

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def num_deferred_blocks(self) -> int:
        """Blocks that only wait for steps in flight. O(blocks that wait)."""
        return self.context.fence.num_deferred_blocks

    @property
    def usage(self) -> float:
        """Share of usable blocks held by requests, 0.0 to 1.0."""
        return self.pool.get_usage()

    def check_integrity(self) -> None:
        """Raise KVCacheIntegrityError unless pool, tables, rows, fence, slots and hashes agree. O(blocks)."""
        held: Counter[int] = Counter()
        for manager in self.managers:
            manager.check_integrity()
            require(
                manager.tables.keys() == self.rows.row_of.keys(), "rows and block tables differ in requests"
            )
            mine = Counter(b.block_id for t in manager.tables.values() for b in t.blocks if not b.is_null)
            require(not held.keys() & mine.keys(), f"group {manager.group_id} holds another group's blocks")
            held |= mine
        self.pool.check_integrity(held + self.context.fence.pins)
        self.context.fence.check_integrity()
        if self.swapper is not None:
            self.swapper.check_integrity()

    # Inside

    def _start(
        self, request: Request, hit: PrefixHit, end: int, full_sequence_must_fit: bool, watermark_blocks: int
    ) -> bool:
        request_id, context = request.request_id, self.context
        available = self.pool.num_free_blocks - watermark_blocks
        context.boundaries[request_id] = context.retention.boundaries(
            self.alignment, request.num_prompt_tokens, (hit.num_tokens, hit.longest_tokens)
        )
        pairs = list(zip(self.managers, hit.groups, strict=True))
        needed = sum(m.num_blocks_to_start(request, prefix, end) for m, prefix in pairs)
        if full_sequence_must_fit:
            whole = request.num_tokens
            gate = sum(m.num_blocks_to_start(request, prefix, whole, capped=True) for m, prefix in pairs)
            needed = max(needed, gate)
        if needed > available:
            del context.boundaries[request_id]
            return False
        may_copy = needed + sum(m.num_blocks_to_copy(prefix) for m, prefix in pairs) <= available
        self.rows.assign(request_id)
        for manager, prefix in pairs:
            manager.start(request_id, prefix, may_copy)
        for manager in self.managers:
            manager.grow(request_id, hit.num_tokens, end)
        for manager in self.search.cross:
            manager.fill(request)
            if request.num_encoder_tokens and not hit.groups[manager.group_id].blocks:
                self._needs_encoder.add(request_id)
        return True

    def _allocate_one_by_one(
        self, requests: Sequence[Request], starts: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        covered = []
        for request, start, end in zip(requests, starts, ends):
            request.num_computed_tokens = start
            if not self.allocate_slots(request, end - start):
                break
            covered.append(self.covered_tokens(request.request_id))
        return covered

    def _cache_encoders(self, requests: Sequence[Request]) -> None:
        """The encoders of these requests have run, where they had to."""
        for request in requests:
            if request.request_id in self._needs_encoder:
                self._needs_encoder.remove(request.request_id)
                for manager in self.search.cross:
                    manager.cache_encoder(request)

    def _awaits_copies(self, request_id: str) -> bool:
        """Whether contents of some block are still to be copied there. O(1) while no copies are pending."""
        copies = self.context.copies
        return len(copies) > 0 and any(
            copies.are_pending(block.block_id for block in manager.tables[request_id].live_blocks)
            for manager in self.managers
        )

    def _cacheable_tokens(self, request: Request) -> int:
        """Computed tokens that have hashes, which are brought up to date."""
        if not self._can_resume:
            return 0
        self.hasher.extend(request)
        return min(request.num_computed_tokens, len(request.block_hashes) * self.hasher.hash_block_size)

    def _swapper(self) -> Swapper:
        if self.swapper is None:
            raise ValueError(
                "this KV cache has no host blocks to swap to; pass host_blocks=HostBlocks(num_slots)"
            )
        return self.swapper
