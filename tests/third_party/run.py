"""`python -m tests.third_party.run --checkouts DIR [NAMES...]`: published models, each in a process of its own.

No code of others is kept here: DIR holds a checkout of each repository at DIR/<owner>+<name>/; `--list` prints the
commands that make them. Exit code 1 if a token is WRONG, anything failed, or nothing ran.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.third_party.case import Case
from tests.third_party.cases import COMMITS, all_cases
from tests.third_party.checkouts import checkout_of, commands
from tests.third_party.serving import STATUSES, Record, check
from tests.third_party.table import short, write_page

LIMIT_SECONDS = 400


def _child(case: Case, folder: Path, pipe) -> None:
    torch.set_num_threads(1)
    pipe.send(check(case, folder))
    pipe.close()


class _Job:
    """One case in a process of its own."""

    def __init__(self, case: Case, folder: Path):
        context = multiprocessing.get_context("fork")
        self.name = case.name
        self.pipe, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(case, folder, sender), daemon=True)
        self.deadline = time.monotonic() + LIMIT_SECONDS
        self.process.start()
        sender.close()

    def result(self) -> Record | None:
        """The record once there is one; a process that died or ran out of time is an error."""
        if self.pipe.poll(0.05):
            try:
                record = self.pipe.recv()
            except EOFError:
                self.process.join()
                record = Record(self.name, "error", f"the process ended with code {self.process.exitcode}")
            self.process.join()
            return record
        if time.monotonic() > self.deadline:
            self.process.kill()
            self.process.join()
            return Record(self.name, "error", f"no result within {LIMIT_SECONDS} seconds")
        return None


def run(todo: Sequence[Case], folder: Path, jobs: int, on_result: Callable[[Record], None]) -> list[Record]:
    """All records, in the order of `todo`; `on_result` as each arrives."""
    waiting, running, records = list(todo), [], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Job(waiting.pop(0), folder))
        for job in list(running):
            if (record := job.result()) is not None:
                running.remove(job)
                records[record.name] = record
                on_result(record)
    return [records[case.name] for case in todo]


def missing_checkouts(todo: Sequence[Case], folder: Path) -> dict[str, str]:
    """What is wrong with the checkout of each repository that has none, or another commit."""
    wrong = {}
    for repository in sorted({case.repository for case in todo}):
        checkout = checkout_of(repository, folder)
        if not checkout.path.is_dir():
            wrong[repository] = "no checkout"
        elif (commit := checkout.commit()) not in (None, COMMITS[repository]):
            wrong[repository] = f"another commit, {commit}"
    return wrong


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases, or parts of their names; all if none is given")
    parser.add_argument("--checkouts", type=Path, default=Path("checkouts"), help="DIR/<owner>+<name>/ each")
    parser.add_argument("--list", action="store_true", help="print the commands that make the checkouts")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--write-docs", action="store_true", help="write docs/third_party.md (a full run)")
    args = parser.parse_args(argv)
    if args.write_docs and args.names:
        parser.error("--write-docs describes all cases: give no names")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, cases = _arguments(argv), all_cases()
    todo = [c for c in cases if not args.names or any(name in c.name for name in args.names)]
    if args.list:
        for repository in sorted({case.repository for case in todo}):
            print(commands(repository, COMMITS[repository], args.checkouts))
        if needs := sorted({name for case in todo for name in case.needs}):
            print(f"pip install {' '.join(needs)}  # what their files import")
        return 0
    missing = missing_checkouts(todo, args.checkouts)
    for repository, what in missing.items():
        print(f"{what}: {repository}. It is made by")
        print(commands(repository, COMMITS[repository], args.checkouts))
    present = [case for case in todo if case.repository not in missing]
    so_far: list[Record] = []

    def show(record: Record) -> None:
        so_far.append(record)
        if args.json:
            args.json.write_text(json.dumps([r.as_dict() for r in so_far], indent=1))
        print(f"{record.status:8} {record.name:24} {record.seconds:6.1f} s  {short(record)}", flush=True)
        if args.names and record.details:
            print(record.details)

    records = run(present, args.checkouts, args.jobs, show)
    for status in STATUSES:
        print(f"{sum(r.status == status for r in records):4} {status}")
    if len(todo) > len(present):
        print(f"{len(todo) - len(present):4} without a checkout")
    if args.write_docs:
        if len(present) < len(cases):
            print("docs/third_party.md is left as it is: it describes all cases")
            return 1
        write_page(cases, records)
    nothing_ran = all(record.status == "not run" for record in records)
    return int(nothing_ran or any(record.status in ("WRONG", "error") for record in records))


if __name__ == "__main__":
    sys.exit(main())
