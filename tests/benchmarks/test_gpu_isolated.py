"""What `make gpu` keeps where a case fails, hangs, or takes its process with it; no GPU is needed to see that."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORKER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from gpu_isolated import work

def bad():
    raise MemoryError("no room")

cases = [
    ("good", lambda: [{{"case": "good", "ms": 1.5}}]),
    ("bad", bad),
    ("half", lambda: [{{"case": "first half", "ms": 2.0}}, {{"case": "other half", "error": "odd"}}]),
    ("dead", lambda: os._exit(139)),
    ("hung", lambda: time.sleep(60)),
    ("last", lambda: [{{"case": "last", "ms": 0.5}}]),
]
print("worker", flush=True)
raise SystemExit(work(Path(sys.argv[2]), int(sys.argv[1]), cases, {{"rate": 3.0}}))
"""


@pytest.fixture
def isolated(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_isolated

    return gpu_isolated


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(folder=str(BENCHMARKS)))
    return [sys.executable, str(script)]


def test_every_other_case_is_kept(isolated, command, tmp_path):
    kept = []
    deadline = time.monotonic() + 60
    run = isolated.Isolated(
        command, tmp_path / "lines", deadline, 2.0, lambda report: kept.append(dict(report))
    )
    report = run.run()
    assert report["rate"] == 3.0 and report["not_run"] == [] and kept[-1] == report
    assert [row.get("ms") for row in report["results"]] == [1.5, None, 2.0, None, None, None, 0.5]
    errors = [(row["case"], row["error"]) for row in report["results"] if "error" in row]
    assert errors == [
        ("bad", "MemoryError: no room"),
        ("other half", "odd"),
        ("dead", "the process ended with 139"),
        ("hung", "not finished after 2 s"),
    ]


def test_what_is_not_reached_is_named(isolated, command, tmp_path):
    deadline = time.monotonic() + 5
    report = isolated.Isolated(command, tmp_path / "lines", deadline, 60.0, lambda report: None).run()
    assert report["results"][-1] == {"case": "hung", "error": "the time for everything is up"}
    assert report["not_run"] == ["last"]


def test_a_worker_that_never_begins_ends_the_run(isolated, tmp_path):
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    report = isolated.Isolated(
        command, tmp_path / "lines", time.monotonic() + 60, 30.0, lambda report: None
    ).run()
    assert report["results"] == [{"case": "start of the benchmarks", "error": "the process ended with 7"}]
