"""The shipped model: our engine beside transformers' `generate`, cold start, and where a step's time goes.

python benchmarks/engine.py [--rounds 5]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import torch
import typer
from common import alternate, median, save
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model
from pagebinder.models import tiny_path

PROMPT_TOKENS = 64
NEW_TOKENS = 64

COLD_START = """
import time; start = time.perf_counter()
import pagebinder
from pagebinder.models import tiny_path
compiled = pagebinder.compile_model(tiny_path())
engine = compiled.engine(pagebinder.EngineConfig(num_kv_blocks=64))
engine.generate([[1, 2, 3]], pagebinder.SamplingParams(max_tokens=1, temperature=0.0))
print(time.perf_counter() - start)
"""


def cold_start_seconds(*, keep_caches: str | None = None) -> float:
    """Import + compile + first token in a new process. With no directory given, every cache is empty."""
    with tempfile.TemporaryDirectory() as fresh:
        root = keep_caches or fresh
        env = {**os.environ, "PAGEBINDER_CACHE": root, "TORCHINDUCTOR_CACHE_DIR": f"{root}/inductor"}
        out = subprocess.run(
            [sys.executable, "-c", COLD_START], env=env, capture_output=True, text=True, check=True
        )
    return float(out.stdout.strip().splitlines()[-1])


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, vocab_size, (count, PROMPT_TOKENS), generator=generator).tolist()


def throughput(rounds: int, batch_sizes: list[int]) -> list[dict]:
    """Generated tokens per second of whole requests (prompt 64, 64 new tokens, greedy, bf16 as shipped)."""
    compiled = compile_model(tiny_path(), CompileConfig())
    peer = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=compiled.source.dtype).eval()
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    rows = []
    for count in batch_sizes:
        batch = prompts(count, compiled.source.vocab_size)
        engine = compiled.engine(EngineConfig(max_num_seqs=count, prefix_caching=False))
        ids = torch.tensor(batch)

        def ours(engine=engine, batch=batch):
            engine.generate(batch, params)

        def theirs(ids=ids):
            with torch.no_grad():
                peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
                              min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)  # fmt: skip

        seconds = alternate({"pagebinder": ours, "transformers": theirs}, rounds=rounds)
        rates = {name: count * NEW_TOKENS / median(values) for name, values in seconds.items()}
        stats = engine.stats()
        share = {k: v / stats.busy_seconds for k, v in stats.step_seconds.items()}
        rows.append({"requests": count, "tokens_per_second": rates, "step_share": share,
                     "ratio": rates["pagebinder"] / rates["transformers"]})  # fmt: skip
    return rows


def main(rounds: int = 5, cold_rounds: int = 3) -> None:
    """Run everything, print a table, write benchmarks/results/engine_cpu.json."""
    console = Console()
    cold = sorted(cold_start_seconds() for _ in range(cold_rounds))
    with tempfile.TemporaryDirectory() as caches:
        cold_start_seconds(keep_caches=caches)
        warm = sorted(cold_start_seconds(keep_caches=caches) for _ in range(cold_rounds))
    rows = throughput(rounds, [1, 8, 32])
    table = Table("requests", "pagebinder tok/s", "transformers tok/s", "ratio", "outside the model")
    for row in rows:
        rates = row["tokens_per_second"]
        outside = 1.0 - row["step_share"]["run"]
        table.add_row(str(row["requests"]), f"{rates['pagebinder']:.0f}", f"{rates['transformers']:.0f}",
                      f"{row['ratio']:.2f}", f"{outside:.1%}")  # fmt: skip
    console.print(table)
    console.print(
        f"import + compile + first token: {median(cold):.1f} s with empty caches, {median(warm):.1f} s warm"
    )
    path = save("engine_cpu", {"cold_start_seconds": cold, "warm_start_seconds": warm, "throughput": rows})
    console.print(f"wrote {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
