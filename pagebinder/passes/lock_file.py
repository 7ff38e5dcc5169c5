"""The file of a plan lock: TOML with one line for each entry, and the checks of a file that people may edit."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagebinder.errors import PlanLockError
from pagebinder.paths import replace_text, user_path

FORMAT = 1
RANGES = re.compile(r"\d{1,6}(-\d{1,6})?(, ?\d{1,6}(-\d{1,6})?)*")
HEADER = (
    "# What the compiler makes of this model, layer by layer. Written by `pagebinder compile DIR --lock`.\n\n"
)
SECTIONS = {
    "model": dict,
    "options": dict,
    "layers": list,
    "outside": dict,
    "kv_groups": list,
    "providers": dict,
}
TABLES_OF_SECTION = ("layers", "kv_groups")
ENTRIES = ("state", "rewrites", "refused")


def write_plan_lock(lock: Mapping[str, Any], path: str | Path) -> None:
    """Write a lock, whole or not at all. Raises OSError."""
    replace_text(user_path(path, PlanLockError), lock_text(lock))


def require_writable(path: str | Path) -> None:
    """Raises PlanLockError if a lock cannot be written to `path`, before anything is computed for it."""
    path = user_path(path, PlanLockError)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a directory" if path.is_dir() else f"is in {path.parent}, which does not exist"
        raise PlanLockError(f"The plan lock cannot be written: {path} {what}. Give the path of a file.")
    if path.is_file() and not _was_lock(path.read_bytes()):
        raise PlanLockError(
            f"The plan lock cannot be written: {path} holds something else. Give another path, or delete it first."
        )


def _was_lock(content: bytes) -> bool:
    """A lock, whatever became of it since, or nothing at all."""
    return (
        not content.strip()
        or b"`pagebinder compile" in content
        or (b"[model]" in content and b"format" in content)
    )


def lock_text(lock: Mapping[str, Any]) -> str:
    """The lock as TOML, one line for each entry, so that a change is one line of a diff."""
    import tomlkit  # who writes no lock needs none

    document = tomlkit.parse(HEADER)
    for name, section in lock.items():
        tables = tomlkit.aot()
        if name in TABLES_OF_SECTION:
            for table in section:
                tables.append(_toml_table(table))
            document.append(name, tables)
        else:
            document.append(name, _toml_table(section) if isinstance(section, Mapping) else section)
    return tomlkit.dumps(document)


def _toml_table(values: Mapping[str, Any]):
    import tomlkit

    table = tomlkit.table()
    for key, value in values.items():
        table.append(key, _toml_lines(value) if _is_tables(value) else value)
    return table


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _toml_lines(entries: Sequence[Mapping]):
    import tomlkit

    lines = tomlkit.array().multiline(True)
    for entry in entries:
        inline = tomlkit.inline_table()
        inline.update(entry)
        lines.append(inline)
    return lines


def read_plan_lock(path: str | Path) -> dict[str, Any]:
    """Read a lock and check its form.

    Raises:
        PlanLockError: there is no such file, it is no TOML, of another format, or lacks a section.
    """
    path = user_path(path, PlanLockError)
    again = "Write it again: pagebinder compile DIR --lock " + str(path)
    elsewhere = "Give the path of a lock that was written by `pagebinder compile DIR --lock FILE`."
    try:
        content = path.read_bytes()
        if not _was_lock(content):
            again = elsewhere
        lock = tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise PlanLockError(f"The plan lock {path} cannot be read: {error.strerror}. {elsewhere}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanLockError(f"The plan lock {path} is not a TOML file: {error}. {again}") from error
    if lock.get("format") != FORMAT:
        raise PlanLockError(
            f"The plan lock {path} has format {lock.get('format')!r}; this version reads format {FORMAT}. {again}"
        )
    problem = _malformed(lock)
    if problem:
        raise PlanLockError(f"The plan lock {path} is damaged: {problem}. {again}")
    return lock


def _malformed(lock: Mapping) -> str | None:
    """What is wrong with the form of a lock, as far as comparing it would fail on it."""
    for name, kind in SECTIONS.items():
        if not isinstance(lock.get(name), kind):
            return f"section {name!r} is missing or no {'table' if kind is dict else 'array of tables'}"
    for table in lock["layers"]:
        if not isinstance(table, dict) or not isinstance(table.get("path"), str):
            return "a layer has no path"
        if RANGES.fullmatch(str(table.get("layers"))) is None:
            return f"layers = {table.get('layers')!r} is no list of numbers and ranges"
    for table in [*lock["layers"], lock["outside"]]:
        for entries in (table.get(name, []) for name in ENTRIES):
            if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
                return "a layer's state, rewrites or refused is no array of tables"
            if not all(isinstance(e.get("at"), str) and isinstance(e.get("count", 1), int) for e in entries):
                return "an entry says not where it is, or how often"
    if not all(isinstance(group, dict) for group in lock["kv_groups"]):
        return "a KV group is no table"
    choices = lock["providers"].get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return "a choice of a provider is no table"
    return None
