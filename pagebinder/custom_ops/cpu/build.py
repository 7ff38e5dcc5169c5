"""Builds the C++ kernels with the local compiler on first use and keeps the result.

    <cache>/pagebinder/<key>/pagebinder_cpu.so         <cache> is $PAGEBINDER_CACHE, $XDG_CACHE_HOME or ~/.cache
    <cache>/pagebinder/<key>/pagebinder_cpu.so.sha256  written last; without a matching digest it is rebuilt

Kernels come in parts, a library each, so that no model waits for kernels that it does not use: "core" is the sources
in this folder, "latent" those in latent/ (latent rows, DeepSeek) and what they need of the core. Kernels of attention
are many for each element type: "bfloat16", "float16" and "float32" hold those of one type, which the other parts find
by name; a call that misses one builds it (`load_part`, provider.py).

The key covers sources, compiler, flags, torch and the CPU's features. Processes that build at the same time
wait for each other on a file lock; where locks do not work they both build and each renames a complete file.

`$CXX` names the compiler (default: the first of c++, g++, clang++), `$PAGEBINDER_CPU_MARCH` the -march value.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch

from pagebinder.errors import CompilerNotFoundError, ProviderError

logger = logging.getLogger("pagebinder")

SOURCE_DIR = Path(__file__).parent
LIBRARY_NAME = "pagebinder_cpu.so"
# part -> (folder of its sources, sources of other folders that it is linked with)
PARTS = {
    "bfloat16": ("bfloat16", ()),
    "core": (".", ()),
    "float16": ("float16", ()),
    "float32": ("float32", ()),
    "fp8": ("fp8", ()),
    "latent": ("latent", ("linear.cpp",)),
    "moe": ("moe", ()),
    "quant": ("quant", ()),
    "quantized_kv": ("quantized_kv", ("attention_plan.cpp", "cache_write.cpp", "qk_write.cpp")),
    "quantized_moe": ("quantized_moe", ("moe/moe_router.cpp",)),
    "recurrent": ("recurrent", ()),
    "sampling": ("sampling", ("argmax.cpp",)),
    "unified": ("unified", ("attention_plan.cpp",)),
}
# part -> folders whose headers it includes, beside its own and this one
HEADERS_OF = {"quantized_moe": ("moe", "quant")}
ELEMENT_PARTS = ("bfloat16", "float16", "float32")
BASE_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
# Bindings check operands and hold no loops that matter. With -O1 they would compile faster still, but each call would
# take some tenths of a microsecond longer.
BINDING_FLAGS = ("-O2",)
CANDIDATES = ("c++", "g++", "clang++")

_locks = {part: threading.Lock() for part in PARTS}
_loaded: dict[str, Path] = {}
_failure: dict[str, ProviderError] = {}
_slots = threading.BoundedSemaphore(os.cpu_count() or 1)  # of compilers that run at a time, for whatever part


def find_compiler() -> list[str]:
    """The compiler's command; raises CompilerNotFoundError if there is none."""
    requested = os.environ.get("CXX")
    if requested:
        command = shlex.split(requested)
        if shutil.which(command[0]) is None:
            raise CompilerNotFoundError(f"CXX={requested!r} is not an executable; unset CXX or correct it")
        return command
    for name in CANDIDATES:
        if shutil.which(name) is not None:
            return [name]
    raise CompilerNotFoundError(
        f"no C++ compiler found (looked for {', '.join(CANDIDATES)} on PATH, and $CXX is not set); "
        "install g++ or clang++, or set CXX"
    )


def flags() -> tuple[str, ...]:
    """Compiler flags: optimised for this machine unless `$PAGEBINDER_CPU_MARCH` says otherwise."""
    option = "-mcpu" if platform.machine() in ("aarch64", "arm64") else "-march"
    return (*BASE_FLAGS, f"{option}={os.environ.get('PAGEBINDER_CPU_MARCH', 'native')}")


def compiler_version() -> str:
    """What the compiler says about itself; raises CompilerNotFoundError."""
    return _compiler_version(tuple(find_compiler()))


def cache_root() -> Path:
    """The directory that holds one folder per build key."""
    base = os.environ.get("PAGEBINDER_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pagebinder"


def build_key(part: str = "core") -> str:
    """A digest of all that a part's library depends on: machine, compiler, flags, torch and sources."""
    all_flags = " ".join((*flags(), *BINDING_FLAGS))
    texts = [part, compiler_version(), all_flags, torch.__version__, cpu_features()]
    files = sorted([*_sources(part), *_headers(part)])
    texts += [path.name + "\0" + path.read_text() for path in files]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


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
        raise ProviderError(
            f"cannot keep the CPU kernels in {path.parent} ({error}); set PAGEBINDER_CACHE to a writable folder"
        ) from error
    return path


def load(part: str = "core", *, built: Path | None = None) -> Path:
    """Build if necessary and register a part's kernels with torch, once per process. Raises ProviderError.

    `built`: a library of this part that was built for this machine before; it is taken as it is.
    """
    with _locks[part]:
        if part in _failure:
            raise _failure[part]
        if part not in _loaded:
            try:
                path = built or build(part)
                _register(part, path)
            except ProviderError as error:
                _failure[part] = error
                raise
            except OSError as error:
                _failure[part] = ProviderError(f"the CPU kernels were built but do not load: {error}")
                raise _failure[part] from error
            _loaded[part] = path
        return _loaded[part]


def _register(part: str, path: Path) -> None:
    if part in ELEMENT_PARTS:  # see binding_elements.h
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    else:
        torch.ops.load_library(str(path))


def is_loaded() -> bool:
    """Have kernels been built (or found) and registered in this process?"""
    return bool(_loaded)


def start_build(part: str = "core") -> threading.Thread:
    """Build in a background thread, so that compilation overlaps with graph capture. `load` waits for it.

    A failure is not raised here; `load` reports it.
    """

    def work() -> None:
        with contextlib.suppress(ProviderError):
            load(part)

    thread = threading.Thread(target=work, name=f"pagebinder-build-{part}", daemon=True)
    thread.start()
    return thread


def problem() -> ProviderError | None:
    """Why the kernels cannot be used, as far as known without building them; None = no known obstacle."""
    if _failure:
        return next(iter(_failure.values()))
    if _loaded:
        return None
    try:
        find_compiler()
    except ProviderError as error:
        return error
    return None


def is_intact(path: Path) -> bool:
    """Does the library exist and match its digest?"""
    try:
        return _digest(path) == _digest_file(path).read_text()
    except OSError:
        return False


def _compile(path: Path, part: str) -> None:
    started = time.perf_counter()
    compiler = find_compiler()
    torch_root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        includes = [f"-I{torch_root / 'include'}", f"-I{SOURCE_DIR}"]
        command = [*compiler, *flags(), *includes]
        bindings = [(source, BINDING_FLAGS) for source in _merged_bindings(part, Path(folder))]
        units = [*bindings, *((source, ()) for source in _sources(part) if not _is_binding(source))]
        objects = [str(Path(folder) / f"{source.stem}.o") for source, _ in units]
        commands = [
            [*command, *extra, "-c", str(s), "-o", o] for (s, extra), o in zip(units, objects, strict=True)
        ]
        _run_all(commands)
        library = Path(folder) / LIBRARY_NAME
        link = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-o", str(library)]
        # Of an inline function that several objects hold the first is linked: a kernel's, not a binding's.
        _run_all([[*compiler, "-shared", *objects[::-1], *link]])
        digest = Path(folder) / "digest"
        digest.write_text(_digest(library))
        os.replace(library, path)
        os.replace(digest, _digest_file(path))
    logger.info("built the CPU kernels in %.1f s (%s)", time.perf_counter() - started, " ".join(compiler))


def _run_all(commands: list[list[str]]) -> None:
    """Run commands, the first ones first; of all parts together as many at a time as there are processors."""
    problems: list[str] = []

    def work(command: list[str]) -> None:
        with _slots:
            if problems:
                return
            try:
                subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
            except subprocess.CalledProcessError as error:
                errors = "\n".join(error.stderr.strip().splitlines()[-15:])
                problems.append(f"{shlex.join(command)}\n{errors}")
            except OSError as error:
                problems.append(f"{shlex.join(command)}: {error}")

    threads = [threading.Thread(target=work, args=(command,), daemon=True) for command in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise ProviderError(f"compiling the CPU kernels failed: {problems[0]}")


def _merged_bindings(part: str, folder: Path) -> list[Path]:
    """A source in `folder` that is all bindings of a part, if it has some: torch's headers are read once."""
    bindings = [source for source in _sources(part) if _is_binding(source)]
    merged = folder / "bindings.cpp"
    merged.write_text("".join(f'#include "{source}"\n' for source in bindings))
    return [merged] if bindings else []


def _is_binding(source: Path) -> bool:
    return source.stem.startswith("binding")


def _sources(part: str) -> list[Path]:
    """The sources of a part, the largest first: what takes longest should not begin last."""
    folder, shared = PARTS[part]
    sources = [*(SOURCE_DIR / folder).glob("*.cpp"), *(SOURCE_DIR / name for name in shared)]
    return sorted(sources, key=lambda path: (-path.stat().st_size, path.name))


def _headers(part: str) -> list[Path]:
    folders = {SOURCE_DIR, *(SOURCE_DIR / name for name in (PARTS[part][0], *HEADERS_OF.get(part, ())))}
    return [header for folder in folders for header in folder.glob("*.h")]


@functools.cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    try:
        result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerNotFoundError(
            f"the C++ compiler {shlex.join(compiler)} does not run: {error}"
        ) from error
    return result.stdout


@functools.cache
def cpu_features() -> str:
    """The processor's feature flags: -march=native depends on them, and machines may share a cache."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
