"""The C++ compiler: which one, for which processor, and a part of the kernels compiled by it into a library.

`$CXX` names the compiler (default: the first of c++, g++, clang++), `$PAGEBINDER_CPU_MARCH` the -march value.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pagebinder.custom_ops.cpu import parts
from pagebinder.errors import CompilerNotFoundError, ProviderError

logger = logging.getLogger("pagebinder")

BASE_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
# Bindings check operands and hold no loops that matter: with -O2 they take half as long again to compile, and a call
# is some tenths of a microsecond shorter. Steps that are replayed (CPU graphs) do not call them.
BINDING_FLAGS = ("-O1",)
# GCC makes two instructions of a multiply-add in a sum where it tunes for Zen 2 or 3, and later releases for more
# processors: half the speed, and bits that depend on the loop around it. Only given to compilers that know it.
FUSED_FLAGS = ("--param", "avoid-fma-max-bits=0")
CANDIDATES = ("c++", "g++", "clang++")
MARCH = "PAGEBINDER_CPU_MARCH"


class Slots:
    """Lets so many callers in at a time; of those that wait the lowest ranks first, then who came first.

    A rank is asked for whenever there is a choice. Those above 0 leave a slot free, where there are several: the
    processor is busy with Python meanwhile, for which the others are waiting.
    """

    def __init__(self, count: int):
        self._free = count
        self._left_free = min(count - 1, 1)
        self._waiting: list[Callable[[], int]] = []  # ranks, in the order of arrival
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, rank: Callable[[], int]):
        with self._changed:
            self._waiting.append(rank)
            self._changed.wait_for(lambda: self._may_enter(rank))
            self._waiting.remove(rank)
            self._free -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def look_again(self) -> None:
        """Ranks have changed."""
        with self._changed:
            self._changed.notify_all()

    def _may_enter(self, rank: Callable[[], int]) -> bool:
        first = min(self._waiting, key=lambda waiting: waiting())  # of equal ranks the first
        return first is rank and self._free > (self._left_free if rank() > 0 else 0)


_slots = Slots(os.cpu_count() or 1)  # of compilers that run at a time, for whatever part
_hurried: set[str] = set()  # parts that somebody waits for


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


def problem() -> CompilerNotFoundError | None:
    """Why nothing can be compiled, as far as known without trying; None = no known obstacle."""
    try:
        find_compiler()
    except CompilerNotFoundError as error:
        return error
    return None


def version() -> str:
    """What the compiler says about itself; raises CompilerNotFoundError."""
    return _version(tuple(find_compiler()))


def flags() -> tuple[str, ...]:
    """Compiler flags: optimised for this machine unless `$PAGEBINDER_CPU_MARCH` says otherwise."""
    option = "-mcpu" if platform.machine() in ("aarch64", "arm64") else "-march"
    return (*BASE_FLAGS, f"{option}={os.environ.get(MARCH, 'native')}")


@functools.cache
def cpu_features() -> str:
    """The processor's feature flags: -march=native depends on them, and machines may share a cache."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


@functools.cache
def accepts(options: tuple[str, ...]) -> bool:
    """Does the compiler know these options (-m...)? It compiles nothing with them. Raises CompilerNotFoundError."""
    command = [*find_compiler(), *options, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def compile_part(part: str, machine_flags: Sequence[str], library: Path) -> None:
    """Compile a part of the kernels with BASE_FLAGS and others, and put the library where it is asked for, complete.

    Raises ProviderError, CompilerNotFoundError; OSError where the folder, which exists, cannot be written.
    """
    started = time.perf_counter()
    compiler = find_compiler()
    torch_root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as name:
        folder = Path(name)
        includes = [f"-I{torch_root / 'include'}", f"-I{parts.SOURCE_DIR}"]
        fused = FUSED_FLAGS if accepts(FUSED_FLAGS) else ()
        command = [*compiler, *machine_flags, *fused, *includes]
        commands, objects = [], []
        for unit, sources in parts.units(part):
            extra = BINDING_FLAGS if parts.is_binding(sources[0]) else ()
            objects.append(str(folder / f"{unit}.o"))
            commands.append(
                [*command, *extra, "-c", str(_one_file(unit, sources, folder)), "-o", objects[-1]]
            )
        _run_all(commands, part)
        made = folder / library.name
        link = [*_linked_with_torch(compiler, torch_root / "lib", folder), "-o", str(made)]
        # Of an inline function that several objects hold the first is linked: a kernel's, not a binding's.
        _run([*compiler, "-shared", *objects[::-1], *link])
        os.replace(made, library)
    seconds = time.perf_counter() - started
    logger.info("built the CPU kernels %s in %.1f s (%s)", part, seconds, " ".join(compiler))


def _linked_with_torch(compiler: list[str], libraries: Path, folder: Path) -> list[str]:
    """Options that make a library need torch's, which is loaded by then. On Linux an empty one of its name says that:
    of torch's own the linker would read some 75,000 symbols, which takes as long as all else that it does."""
    if platform.system() != "Linux":
        return [f"-L{libraries}", "-ltorch_cpu"]
    empty = folder / "libtorch_cpu.so"
    named = ["-shared", "-fPIC", f"-Wl,-soname,{empty.name}", "-o", str(empty)]
    _run([*compiler, *named, "-x", "c++", os.devnull])
    return [f"-L{folder}", "-Wl,--no-as-needed", "-ltorch_cpu"]


def hurry(part: str) -> None:
    """Somebody waits for this part now: it is compiled like any other."""
    if part not in _hurried:
        _hurried.add(part)
        _slots.look_again()


def _rank(part: str) -> int:
    return 0 if part in _hurried else parts.RANKS.get(part, 0)


def _run_all(commands: list[list[str]], part: str) -> None:
    """Run a part's commands in order; of all parts together as many at a time as there are processors."""
    problems: list[ProviderError] = []

    def work(command: list[str]) -> None:
        with _slots.taken(lambda: _rank(part)):
            if problems:
                return
            try:
                _run([*_modestly(), *command] if _rank(part) > 0 else command)
            except ProviderError as error:
                problems.append(error)

    threads = [threading.Thread(target=work, args=(command,), daemon=True) for command in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


@functools.cache
def _modestly() -> tuple[str, ...]:
    """Begins the command of what nobody waits for yet, beside a first step; it is still done when somebody does."""
    return ("nice", "-n", "5") if shutil.which("nice") is not None else ()


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    except subprocess.CalledProcessError as error:
        problem = "\n" + "\n".join(error.stderr.strip().splitlines()[-15:])
    except OSError as error:
        problem = f": {error}"
    else:
        return
    raise ProviderError(f"compiling the CPU kernels failed: {shlex.join(command)}{problem}")


def _one_file(unit: str, sources: list[Path], folder: Path) -> Path:
    """The source of a unit, or one in `folder` that is all of them: their headers are read once."""
    if len(sources) == 1:
        return sources[0]
    merged = folder / f"{unit}.cpp"
    merged.write_text("".join(f'#include "{source}"\n' for source in sources))
    return merged


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerNotFoundError(
            f"the C++ compiler {shlex.join(command)} does not run: {error}"
        ) from error
    return result.stdout
