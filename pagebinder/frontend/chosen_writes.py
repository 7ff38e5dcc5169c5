"""Chosen entries of a value for every row, and writes to them, as calls that keep all rows (`chosen_rows.py`)."""

from __future__ import annotations

import torch
from torch.fx import Node

from pagebinder.frontend.chosen_masks import ONE, ROW, SLOT, NotChosen, row_mask, slot_mask
from pagebinder.frontend.chosen_places import Entries
from pagebinder.graph_tools import aten, insert_call, size_text, val


def chosen_part(like: Node, x: Node, entries: Entries) -> Node:
    """A new value before `like`: of each row what an index takes, along the dimension at which the index began."""
    labels, start, graph = list(entries.labels), entries.start, like.graph
    if not (val(x).is_floating_point() or val(x).is_complex() or val(x).dtype is torch.bool):
        raise NotChosen("whole numbers are taken of chosen rows")  # of others they may be no index
    if SLOT in labels:
        # One slot of a chosen row is set: the sum of its value and zeros is this value.
        mask = mask_over(like, x, entries)
        alone = insert_call(graph, like, aten.where.ScalarOther, (mask, x, 0))
        at = start + labels.index(SLOT)
        x = insert_call(graph, like, *_over_slots(alone, at))
        labels.remove(SLOT)
    for at in reversed([i for i, label in enumerate(labels) if label == ONE]):
        x = insert_call(graph, like, aten.squeeze.dim, (x, start + at))
    return x


def _over_slots(alone: Node, at: int) -> tuple:
    if val(alone).dtype is torch.bool:
        return aten.any.dim, (alone, at)
    return aten.sum.dim_IntList, (alone, [at])


def mask_over(like: Node, x: Node, entries: Entries) -> Node:
    """A new mask before `like` that broadcasts over `x`: the entries that are chosen."""
    graph, labels = like.graph, [label for label in entries.labels if label != ONE]
    make = slot_mask if SLOT in labels else row_mask
    mask = make(like, entries.by.choice)
    if labels == [SLOT, ROW]:
        mask = insert_call(graph, like, aten.transpose.int, (mask, 0, 1))
    for at, label in enumerate(entries.labels):
        if label == ONE:
            mask = insert_call(graph, like, aten.unsqueeze.default, (mask, at))
    for _ in range(val(x).dim() - entries.start - len(entries.labels)):
        mask = insert_call(graph, like, aten.unsqueeze.default, (mask, -1))
    return mask


def written(node: Node, base: Node, values: Node, entries: Entries, *, is_of_rows: bool, adds: bool) -> Node:
    """A new value before `node`: `base` with `values` put, or added, to its chosen entries.

    Args:
        values: those of all rows if `is_of_rows`, else what is put into each of the chosen ones.
    Raises:
        NotChosen: rows of the values are not where the index has them.
    """
    graph, behind = node.graph, val(base).dim() - entries.start - len(entries.labels)
    if val(values).dtype is not val(base).dtype:
        raise NotChosen("values of another dtype are written to chosen rows")
    at = val(values).dim() - behind - 1
    if is_of_rows:
        rows = entries.by.sizes()[ROW]
        if [d for d, n in enumerate(val(values).shape) if size_text(n) == rows] != [at]:
            raise NotChosen("rows are written along another dimension than they were chosen from")
        before = entries.labels.index(ROW)
        for place in [at] * before + [at + 1 + before] * (len(entries.labels) - before - 1):
            values = insert_call(graph, node, aten.unsqueeze.default, (values, place))
    elif at >= 0:
        raise NotChosen("values of other rows are written to chosen ones")
    if adds:
        values = insert_call(graph, node, aten.add.Tensor, (base, values))
    mask = mask_over(node, base, entries)
    new = insert_call(graph, node, aten.where.self, (mask, values, base))
    if [size_text(n) for n in val(new).shape] != [size_text(n) for n in val(base).shape]:
        raise NotChosen("what is written to chosen rows has more dimensions than they")
    return new
