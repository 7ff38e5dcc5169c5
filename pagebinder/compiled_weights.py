"""Weights of an artefact: by reference to the checkpoint they came from, mapped and not copied.

    weights.json   files    path (from the artefact, and absolute), size, time of change, SHA-256
                   tensors  file, name in it, dtype here, how it lies
                   names    graph -> name in it -> tensor             one tensor may have several names (tied weights)

A tensor is taken to be the checkpoint's where its values are, whatever it is called: what a pass or transformers made
(frequencies of RoPE, masks, quantised weights), and a module that came from no checkpoint, goes to
tensors.safetensors in the artefact. Packed weights are stored plain, and packed again. A file is
trusted if its size and time of change are as they were; else it is read and hashed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagebinder.compiled_files import TENSORS, digest
from pagebinder.compiled_values import from_json, to_json
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu.pack import code, code_all, pack_all, unpack
from pagebinder.custom_ops.linear import packed_weights
from pagebinder.custom_ops.linear.packed_weights import is_coded, is_plain
from pagebinder.errors import ArtefactError

FIRST_VALUES = 64
OWN = 0  # the number of tensors.safetensors among the files


@dataclass(frozen=True)
class _Place:
    file: int
    name: str


def save_weights(
    graphs: Mapping[str, Mapping[str, torch.Tensor]], checkpoint: Path | None, folder: Path, target: Path
) -> dict[str, Any]:
    """Write what `checkpoint` does not hold; returns the JSON-ready table of all tensors.

    Args:
        graphs: graph -> name in it -> tensor. folder: where to write. target: what that folder will be called.
    """
    unique: dict[tuple, torch.Tensor] = {}
    names_of: dict[tuple, list[str]] = {}
    for tensors in graphs.values():
        for name, tensor in tensors.items():
            unique.setdefault(_identity(tensor), tensor)
            names_of.setdefault(_identity(tensor), []).append(name)
    source = _Checkpoint(checkpoint)
    own: dict[str, torch.Tensor] = {}
    records = []
    for number, (key, tensor) in enumerate(unique.items()):
        plain = tensor if is_plain(tensor) else packed_weights.in_place_of(tensor, unpack(tensor))
        place = source.find(names_of[key], plain)
        if place is None:
            place = _Place(OWN, str(number))
            own[place.name] = _as_stored(plain)
        packed = {} if is_plain(tensor) else {"packed": "coded" if is_coded(tensor) else True}
        records.append(_record(plain, place) | packed)
    _write_own(own, folder / TENSORS)
    used = sorted({record["file"] for record in records} - {OWN})
    for record in records:
        record["file"] = OWN if record["file"] == OWN else 1 + used.index(record["file"])
    numbers = {key: number for number, key in enumerate(unique)}
    return {
        "files": [_own_facts(folder / TENSORS), *(_file_facts(source.files[i - 1], target) for i in used)],
        "tensors": records,
        "names": {level: {n: numbers[_identity(t)] for n, t in ts.items()} for level, ts in graphs.items()},
    }


def load_weights(
    data: Mapping, folder: Path, *, checkpoint: Path | None = None, verify: bool = False
) -> dict[str, dict[str, torch.Tensor]]:
    """graph -> name -> tensor, mapped from their files; tied names share one tensor.

    Args:
        checkpoint: where the checkpoint is now, if it was moved. verify: hash all files, changed or not.
    Raises:
        ArtefactError: a file is missing or is not the one that was saved.
    """
    from safetensors import safe_open

    used = {record["file"] for record in data["tensors"]}
    opened = {}
    for number, facts in enumerate(data["files"]):
        if number in used:
            path = _found(facts, folder, checkpoint)
            _check(path, facts, verify)
            opened[number] = safe_open(path, framework="pt")
    tensors = [_tensor(opened[record["file"]], record) for record in data["tensors"]]
    forms = [record.get("packed") for record in data["tensors"]]
    _pack(tensors, [i for i, form in enumerate(forms) if form is True], pack_all, packed_weights.pack)
    _pack(tensors, [i for i, form in enumerate(forms) if form == "coded"], code_all, code)
    return {level: {n: tensors[i] for n, i in names.items()} for level, names in data["names"].items()}


def checkpoint_of(data: Mapping, folder: Path, checkpoint: Path | None) -> Path | None:
    """The directory that holds the referenced weights now; None where there are none."""
    outside = [facts for facts in data["files"] if "absolute" in facts]
    return _found(outside[0], folder, checkpoint).parent if outside else None


def _identity(tensor: torch.Tensor) -> tuple:
    """Equal for names of one and the same tensor."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _same(stored: torch.Tensor, ours: torch.Tensor) -> bool:
    """Has the stored tensor, in our dtype, the same bits? A few values first: most candidates differ there."""
    pairs = ((t.detach().reshape(-1) for t in (stored, ours)) for _ in range(2))
    return all(
        torch.equal(*(t[:end].to(ours.dtype).view(torch.uint8) for t in pair))
        for pair, end in zip(pairs, (FIRST_VALUES, None))
    )


class _Checkpoint:
    """The tensors of a checkpoint directory's files, to find ours among them."""

    def __init__(self, folder: Path | None) -> None:
        from safetensors import safe_open

        self.files = [] if folder is None else sorted(folder.glob("*.safetensors"))
        self._handles = [safe_open(file, framework="pt") for file in self.files]
        self._names: dict[tuple, dict[str, int]] = {}
        for number, handle in enumerate(self._handles):
            names = handle.keys()
            for name in names:
                shape = tuple(handle.get_slice(name).get_shape())
                self._names.setdefault(shape, {})[name] = number

    def find(self, names: list[str], tensor: torch.Tensor) -> _Place | None:
        """Where the same values are: under one of our names, or under any other (tied weights, other prefixes)."""
        numbers = self._names.get(tuple(tensor.shape), {})
        for name in dict.fromkeys((*(n for n in names if n in numbers), *numbers)):
            if _same(self._handles[numbers[name]].get_tensor(name), tensor):
                return _Place(1 + numbers[name], name)
        return None


def _record(tensor: torch.Tensor, place: _Place) -> dict:
    layout = {} if tensor.is_contiguous() else {"strides": list(tensor.stride()), "shape": list(tensor.shape)}
    kind = {"parameter": True} if isinstance(tensor, torch.nn.Parameter) else {}
    return {"file": place.file, "name": place.name, **to_json(tensor.dtype), **layout, **kind}


def _tensor(handle, record: Mapping) -> torch.Tensor:
    tensor = handle.get_tensor(record["name"]).to(from_json({"dtype": record["dtype"]}))
    if "strides" in record:
        tensor = _laid_out(tensor, record["shape"], record["strides"])
    return torch.nn.Parameter(tensor, requires_grad=False) if record.get("parameter") else tensor


def _pack(
    tensors: list[torch.Tensor], numbers: Sequence[int], pack_many: Callable, pack_one: Callable
) -> None:
    """Put packed weights in the place of those with these numbers, which are as they were stored."""
    if not numbers:
        return
    cpu_build.load()
    packed = pack_many([tensors[i] for i in numbers])
    if packed is None:  # little memory: the graphs take no other form
        packed = [pack_one(tensors[i]) for i in numbers]
    for i, tensor in zip(numbers, packed, strict=True):
        tensors[i] = packed_weights.in_place_of(tensors[i], tensor)


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, repeated values once."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.contiguous()


def _laid_out(stored: torch.Tensor, shape: list[int], strides: list[int]) -> torch.Tensor:
    """The tensor as it lay before `_as_stored`, or before the checkpoint's order was changed."""
    once = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    result = torch.empty_strided(once, strides, dtype=stored.dtype, device="cpu")
    return result.copy_(stored).expand(shape)


def _write_own(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    seen: set[int] = set()
    for name, tensor in tensors.items():  # different views of the same memory, which save_file refuses
        memory = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    save_file(tensors, path)
    path.chmod(0o644)  # as the other files: it is written for its owner alone


def _own_facts(path: Path) -> dict:
    return {"path": TENSORS, **_stat(path), "sha256": digest(path)}


def _file_facts(path: Path, target: Path) -> dict:
    path = path.absolute()
    relative = os.path.relpath(path, target.absolute())
    return {"path": relative, "absolute": str(path), **_stat(path), "sha256": digest(path)}


def _stat(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"bytes": stat.st_size, "changed_ns": stat.st_mtime_ns}


def _found(facts: Mapping, folder: Path, checkpoint: Path | None) -> Path:
    """Where a file is now: in `checkpoint`, beside the artefact as it was, or where it was."""
    places = [folder / facts["path"]]
    if "absolute" in facts:
        absolute = Path(facts["absolute"])
        places = [places[0], absolute] if checkpoint is None else [checkpoint / absolute.name]
    for place in places:
        if place.is_file():
            return place
    remedy = "copy the artefact again, or compile and save it again"
    if "absolute" in facts:
        remedy = "put the checkpoint back, or say where it is: load(dir, checkpoint=...)"
    raise ArtefactError(f"{places[-1]}, which holds weights, is missing: {remedy}.")


def _check(path: Path, facts: Mapping, verify: bool) -> None:
    stat = _stat(path)
    same_size = stat["bytes"] == facts["bytes"]
    if same_size and stat["changed_ns"] == facts["changed_ns"] and not verify:
        return
    if not same_size or digest(path) != facts["sha256"]:
        raise ArtefactError(
            f"{path} is not the file that the weights were in when the artefact was saved: put that one back, or "
            "compile and save again."
        )
