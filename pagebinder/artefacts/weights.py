"""Weights of an artefact: by reference to the checkpoint they came from, mapped and not copied.

    weights.json   files    path (from the artefact, and absolute), size, time of change, SHA-256, digest of a sample
                   tensors  file, name in it, dtype here, how it lies
                   names    graph -> name in it -> tensor             one tensor may have several names (tied weights)

A tensor is taken to be the checkpoint's where its values are, whatever it is called: what a pass or transformers made
(frequencies of RoPE, masks, quantised weights), and a module that came from no checkpoint, goes to
tensors.safetensors in the artefact. Packed weights are stored plain, and packed again.

A file is the one that was saved if size, time of change and a sample are as they were: its header, and some bytes of
every tensor, which another fine-tune of the same model has otherwise. With another time it is read and hashed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagebinder.artefacts.files import TENSORS, digest
from pagebinder.artefacts.values import from_json, to_json
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu.pack import code, code_all, pack_all, unpack
from pagebinder.custom_ops.linear import packed_weights
from pagebinder.custom_ops.linear.packed_weights import is_coded, is_plain
from pagebinder.errors import ArtefactError

logger = logging.getLogger("pagebinder")

FIRST_VALUES = 64
SAMPLES, SAMPLE_BYTES = 1024, 4096  # of a file; one of each tensor at least
MISSING = "is missing"
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


def find_files(
    data: Mapping, folder: Path, *, checkpoint: Path | None = None, verify: bool = False
) -> dict[int, Path]:
    """Where the files with weights are now, by number: in `checkpoint`, else as far from the artefact as they were,
    else where they were. Another file in such a place is passed over.

    Args:
        checkpoint: where the checkpoint is now, if it was moved. verify: hash all files, changed or not.
    Raises:
        ArtefactError: a file is missing, cannot be read, or is not the one that was saved.
    """
    used = {record["file"] for record in data["tensors"]}
    if checkpoint is not None and used - {OWN} and not checkpoint.is_dir():
        what = "is a file" if checkpoint.exists() else "does not exist"
        names = ", ".join(Path(data["files"][i]["absolute"]).name for i in sorted(used - {OWN}))
        raise ArtefactError(f"The checkpoint {checkpoint} {what}: give the directory that holds {names}.")
    return {number: _found(data["files"][number], folder, checkpoint, verify) for number in sorted(used)}


def load_weights(data: Mapping, files: Mapping[int, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """graph -> name -> tensor, mapped from the files that `find_files` found; tied names share one tensor."""
    from safetensors import safe_open

    opened = {number: safe_open(path, framework="pt") for number, path in files.items()}
    tensors = [_tensor(opened[record["file"]], record) for record in data["tensors"]]
    forms = [record.get("packed") for record in data["tensors"]]
    _pack(tensors, [i for i, form in enumerate(forms) if form is True], pack_all, packed_weights.pack)
    _pack(tensors, [i for i, form in enumerate(forms) if form == "coded"], code_all, code)
    return {level: {n: tensors[i] for n, i in names.items()} for level, names in data["names"].items()}


def checkpoint_of(files: Mapping[int, Path]) -> Path | None:
    """The directory that holds the referenced weights now; None where there are none."""
    return next((path.parent for number, path in files.items() if number != OWN), None)


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
    """The tensors of a checkpoint directory's files, to find ours among them; of those that can be read still."""

    def __init__(self, folder: Path | None) -> None:
        from safetensors import SafetensorError, safe_open

        self.files: list[Path] = []
        self._handles = []
        for file in [] if folder is None else sorted(folder.glob("*.safetensors")):
            try:
                self._handles.append(safe_open(file, framework="pt"))
                self.files.append(file)
            except (OSError, SafetensorError) as error:
                logger.warning("%s cannot be read any more (%s): the artefact holds its weights", file, error)
        self._names: dict[tuple, dict[str, int]] = {}
        for number, handle in enumerate(self._handles):
            names = handle.keys()
            for name in names:
                shape = tuple(handle.get_slice(name).get_shape())
                self._names.setdefault(shape, {})[name] = number

    def find(self, names: list[str], tensor: torch.Tensor) -> _Place | None:
        """Where the same values are: under one of our names, or under any other (tied weights, other prefixes); None
        for repeated values, which no file holds as they are."""
        if 0 in tensor.stride():
            return None
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
    return {"path": TENSORS, **_content(path)}


def _file_facts(path: Path, target: Path) -> dict:
    path = path.absolute()
    return {"path": os.path.relpath(path, target), "absolute": str(path), **_content(path)}


def _content(path: Path) -> dict:
    stat = path.stat()
    facts = {"bytes": stat.st_size, "changed_ns": stat.st_mtime_ns}
    return facts | {"sha256": digest(path), "sample": _sample(path, stat.st_size)}


def _sample(path: Path, num_bytes: int) -> str:
    """SHA-256 of a safetensors file's header and of bytes from inside every tensor."""
    with open(path, "rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < num_bytes else b""
        hashed = hashlib.sha256(header)
        for offset, size in _sampled_spans(header):
            file.seek(8 + length + offset)
            hashed.update(file.read(size))
    return hashed.hexdigest()


def _sampled_spans(header: bytes) -> list[tuple[int, int]]:
    """Offset and size of what is sampled, none of a damaged header: some pieces of every tensor, spread evenly."""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        tensors = sorted(
            (int(begin), int(end)) for begin, end in (entry["data_offsets"] for entry in entries)
        )
    except (ValueError, TypeError, AttributeError, KeyError):
        return []
    most = max(1, SAMPLES // max(1, len(tensors)))
    spans = []
    for begin, end in tensors:
        if 0 <= begin < end:
            count = min(most, -(-(end - begin) // SAMPLE_BYTES))
            room = max(0, end - begin - SAMPLE_BYTES)
            size = min(SAMPLE_BYTES, end - begin)
            spans += [(begin + room * (2 * i + 1) // (2 * count), size) for i in range(count)]
    return spans


def _found(facts: Mapping, folder: Path, checkpoint: Path | None, verify: bool) -> Path:
    places = [Path(os.path.normpath(folder / facts["path"]))]
    if "absolute" in facts:
        absolute = Path(facts["absolute"])
        places = [places[0], absolute] if checkpoint is None else [checkpoint / absolute.name]
    problems = []
    for place in places:
        problem = _problem(place, facts, verify)
        if problem is None:
            return place
        problems.append(f"{place}, which holds weights, {problem}")
    remedy = "copy the artefact again, or compile and save it again"
    if "absolute" in facts:
        remedy = "put the checkpoint back, or say where it is: load(dir, checkpoint=...), --checkpoint DIR"
    told = next((p for p in problems if not p.endswith(MISSING)), problems[-1])
    raise ArtefactError(f"{told}: {remedy}.")


def _problem(path: Path, facts: Mapping, verify: bool) -> str | None:
    """Why a file is not the one that was saved; None: it is."""
    other = "is not the file that the weights were in when the artefact was saved"
    try:
        if not path.is_file():
            return MISSING
        stat = path.stat()
        if stat.st_size != facts["bytes"]:
            return other
        if "sample" in facts and _sample(path, stat.st_size) != facts["sample"]:
            return other
        is_same = "sample" in facts and stat.st_mtime_ns == facts["changed_ns"] and not verify
        return None if is_same or digest(path) == facts["sha256"] else other
    except OSError as error:
        return f"cannot be read: {error.strerror}"
