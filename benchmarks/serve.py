"""What HTTP costs: requests to `pagebinder serve` beside the same ones in a call of `engine.generate`, in turns.

python benchmarks/serve.py [--model DIR] [--requests 1 --requests 32] [--tokens 64] [--rounds 5]

Prompts are token ids; all requests of a round come at once, each over a connection of its own, and the server sends
whole answers or streams. Engine and server live in processes of their own; clients take of the same cores.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import median, save, wide_console
from rich.table import Table

from pagebinder import EngineConfig, SamplingParams, compile_model
from pagebinder.models import tiny_path

PROMPT_TOKENS = 32
SHIPPED = Path(tiny_path())


def prompts_of(requests: int, vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (requests, PROMPT_TOKENS), generator=generator).tolist()


async def ask(port: int, body: dict) -> int:
    """Sends one request and reads its answer to the end; returns its bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = ("POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", "connection: close")
    writer.write("\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    return len(answer)


async def ask_all(port: int, prompts: list[list[int]], tokens: int, *, stream: bool) -> None:
    fields = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    await asyncio.gather(*(ask(port, {"prompt": prompt} | fields) for prompt in prompts))


def start_server(model: Path) -> tuple[subprocess.Popen, int]:
    command = [sys.executable, "-m", "pagebinder", "serve", str(model), "--port", "0", "--no-prefix-caching"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while "serving" not in (line := process.stderr.readline()):
        assert line, "the server did not start"
    return process, int(line.split("/v1")[0].rsplit(":", 1)[1])


def main(
    model: Annotated[Path, typer.Option(help="Default: the shipped one.")] = SHIPPED,
    requests: Annotated[list[int], typer.Option(help="At once; may be repeated.")] = [1, 8, 32],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    process, port = start_server(model)
    compiled = compile_model(model)
    engine = compiled.engine(EngineConfig(prefix_caching=False))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    rows = []
    try:
        for number in requests:
            seconds: dict[str, list[float]] = {"engine": [], "whole": [], "stream": []}
            for turn in range(rounds + 1):
                prompts = prompts_of(number, compiled.source.vocab_size, turn)
                runs = {
                    "engine": lambda p=prompts: engine.generate(p, params),
                    "whole": lambda p=prompts: asyncio.run(ask_all(port, p, tokens, stream=False)),
                    "stream": lambda p=prompts: asyncio.run(ask_all(port, p, tokens, stream=True)),
                }
                for name, run in runs.items():
                    started = time.perf_counter()
                    run()
                    seconds[name].append(time.perf_counter() - started)
            rate = {name: number * tokens / median(values[1:]) for name, values in seconds.items()}
            shares = {
                name: median(e / s for e, s in zip(seconds["engine"][1:], seconds[name][1:]))
                for name in ("whole", "stream")
            }
            rows.append({"requests": number, "tokens_per_second": rate, "share_of_engine": shares})
    finally:
        process.terminate()
        process.wait()
    table = Table(
        "requests", "engine, tokens/s", "whole answers", "streams", title=f"{model.name}, over HTTP"
    )
    for row in rows:
        rate, share = row["tokens_per_second"], row["share_of_engine"]
        cells = (f"{rate[name]:.0f} ({share[name]:.2f})" for name in share)
        table.add_row(str(row["requests"]), f"{rate['engine']:.0f}", *cells)
    wide_console().print(table)
    print(f"wrote {save('serve', {'model': model.name, 'tokens': tokens, 'rows': rows})}")


if __name__ == "__main__":
    typer.run(main)
