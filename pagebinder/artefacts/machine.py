"""What an artefact was made with, and how that differs from what is here.

pagebinder, torch, python, CPU, compiler, flags     machine code was made for these: it is compiled again
transformers                                        only read the model: told, nothing depends on it any more
"""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata

import torch

import pagebinder
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu import compiler, prebuilt
from pagebinder.errors import CompilerNotFoundError

NO_CODE_DEPENDS_ON = "transformers"


def made_with() -> dict[str, str | None]:
    """Versions and machine, by name; None: it is not here."""
    return {
        "pagebinder": pagebinder.__version__,
        "torch": str(torch.__version__),
        "transformers": _version("transformers"),
        "python": sys.implementation.cache_tag,
        "CPU": hashlib.sha256(compiler.cpu_features().encode()).hexdigest()[:12],
        "compiler": _compiler(),
        "flags": " ".join(compiler.flags()),
    }


def differences(then: dict[str, str | None]) -> tuple[list[str], list[str]]:
    """What makes the saved machine code useless here, and what is only worth telling; in words.

    Without a compiler here, that another one was used there does not matter: the code is ready. Without one there
    none was used.
    """
    now = made_with()
    compiled = None not in (now["compiler"], then.get("compiler"))
    names = [n for n in now if now[n] != then.get(n) and (n != "compiler" or compiled)]
    words = {n: f"{n} {then.get(n) or 'none'} there, {now[n] or 'none'} here" for n in names}
    told = [words.pop(NO_CODE_DEPENDS_ON)] if NO_CODE_DEPENDS_ON in words else []
    return list(words.values()), told


def kernel_key(part: str) -> str | None:
    """What a part of our kernels is made from here: prebuilt, or by the compiler; None with neither."""
    found, _ = cpu_build.in_use()
    return _built_key(part) if found is None else prebuilt.key(part, found.level, found.sources)


def kernel_fits(part: str, key: str | None) -> bool:
    """Was a library with this key made from the sources that are here, for a processor like this one? Where there
    is none, prebuilt or by a compiler, any will have to do."""
    return kernel_key(part) in (key, None) or key == _built_key(part) or key in prebuilt.fitting_keys(part)


def _built_key(part: str) -> str | None:
    try:
        return cpu_build.build_key(part)
    except CompilerNotFoundError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    try:
        return compiler.version().splitlines()[0]
    except CompilerNotFoundError:
        return None
