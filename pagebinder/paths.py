"""Paths that users give: how they are read, and how a file of theirs is replaced without losing what it held."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from pagebinder.errors import ConfigError, PagebinderError

MAX_STEM = 40  # characters of a name that are kept beside a random part: names are of 255 bytes at most


def user_path(path: str | Path, kind: type[PagebinderError] = ConfigError) -> Path:
    """A path as a user gives it, with ~ expanded. Raises `kind` if it can be none."""
    text = os.fspath(path)
    if not text:
        raise kind('The path is empty: give the name of a file or directory ("." is the one you are in).')
    if "\0" in text:
        raise kind(f"The path {text!r} holds a NUL character, which no name of a file can.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # no such user, or nobody knows this one's home
        raise kind(
            f"{text}: the home directory that {Path(text).parts[0]} stands for is unknown: write it out."
        ) from error


@contextlib.contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """A new file to write; it takes the place of `path` if the block ends well, else that stays as it was.

    Links are followed and permissions kept. A device or pipe (/dev/stdout) is written to itself.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    path = Path(path)
    try:
        if path.exists() and (not path.is_file() or path.is_relative_to("/dev")):
            yield path
            return
        target = Path(os.path.realpath(path))
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        new = target.with_name(f".{target.stem[:MAX_STEM]}-{secrets.token_hex(4)}{target.suffix}")
        try:
            yield new
            _put(new, target)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all. Raises OSError, which names it."""
    with replaced(path) as new:
        new.write_text(text, encoding="utf-8")


def _put(new: Path, target: Path) -> None:
    if target.exists():
        shutil.copymode(target, new)
    try:
        os.replace(new, target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        shutil.copyfile(new, target)  # a file that is mounted on its own can only be overwritten
