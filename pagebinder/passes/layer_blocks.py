"""Which layer of the source model a module path belongs to, and short names for many layers.

    "model.layers.3.self_attn.q_proj"  ->  stack "model.layers", layer 3, "self_attn.q_proj" in it
    "model.norm"                       ->  outside of every layer
    0, 1, 2, 3, 5                      ->  "0-3, 5"

The plan lock and the report's page fold layers that are equal, and both name them this way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

NO_MODULE = "_empty_nn_module_stack"  # torch.export's name for nodes that no module made


@dataclass(frozen=True)
class Place:
    """Where a module is: layer `index` of `stack` and the path below; outside of layers `stack` is "", index None."""

    stack: str
    index: int | None
    inside: str

    @property
    def layer(self) -> str:
        """The path of the layer, "" outside of layers."""
        return "" if self.index is None else f"{self.stack}.{self.index}"


def place_of(path: str) -> Place:
    """Split a module path at its first number."""
    if path.startswith(NO_MODULE):
        return Place("", None, "")
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and i > 0:
            return Place(".".join(parts[:i]), int(part), ".".join(parts[i + 1 :]))
    return Place("", None, path)


def to_ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} -> "0-2, 5"."""
    runs = []
    for _, run in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs)


def from_ranges(text: str) -> list[int]:
    """ "0-2, 5" -> [0, 1, 2, 5]. Raises ValueError."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def name_of_layers(stack: str, indices: Iterable[int]) -> str:
    """("model.layers", [0, 1, 2]) -> "model.layers.[0-2]"; a single layer keeps its own path."""
    text = to_ranges(indices)
    return f"{stack}.{text}" if text.isdigit() else f"{stack}.[{text}]"
