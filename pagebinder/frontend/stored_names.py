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

    def of_experts(self, path: str) -> list[tuple[str, Any]]:
        """What the files say of each weight of the experts at a path of the model: (projection, as `found` says it).

        Names inside a layer are the checkpoint's own: all below `.experts.` in the layer of that number, and of
        several such layers (of one that guesses tokens, say) those whose name has most in common with the path.
        """
        owners, parts = self._experts_by_stack.get(stack_of(path), {}), set(path.split("."))
        return owners[max(owners, key=lambda name: len(parts & set(name.split("."))))] if owners else []

    @functools.cached_property
    def _experts_by_stack(self) -> dict[str, dict[str, list[tuple[str, Any]]]]:
        """By the stack and the number of their layer, layers.3, and by the name of what has them."""
        found: dict[str, dict[str, list[tuple[str, Any]]]] = {}
        for name in (name for name in (*self.layers, *self.plain) if ".experts." in name):
            owner, projection = name.partition(".experts.")[0], name.rpartition(".")[2]
            of_owner = found.setdefault(stack_of(name), {}).setdefault(owner, [])
            of_owner.append((projection, self.layers.get(name)))
        return found


def stack_of(path: str) -> str:
    """layers.3 of a path below it."""
    return ".".join(tail(path).split(".")[:2])


def tail(path: str) -> str:
    """A layer's path from the name of its stack on: layers.3.mlp.up_proj, whatever models put around that."""
    names = path.split(".")
    first = next((i for i, name in enumerate(names) if name.isdigit()), len(names))
    return ".".join(names[max(0, min(first, len(names)) - 1) :])
