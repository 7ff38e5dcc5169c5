"""Which resume points of a request the prefix cache keeps alive for layers that do not keep everything.

    tokens     |-------- system prompt --------|----- question -----|-- answer --
    dense      |....|....|....|....|....|....|....|....|....|....|....|....|....     every aligned boundary
    sparse                                     ^ junction          ^ last boundary of the prompt

At a retained boundary b a window group keeps the blocks that cover [b - W + 1, b), a chunked group those of b's
chunk, a recurrent group the checkpoint of b. Full attention keeps everything anyway. The junction is where a request
left what others had computed: more requests are likely to part there.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from pagebinder.errors import ConfigError

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class PrefixRetention:
    """How densely resume points are kept. Use `dense()` or `sparse(interval)`."""

    is_sparse: bool
    interval: int = 0

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ConfigError(
                f"the interval of retained prefixes is {self.interval}; it must be 0 or more tokens"
            )

    @staticmethod
    def dense() -> PrefixRetention:
        """Every aligned boundary can be resumed from."""
        return PrefixRetention(False)

    @staticmethod
    def sparse(interval: int = 0) -> PrefixRetention:
        """The prompt's last boundary, junctions, the end, and every `interval` tokens (rounded up to an aligned
        length; 0: no others)."""
        return PrefixRetention(True, interval)

    def boundaries(self, alignment: int, num_prompt_tokens: int, points: tuple[int, ...]) -> Boundaries:
        """Those of one request; `points`: its junctions. All are multiples of `alignment`."""
        if not self.is_sparse:
            return Boundaries((), alignment)
        kept = {point // alignment * alignment for point in (*points, num_prompt_tokens - 1)}
        return Boundaries(tuple(sorted(kept - {0})), -(-self.interval // alignment) * alignment)

    def most_checkpoints(self, alignment: int, num_tokens: int) -> int:
        """Most retained lengths in any range of `num_tokens` tokens of a request."""
        interval = -(-self.interval // alignment) * alignment if self.is_sparse else alignment
        # The end of the hit, the junction, the end of the prompt.
        return (3 if self.is_sparse else 0) + (-(-num_tokens // interval) if interval else 0)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Retained lengths of one request: `points` in order, and every multiple of `interval` (0: none)."""

    points: tuple[int, ...]
    interval: int

    def next_after(self, num_tokens: int) -> int:
        """The smallest retained length above `num_tokens`; NEVER if there is none."""
        regular = (num_tokens // self.interval + 1) * self.interval if self.interval else NEVER
        i = bisect_right(self.points, num_tokens)
        return min(regular, self.points[i]) if i < len(self.points) else regular

    def is_retained(self, num_tokens: int) -> bool:
        return self.next_after(num_tokens - 1) == num_tokens


NO_BOUNDARIES = Boundaries((), 0)
