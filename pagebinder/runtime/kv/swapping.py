"""Saving a request's blocks to host memory and bringing them back.

swap_out   live blocks -> host slots, recorded as copies; blocks and row go back at once (the copies run before
           anything else of the next step, so nobody can have overwritten the blocks by then)
swap_in    host slots -> new blocks at the same logical places; the slots go back when that step has finished
"""

from __future__ import annotations

from collections.abc import Sequence

from pagebinder.runtime.kv.blocks import require
from pagebinder.runtime.kv.context import CacheContext
from pagebinder.runtime.kv.host_blocks import HostBlocks, SwapImage
from pagebinder.runtime.kv.manager_base import SingleTypeManager
from pagebinder.runtime.request import Request


class Swapper:
    """Host slots, and which image holds which."""

    def __init__(
        self, host: HostBlocks, managers: Sequence[SingleTypeManager], context: CacheContext
    ) -> None:
        self.host, self.managers, self.context = host, tuple(managers), context
        self._images: set[SwapImage] = set()
        self._returning: list[int] = []

    def save(self, request: Request, needs_encoder: bool) -> SwapImage | None:
        """Record the copies of a request's live blocks; None (and nothing done) if slots are short.

        Also None while contents of the request are still to come from the host themselves.
        """
        request_id, num_tokens = request.request_id, request.num_computed_tokens
        live = [self._live_places(manager, request_id, num_tokens) for manager in self.managers]
        ids = [block for places in live for _, block in places]
        if any(self.context.copies.awaits_host(block) for block in ids):
            return None
        slots = self.host.allocate(len(ids))
        if slots is None:
            return None
        for block, slot in zip(ids, slots):
            self.context.copies.to_host(block, slot)
        rest = iter(slots)
        image = SwapImage(
            request_id=request_id,
            num_computed_tokens=num_tokens,
            groups=tuple(tuple((index, next(rest)) for index, _ in places) for places in live),
            tables=tuple(
                (min(manager.num_blocks_for(num_tokens), len(table.blocks)), table.begins_inside)
                for manager, table in ((m, m.tables[request_id]) for m in self.managers)
            ),
            boundaries=self.context.boundaries[request_id],
            needs_encoder=needs_encoder,
        )
        self._images.add(image)
        return image

    def restore(self, request: Request, image: SwapImage) -> None:
        """Open the request's tables with new blocks, which must be free, and record the copies into them."""
        self._forget(image)
        for manager, table, pairs in zip(self.managers, image.tables, image.groups):
            manager.restore(request.request_id, *table, pairs)
        slots = image.slots
        self._returning.extend(slots)
        blocks = tuple(
            manager.tables[request.request_id].blocks[index].block_id
            for manager, pairs in zip(self.managers, image.groups)
            for index, _ in pairs
        )
        self.context.fence.hold_for_copy(blocks, lambda: self._return(slots))

    def drop(self, image: SwapImage) -> None:
        """Give up an image: its slots are free at once."""
        self._forget(image)
        self.host.release(image.slots)

    def check_integrity(self) -> None:
        """Raise KVCacheIntegrityError unless every slot is free, in one image, or on its way back."""
        held = [slot for image in self._images for slot in image.slots] + self._returning
        require(len(set(held)) == len(held), "a host slot is held twice")
        require(not self.host.free_slots & set(held), "a host slot is free and held")
        require(self.host.num_free + len(held) == self.host.num_slots, "free + held host slots != total")
        unguarded = self.context.copies.slots_to_read.difference(self._returning)
        require(not unguarded, f"slots of pending copies are not held: {sorted(unguarded)}")

    def _forget(self, image: SwapImage) -> None:
        if image not in self._images:
            raise ValueError(
                f"the swap image of request {image.request_id!r} was restored or dropped already"
            )
        self._images.remove(image)

    def _return(self, slots: list[int]) -> None:
        gone = set(slots)
        self._returning = [slot for slot in self._returning if slot not in gone]
        self.host.release(slots)

    @staticmethod
    def _live_places(manager: SingleTypeManager, request_id: str, num_tokens: int) -> list[tuple[int, int]]:
        """(logical index, block id) of the blocks that hold something a resume at `num_tokens` reads."""
        table = manager.tables[request_id]
        end = min(manager.num_blocks_for(num_tokens), len(table.blocks))
        return [
            (i, table.blocks[i].block_id) for i in range(table.first_live, end) if not table.blocks[i].is_null
        ]
