"""Cases in a process of their own, which is started anew behind one that fails, hangs or takes the process with it:
after an illegal access nothing that follows in the same process can be believed.

    worker      work(file, first, cases)      appends a line of JSON for each thing that happens
    parent      Isolated(...).run()           reads them, and has everything that was finished, whatever comes next
"""

from __future__ import annotations

import json
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FAILED_CASE = 3  # a worker's exit code where it has told of the error itself
POLL_SECONDS = 0.1

Case = tuple[str, Callable[[], list[dict]]]


def say(path: Path, **facts) -> None:
    with path.open("a") as file:
        file.write(json.dumps(facts) + "\n")


def error_row(case: str, error: Exception) -> dict:
    return {"case": case, "error": f"{type(error).__name__}: {error}"[:600]}


def work(path: Path, first: int, cases: Sequence[Case], facts: dict) -> int:
    """In the worker: run cases from number `first` on, up to one that fails. Returns the exit code."""
    say(path, names=[name for name, _ in cases], facts=facts)
    for number, (name, run) in enumerate(cases[first:], first):
        say(path, begins=number)
        try:
            rows = run()
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-3:])[-1500:]
            rows = [{**error_row(name, error), "where": where}]
        say(path, done=number, rows=rows)
        if any("error" in row for row in rows):
            return FAILED_CASE
    return 0


@dataclass
class Isolated:
    """Runs a worker until all cases are done, or the time is up.

    Attributes:
        command: the worker's; the number of the first case and the file of lines are appended.
        path: of the file of lines; what is there is dropped.
        deadline: for everything, as time.monotonic() tells it.
        case_seconds: that one case may take, the worker's start included.
        changed: called with the report whenever there is more of it.
    """

    command: Sequence[str]
    path: Path
    deadline: float
    case_seconds: float
    changed: Callable[[dict], None]
    report: dict = field(default_factory=lambda: {"results": [], "not_run": []})
    _names: list[str] = field(default_factory=list)
    _next: int = 0  # the first case that is not done
    _running: int | None = None
    _read_bytes: int = 0

    def run(self) -> dict:
        self.path.write_text("")
        while True:
            why = self._run_worker()
            if why and not self._note_failure(why):
                break
            if self._next >= len(self._names) or time.monotonic() > self.deadline:
                break
        self.report["not_run"] = self._names[self._next :]
        self.changed(self.report)
        return self.report

    def _run_worker(self) -> str:
        """Why a worker ended early: "" where it did not, or has said so itself."""
        worker = subprocess.Popen([*self.command, str(self._next), str(self.path)])
        self._running, since, why = None, time.monotonic(), ""
        try:
            while worker.poll() is None and not why:
                if self._take_lines():
                    since = time.monotonic()
                why = self._out_of_time(since)
                time.sleep(POLL_SECONDS)
        finally:
            worker.kill()
            worker.wait()
        self._take_lines()
        ended = "" if worker.returncode in (0, FAILED_CASE) else f"the process ended with {worker.returncode}"
        return why or ended

    def _out_of_time(self, since: float) -> str:
        now = time.monotonic()
        if now > self.deadline:
            return "the time for everything is up"
        return f"not finished after {self.case_seconds:.0f} s" if now - since > self.case_seconds else ""

    def _note_failure(self, why: str) -> bool:
        """Is it worth to go on?"""
        name = "start of the benchmarks" if self._running is None else self._names[self._running]
        self.report["results"].append({"case": name, "error": why})
        self.changed(self.report)
        if self._running is None:
            return False  # it would end in the same way again
        self._next = self._running + 1
        return True

    def _take_lines(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            lines = [line for line in file.readlines() if line.endswith(b"\n")]
        self._read_bytes += sum(map(len, lines))
        for line in lines:
            self._take(json.loads(line))
        return bool(lines)

    def _take(self, fact: dict) -> None:
        if "names" in fact:
            self._names = fact["names"]
            self.report = {**fact["facts"], **self.report}
        elif "begins" in fact:
            self._running = fact["begins"]
        else:
            self._next, self._running = fact["done"] + 1, None
            self.report["results"] += fact["rows"]
            for row in fact["rows"]:
                print(row_text(row), flush=True)
            self.changed(self.report)


def row_text(row: dict) -> str:
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if k != "where"}
    return ", ".join(f"{k} {v}" for k, v in shown.items())
