"""`python -m tests.zoo.run [names...]`: check architectures, each in a process of its own with a time limit.

The processes are forked from one that has imported everything, so a name costs only its own compilation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import signal
import sys
import time

import torch

import pagebinder  # noqa: F401  (imported before forking)
from tests.zoo.architectures import FAMILIES, Architecture, architectures
from tests.zoo.serving import STATUSES, Record, check
from tests.zoo.table import write_page

CPU_LIMIT_SECONDS = 120
# A process that waits for ever uses no processor time.
WALL_LIMIT_SECONDS = 600
WARM_UP = "llama"


def warm_up() -> None:
    """Compile one model here, so that the forked processes need not import torch.export's machinery again."""
    record = check(next(a for a in architectures("causal") if a.name == WARM_UP))
    if record.status != "exact":
        raise SystemExit(
            f"{WARM_UP} is {record.status}, so nothing else is tried:\n{record.details or record.reason}"
        )


def _child(architecture: Architecture, levels: bool, pipe) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_SECONDS, CPU_LIMIT_SECONDS))
    pipe.send(check(architecture, levels))
    pipe.close()


class _Job:
    """One architecture in a process of its own."""

    def __init__(self, architecture: Architecture, levels: bool):
        context = multiprocessing.get_context("fork")
        self.architecture = architecture
        self.pipe, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(architecture, levels, sender), daemon=True)
        self.deadline = time.monotonic() + WALL_LIMIT_SECONDS
        self.process.start()
        sender.close()

    def result(self) -> Record | None:
        """The record once there is one; a process that died or ran out of time is an error."""
        if self.pipe.poll(0.02):
            try:
                record = self.pipe.recv()
            except EOFError:
                self.process.join()
                record = self._failed(self._how_it_ended())
            self.process.join()
            return record
        if time.monotonic() > self.deadline:
            self.process.kill()
            self.process.join()
            return self._failed(f"no result within {WALL_LIMIT_SECONDS} seconds")
        return None

    def _how_it_ended(self) -> str:
        code = self.process.exitcode
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"no result within {CPU_LIMIT_SECONDS} seconds of processor time, or out of memory"
        return f"the process ended with code {code}"

    def _failed(self, reason: str) -> Record:
        a = self.architecture
        return Record(a.name, a.family, a.class_name, status="error", reason=reason)


def run(todo: list[Architecture], num_jobs: int, on_result, levels: bool = False) -> list[Record]:
    """All records, in the order of `todo`; `on_result(record)` as each arrives. `levels`: see `check`."""
    waiting, running, records = list(todo), [], {}
    while waiting or running:
        while waiting and len(running) < num_jobs:
            running.append(_Job(waiting.pop(0), levels))
        for job in list(running):
            if (record := job.result()) is not None:
                running.remove(job)
                records[record.family, record.name] = record
                on_result(record)
    return [records[a.family, a.name] for a in todo]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types; all if none is given")
    parser.add_argument("--family", choices=FAMILIES, help="only this list of transformers")
    parser.add_argument(
        "--levels",
        action="store_true",
        help='nothing is served: verify="full" in bfloat16, each level in turn',
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", help="write the records to this file")
    parser.add_argument(
        "--write-docs", action="store_true", help="write docs/compatibility.md (needs a full run)"
    )
    args = parser.parse_args()
    if args.write_docs and (args.names or args.family or args.levels):
        parser.error("--write-docs describes all architectures, served: give no names, --family or --levels")
    families = [args.family] if args.family else list(FAMILIES)
    todo = [a for family in families for a in architectures(family) if not args.names or a.name in args.names]
    unknown = set(args.names) - {a.name for a in todo}
    if unknown:
        parser.error(f"no such architecture: {', '.join(sorted(unknown))}")

    warm_up()
    so_far: list[Record] = []

    def show(record: Record) -> None:
        so_far.append(record)
        if args.json:
            with open(args.json, "w") as file:
                json.dump([r.as_dict() for r in so_far], file, indent=1)
        print(
            f"{record.status:13} {record.family:8} {record.name:28} {record.seconds:6.1f} s  {record.reason}"
        )
        if args.names and record.details:
            print(record.details)
        sys.stdout.flush()

    records = run(todo, args.jobs, show, args.levels)
    for status in STATUSES:
        print(f"{sum(r.status == status for r in records):4} {status}")
    if args.write_docs:
        write_page(records)
    return int(any(r.status in ("wrong", "error") for r in records))


if __name__ == "__main__":
    sys.exit(main())
