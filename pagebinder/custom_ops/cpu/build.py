"""Loads the C++ kernels: those that came compiled with the package (prebuilt.py), else those that the local compiler
builds on first use, which are kept.

    <cache>/pagebinder/<key>/pagebinder_cpu.so         <cache> is $PAGEBINDER_CACHE, $XDG_CACHE_HOME or ~/.cache
    <cache>/pagebinder/<key>/pagebinder_cpu.so.sha256  written last; without a matching digest it is rebuilt

Kernels come in parts, a library each (parts.py). The key covers sources, compiler, flags (compiler.py), torch and the
CPU's features. Processes that build at the same time wait for each other on a file lock; where locks do not work they
both build and each renames a complete file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import threading
import warnings
from pathlib import Path

import torch

from pagebinder.custom_ops.cpu import compiler, prebuilt
from pagebinder.custom_ops.cpu.parts import ELEMENT_PARTS, PARTS, file_digest, source_texts
from pagebinder.errors import ProviderError

logger = logging.getLogger("pagebinder")

LIBRARY_NAME = "pagebinder_cpu.so"

_locks = {part: threading.Lock() for part in PARTS}
_loaded: dict[str, Path] = {}
_failure: dict[str, ProviderError] = {}
_told: list[str] = []  # the first part that could not be kept
_prebuilt_failure: list[OSError] = []  # one is enough: the rest is built here, too


def cache_root() -> Path:
    """The directory that holds one folder per build key. Raises ProviderError if the user has no home for it."""
    base = os.environ.get("PAGEBINDER_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "pagebinder"
    except RuntimeError as error:  # no HOME, and a user whom the system does not know
        raise ProviderError(
            "there is no home directory to keep the CPU kernels in; set PAGEBINDER_CACHE to a writable folder"
        ) from error


def build_key(part: str = "core") -> str:
    """A digest of all that a part's library depends on: machine, compiler, flags, torch and sources."""
    all_flags = " ".join((*compiler.flags(), *compiler.BINDING_FLAGS, *compiler.FUSED_FLAGS))
    texts = [part, compiler.version(), all_flags, torch.__version__, compiler.cpu_features()]
    return hashlib.sha256("\0".join([*texts, *source_texts(part)]).encode()).hexdigest()[:20]


def library_path(part: str = "core") -> Path:
    """Where a part's library for this machine, compiler and source belongs; it need not exist yet."""
    return cache_root() / build_key(part) / LIBRARY_NAME


def build(part: str = "core") -> Path:
    """The path of an intact library, built if necessary. Raises ProviderError if that fails."""
    path = library_path(part)
    if is_intact(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _file_lock(path.parent / "lock"):
            if is_intact(path):
                return path
            if path.exists():
                warnings.warn(f"the cached CPU kernels in {path} are damaged; rebuilding them", stacklevel=2)
            _compile(path, part)
    except OSError as error:
        reason = f"cannot keep the CPU kernels in {path.parent} ({error}); set PAGEBINDER_CACHE to a writable folder"
        if not _told:
            logger.warning("%s. Reference implementations run instead, which are slower.", reason)
            _told.append(part)
        raise ProviderError(reason) from error
    return path


def load(part: str = "core", *, built: Path | None = None, in_background: bool = False) -> Path:
    """Register a part's kernels with torch, once per process: prebuilt ones, else built if necessary. Raises
    ProviderError.

    `built`: a library of this part that was built for this machine before; it is taken as it is. `in_background`:
    nobody waits for it, so that parts that come last (parts.RANKS) may.
    """
    if not in_background:
        compiler.hurry(part)
    with _locks[part]:
        if part in _failure:
            raise _failure[part]
        if part not in _loaded:
            try:
                path = _load_prebuilt(part) if built is None else None
                _loaded[part] = path or _load_built(part, built)
            except ProviderError as error:
                _failure[part] = error
                raise
            except OSError as error:
                _failure[part] = ProviderError(f"the CPU kernels were built but do not load: {error}")
                raise _failure[part] from error
        return _loaded[part]


def _load_built(part: str, built: Path | None) -> Path:
    path = built or build(part)
    _register(part, path)
    return path


def _load_prebuilt(part: str) -> Path | None:
    """The library that came with the package, registered; None if there is none for this machine."""
    found, why = in_use()
    if found is None:
        logger.debug("no prebuilt CPU kernels %s: %s", part, why)
        return None
    path = found.library(part)
    try:
        if path is None:
            raise OSError(f"{found.folder / part}.so is damaged")
        _register(part, path)
    except OSError as error:  # the wheel is of a newer system, for example
        _prebuilt_failure.append(error)
        logger.warning("prebuilt CPU kernels cannot be used here, building them: %s", error)
        return None
    logger.info("CPU kernels %s: prebuilt for %s", part, found.level.name)
    return path


def in_use() -> tuple[prebuilt.Prebuilt | None, str]:
    """The prebuilt kernels that this process uses, and why no better ones (with None: why none), in words."""
    if _prebuilt_failure:
        return None, str(_prebuilt_failure[0])
    return prebuilt.find()


def _register(part: str, path: Path) -> None:
    if part in ELEMENT_PARTS:  # see binding_elements.h
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    else:
        torch.ops.load_library(str(path))


def compiler_is_proven() -> bool:
    """Does the compiler make code for the widest instructions of this processor, and do they run? Kernels that it
    built here show both; of prebuilt ones the compiler must at least know the options that they were made with."""
    if not _loaded or compiler.problem() is not None:
        return False
    if in_use()[0] is None:
        return True
    best = prebuilt.best_level()
    return best is not None and compiler.accepts(best.options)


def start_build(part: str = "core") -> threading.Thread:
    """Build in a background thread, so that compilation overlaps with graph capture. `load` waits for it.

    A failure is not raised here; `load` reports it.
    """

    def work() -> None:
        with contextlib.suppress(ProviderError):
            load(part, in_background=True)

    thread = threading.Thread(target=work, name=f"pagebinder-build-{part}", daemon=True)
    thread.start()
    return thread


def problem() -> ProviderError | None:
    """Why the kernels cannot be used, as far as known without building them; None = no known obstacle."""
    if _failure:
        return next(iter(_failure.values()))
    if _loaded or in_use()[0] is not None:
        return None
    return compiler.problem()


def is_intact(path: Path) -> bool:
    """Does the library exist and match its digest?"""
    try:
        return file_digest(path) == _digest_file(path).read_text()
    except OSError:
        return False


def _compile(path: Path, part: str) -> None:
    compiler.compile_part(part, compiler.flags(), path)
    digest = path.with_name(f"digest-{os.getpid()}-{threading.get_ident()}")
    digest.write_text(file_digest(path))
    os.replace(digest, _digest_file(path))


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


@contextlib.contextmanager
def _file_lock(path: Path):
    """An exclusive lock between processes, where the file system has them."""
    with open(path, "w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
