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
from pagebinder.errors import CompilerNotFoundError

NO_CODE_DEPENDS_ON = "transformers"


def made_with() -> dict[str, str | None]:
    """Versions and machine, by name; None: it is not here."""
    return {
        "pagebinder": pagebinder.__version__,
        "torch": str(torch.__version__),
        "transformers": _version("transformers"),
        "python": sys.implementation.cache_tag,
        "CPU": hashlib.sha256(cpu_build.cpu_features().encode()).hexdigest()[:12],
        "compiler": _compiler(),
        "flags": " ".join(cpu_build.flags()),
    }


def differences(then: dict[str, str | None]) -> tuple[list[str], list[str]]:
    """What makes the saved machine code useless here, and what is only worth telling; in words.

    Without a compiler here, that another one was used there does not matter: the code is ready.
    """
    now = made_with()
    names = [n for n in now if now[n] != then.get(n) and not (n == "compiler" and now[n] is None)]
    words = {n: f"{n} {then.get(n) or 'none'} there, {now[n] or 'none'} here" for n in names}
    told = [words.pop(NO_CODE_DEPENDS_ON)] if NO_CODE_DEPENDS_ON in words else []
    return list(words.values()), told


def kernel_key(part: str) -> str | None:
    """What a part of our kernels would be built from here; None without a compiler."""
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
        return cpu_build.compiler_version().splitlines()[0]
    except CompilerNotFoundError:
        return None
