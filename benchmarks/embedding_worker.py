"""One side of benchmarks/embeddings.py, in a process of its own: reads a job, then computes each time it is told to.

    stdin   {"side": "pagebinder" | "sentence-transformers", "model": DIR, "texts": [...], "threads": n,
             "batch_size": n, "out": FILE.npy}
            then one line per run, until the end of the input
    stdout  {"ready": seconds}, then {"wall": seconds, "cpu": seconds} per run

It imports nothing of this repository but pagebinder, since the other side runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time


def embedder(job: dict):
    """A function () -> [texts, C] numpy array, and the name and version of what computes it."""
    if job["side"] == "pagebinder":
        import pagebinder

        compiled = pagebinder.compile_model(job["model"])
        return lambda: compiled.embed(job["texts"]).numpy(), f"pagebinder {pagebinder.__version__}"
    import sentence_transformers

    model = sentence_transformers.SentenceTransformer(job["model"], device="cpu")
    name = f"sentence-transformers {sentence_transformers.__version__}"
    return lambda: model.encode(job["texts"], batch_size=job["batch_size"], show_progress_bar=False), name


def main() -> None:
    job = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    import numpy
    import torch

    torch.set_num_threads(job["threads"])
    embed, name = embedder(job)
    numpy.save(job["out"], embed())
    print(json.dumps({"ready": time.perf_counter() - start, "name": name}), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        embed()
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}), flush=True)


if __name__ == "__main__":
    main()
