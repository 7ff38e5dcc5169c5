"""`pagebinder doctor --kv DIR`: the plan of a model's KV cache, from its config.json alone."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.text import Text

from pagebinder.commands.support import STAGES, quiet_third_parties, show, working
from pagebinder.errors import ConfigError

UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}ib": 1 << 10 * (i + 1) for i, prefix in enumerate("kmgt")}
UNITS |= {f"{prefix}b": 1000 ** (i + 1) for i, prefix in enumerate("kmgt")}


def parse_bytes(text: str) -> int:
    """ "20GiB", "1.5 GB", "4096" -> bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise ConfigError(f"{text!r} is not an amount of memory; write it like 20GiB, 512MiB or 16GB.")
    num_bytes = int(float(match[1]) * UNITS[match[2].lower()])
    if num_bytes < 1:
        raise ConfigError(f"{text!r} is no memory at all; give at least one block of the cache, like 512MiB.")
    return num_bytes


def parse_tokens(text: str) -> int:
    """ "8000", "32k" (k = 1024 tokens) -> tokens. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+)\s*([kK]?)\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a number of tokens; write it like 8000 or 32k (k = 1024).")
    return int(match[1]) * (1024 if match[2] else 1)


def read_workload(path: Path) -> dict:
    """The fields of a workload file, checked as far as that is possible without a model. Raises ConfigError."""
    from pagebinder.runtime.kv.workload import UNLIMITED_TOKENS, Workload

    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"the workload file {path} does not exist; write one like: contexts = [[2000, 0.7], [8000, 0.3]]."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from error
    Workload.of(fields, UNLIMITED_TOKENS)
    return fields


def doctor_kv(
    directory: Path,
    *,
    contexts: Sequence[str],
    memory: Sequence[str],
    workload: Path | None,
    max_model_len: int | None,
    block_size: int | None,
    kv_dtype: str,
    index_dtype: str,
    as_json: bool,
) -> None:
    """Print the plan: groups, waste, next best plan, formulas, and what fits into how much memory."""
    contexts = [parse_tokens(text) for text in contexts]
    memory_bytes = [parse_bytes(text) for text in memory]
    fields = None if workload is None else read_workload(workload)
    with working("planning the KV cache") as step:
        from pagebinder.compile import explain_model
        from pagebinder.config import CompileConfig

        def on_stage(name: str) -> None:
            quiet_third_parties()  # again: transformers is imported by now
            step(STAGES.get(name, name))

        config = CompileConfig(
            max_model_len=max_model_len, block_size=block_size, workload=fields, kv_dtype=kv_dtype,
            index_dtype=index_dtype,
        )  # fmt: skip
        model = explain_model(directory, config, on_stage=on_stage)
    if hasattr(model, "embed"):
        raise ConfigError(f"{directory} holds an encoder, which has no KV cache: there is nothing to plan.")
    plan, facts = model.kv_spec, model.report.kv
    for tokens in contexts:
        if not 1 <= tokens <= plan.max_model_len:
            raise ConfigError(
                f"--context {tokens}: this model has contexts of 1 to {plan.max_model_len:,} tokens."
            )
    if as_json:
        from pagebinder.runtime.kv.plan_text import longest_encoder

        encoder = longest_encoder(plan)
        fits = [
            {"memory_bytes": m, "context_tokens": t, "encoder_tokens": encoder,
             "requests": plan.capacity(m, t, encoder_tokens=encoder)}
            for m in memory_bytes
            for t in contexts or [plan.max_model_len]
        ]  # fmt: skip
        print(
            json.dumps(
                {key: value for key, value in facts.items() if key != "lines"} | {"fits": fits}, indent=2
            )
        )
        return
    stateless = [layer["layer"] for layer in model.report.layers if layer["group"] is None]
    lines = plan.describe(contexts or None, memory_bytes or None, stateless)
    show(Group(*(Text(line, overflow="fold") for line in lines)))
