"""The directory of an artefact: written whole or not at all, and every file checked before it is read.

    artefact.json        what was compiled, and with what
    weights.json         where each weight lies             tensors.safetensors   weights that no checkpoint holds
    graphs/<level>.json  the graphs                         program/<graph>/      what inductor made of them
    kernels/<part>.so    our own kernels                    tokenizer/            files of the tokenizer
    SHA256SUMS           of all files but tensors.safetensors, as `sha256sum -c` reads it

A new artefact is written to .NAME-xxxxxxxx beside its place and renamed, so an error, Ctrl-C or a lost process leaves
what was there before. The directory is replaced as a whole, so one that cannot be renamed (a mount point), or should
not (the working directory), is refused. Digests tell damage, not malice: an artefact holds machine code, and whoever
wrote it can have written its digests.
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
from pagebinder.paths import user_path

MANIFEST = "artefact.json"
WEIGHTS = "weights.json"
TENSORS = "tensors.safetensors"
SUMS = "SHA256SUMS"
FORMAT = 1
# The one folder of an artefact that may be empty.
ADAPTERS = "program/ops/adapters"
TOP_NAMES = {MANIFEST, WEIGHTS, TENSORS, SUMS, "step_plan.json", "graphs", "program", "kernels", "tokenizer"}
MOUNTS = Path("/proc/self/mountinfo")


def is_artefact(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_target(path: str | Path) -> Path:
    """Where an artefact that is saved to `path` goes: links and ".." are followed.

    Raises ArtefactError if none must be written there: something else is there, or what cannot be replaced.
    """
    path = user_path(path, ArtefactError).absolute()
    for place in (path, *path.parents):
        if os.path.islink(place) and not os.path.exists(place):
            raise ArtefactError(not_made(path, OSError()))
    path = Path(os.path.realpath(path))
    if not path.exists():
        return path
    if not path.is_dir():
        raise ArtefactError(f"{path} is a file: give a directory that is new, empty, or an artefact.")
    is_empty = not any(path.iterdir())
    if not is_empty and not is_artefact(path):
        raise ArtefactError(
            f"{path} holds other files and is no artefact: give a new directory, or empty this one."
        )
    if what := _immovable(path):
        raise ArtefactError(
            f"{path} {what}, and would be replaced as a whole: give a directory in it, like {path / 'artefact'}."
        )
    if is_empty:
        return path
    foreign = sorted(_entries(path) - set(_read_sums(path)) - {SUMS, TENSORS, ADAPTERS})
    if foreign:
        raise ArtefactError(
            f"{path} is an artefact, but {foreign[0]} is none of its files and would be lost: move it away."
        )
    return path


def _immovable(path: Path) -> str:
    """Why a directory must stay where it is, in words; "" = it may be renamed."""
    with contextlib.suppress(OSError):  # the working directory may be gone
        if Path.cwd().is_relative_to(path):
            return "is the working directory" if Path.cwd() == path else "holds the working directory"
    mounted = str(path).translate({ord(c): f"\\{ord(c):03o}" for c in "\\ \t\n"})
    with contextlib.suppress(OSError):  # of a system that lists them; `ismount` overlooks some
        if any(line.split()[4] == mounted for line in MOUNTS.read_text().splitlines()):
            return "is a mount point"
    return "is a mount point" if os.path.ismount(path) else ""


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """An empty folder to write to; it becomes `path` if the block ends well, and disappears if it does not.

    `path`: from `check_target`. What processes that were killed left beside it is removed in the end.
    """
    try:
        folder, held = _new_folder(path)
    except OSError as error:
        raise ArtefactError(not_made(path, error)) from error
    old = _beside(path)
    try:
        yield folder
        _write_sums(folder)
        if path.exists():
            shutil.copymode(path, folder)
            path.rename(old)
        folder.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)
        if path.exists():  # else interrupted twice: `old` is what there is
            shutil.rmtree(old, ignore_errors=True)
    _remove_left_behind(path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}-{secrets.token_hex(4)}")


def _new_folder(path: Path) -> tuple[Path, int]:
    """A folder beside `path`, and a descriptor that holds its lock for as long as this process lives."""
    while True:
        folder = _beside(path)
        folder.mkdir(parents=True)
        with contextlib.suppress(
            FileNotFoundError
        ):  # who removes what was left behind was faster: another one
            held = os.open(folder, os.O_RDONLY)
            if _lock(held) is not False:
                return folder, held
            os.close(held)


def _lock(descriptor: int) -> bool | None:
    """Lock a folder. False: another process has. None: there are no locks on this file system."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _remove_left_behind(path: Path) -> None:
    """Remove folders that processes made to write to `path`, and hold no more. It is whole: nobody needs them."""
    pattern = re.compile(re.escape(f".{path.name}-") + "[0-9a-f]{8}")
    with contextlib.suppress(OSError):  # somebody else removes them, or they are somebody else's
        for left in path.parent.iterdir():
            if pattern.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
                descriptor = os.open(left, os.O_RDONLY)
                try:
                    if {p.name for p in left.iterdir()} <= TOP_NAMES and _lock(descriptor):
                        shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(descriptor)


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


def _entries(folder: Path) -> set[str]:
    """Files, links to whatever, and folders that hold nothing."""
    ends = (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir() or not any(p.iterdir()))
    return {p.relative_to(folder).as_posix() for p in ends}


def _write_sums(folder: Path) -> None:
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    lines = [f"{digest(folder / name)}  {name}\n" for name in names if name != TENSORS]
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
