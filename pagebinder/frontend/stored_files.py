"""What the files of a checkpoint say of weights in few bits: which layers are stored so, and how."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pagebinder.errors import CheckpointError
from pagebinder.frontend.bnb_weights import StoredTables
from pagebinder.frontend.fp8_format import StoredFp8
from pagebinder.frontend.int_format import StoredInts
from pagebinder.frontend.stored_format import Stored
from pagebinder.frontend.stored_names import StoredTensors
from pagebinder.frontend.stored_parts import StoredParts

FLOATS = ("F16", "BF16", "F32", "F64")  # safetensors' names
OF_CODES = ("weight", "qweight", "weight_packed")  # tensors of codes


def with_files(stored: Stored, path: Path) -> Stored:
    """With what the files in `path` say of layers, for formats of which they say more than the config does.

    Raises:
        CheckpointError: a file cannot be read, or holds weights in e5m2, which a loader would round to e4m3.
    """
    layers = _layers_of_files(path)
    if isinstance(stored, StoredInts):
        return ints_of_files(stored, layers)
    if isinstance(stored, StoredTables):
        blocks = {
            name.removesuffix(".weight"): tensors["absmax"][1][0]
            for name, tensors in layers.items()
            if name.endswith(".weight") and "absmax" in tensors
        }
        return replace(stored, layers=blocks, plain=_weights(layers) - blocks.keys())
    return (
        _parts_of_files(stored, layers) if isinstance(stored, StoredParts) else _fp8_of_files(stored, layers)
    )


def _layers_of_files(path: Path) -> dict[str, StoredTensors]:
    """The tensors in the files, by the names of their layers."""
    from safetensors import SafetensorError, safe_open

    layers: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part, (owner, _, kind) = tensors.get_slice(name), name.rpartition(".")
                    if part.get_dtype() == "F8_E5M2":
                        raise CheckpointError(f"{file}: {name} is stored in e5m2; e4m3 is served.")
                    layers.setdefault(owner, {})[kind] = part.get_dtype(), tuple(part.get_shape())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return layers


def ints_of_files(stored: StoredInts, layers: Mapping[str, StoredTensors]) -> StoredInts:
    """With what the files say of layers: which are stored as integers, and how.

    Raises:
        CheckpointError: a tensor has another dtype there; a loader would round it without a word.
    """
    own = {name: tensors for name, tensors in layers.items() if stored.tensors.marker in tensors}
    for name, tensors in own.items():
        for kind, wanted in stored.tensors.dtypes.items():
            if kind in tensors and tensors[kind][0] not in wanted:
                raise CheckpointError(
                    f"{name}.{kind} is stored as {tensors[kind][0]}; {' or '.join(wanted)} is read."
                )
    return stored.with_layers(own, _weights(layers) - own.keys())


def _fp8_of_files(stored: StoredFp8, layers: Mapping[str, StoredTensors]) -> StoredFp8:
    """The same of e4m3: which have a scale."""
    own = {name: tensors for name, tensors in layers.items() if stored.scale_name in tensors}
    for name, tensors in own.items():
        dtype = tensors.get("weight", ("",))[0]
        if dtype in FLOATS:
            raise CheckpointError(
                f"{name}.weight is stored as {dtype} beside {name}.{stored.scale_name}; e4m3 is read."
            )
    if not own:  # tensors have other names there, which a loader knows
        return stored
    return stored.with_layers(own, _weights(layers) - own.keys())


def _parts_of_files(stored: StoredParts, layers: Mapping[str, StoredTensors]) -> StoredParts:
    """The same of several formats: which layer has which.

    Raises:
        CheckpointError: codes that are in none of them.
    """
    own: dict[str, tuple[int, StoredTensors]] = {}
    for name, tensors in layers.items():
        number = stored.part_of(tensors, name)
        if number is not None:
            own[name] = number, tensors
        elif kind := next((k for k in OF_CODES if k in tensors and tensors[k][0] not in FLOATS), None):
            said = ", ".join(f"{k} {dtype} {list(shape)}" for k, (dtype, shape) in sorted(tensors.items()))
            raise CheckpointError(
                f"{name}.{kind} holds codes in none of the formats that its config describes; beside it lie {said}."
            )
    return stored.with_layers(own, _weights(layers) - own.keys())


def _weights(layers: Mapping[str, StoredTensors]) -> frozenset[str]:
    """The names of layers that have a `weight`."""
    return frozenset(name for name, tensors in layers.items() if "weight" in tensors)


def weight_files(path: Path) -> list[Path]:
    """The files that transformers reads, of all that lie there. Raises CheckpointError: the index cannot be read."""
    index, whole = path / "model.safetensors.index.json", path / "model.safetensors"
    if whole.exists():
        return [whole]
    if index.exists():
        try:
            return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} names no files of weights: {error!r}") from error
    return sorted(path.glob("*.safetensors"))
