"""What the files of a checkpoint say of weights in few bits: which layers are stored so, and how."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pagebinder.errors import CheckpointError
from pagebinder.frontend.bnb_weights import StoredTables
from pagebinder.frontend.fp8_format import StoredFp8
from pagebinder.frontend.int_format import StoredInts
from pagebinder.frontend.stored_format import Stored

FLOATS = ("F16", "BF16", "F32", "F64")  # safetensors' names


def with_files(stored: Stored, path: Path) -> Stored:
    """With what the files in `path` say of layers, for formats of which they say more than the config does.

    Raises:
        CheckpointError: a file cannot be read, or holds weights in e5m2, which a loader would round to e4m3.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                dtypes |= {name: part.get_dtype() for name, part in slices.items()}
                shapes |= {name: tuple(part.get_shape()) for name, part in slices.items()}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if name := next((name for name in slices if dtypes[name] == "F8_E5M2"), None):
            raise CheckpointError(f"{file}: {name} is stored in e5m2; e4m3 is served.")
    if isinstance(stored, StoredInts):
        stored = ints_of_files(stored, shapes, dtypes)
    elif isinstance(stored, StoredTables):
        blocks = {
            name.removesuffix(".weight.absmax"): shape[0]
            for name, shape in shapes.items()
            if name.endswith(".weight.absmax")
        }
        stored = replace(stored, layers=blocks, plain=_owners(shapes) - blocks.keys())
    elif isinstance(stored, StoredFp8):
        stored = _fp8_of_files(stored, dtypes)
    return stored


def ints_of_files(
    stored: StoredInts, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]
) -> StoredInts:
    """With what the files say of layers: which are stored as integers, and how.

    Raises:
        CheckpointError: a tensor has another dtype there; a loader would round it without a word.
    """
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    plain, of_scales = set(), set()
    for name, shape in shapes.items():
        owner, _, kind = name.rpartition(".")
        if f"{owner}.{stored.tensors.marker}" not in shapes:
            plain |= {owner} if kind == "weight" else set()
        elif kind in stored.tensors.names:
            layers.setdefault(owner, {})[kind] = shape
            wanted = stored.tensors.dtypes[kind]
            if dtypes[name] not in wanted:
                raise CheckpointError(f"{name} is stored as {dtypes[name]}; {' or '.join(wanted)} is read.")
            if kind == stored.tensors.scales:
                of_scales.add(dtypes[name])
    return replace(stored, layers=layers, plain=frozenset(plain), bf16_scales=of_scales == {"BF16"})


def _fp8_of_files(stored: StoredFp8, dtypes: dict[str, str]) -> StoredFp8:
    """The same of e4m3: which have a scale."""
    coded = set()
    for name in (name for name in dtypes if name.endswith(f".{stored.scale_name}")):
        codes = stored.codes_beside(name)
        if dtypes.get(codes) in FLOATS:
            raise CheckpointError(f"{codes} is stored as {dtypes[codes]} beside {name}; e4m3 is read.")
        coded.add(name.removesuffix(f".{stored.scale_name}"))
    if not coded:  # tensors have other names there, which a loader knows
        return stored
    return replace(stored, layers=dict.fromkeys(coded, True), plain=_owners(dtypes) - coded)


def _owners(names) -> frozenset[str]:
    return frozenset(name.removesuffix(".weight") for name in names if name.endswith(".weight"))


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
