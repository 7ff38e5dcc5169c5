"""Where published code lies, and how a file of it is imported as it is.

One checkout for each repository, at DIR/<owner>+<name>/.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Checkout:
    """A repository's files at `path`."""

    path: Path

    def load(self, module: str, under: str = ".") -> types.ModuleType:
        """Import `module` with the folder `under` first on the path."""
        sys.path.insert(0, str(self.path / under))
        importlib.invalidate_caches()
        return importlib.import_module(module)

    def load_edited(self, file: str, *edits: tuple[str, str], until: str | None = None) -> types.ModuleType:
        """Import a file, up to the text `until`, changed while it is read without changing its lines' numbers."""
        path = self.path / file
        text = path.read_text()
        if until is not None:
            text = text[: text.index(until)]
        for old, new in edits:
            if old not in text or old.count("\n") != new.count("\n"):
                raise ValueError(f"{file} has no {old!r}, or other lines would result")
            text = text.replace(old, new)
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        sys.modules[path.stem] = module
        exec(compile(text, str(path), "exec"), module.__dict__)
        return module

    def commit(self) -> str | None:
        """What is checked out, where git says it."""
        if not (self.path / ".git").exists():
            return None
        command = ["git", "-C", str(self.path), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def checkout_of(repository: str, folder: Path) -> Checkout:
    return Checkout(folder / repository.replace("/", "+"))


def commands(repository: str, commit: str, folder: Path) -> str:
    """The commands that make a checkout."""
    path = checkout_of(repository, folder).path
    return (
        f"git clone https://github.com/{repository} {path}\n"
        f"git -C {path} checkout {commit}"
    )  # fmt: skip


class _Stub(types.ModuleType):
    """A module that is not there: any class can be imported from it, none can be made."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(self, *args, **kwargs):
            raise NotImplementedError(f"{type(self).__name__} is a stub")

        return type(f"{self.__name__}.{name}", (), {"__init__": absent})


def stub(name: str, **attributes) -> None:
    """Let `import name` find a module in memory with these attributes, and its parents."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        full = ".".join(parts[:end])
        if full not in sys.modules:
            sys.modules[full] = _Stub(full)
            sys.modules[full].__path__ = []
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[full])
    for key, value in attributes.items():
        setattr(sys.modules[name], key, value)


def package(name: str, path: Path) -> None:
    """Let `name` be a package at `path` without the code of its __init__."""
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]


def stay_on_cpu() -> None:
    """`.cuda()` gives the tensor or module itself."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    nn.Module.cuda = lambda self, *args, **kwargs: self


def one_process() -> None:
    """torch.distributed with a world of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
