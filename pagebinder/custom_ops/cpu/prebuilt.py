"""Kernels that came compiled with the package, so that a fresh installation needs no compiler and waits for none.

    prebuilt/<level>/<part>.so         all parts, for processors that have all features of the level
    prebuilt/<level>/manifest.json     what they were made from and for: sources, torch, flags; their digests

`make wheel` makes them (make_prebuilt.py). The best level whose features this processor has is used, if it was made
from the very sources that lie beside it and for this release of torch; else the kernels are built here (build.py).
All parts or none: kernels of one part call those of another, and both must know the same of the processor.

With `$PAGEBINDER_CPU_MARCH` set, "native" for example, the kernels are always built here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from pagebinder.custom_ops.cpu import compiler, parts

FOLDER = Path(__file__).parent / "prebuilt"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Level:
    """A set of instructions. `options`: of the compiler; `features`: what Linux calls those that it may then use."""

    name: str
    options: tuple[str, ...]
    features: frozenset[str]

    @property
    def flags(self) -> tuple[str, ...]:
        return (*compiler.BASE_FLAGS, *self.options)


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_DOTS = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}
_TILES = _DOTS | {"amx_tile", "amx_bf16", "amx_int8"}
_DOT_OPTIONS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mtune=icelake-server")
_TILE_OPTIONS = (*_DOT_OPTIONS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
LEVELS = (  # the best first
    Level("amx", _TILE_OPTIONS, _TILES),
    Level("avx512-bf16", _DOT_OPTIONS, _DOTS),
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
)


@dataclass(frozen=True)
class Prebuilt:
    """The level in use, and its folder."""

    level: Level
    folder: Path
    sources: str  # digest
    libraries: dict[str, str]  # part -> digest

    def library(self, part: str) -> Path | None:
        """The library of a part; None if it is missing or not what was made."""
        path = self.folder / f"{part}.so"
        try:
            return path if parts.file_digest(path) == self.libraries.get(part) else None
        except OSError:
            return None


def find() -> tuple[Prebuilt | None, str]:
    """What can be used here, and why nothing better (with None: why nothing) can; in words."""
    if os.environ.get(compiler.MARCH):
        return None, f"{compiler.MARCH} is set"
    return _find(FOLDER, parts.SOURCE_DIR)


def key(part: str, level: Level, sources: str) -> str:
    """A digest of all that a prebuilt library depends on; `sources`: the digest of those."""
    texts = (part, *level.flags, *compiler.BINDING_FLAGS, *compiler.FUSED_FLAGS, torch_release(), sources)
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def fitting_keys(part: str) -> set[str]:
    """Of prebuilt libraries that would do on this machine, whether they are here or not."""
    if os.environ.get(compiler.MARCH):
        return set()
    sources = parts.source_digest()
    return {key(part, level, sources) for level in LEVELS if not _missing(level)}


def best_level() -> Level | None:
    """The best level whose features this processor has."""
    return next((level for level in LEVELS if not _missing(level)), None)


def torch_release() -> str:
    """torch's version without the "+cpu" of its build: the kernels see its stable ABI alone. That one library serves
    several releases is what that ABI is for, but is not tested here."""
    return torch.__version__.split("+")[0]


@functools.cache
def _find(folder: Path, source_dir: Path) -> tuple[Prebuilt | None, str]:
    """Once per process: reading all sources takes some milliseconds."""
    reasons = []
    there = [level for level in LEVELS if (folder / level.name / MANIFEST).exists()]
    if not there:
        return None, "this installation has none"
    for level in there:
        try:
            manifest = json.loads((folder / level.name / MANIFEST).read_text())
            reason = _reason_against(level, manifest)
            if not reason:
                made = Prebuilt(level, folder / level.name, manifest["sources"], manifest["libraries"])
                return made, "; ".join(reasons)
        except (OSError, ValueError, KeyError) as error:
            reason = f"{MANIFEST} cannot be read: {error!r}"
        reasons.append(f"{level.name}: {reason}")
    return None, "; ".join(reasons)


def _reason_against(level: Level, manifest: dict) -> str:
    """Why a level cannot be used, "" if it can."""
    if missing := _missing(level):
        return f"this processor has no {', '.join(missing)}"
    if manifest["torch"] != torch_release():
        return f"made for torch {manifest['torch']}, this is {torch_release()}"
    if manifest["sources"] != parts.source_digest() or manifest["flags"] != " ".join(level.flags):
        return "made from other sources than those beside it"
    return ""


def _missing(level: Level) -> list[str]:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ["x86-64 Linux"]
    return sorted(level.features - set(compiler.cpu_features().split()))
