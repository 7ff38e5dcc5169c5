"""The plan of two streams as the host carries it out: which launch goes where and when, and what is waited for.

    host order   main f   side b1   main a1   main a2 , waits for b1   ...
                     `─event─▲  `───────event──────────────▲

- A stream runs its launches in the graph's order; the host launches the side's as soon as it may, in runs.
- A launch waits for the other stream only if it needs one of its launches, later than all that its stream has waited
  for already. So no wait can be left out, and none tells anything that is known.
- At the graph's end the main stream waits for the side, and in the beginning the side for the main stream. So two
  runs never overlap, and a capture of the main stream holds the side.

Memory belongs to the stream on which it was allocated: when the host drops its last reference, the allocator gives it
to that stream's next launch at once, though the other stream may still be reading. So a value that the other stream
reads is held until the owner has waited for the reader:

    x made on main, read by b1 on the side      held until main waits for b1 or a later one: the join
    y made on the side, read by the join        held until the side waits for main again, or to the end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from pagebinder.runtime.streams.branches import MAIN, SIDE
from pagebinder.runtime.streams.launches import Launches, maker

# Stands for the launch that all launches come after: the beginning of the graph, on the main stream.
START = None


@dataclass(frozen=True)
class Schedule:
    """order: all launches as the host makes them. stream: MAIN or SIDE of each. waits: launch -> the launch of the
    other stream that it waits for (START: what ran before the graph). joined: the side's last launch, for which the
    main stream waits at the end, if it has not before.

    released: launch -> values that the host may drop once it has launched it; what is not in it lives to the end.
    held: values -> the launch (None: the end) at which the stream that owns them has waited for their last reader.
    """

    launches: Launches
    order: tuple[Node, ...]
    stream: dict[Node, int]
    waits: dict[Node, Node | None]
    joined: Node | None
    released: dict[Node, tuple[Node, ...]]
    held: dict[Node, Node | None]

    @property
    def recorded(self) -> set[Node | None]:
        """Launches after which an event is recorded."""
        return {*self.waits.values(), *(() if self.joined is None else (self.joined,))}

    def of(self, stream: int) -> list[Node]:
        """The launches of one stream, in order."""
        return [node for node in self.order if self.stream[node] == stream]


def make_schedule(launches: Launches, side: frozenset[Node]) -> Schedule:
    """The schedule of a graph whose launches `side` run on the side stream."""
    stream = {node: SIDE if node in side else MAIN for node in launches.nodes}
    waits, joined = _waits(launches, stream)
    order = _host_order(launches.nodes, stream, waits)
    released, held = _lifetimes(launches, order, stream, waits)
    return Schedule(launches, tuple(order), stream, waits, joined, released, held)


def _waits(launches: Launches, stream: dict[Node, int]) -> tuple[dict[Node, Node | None], Node | None]:
    """Who waits for whom, and whom the main stream still has to wait for at the end."""
    number = {node: i for i, node in enumerate(launches.nodes)}
    waits: dict[Node, Node | None] = {}
    seen = {MAIN: -1, SIDE: -2}  # the last launch of the other stream that a stream has waited for; -1: START
    for node in launches.nodes:
        mine = stream[node]
        needed = max((number[o] for o in launches.before[node] if stream[o] != mine), default=-1)
        if needed > seen[mine]:
            waits[node] = START if needed < 0 else launches.nodes[needed]
            seen[mine] = needed
    of_side = [number[node] for node in launches.nodes if stream[node] == SIDE]
    is_open = bool(of_side) and of_side[-1] > seen[MAIN]
    return waits, launches.nodes[of_side[-1]] if is_open else None


def _host_order(nodes: Sequence[Node], stream: dict[Node, int], waits: dict[Node, Node | None]) -> list[Node]:
    """The side's next launch whenever what it waits for was launched, else the main stream's."""
    queues = {which: [n for n in nodes if stream[n] == which][::-1] for which in (SIDE, MAIN)}
    order: list[Node] = []
    launched: set[Node | None] = {START}
    while any(queues.values()):
        queue = next(q for q in queues.values() if q and waits.get(q[-1], START) in launched)
        order.append(queue.pop())
        launched.add(order[-1])
    return order


def _lifetimes(launches: Launches, order: Sequence[Node], stream, waits):
    """When the host may drop each value, and which values wait for another stream's readers."""
    place = {node: i for i, node in enumerate(order)}
    number = {node: i for i, node in enumerate(launches.nodes)}
    readers: dict[Node, list[Node]] = {}
    for node in order:
        for value in launches.values[node]:
            readers.setdefault(value, []).append(node)
    for node in order:  # what nobody reads
        readers.setdefault(node, [])
    released: dict[Node, list[Node]] = {}
    held: dict[Node, Node | None] = {}
    for value, users in readers.items():
        if value in launches.results:
            continue
        last = max(place[n] for n in (*users, maker(value)))
        for owner in sorted({stream[s] for s in launches.storages[value] if s in stream}):
            foreign = [number[user] for user in users if stream[user] != owner]
            if foreign:
                join = _first_wait(order, stream, waits, owner, max(foreign), number)
                held[value] = join
                last = max(last, len(order) if join is None else place[join])
        if last < len(order):
            released.setdefault(order[last], []).append(value)
    return {node: tuple(values) for node, values in released.items()}, held


def _first_wait(order, stream, waits, owner: int, reader: int, number) -> Node | None:
    """The first launch of a stream that waits for the other's launch `reader` or a later one."""
    for node in order:
        target = waits.get(node)
        if stream[node] == owner and target is not None and number[target] >= reader:
            return node
    return None


def problems(schedule: Schedule) -> list[str]:
    """What a schedule lets happen too early, from the order of its streams and its events alone; empty if nothing.

    A check that shares nothing with how schedules are made: launches that happen before a launch, as a set of bits.
    """
    launches, stream = schedule.launches, schedule.stream
    bit = {node: 1 << i for i, node in enumerate((START, *schedule.order))}
    seen = {MAIN: bit[START], SIDE: 0}  # what is done before a stream's next launch
    done: dict[Node | None, int] = {START: 0}
    found = []
    for node in schedule.order:
        mine = stream[node]
        if node in schedule.waits:
            target = schedule.waits[node]
            if target not in done:
                found.append(f"{node} waits for {target}, which is launched after it")
            seen[mine] |= done.get(target, 0) | bit[target]
        if not seen[mine] & bit[START]:
            found.append(f"{node} may run before the graph begins")
        found += [
            f"{node} may run before {other} ({why})"
            for other, why in launches.before[node].items()
            if not seen[mine] & bit[other]
        ]
        done[node] = seen[mine]
        seen[mine] |= bit[node]
    if schedule.joined is not None:
        seen[MAIN] |= done[schedule.joined] | bit[schedule.joined]
    found += [
        f"{node} may run on after the graph's end" for node in schedule.order if not seen[MAIN] & bit[node]
    ]
    return found + _early_releases(schedule, done, bit)


def _early_releases(schedule: Schedule, done, bit) -> list[str]:
    """Values whose memory a stream may use again while the other one reads it."""
    launches, stream = schedule.launches, schedule.stream
    found = []
    for at, values in schedule.released.items():
        after = schedule.order[schedule.order.index(at) + 1 :]
        for value in values:
            users = [n for n in schedule.order if value in launches.values[n]]
            if any(n in after for n in users):
                found.append(f"{value} is dropped before it is read")
            for owner in {stream[s] for s in launches.storages[value] if s in stream}:
                first = next((n for n in after if stream[n] == owner), None)
                found += [
                    f"{first} may be given the memory of {value}, which {user} reads"
                    for user in users
                    if first is not None and stream[user] != owner and not done[first] & bit[user]
                ]
    return found
