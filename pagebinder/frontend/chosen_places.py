"""Where a mask is set: what `where` and `nonzero` return of it, and how code takes it apart before it indexes.

t, k = where(mask)              Place(row), Place(slot)
nonzero(mask)                   Places(row, slot), of which [:, 0], unbind(1), squeeze(-1) are Place
t.unsqueeze(-1).expand(-1, C)   a wide Place, as gather and scatter_add take it
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from pagebinder.frontend.chosen_masks import ROW, ChosenBy, NotChosen, chosen_by
from pagebinder.frontend.node_numbers import Numbering
from pagebinder.graph_tools import CASTS, IDENTITIES, aten, is_call, size_text, val

FINDS = (aten.where.default, aten.nonzero_numpy.default, aten.nonzero.default)
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
             aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)  # fmt: skip


@dataclass(frozen=True)
class Places:
    """All places at which a mask is set: [n, dimensions of the mask], or one tensor of each."""

    by: ChosenBy


@dataclass(frozen=True)
class Place:
    """One number of each place, [n], or `wide`: [n, 1] or repeated along further dimensions."""

    by: ChosenBy
    label: str
    is_wide: bool = False


@dataclass(frozen=True)
class Entries:
    """What an index takes of a value: chosen entries, of the dimensions from `start` on that `labels` name."""

    by: ChosenBy
    labels: tuple[str, ...]
    start: int


def places_of(node: Node, found: dict[Node, object], numbering: Numbering) -> Places | Place | None:
    """None: a call makes no places, or of places what is none. Raises NotChosen: see `chosen_by`."""
    if is_call(node, *FINDS):
        return Places(chosen_by(node.args[0], numbering))
    given = found.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if isinstance(given, Places):
        return _part(node, given)
    if not isinstance(given, Place) or len([n for n in node.all_input_nodes if n in found]) != 1:
        return None
    if is_call(node, *CASTS, *IDENTITIES):
        return given if val(node).dtype in (torch.int64, torch.int32) else None
    if is_call(node, aten.expand.default) and given.is_wide:
        return given
    if not is_call(node, *_RESHAPES):
        return None
    wide = [size_text(n) for n in val(node).shape[1:]]
    same = val(node).dim() > 0 and size_text(val(node).shape[0]) == size_text(val(node.args[0]).shape[0])
    return replace(given, is_wide=bool(wide)) if same and set(wide) <= {"1"} else None


def _part(node: Node, places: Places) -> Places | Place | None:
    labels, whole = places.by.labels, node.args[0]
    if is_call(node, operator.getitem):
        if is_call(whole, aten.unbind.int):
            return None
        return Place(places.by, labels[node.args[1]])
    if is_call(node, aten.unbind.int):
        return places if node.args[1:] and node.args[1] in (1, -1) else None
    if is_call(node, aten.select.int) and node.args[1] in (1, -1) and isinstance(node.args[2], int):
        return Place(places.by, labels[node.args[2]])
    if is_call(node, *IDENTITIES):
        return places
    if is_call(node, *_RESHAPES) and len(labels) == 1 and val(node).dim() == 1:
        return Place(places.by, labels[0])
    return None


def entries_of(indices, values: Node, found: dict[Node, object], numbering: Numbering) -> Entries:
    """Of an index of `values`. Raises NotChosen: it does not take chosen rows of each token's own."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    dims = [dim for dim, _ in given]
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise NotChosen("it is indexed at dimensions that are no neighbours")
    if len(given) == 1 and val(given[0][1]).dtype in (torch.bool, torch.uint8):
        by = chosen_by(given[0][1], numbering)
        entries = Entries(by, by.labels, dims[0])
    else:
        places = [found.get(index) for _, index in given]
        if not all(isinstance(place, Place) and not place.is_wide for place in places):
            raise NotChosen("it is indexed by something else than the places of a mask")
        if len({place.by.order for place in places}) > 1:
            raise NotChosen("it is indexed by places of several masks")
        entries = Entries(places[0].by, tuple(place.label for place in places), dims[0])
    _check_sizes(entries, values)
    return entries


def entries_along(place: Place, dim: int, values: Node) -> Entries:
    """Of an index along one dimension, as index_add has it."""
    entries = Entries(place.by, (place.label,), dim % val(values).dim())
    _check_sizes(entries, values)
    return entries


def _check_sizes(entries: Entries, values: Node) -> None:
    """A place may only be looked up where its mask has it: a table of positions has rows for other numbers, too."""
    if entries.labels.count(ROW) != 1 or len(set(entries.labels)) < len(entries.labels):
        raise NotChosen("it is indexed by a place that does not say which token it is")
    sizes = entries.by.sizes()
    for label, size in zip(entries.labels, val(values).shape[entries.start :]):
        if size_text(size) != sizes.get(label, "1"):
            raise NotChosen("it is indexed by the places of a mask that has other rows than it")
