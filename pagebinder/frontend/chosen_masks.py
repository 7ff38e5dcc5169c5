"""What a mask says that chooses tokens for an expert: which dimension counts rows, and which ids it compares.

    (ids == 3)                       [T, K]      row t, slot k: did token t choose expert 3 as its k-th?
    one_hot(ids, E).permute(2, 1, 0)[3]          [K, T], the same by slot first
    (ids == 3).any(-1), or any other mask [T]    one entry for each row
    (ids.view(-1) == 3)              [K T]       rows of slots: of those each has one entry, too

Rows that such a mask chooses are one for each token only if no token names an expert twice: ids of `topk` and `sort`
are distinct along their dimension, of others that is not known.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from pagebinder.frontend.node_numbers import Numbering, is_of_data
from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    arg,
    aten,
    attribute,
    insert_call,
    is_call,
    size_text,
    val,
)

ROW, SLOT, ONE, EXPERT = "row", "slot", "one", "expert"
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
             aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)  # fmt: skip
_ANY = (aten.any.dim, aten.any.dims, aten.sum.dim_IntList, aten.amax.default)
# Comparisons of 0 and 1 that are true of 1.
_IS_SET = {(aten.eq.Scalar, 1), (aten.ne.Scalar, 0), (aten.gt.Scalar, 0), (aten.ge.Scalar, 1)}


class NotChosen(Exception):
    """Why rows are not known to be chosen one for each token."""


@dataclass(frozen=True)
class _Table:
    """Ids, or whether they are an expert's (`hot`): `labels` of its dimensions; `expert` where it is one's alone."""

    ids: Node
    labels: tuple[str, ...]
    hot: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class Choice:
    """The rows whose `ids` ([R] or with slots) hold `expert`, or, without one, where the mask `ids` [R] is set."""

    ids: Node
    expert: int | None
    key: tuple  # equal for equal choices, however often the mask is computed

    def has_slots(self) -> bool:
        return self.expert is not None and SLOT in labels_of(self.ids)


@dataclass(frozen=True)
class ChosenBy:
    """A choice, and the order of its rows: `labels` of the mask's dimensions, which are read one after the other."""

    choice: Choice
    labels: tuple[str, ...]

    def sizes(self) -> dict[str, str]:
        """How many rows and slots there are."""
        labels = labels_of(self.choice.ids)
        return {label: size_text(n) for label, n in zip(labels, val(self.choice.ids).shape)}

    def of_all(self, size: int | torch.SymInt) -> str:
        """A size in which every number that the data knows is that of all rows."""
        if not is_of_data(size):
            return size_text(size)
        ids = self.choice.ids
        rows = val(ids).shape[labels_of(ids).index(ROW)].node.expr
        symbols = [s for s in size.node.expr.free_symbols if str(s).startswith("u")]
        return str(size.node.expr.subs(dict.fromkeys(symbols, rows)))

    @property
    def order(self) -> tuple:
        """Equal if the rows are the same in the same order."""
        by_slot = SLOT in self.labels and self.labels.index(SLOT) < self.labels.index(ROW)
        return self.choice.key, by_slot


def labels_of(node: Node) -> tuple[str, ...] | None:
    """Of a value with one dimension of rows, and one of slots at most; else None."""
    labels = tuple(ROW if isinstance(n, torch.SymInt) else ONE if n == 1 else SLOT for n in val(node).shape)
    return labels if labels.count(ROW) == 1 and labels.count(SLOT) < 2 else None


def chosen_by(mask: Node, numbering: Numbering) -> ChosenBy:
    """What a mask chooses. Raises NotChosen: not known to be one for each token."""
    table = _table(mask)
    if table is not None and table.hot and EXPERT not in table.labels:
        slots = SLOT in labels_of(table.ids)
        if not slots or _are_distinct(table.ids):
            key = ("ids", numbering.of(table.ids), table.expert)
            return ChosenBy(Choice(table.ids, table.expert, key), table.labels)
        if SLOT in table.labels:
            raise NotChosen(
                "a token may choose an expert twice there: the ids are no indices of topk or sort over the experts"
            )
    labels = labels_of(mask)
    if labels is None or SLOT in labels:
        raise NotChosen(
            "the mask is neither one for each token nor one of an expert's number among the ids that were chosen"
        )
    mask = _plain(mask)
    return ChosenBy(Choice(mask, None, ("mask", numbering.of(mask))), labels)


def _plain(mask: Node) -> Node:
    """A mask of rows before it became another one's shape or 0 and 1."""
    while is_call(mask, *CASTS, *IDENTITIES) or _only_ones_change(mask):
        before = mask.args[0]
        if val(before).dtype is not torch.bool and val(mask).dtype is not val(before).dtype:
            break
        mask = before
    return mask


def _table(node: Node) -> _Table | None:
    """None: a node is neither ids nor what is said of an expert among them."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return _ids(node)
    moved = _moved(node)
    if moved is not None:
        return moved
    if is_call(node, aten.one_hot.default):
        table = _table(node.args[0])
        if table is not None and not table.hot and isinstance(arg(node, 1, "num_classes", -1), int):
            return replace(table, labels=(*table.labels, EXPERT), hot=True)
        return None
    if is_call(node, aten.eq.Tensor):
        return _against_classes(*node.args) or _against_classes(*reversed(node.args))
    if is_call(node, aten.eq.Scalar, aten.ne.Scalar, aten.gt.Scalar, aten.ge.Scalar):
        return _compared(node)
    if is_call(node, *_ANY):
        return _reduced(node)
    return _ids(node)


def _ids(node: Node) -> _Table | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
        return None
    labels = labels_of(node)
    return None if labels is None else _Table(node, labels)


def _compared(node: Node) -> _Table | None:
    table, number = _table(node.args[0]), node.args[1]
    if table is None or not isinstance(number, int):
        return None
    if table.hot:
        return table if (node.target, int(number)) in _IS_SET else None
    if not is_call(node, aten.eq.Scalar) or isinstance(number, bool):
        return None
    return replace(table, hot=True, expert=number)


def _against_classes(ids: Node, classes: Node) -> _Table | None:
    """ids [.., 1] == arange(E), or with another dimension of classes."""
    table = _table(ids) if isinstance(ids, Node) else None
    if table is None or table.hot or not isinstance(classes, Node):
        return None
    shape = val(classes).shape
    wide = [d - len(shape) for d, n in enumerate(shape) if n != 1]
    while _only_ones_change(classes) or is_call(classes, *CASTS, *IDENTITIES):
        classes = classes.args[0]
    counts = is_call(classes, aten.arange.default) or (
        is_call(classes, aten.arange.start) and classes.args[0] == 0
    )
    labels = (ONE,) * (len(shape) - len(table.labels)) + table.labels
    if not counts or len(wide) != 1 or val(classes).is_floating_point() or labels[wide[0]] != ONE:
        return None
    at = len(labels) + wide[0]
    return replace(table, labels=(*labels[:at], EXPERT, *labels[at + 1 :]), hot=True)


def _reduced(node: Node) -> _Table | None:
    """any, sum or amax over the slots: is an expert any of a token's?"""
    table, dims = _table(node.args[0]), node.args[1]
    if table is None or not table.hot:
        return None
    rank, keeps = len(table.labels), arg(node, 2, "keepdim", False)
    dims = {d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    if not dims or any(table.labels[d] not in (SLOT, ONE) for d in dims):
        return None
    kept = (ONE if d in dims else label for d, label in enumerate(table.labels) if keeps or d not in dims)
    return replace(table, labels=tuple(kept))


def _moved(node: Node) -> _Table | None:
    """The table of a value whose dimensions were only moved, renamed, or one of them entered."""
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.unbind.int):
        split = node.args[0]
        return _entered(_table(split.args[0]), arg(split, 1, "dim", 0), node.args[1])
    if is_call(node, aten.select.int):
        return _entered(_table(node.args[0]), node.args[1], node.args[2])
    if is_call(node, aten.index.Tensor):
        return _looked_up(node)
    if not (is_call(node, *CASTS, *IDENTITIES, aten.permute.default, aten.transpose.int, aten.t.default)
            or _only_ones_change(node)):  # fmt: skip
        return None
    table = _table(node.args[0])
    if table is None or is_call(node, *CASTS, *IDENTITIES):
        whole = table is not None and not val(node).is_floating_point()
        return table if whole and (table.hot or val(node).dtype is not torch.bool) else None
    labels = list(table.labels)
    if is_call(node, aten.permute.default):
        labels = [labels[d] for d in node.args[1]]
    elif is_call(node, aten.transpose.int, aten.t.default):
        i, j = node.args[1:3] if len(node.args) > 2 else (0, -1)
        labels[i], labels[j] = labels[j], labels[i]
    else:
        if any(label == EXPERT and n == 1 for label, n in zip(labels, val(node.args[0]).shape)):
            return None
        kept = iter([label for label in labels if label != ONE])
        labels = [ONE if n == 1 else next(kept) for n in val(node).shape]
    return replace(table, labels=tuple(labels))


def _entered(table: _Table | None, dim: int, entry: int) -> _Table | None:
    if table is None or not isinstance(entry, int):
        return None
    dim %= len(table.labels)
    labels = table.labels[:dim] + table.labels[dim + 1 :]
    if table.labels[dim] == ONE:
        return replace(table, labels=labels)
    return replace(table, labels=labels, expert=entry) if table.labels[dim] == EXPERT and entry >= 0 else None


def _looked_up(node: Node) -> _Table | None:
    """mask[tensor([3])]: as mask[3], with a dimension of one entry in its place."""
    (dim, index), *others = ((d, i) for d, i in enumerate(node.args[1]) if i is not None)
    while is_call(index, *IDENTITIES, *CASTS, aten.lift_fresh_copy.default, aten.detach_.default):
        index = index.args[0]
    table = _table(node.args[0]) if not others and index.op == "get_attr" else None
    number = None if table is None else attribute(node.graph.owning_module, index.target)
    if number is None or number.is_meta or number.numel() != 1 or number.dtype is not torch.int64:
        return None
    entered = _entered(table, dim, int(number))
    if entered is None or number.dim() == 0:
        return entered
    labels = entered.labels
    return replace(entered, labels=(*labels[:dim], *(ONE,) * number.dim(), *labels[dim:]))


def _only_ones_change(node) -> bool:
    """Is a call a reshape that only adds or drops dimensions of size one?"""
    if not is_call(node, *_RESHAPES):
        return False
    before, after = (
        [size_text(n) for n in val(x).shape if size_text(n) != "1"] for x in (node.args[0], node)
    )
    return before == after


def _are_distinct(ids: Node) -> bool:
    """Are the ids along the slots different for each row?"""
    dim = labels_of(ids).index(SLOT)
    ids = _before_reshapes(ids)
    while is_call(ids, aten.slice.Tensor) and arg(ids, 1, "dim", 0) % val(ids).dim() == dim:
        ids = ids.args[0]
    if is_call(ids, aten.argsort.default):
        return arg(ids, 1, "dim", -1) % val(ids).dim() == dim
    if not is_call(ids, operator.getitem) or ids.args[1] != 1:
        return False
    best = ids.args[0]
    place = {aten.topk.default: 2, aten.sort.default: 1}.get(best.target)
    return place is not None and arg(best, place, "dim", -1) % val(ids).dim() == dim


def _before_reshapes(ids: Node) -> Node:
    """ids.view(-1).view(-1, K): the first that had the same shape."""
    first, node = ids, ids
    while is_call(node, *_RESHAPES):
        node = node.args[0]
        if [size_text(n) for n in val(node).shape] == [size_text(n) for n in val(ids).shape]:
            first = node
    return first


def row_mask(like: Node, choice: Choice) -> Node:
    """A new mask bool [R] before `like`: the rows that are chosen."""
    graph = like.graph
    if choice.expert is None:
        mask = _flat(like, choice.ids)
        return mask if val(mask).dtype is torch.bool else insert_call(graph, like, aten.ne.Scalar, (mask, 0))
    hot = slot_mask(like, choice)
    return insert_call(graph, like, aten.any.dim, (hot, 1)) if choice.has_slots() else hot


def slot_mask(like: Node, choice: Choice) -> Node:
    """A new mask bool [R, K] before `like`, [R] if there are no slots: where is the expert chosen?"""
    return insert_call(like.graph, like, aten.eq.Scalar, (_flat(like, choice.ids), choice.expert))


def _flat(like: Node, ids: Node) -> Node:
    """As [R], or [R, K]."""
    labels = labels_of(ids)
    for dim in reversed([d for d, label in enumerate(labels) if label == ONE]):
        ids = insert_call(like.graph, like, aten.squeeze.dim, (ids, dim))
    labels = [label for label in labels if label != ONE]
    return insert_call(like.graph, like, aten.transpose.int, (ids, 0, 1)) if labels == [SLOT, ROW] else ids
