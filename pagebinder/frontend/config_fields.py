"""Fields of a config.json that transformers takes as they come, and fails with far from where it reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pagebinder.config_checks import short_repr
from pagebinder.errors import CheckpointError

SIZES = ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads")
DTYPES = ("dtype", "torch_dtype")


def check_fields(config: dict[str, Any], file: Path) -> None:
    """Raises CheckpointError: a field cannot mean anything; names it and what it must be."""
    text = config.get("text_config")
    for part, prefix in ((config, ""), *([(text, "text_config.")] if isinstance(text, dict) else [])):
        for name, wanted in _wrong(part):
            raise CheckpointError(
                f"{file}: {prefix}{name} is {short_repr(part[name])}, and must be {wanted}."
            )


def _wrong(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, what it must be) of those that are something else."""
    for name in SIZES:
        if type(config.get(name)) is int and config[name] == 0:
            yield name, "at least 1"
    for name in DTYPES:
        dtype = config.get(name)
        known = isinstance(dtype, str) and isinstance(
            getattr(torch, dtype.removeprefix("torch."), None), torch.dtype
        )
        if isinstance(dtype, str) and dtype != "auto" and not known:
            yield name, "the name of a dtype of torch's"
    if not isinstance(config.get("quantization_config") or {}, dict):
        yield "quantization_config", "an object with quant_method"
