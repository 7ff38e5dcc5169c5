"""May a request enter: can it ever run (once, when it arrives), and does it get in now (every step).

A preempted request comes back in one of two ways: its blocks return from host memory, or its tokens are computed
again from its prefix hit on. Which one was chosen when it left does not bind: the hit may have grown since.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagebinder.errors import CacheCapacityError, RequestError
from pagebinder.runtime.kv.coordinator import KVCacheManager
from pagebinder.runtime.request import Request
from pagebinder.runtime.swap_policy import SwapPolicy


def check_fits(
    kv: KVCacheManager, max_model_len: int, prompt_len: int, max_tokens: int, num_encoder_tokens: int = 0
) -> None:
    """Raise unless a request of this size can run to its end when it is alone in the cache.

    Generation may stop early with finish reason "length" at max_model_len, so only the prompt must fit the
    model (else RequestError), but all tokens up to there must fit the cache (else CacheCapacityError).
    """
    if prompt_len >= max_model_len:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, but max_model_len is {max_model_len} including at least one "
            "generated token; shorten the prompt, or compile with a larger max_model_len if the model allows it"
        )
    # The last generated token is never fed back, so it needs no slot.
    num_tokens = min(prompt_len + max_tokens, max_model_len) - 1
    needed, usable = kv.max_blocks_for(num_tokens, num_encoder_tokens), kv.num_usable_blocks
    if needed > usable:
        encoder = f", an encoder prompt of {num_encoder_tokens}" if num_encoder_tokens else ""
        raise CacheCapacityError(
            f"a prompt of {prompt_len} tokens{encoder} and max_tokens of {max_tokens} need up to {needed} KV "
            f"blocks, but the cache has {usable} beside the null block; raise kv_cache_bytes (or num_kv_blocks), or "
            "lower max_tokens, the prompt's length or max_num_batched_tokens (windows hold a step's tokens too)"
        )


def check_whole_ranges(request: Request, max_num_batched_tokens: int) -> None:
    """Raise RequestError unless a step has room for what must be computed as a whole."""
    longest = max((end - start for start, end in request.whole_ranges), default=0)
    if longest > max_num_batched_tokens:
        raise RequestError(
            f"{longest} embeddings of the prompt see each other (parts of an image), so one step computes them all, "
            f"and steps have at most {max_num_batched_tokens} tokens: use "
            f"EngineConfig(max_num_batched_tokens={longest}) or more"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A request got in: tokens it need not compute, tokens it computes in this step."""

    num_computed_tokens: int
    num_new_tokens: int
    swapped_in: bool = False


class Admission:
    """Lets requests in and out of the cache. `watermark_blocks` stay free when one enters beside others."""

    def __init__(self, kv: KVCacheManager, swaps: SwapPolicy | None, watermark_blocks: int = 0) -> None:
        self.kv = kv
        self.swaps = swaps
        self.watermark_blocks = watermark_blocks
        self._memo = AdmissionMemo(kv)

    def try_admit(self, request: Request, max_new_tokens: int, *, room: int, alone: bool) -> Entry | None:
        """Give a waiting request blocks for up to `max_new_tokens` tokens; None: it must wait.

        `room`: tokens that a range may have that is computed as a whole. `alone`: nothing runs, so it must be tried:
        it is known to fit.
        """
        if not alone and self._memo.still_refused(request):
            return None
        hit = self.kv.find_prefix(request)
        watermark = 0 if alone else self.watermark_blocks
        image = request.swap_image
        if image is not None and self.swaps.prefers_swap_in(image, request.num_tokens, hit.num_tokens):
            entry = self._swap_in(request, max_new_tokens, room, watermark, alone)
        else:
            count = min(request.num_tokens - hit.num_tokens, max_new_tokens)
            count = request.fit_chunk(hit.num_tokens, count, room)
            if not count:  # for want of room in the step, not of blocks
                return None
            entry = self._recompute(request, count, hit, watermark)
        if entry is None:
            self._memo.refuse(request, hit.num_tokens)
        else:
            self._memo.clear()
        return entry

    def give_up(self, request: Request) -> bool:
        """Take a preempted request's blocks away; True if its state went to host memory."""
        if self.swaps is not None and self.swaps.prefers_swap_out(self.kv, request):
            request.swap_image = self.kv.swap_out(request)
        if request.swap_image is None:
            self.kv.free(request)
        return request.swap_image is not None

    def forget(self, request: Request) -> None:
        """Drop what host memory holds of a request."""
        if request.swap_image is not None:
            self.kv.drop_image(request.swap_image)
            request.swap_image = None

    def _recompute(self, request: Request, count: int, hit, watermark: int) -> Entry | None:
        request.num_computed_tokens = 0
        if not self.kv.allocate_slots(
            request, count, hit, full_sequence_must_fit=True, watermark_blocks=watermark
        ):
            return None
        if self.swaps is not None and request.num_preemptions:
            self.swaps.note_recompute(request.num_tokens, hit.num_tokens)
        self.forget(request)
        return Entry(hit.num_tokens, count)

    def _swap_in(
        self, request: Request, max_new_tokens: int, room: int, watermark: int, alone: bool
    ) -> Entry | None:
        image = request.swap_image
        # Room for the next tokens too, or it would be the first to be preempted again.
        blocks = image.num_blocks + len(self.kv.groups) + watermark
        if (not alone and self.kv.num_free_blocks < blocks) or not self.kv.swap_in(request, image):
            return None
        request.swap_image = None
        request.num_computed_tokens = computed = image.num_computed_tokens
        count = request.fit_chunk(computed, min(request.num_tokens - computed, max_new_tokens), room)
        return Entry(
            computed, count if count and self.kv.allocate_slots(request, count) else 0, swapped_in=True
        )


class AdmissionMemo:
    """Remembers the last refused admission, so that the head of the line does not search its whole prompt
    in every step that it waits."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._request: Request | None = None
        self._num_free_blocks = 0
        self._num_hit_tokens = 0

    def clear(self) -> None:
        self._request = None

    def refuse(self, request: Request, num_hit_tokens: int) -> None:
        self._request = request
        self._num_free_blocks = self._kv.num_free_blocks
        self._num_hit_tokens = num_hit_tokens

    def still_refused(self, request: Request) -> bool:
        """True if trying again is pointless: no block was freed since and the hit cannot be longer."""
        if request is not self._request:
            return False
        before, now = self._num_free_blocks, self._kv.num_free_blocks
        # The lowest level seen counts: blocks that were taken and freed again may have been its own hits.
        self._num_free_blocks = min(before, now)
        return now <= before and not self._kv.prefix_may_grow(request, self._num_hit_tokens)
