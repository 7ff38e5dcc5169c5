"""May a request enter: can it ever run (once, when it arrives), and is it worth trying again (every step)."""

from __future__ import annotations

from pagebinder.errors import CacheCapacityError, RequestError
from pagebinder.runtime.kv.coordinator import KVCacheManager
from pagebinder.runtime.request import Request


def check_fits(kv: KVCacheManager, max_model_len: int, prompt_len: int, max_tokens: int) -> None:
    """Raise unless a request of this size can run to its end when it is alone in the cache.

    Generation may stop early with finish reason "length" at max_model_len, so only the prompt must fit the
    model (else RequestError), but all tokens up to there must fit the cache (else CacheCapacityError).
    """
    if prompt_len >= max_model_len:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, but max_model_len is {max_model_len} including at least one "
            "generated token; shorten the prompt or raise max_model_len"
        )
    # The last generated token is never fed back, so it needs no slot.
    num_tokens = min(prompt_len + max_tokens, max_model_len) - 1
    needed, usable = kv.max_blocks_for(num_tokens), kv.num_usable_blocks
    if needed > usable:
        raise CacheCapacityError(
            f"a prompt of {prompt_len} tokens and max_tokens of {max_tokens} need up to {needed} KV blocks, but "
            f"the cache has {usable}; raise kv_cache_bytes (or num_kv_blocks), or lower max_tokens, the "
            "prompt's length or max_num_batched_tokens (sliding windows hold a step's tokens too)"
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
