"""Rows that a mask chooses, computed and put back, as all rows of which the others keep what they had.

Matches:
    t, k = where(ids == e)  |  nonzero(...)  |  a mask itself             see `chosen_masks.py`
    v = f(x[t], w[t, k])                                                  every row from itself alone
    y[t] = v  |  y[t] += v  |  y.index_add(0, t, v)  |  index_copy, scatter_add
Replaces with:
    V = f(x, sum(where(ids == e, w, 0), over k))
    where(chosen, V, y)  |  where(chosen, y + V, y)

The size of v is known by the data alone, so no graph of it can be served. A token that chose e is given what it was
given before, by the same arithmetic; what f makes of others is not looked at, be it NaN. That holds if a token is
chosen at most once, and if f computes every row from itself: each call of it is put to the audit's question. Code
that is not known to be so stays as it is, and is refused with the reason.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.errors import CaptureError
from pagebinder.frontend.audit import reason_to_mix
from pagebinder.frontend.chosen_masks import ChosenBy, NotChosen, row_mask
from pagebinder.frontend.chosen_places import (
    FINDS,
    Entries,
    Place,
    Places,
    entries_along,
    entries_of,
    places_of,
)
from pagebinder.frontend.chosen_writes import chosen_part, written
from pagebinder.frontend.mask_questions import questions_in
from pagebinder.frontend.node_numbers import Numbering, is_of_data
from pagebinder.frontend.tidy import ASSERTIONS
from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    arg,
    aten,
    calls,
    finish,
    insert_call,
    is_call,
    module_path,
    size_text,
    source_line,
    tensors,
    val,
)

_FILLED = {aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format}
_ARITHMETIC = {operator.mul, operator.add, operator.sub, operator.floordiv}
# Where rows are added to, or replaced: op -> (position of the index, of the values)
_ALONG = {
    aten.index_add.default: (2, 3), aten.index_copy.default: (2, 3), aten.scatter_add.default: (2, 3),
}  # fmt: skip
_LOOK_UPS = (
    aten.gather.default, aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.one_hot.default,
    aten.take_along_dim.default,
)  # fmt: skip
_ADD = {aten.index_add.default, aten.scatter_add.default}


@dataclass(frozen=True)
class Rows:
    """A value of chosen rows, and `dense`, the node of the same of all rows."""

    by: ChosenBy
    dense: Node


@dataclass(frozen=True)
class Size:
    """A number made of how many rows were chosen, and `dense`, made of how many there are."""

    by: ChosenBy
    dense: Node


def write_for_all_rows(gm: GraphModule) -> None:
    """In place, where it is known to be the same; `gm` is functional.

    Raises:
        CaptureError: sizes that the data knows are left; says where the first is made, and why it is.
    """
    for node in questions_in(gm.graph):  # which have been run
        gm.graph.erase_node(node)
    chosen = {
        node for node in gm.graph.nodes if is_chosen(node)
    }  # noted before: torch may equate their sizes
    if not chosen:
        return
    for node in calls(gm.graph, *ASSERTIONS):
        gm.graph.erase_node(node)
    walk = _Walk(gm)
    for node in list(gm.graph.nodes):
        if node.op == "call_function":
            walk.visit(node)
    gm.graph.eliminate_dead_code()
    for node in reversed(list(gm.graph.nodes)):  # dropout stays if nobody reads it, too
        if node in walk.found and not node.users:
            gm.graph.erase_node(node)
    finish(gm)
    left = [node for node in gm.graph.nodes if node in chosen or is_chosen(node)]
    if left:
        reason = next((walk.reasons[n] for n in gm.graph.nodes if n in walk.reasons), None)
        raise CaptureError(
            f"The model's code picks entries by their values{_place(left[0])} (a mask or a search whose result has "
            f"as many rows as match), so the shapes of the captured graph depend on data{_why(reason)}."
        )


def _why(reason: str | None) -> str:
    what = "what it does with them is not known to be the same for each token alone"
    return "" if reason is None else f", and {what}: {reason}"


def _place(node: Node) -> str:
    places = [place for place in (module_path(node), source_line(node)) if place]
    return f" in {', '.join(places)}" if places else ""


class _Walk:
    """Follows chosen rows through a graph in its order. `found`: what nodes are; `reasons`: why some are nothing, and
    `lost`: these, and all that is made of them."""

    def __init__(self, gm: GraphModule) -> None:
        self.graph, self.numbering = gm.graph, Numbering()
        self.found: dict[Node, Places | Place | Rows | Size] = {}
        self.reasons: dict[Node, str] = {}
        self.lost: set[Node] = set()
        self.tokens = val(next(n for n in gm.graph.nodes if n.op == "placeholder")).shape[0].node.expr

    def visit(self, node: Node) -> None:
        if any(n in self.lost for n in node.all_input_nodes):
            self.lost.add(node)
            return
        try:
            what = self._what(node)
        except NotChosen as reason:
            self.reasons[node] = f"{reason} ({node.target}{_place(node)})"
            self.lost.add(node)
            return
        if isinstance(what, Node):
            node.replace_all_uses_with(what)
        elif what is not None:
            self.found[node] = what

    def _what(self, node: Node) -> Places | Place | Rows | Size | Node | None:
        """What a call is, or the call that is to take its place; None: nothing that is chosen."""
        given = [self.found[n] for n in node.all_input_nodes if n in self.found]
        write = self._write(node)
        if write is not None:
            return write
        if is_call(node, *FINDS) or any(isinstance(x, Places | Place) for x in given):
            places = places_of(node, self.found, self.numbering)
            if places is not None:
                return places
        if is_call(node, aten.index.Tensor) and node.args[0] not in self.found and is_chosen(node):
            return self._part(node, entries_of(node.args[1], node.args[0], self.found, self.numbering))
        if is_call(node, aten.index_select.default) and isinstance(self.found.get(node.args[2]), Place):
            place = self.found[node.args[2]]
            return self._part(node, entries_along(place, node.args[1], node.args[0]))
        return self._same_of_all(node, given) if given else self._unknown(node)

    def _unknown(self, node: Node) -> None:
        if is_chosen(node):
            raise NotChosen("it makes rows by values in a way that is not known")

    def _part(self, node: Node, entries: Entries) -> Rows:
        return Rows(entries.by, chosen_part(node, node.args[0], entries))

    def _write(self, node: Node) -> Node | None:
        """The call that takes the place of a write to chosen rows; None: a call is none."""
        if is_call(node, aten.index_put.default):
            base, indices, values = node.args[:3]
            if not any(n in self.found for n in (*indices, values)):
                return None  # of a number where a mask is set, which the audit knows
            entries = entries_of(indices, base, self.found, self.numbering)
            adds = bool(arg(node, 3, "accumulate", False))
        elif is_call(node, *_ALONG):
            at, of_values = _ALONG[node.target]
            base, place, values = node.args[0], self.found.get(node.args[at]), node.args[of_values]
            if not isinstance(place, Place):
                return None
            wide = is_call(node, aten.scatter_add.default)
            if place.is_wide is not wide or arg(node, 4, "alpha", 1) != 1:
                raise NotChosen("rows are added with a factor, or to some channels alone")
            if wide and [size_text(n) for n in val(node.args[at]).shape] != [
                size_text(n) for n in val(values).shape
            ]:
                raise NotChosen("rows are added to some channels alone")
            entries, adds = entries_along(place, node.args[1], base), node.target in _ADD
        else:
            return None
        if base in self.found:
            raise NotChosen("it chooses among chosen rows")
        rows = self.found.get(values)
        if values in self.found and not (isinstance(rows, Rows) and rows.by.order == entries.by.order):
            raise NotChosen("rows are written to others than they were chosen from")
        dense = rows.dense if isinstance(rows, Rows) else values
        return written(node, base, dense, entries, is_of_rows=rows is not None, adds=adds)

    def _same_of_all(self, node: Node, given: list) -> Rows | Size:
        """The call again, of all rows."""
        if any(isinstance(x, Places | Place) for x in given):
            if node.target is aten.sym_size.int and node.args[1] == 0:
                rows = row_mask(node, given[0].by.choice)
                return Size(given[0].by, insert_call(self.graph, node, node.target, (rows, 0)))
            raise NotChosen("it computes with the places of chosen rows")
        if len({x.by.order for x in given}) > 1:
            raise NotChosen("it combines rows that several masks chose, or in several orders")
        by = given[0].by
        if any(n not in self.found and is_chosen(n) for n in node.all_input_nodes):
            raise NotChosen("it combines chosen rows with others")
        _refuse_values_of_others(node, given)
        dense_of = lambda n: self.found[n].dense if n in self.found else n  # noqa: E731
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), dense_of)
        try:
            dense = insert_call(self.graph, node, node.target, args, kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise NotChosen(f"it cannot be computed for all rows: {str(error).splitlines()[0]}") from error
        if not tensors(node):
            return Size(by, dense)
        reason = reason_to_mix(dense, self.tokens)
        if reason is not None:
            raise NotChosen(reason)
        _check_same_sizes(node, dense, by)
        return Rows(by, dense)


def is_chosen(node: Node) -> bool:
    """Has a value sizes that only the data knows?"""
    return any(is_of_data(size) for t in tensors(node) for size in t.shape)


def _refuse_values_of_others(node: Node, given: list) -> None:
    """Raises NotChosen: how many were chosen is a value, or a row that nobody chose could make a call fail."""
    if not any(isinstance(x, Rows) for x in given):
        if tensors(node) and node.target not in _FILLED:
            raise NotChosen("it makes rows of the number of chosen ones")
        if not tensors(node) and node.target not in _ARITHMETIC:
            raise NotChosen("it computes with the number of chosen rows")
    is_cast = is_call(node, *CASTS) and val(node.args[0]).is_floating_point()
    if is_cast and not val(node).is_floating_point() and val(node).dtype is not torch.bool:
        raise NotChosen("it makes whole numbers of chosen rows")
    if is_call(node, *_LOOK_UPS) and not all(map(_is_best, _indices(node))):
        raise NotChosen("it looks up whole numbers that it has made of chosen rows")


def _indices(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if val(n).dtype in (torch.int64, torch.int32)]


def _is_best(index: Node) -> bool:
    """Is it the number of an entry, whatever the entries are?"""
    while is_call(index, *CASTS, *IDENTITIES, aten.unsqueeze.default, aten.squeeze.dim):
        index = index.args[0]
    if is_call(index, operator.getitem):
        return is_call(index.args[0], aten.topk.default, aten.sort.default) and index.args[1] == 1
    return is_call(index, aten.argmax.default, aten.argmin.default, aten.argsort.default)


def _check_same_sizes(node: Node, dense: Node, by: ChosenBy) -> None:
    """Raises NotChosen unless all is as before, with all rows in the place of the chosen ones."""
    for before, after in zip(tensors(node), tensors(dense), strict=True):
        expected = [by.of_all(size) for size in before.shape]
        if expected != [size_text(size) for size in after.shape] or before.dtype is not after.dtype:
            raise NotChosen("its result has other sizes for all rows")
