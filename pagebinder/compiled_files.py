"""The directory of an artefact: written whole or not at all, and every file checked before it is read.

    artefact.json        what was compiled, and with what
    weights.json         where each weight lies             tensors.safetensors   weights that no checkpoint holds
    graphs/<level>.json  the graphs                         program/<graph>/      what inductor made of them
    kernels/<part>.so    our own kernels                    tokenizer/            files of the tokenizer
    SHA256SUMS           of all files but tensors.safetensors, as `sha256sum -c` reads it

A new artefact is written beside its place and renamed, so an error or Ctrl-C leaves what was there before. Digests
tell damage, not malice: an artefact holds machine code, and whoever wrote it can have written its digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagebinder.errors import ArtefactError, not_made

MANIFEST = "artefact.json"
WEIGHTS = "weights.json"
TENSORS = "tensors.safetensors"
SUMS = "SHA256SUMS"
FORMAT = 1


def is_artefact(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_target(path: Path) -> None:
    """Raises ArtefactError if an artefact must not be written to `path`: something else is there."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ArtefactError(f"{path} is a file: give a directory that is new, empty, or an artefact.")
    present = set(_files(path))
    if not present:
        return
    if not is_artefact(path):
        raise ArtefactError(
            f"{path} holds other files and is no artefact: give a new directory, or empty this one."
        )
    foreign = sorted(present - set(_read_sums(path)) - {SUMS, TENSORS})
    if foreign:
        raise ArtefactError(
            f"{path} is an artefact, but {foreign[0]} is none of its files and would be lost: move it away."
        )


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """An empty folder to write to; it becomes `path` if the block ends well, and disappears if it does not."""
    check_target(path)
    folder, old = (path.with_name(f".{path.name}-{secrets.token_hex(4)}") for _ in range(2))
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ArtefactError(not_made(path, error)) from error
    try:
        yield folder
        _write_sums(folder)
        if path.exists():
            path.rename(old)
        folder.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        for left in (folder, old):
            shutil.rmtree(left, ignore_errors=True)


def write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Raises ArtefactError, which names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtefactError(f"{path} cannot be read: {error}") from error


def check_files(path: Path) -> None:
    """Raises ArtefactError if `path` is no artefact, or one of its files is missing or is not what was written."""
    if not is_artefact(path):
        what = f"has no {MANIFEST}" if path.is_dir() else "is not a directory"
        raise ArtefactError(
            f"{path} {what}, so it is no artefact: give a directory that compiled.save(dir) wrote."
        )
    for name, expected in _read_sums(path).items():
        file = path / name
        if not file.is_file():
            raise ArtefactError(f"{file} is missing: copy the artefact again, or compile and save it again.")
        if digest(file) != expected:
            raise ArtefactError(
                f"{file} is damaged (its SHA-256 is not the one in {SUMS}): copy the artefact again, or compile "
                "and save it again."
            )


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())


def _write_sums(folder: Path) -> None:
    lines = [f"{digest(folder / name)}  {name}\n" for name in _files(folder) if name != TENSORS]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _read_sums(path: Path) -> dict[str, str]:
    """Digest by file name, which never leads out of the artefact."""
    try:
        text = (path / SUMS).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArtefactError(f"{path / SUMS} cannot be read: {error}") from error
    sums = {name: value for value, _, name in (line.partition("  ") for line in text.splitlines())}
    is_whole = text.endswith("\n") and MANIFEST in sums
    is_whole &= all(name and re.fullmatch("[0-9a-f]{64}", value) for name, value in sums.items())
    if not is_whole or any(".." in Path(n).parts or os.path.isabs(n) for n in sums):
        raise ArtefactError(
            f"{path / SUMS} is damaged: copy the artefact again, or compile and save it again."
        )
    return sums
