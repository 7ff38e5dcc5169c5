"""Names of layers in a checkpoint's files, which may begin differently than those of the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

# The tensors of a weight: name behind that of its layer -> dtype, as safetensors calls it, and shape.
StoredTensors = Mapping[str, tuple[str, tuple[int, ...]]]


class NamedLayers:
    """What the files say of layers that are stored as codes: `layers`, by their names there; None: unknown. `plain`:
    names of layers that have plain weights there.
    """

    layers: Mapping[str, Any] | None
    plain: frozenset[str]

    def found(self, path: str) -> Any:
        """What the files say of a layer of the model, None where it is plain there.

        A name in the files may begin differently: of all that end alike, the one with most in common is the layer's.
        """
        if path in self.layers or path in self.plain:
            return self.layers.get(path)
        alike, parts = self._by_tail.get(tail(path), ()), set(path.split("."))
        return self.layers.get(max(alike, key=lambda name: len(parts & set(name.split("."))), default=None))

    def knows(self, path: str) -> bool:
        """Have the files a weight of this layer?"""
        return path in self.layers or path in self.plain or tail(path) in self._by_tail

    @functools.cached_property
    def _by_tail(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for name in (*self.layers, *self.plain):
            names.setdefault(tail(name), []).append(name)
        return names

    @functools.cached_property
    def experts_of(self) -> dict[str, list[Any]]:
        """What is said of those below `.experts.`, by the stack and the number of their layer: layers.3."""
        found: dict[str, list[Any]] = {}
        for name in (name for name in self.layers if ".experts." in name):
            found.setdefault(stack_of(name), []).append(self.layers[name])
        return found


def stack_of(path: str) -> str:
    """layers.3 of a path below it."""
    return ".".join(tail(path).split(".")[:2])


def tail(path: str) -> str:
    """A layer's path from the name of its stack on: layers.3.mlp.up_proj, whatever models put around that."""
    names = path.split(".")
    first = next((i for i, name in enumerate(names) if name.isdigit()), len(names))
    return ".".join(names[max(0, min(first, len(names)) - 1) :])
