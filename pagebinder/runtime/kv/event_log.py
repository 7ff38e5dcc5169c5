"""What happened to a pool, step by step: counters per step, as data and as JSON lines.

    line 0   {"format": "pagebinder-kv-events", "version": 1, "num_blocks": 64, "groups": [...], ...}
    line 1   {"step": 0, "time": 0.0, "in_use": [3, 2], "cached": [0, 0], "free": 58, ...}
    line 2   {"step": 1, ...

Every usable block (all but the null block) is in exactly one place, so in_use + cached + free = num_blocks - 1 in
every line; `cached` blocks are nobody's but can be hit, `free` ones hold nothing. A line is the pool while a step
runs: blocks of the step are allocated, and the tokens it computes count as stored.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from pagebinder.errors import EventLogError
from pagebinder.paths import replaced, user_path

FORMAT = "pagebinder-kv-events"
VERSION = 1
# Owners of single blocks that are no request ids.
FREE = None
CACHED = ""

Owner = str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What a reader of the log needs to know of a group. `slots_per_block`: tokens, or 1 state of constant size."""

    kind: str
    num_layers: int
    block_size: int
    slots_per_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step. Tuples have one entry per group; counts of things that happen are since the step before.

    time: seconds since recording began (monotonic clock). in_use: blocks held by requests. cached: held by nobody,
    but findable. free: neither (`deferred` of all these wait for a step that is still in flight). slots: entries
    that the blocks in use have room for; tokens: how many of them are filled. evictions: cached blocks that were
    overwritten. allocations: blocks handed out empty. swaps: requests moved to host memory and back. owners: (block
    id, new owner) of every block whose owner changed: a request id, CACHED or FREE.
    """

    step: int
    time: float
    in_use: tuple[int, ...]
    cached: tuple[int, ...]
    free: int
    deferred: int
    slots: tuple[int, ...]
    tokens: tuple[int, ...]
    scheduled_tokens: int
    queried_tokens: int
    hit_tokens: int
    evictions: int
    allocations: int
    preemptions: int
    swaps_out: int
    swaps_in: int
    running: int
    waiting: int
    owners: tuple[tuple[int, Owner], ...] = ()

    @property
    def num_blocks_in_use(self) -> int:
        return sum(self.in_use)

    @property
    def waste(self) -> float:
        """Share of the memory in use that is allocated but not filled, 0.0 to 1.0. All blocks have equal bytes."""
        empty = sum(n * (1 - t / s) for n, t, s in zip(self.in_use, self.tokens, self.slots) if s)
        return empty / self.num_blocks_in_use if self.num_blocks_in_use else 0.0


_TUPLES = ("in_use", "cached", "slots", "tokens")
_FIELDS = tuple(f.name for f in fields(StepRecord))
_COUNTS = tuple(name for name in _FIELDS if name not in (*_TUPLES, "time", "owners"))


@dataclass(slots=True)
class KVEventLog:
    """The records of one run. `bytes_per_block` is 0 if whoever recorded it did not know."""

    num_blocks: int
    groups: tuple[GroupFacts, ...]
    bytes_per_block: int = 0
    has_owners: bool = False
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    def total(self, name: str) -> int:
        """Sum of one of the counters of StepRecord over all steps, for example total("evictions")."""
        return sum(getattr(step, name) for step in self.steps)

    @property
    def hit_rate(self) -> float:
        """Share of the queried prompt tokens that the prefix cache had."""
        queried = self.total("queried_tokens")
        return self.total("hit_tokens") / queried if queried else 0.0

    @property
    def mean_waste(self) -> float:
        """`StepRecord.waste`, every step weighted by the blocks in use in it."""
        blocks = sum(step.num_blocks_in_use for step in self.steps)
        return sum(step.waste * step.num_blocks_in_use for step in self.steps) / blocks if blocks else 0.0

    def owners_over_time(self) -> Iterator[tuple[int, dict[int, Owner]]]:
        """(index of the step, owner of every block that is not free). The dict is updated in place."""
        owners: dict[int, Owner] = {}
        for i, step in enumerate(self.steps):
            for block_id, owner in step.owners:
                if owner is FREE:
                    owners.pop(block_id, None)
                else:
                    owners[block_id] = owner
            yield i, owners

    def save(self, path: str | Path) -> None:
        """Write JSON lines: a header, then one line per step. Raises EventLogError if the file cannot be written."""
        header = {"format": FORMAT, "version": VERSION, "num_blocks": self.num_blocks,
                  "bytes_per_block": self.bytes_per_block, "has_owners": self.has_owners,
                  "groups": [asdict(group) for group in self.groups]}  # fmt: skip
        records = itertools.chain([header], map(_as_dict, self.steps))
        path = user_path(path, EventLogError)
        try:
            with replaced(path) as new, new.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        except OSError as error:
            raise cannot_write(path, error) from error

    @classmethod
    def load(cls, path: str | Path) -> KVEventLog:
        """Read what `save` wrote. Raises EventLogError, naming file and line, for anything else."""
        path = user_path(path, EventLogError)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise EventLogError(f"cannot read the event log {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise EventLogError(f"{path} is not a text file, so it is no KV event log") from error
        log = _header(lines[0] if lines else "", path)
        log.steps = list(_records(lines[1:], log, path))
        return log


def _as_dict(step: StepRecord) -> dict:
    record = {name: getattr(step, name) for name in _FIELDS}
    record["time"] = round(step.time, 6)
    if not step.owners:
        del record["owners"]
    return record


def cannot_write(path: str | Path, error: OSError) -> EventLogError:
    """The error for a file that cannot be made; a folder that is missing is named."""
    folder = Path(path).parent
    if not folder.is_dir():
        return EventLogError(f"cannot write {path}: the folder {folder} does not exist; create it first")
    return EventLogError(f"cannot write {path}: {error.strerror}")


def _header(line: str, path: Path) -> KVEventLog:
    header = _json(line, path, 1) if line.startswith("{") else {}
    if header.get("format") != FORMAT:
        raise EventLogError(f"{path} is no KV event log: write one with KVEventLog.save()")
    if header.get("version") != VERSION:
        raise EventLogError(
            f"{path} has version {header.get('version')} of the log format; this release reads {VERSION}"
        )
    try:
        groups = tuple(GroupFacts(**group) for group in header["groups"])
        sizes = [header["num_blocks"], header["bytes_per_block"], *(g.slots_per_block for g in groups)]
        has_owners = bool(header["has_owners"])
    except (KeyError, TypeError) as error:
        raise EventLogError(f"{path}, line 1: the header is damaged ({error})") from error
    if not all(map(_is_count, sizes)) or sizes[0] < 2:
        raise EventLogError(f"{path}, line 1: the header is damaged (a size is not a whole number)")
    return KVEventLog(sizes[0], groups, sizes[1], has_owners)


def _records(lines: Iterable[str], log: KVEventLog, path: Path) -> Iterator[StepRecord]:
    before = -1
    for number, line in enumerate(lines, 2):
        record = _json(line, path, number)
        if problem := _problem(record, log, before):
            raise EventLogError(f"{path}, line {number}: {problem}")
        before = record["step"]
        for name in _TUPLES:
            record[name] = tuple(record[name])
        record["owners"] = tuple((b, owner) for b, owner in record.get("owners", ()))
        yield StepRecord(**record)


def _problem(record: dict, log: KVEventLog, step_before: int) -> str:
    """What is wrong with a line, or "" if nothing is."""
    if missing := [name for name in _FIELDS[:-1] if name not in record]:
        return f"{', '.join(missing)} missing"
    if unknown := record.keys() - set(_FIELDS):
        return f"unknown: {', '.join(sorted(unknown))}"
    for name in _TUPLES:
        value = record[name]
        if not (isinstance(value, list) and len(value) == len(log.groups) and all(map(_is_count, value))):
            return f"{name} must be {len(log.groups)} counts, one per group"
    if bad := [name for name in _COUNTS if not _is_count(record[name])]:
        return f"not a count: {', '.join(bad)}"
    if isinstance(record["time"], bool) or not isinstance(record["time"], (int, float)):
        return "time must be a number of seconds"
    if not all(_is_owner(item, log.num_blocks) for item in record.get("owners", ())):
        return "owners must be pairs of a block id and a request id, null or an empty string"
    if record["step"] <= step_before:
        return f"step {record['step']} follows step {step_before}"
    total = sum(record["in_use"]) + sum(record["cached"]) + record["free"]
    if total != log.num_usable_blocks:
        return f"{total} blocks are accounted for, but the pool has {log.num_usable_blocks}"
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_owner(item: object, num_blocks: int) -> bool:
    if not (isinstance(item, list) and len(item) == 2):
        return False
    block_id, owner = item
    return _is_count(block_id) and 0 < block_id < num_blocks and (owner is None or isinstance(owner, str))


def _json(line: str, path: Path, number: int) -> dict:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise EventLogError(
            f"{path}, line {number}: not JSON ({error}). A run that was killed while saving leaves half a line: "
            "delete that line to use the rest."
        ) from error
    if not isinstance(value, dict):
        raise EventLogError(f"{path}, line {number}: not a JSON object")
    return value
