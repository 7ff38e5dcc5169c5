"""Reading a checkpoint directory: config.json and safetensors weights, one file or sharded."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from pagebinder.errors import CheckpointError

_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # derived from the config; some old checkpoints carry it


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error


def read_config(directory: str | Path) -> dict:
    """The contents of `directory`/config.json. Raises `CheckpointError` when it is missing or not JSON."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist; a checkpoint directory holds config.json and *.safetensors."
        )
    return _read_json(path)


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises `CheckpointError` when one is missing."""
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    files = [directory / name for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise CheckpointError(
            f"{directory} lacks weight files: {', '.join(missing) or index.name + ' is empty'}."
        )
    return files


def _problems(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    problems = [f"missing {name}" for name in wanted if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        if wanted[name].shape != found[name].shape:
            problems.append(
                f"{name} is {list(found[name].shape)}, config.json says {list(wanted[name].shape)}"
            )
    return sorted(problems)


def load_into(model: nn.Module, directory: str | Path, dtype: torch.dtype | None = None) -> None:
    """Give `model` (built on the meta device, with `.config` and `.tie_weights()`) its tensors.

    `dtype=None` keeps the stored one. Raises `CheckpointError` naming tensors that are missing, unexpected or
    mis-shaped.
    """
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(directory):
        found |= {name: t for name, t in load_file(path).items() if not name.endswith(_IGNORED_SUFFIX)}
    embedding, head = found.get("model.embed_tokens.weight"), found.get("lm_head.weight")
    if model.config.tie_word_embeddings and embedding is not None:
        if head is not None and not torch.equal(head, embedding):
            raise CheckpointError(
                f"{directory}: tie_word_embeddings is set, but lm_head.weight differs from the embedding."
            )
        found["lm_head.weight"] = embedding
    problems = _problems(model.state_dict(), found)
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{directory} does not fit its config.json: {shown}.")
    if dtype is not None:
        found = {name: tensor.to(dtype) for name, tensor in found.items()}
    model.load_state_dict(found, assign=True)
    model.tie_weights()
