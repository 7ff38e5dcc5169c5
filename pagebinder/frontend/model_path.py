"""A path -> `ModelSource`: an ONNX file, a GGUF file, or a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

import torch

from pagebinder.frontend.gguf.file import gguf_path, read_gguf
from pagebinder.frontend.gguf.source import source_from_gguf
from pagebinder.frontend.gguf.tokenizer import unknown_tokenizer
from pagebinder.frontend.onnx_source import onnx_file, source_from_onnx
from pagebinder.frontend.source import ModelSource, source_from_dir


def source_from_path(
    path: str | Path, *, dtype: torch.dtype | None = None, weights: bool = True
) -> ModelSource:
    """What a path means. `weights`: False reads only what describes the model (for `explain`).

    Raises:
        CheckpointError, CaptureError, ConfigError: as the one of the three that it means.
    """
    if (file := onnx_file(path)) is not None:
        return source_from_onnx(file, dtype=dtype, weights=weights)
    if (file := gguf_path(path)) is not None:
        return source_from_gguf(file, dtype=dtype, weights=weights)
    return source_from_dir(path, dtype=dtype, weights=weights)


def tokenizer_problem(path: Path) -> str | None:
    """Why a model has no tokenizer; None: it has one."""
    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer.json").exists():
        return None
    if (file := gguf_path(path)) is None:
        return f"{folder} has no tokenizer.json"
    unknown = unknown_tokenizer(read_gguf(file))
    return (
        None
        if unknown is None
        else f"{file} has {unknown}, which is not known (and no tokenizer.json beside it)"
    )
