"""Compiles all kernels for each instruction-set level into the package, for a wheel that carries them (prebuilt.py).

    python -m pagebinder.custom_ops.cpu.make_prebuilt [level ...]        all levels: some minutes on two cores

What is there already and made from these sources is kept. `make wheel` calls it by way of setup.py.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagebinder.custom_ops.cpu import compiler, parts, prebuilt


def make(level: prebuilt.Level, folder: Path) -> None:
    """Compile every part for a level into folder/<level>, whole or not at all. Raises ProviderError, OSError."""
    target = folder / level.name
    manifest = {
        "torch": prebuilt.torch_release(),
        "flags": " ".join(level.flags),
        "sources": parts.source_digest(),
        "compiler": compiler.version().splitlines()[0],
    }
    if is_made(target, manifest):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{level.name}-") as name:
        made = Path(name) / level.name
        made.mkdir()
        with ThreadPoolExecutor() as pool:  # of the compilers only so many run as there are processors
            compile_part = functools.partial(_compile_part, level, made)
            list(pool.map(compile_part, parts.PARTS))
        digests = {part: parts.file_digest(made / f"{part}.so") for part in parts.PARTS}
        (made / prebuilt.MANIFEST).write_text(json.dumps({**manifest, "libraries": digests}, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)


def _compile_part(level: prebuilt.Level, folder: Path, part: str) -> None:
    compiler.compile_part(part, level.flags, folder / f"{part}.so")


def is_made(target: Path, manifest: dict) -> bool:
    """Is a level complete in its folder, and made from what this manifest says?"""
    try:
        there = json.loads((target / prebuilt.MANIFEST).read_text())
        return manifest.items() <= there.items() and all(
            parts.file_digest(target / f"{part}.so") == there["libraries"][part] for part in parts.PARTS
        )
    except (OSError, ValueError, KeyError):
        return False


def main(names: Sequence[str]) -> None:
    known = {level.name: level for level in prebuilt.LEVELS}
    if unknown := set(names) - known.keys():
        raise SystemExit(f"no such level: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in names or known:
        make(known[name], prebuilt.FOLDER)
        print(f"kernels for {name}: {prebuilt.FOLDER / name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
