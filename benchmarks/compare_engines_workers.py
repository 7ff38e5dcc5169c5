"""The parent's side of peers/worker.py: engines in processes of their own, of which one runs at a time.

    Pool["vllm"]        started when it is first asked for, in a process group of its own
    worker.ask(...)     SIGCONT to the group, command, answer, SIGSTOP

Threads of an engine that waits often spin, so all but the one that is measured are stopped. Groups share the parent's
session: should the parent die, the kernel wakes and hangs up whatever it left stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

PEERS = Path(__file__).with_name("peers")
SECONDS_TO_END = 20


@dataclass(frozen=True)
class Engine:
    """How a worker is started. `distribution`: the package that it measures. The rest adds to what all get."""

    python: str
    script: str
    distribution: str
    options: Mapping = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def version(self) -> str:
        code = f"import importlib.metadata as m; print(m.version({self.distribution!r}))"
        return subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()

    def with_options(self, options: Mapping) -> Engine:
        return replace(self, options={**self.options, **options})

    def with_caches_in(self, folder: Path) -> Engine:
        """Of compiled graphs and kernels."""
        names = ("PAGEBINDER_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        return replace(self, environment={**self.environment, **{n: str(folder / n.lower()) for n in names}})


def preloaded_openmp(python: str) -> dict[str, str]:
    """vLLM wants Intel's OpenMP before torch's own, where its environment has it."""
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


class Worker:
    """One engine's process. What it prints goes to `log`."""

    def __init__(self, engine: Engine, options: dict, log: Path) -> None:
        self.log = log
        environment = {
            **os.environ, "OMP_NUM_THREADS": str(options["threads"]), "HF_HUB_OFFLINE": "1",
            "WORKER_STARTED": str(time.time()), **engine.environment,
        }  # fmt: skip
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [engine.python, str(PEERS / engine.script), json.dumps({**options, **engine.options})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                process_group=0,
            )  # fmt: skip
        try:
            self.ready_seconds = self._answer()["ready"]
        except BaseException:
            self.close()
            raise
        self._stop()

    def ask(self, command: dict) -> dict:
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self._stop()
        return answer

    def close(self) -> None:
        """End it: politely, then not."""
        if self.process.poll() is None:
            self._signal(signal.SIGCONT)
            self.process.stdin.close()
            try:
                self.process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self.process.wait()
        self.process.stdout.close()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"{self.log.stem} ended without an answer:\n{last}")
        return json.loads(line)

    def _stop(self) -> None:
        """Returns when it has stopped, or ended."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


class Pool:
    """Workers with the same options, by the engine's name. A context manager: all end with it.

    `read_rate`: what memory gives now, in bytes per second."""

    def __init__(
        self, engines: Mapping[str, Engine], options: dict, folder: Path, read_rate: Callable[[], float]
    ) -> None:
        self.engines, self.options, self.folder, self.read_rate = engines, options, folder, read_rate
        self.workers: dict[str, Worker] = {}
        self.ready_seconds: dict[str, float] = {}  # of every worker that was started, ended ones too

    def __getitem__(self, name: str) -> Worker:
        if name not in self.workers:
            log = self.folder / f"{name.replace(' ', '_')}.log"
            self.workers[name] = Worker(self.engines[name], self.options, log)
            self.ready_seconds[name] = self.workers[name].ready_seconds
        return self.workers[name]

    def start(self, names: Sequence[str]) -> None:
        """Start those that do not run yet, one after the other."""
        for name in names:
            self[name]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
