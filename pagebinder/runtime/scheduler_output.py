"""What the scheduler decides in one step, and what it counts.

    tokens of a request   |###### computed ######|== this step's chunk ==|.. later ..|
                                                 ^ start                 ^ start + num_new_tokens

`samples` is True when nothing is left for later: the chunk reaches the last known token.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagebinder.runtime.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Tokens [start, start + num_new_tokens) of a request are to be computed.

    `samples`: the last of them is the last known token, so its logits give a new one.
    """

    request: Request
    start: int
    num_new_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: running requests best first, then the newly admitted. Blocks for all of it are allocated."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted_ids: tuple[str, ...]
    total_num_tokens: int


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. Prefix counters are of first admissions; resumed requests count apart."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    resumed_hit_tokens: int = 0
