"""How many tokens a captured graph holds for, where that is not any number, and what ends there.

    the source                                        up to
    T > 50: another branch; mask[:, :T]               the range that torch found while tracing
    table(positions), table[positions + 2]            the first position whose row the table does not have
    RoPE by length                                    its original length, see `leaves/rope_by_length.py`

The limit is meta["max_tokens"] of input_ids, the reason meta["max_tokens_reason"].
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Graph, Node

from pagebinder.errors import CaptureError
from pagebinder.frontend.look_ups import LookUp, look_ups
from pagebinder.frontend.mask_proof import FAR_SIZE
from pagebinder.frontend.mask_values import (
    MaskNotProven,
    NotPointwise,
    Values,
    ancestors,
    depends_on_tokens,
    token_dims,
)
from pagebinder.graph_tools import val

LONGEST_FLAT = 4096  # tokens whose pairs are all computed
OF_CODE = "the model's code takes another branch, or a buffer of it (a mask for example) ends"
OF_ROPE = "RoPE's original frequencies end"


@dataclass(frozen=True)
class LengthLimit:
    """`reason` goes on after "beyond, "."""

    num_tokens: int
    reason: str


def note_limit(graph: Graph, limits: Iterable[LengthLimit]) -> None:
    """Keep the smallest of these limits, if there is one."""
    limit = min(limits, key=lambda limit: limit.num_tokens, default=None)
    if limit is not None:
        meta = _input_ids(graph).meta
        meta["max_tokens"], meta["max_tokens_reason"] = limit.num_tokens, limit.reason


def limit_of(graph: Graph) -> LengthLimit | None:
    """What `note_limit` kept."""
    meta = _input_ids(graph).meta
    return LengthLimit(meta["max_tokens"], meta["max_tokens_reason"]) if "max_tokens" in meta else None


def limit_of_tables(graph: Graph, longest: int) -> LengthLimit | None:
    """The most tokens, fewer than `longest`, whose positions are all rows of the tables that they look up.

    Raises:
        CaptureError: already the first position is none.
    """
    limit = None
    for look_up in look_ups(graph):
        num_tokens = _num_tokens_within(look_up, longest if limit is None else limit.num_tokens)
        if num_tokens is None:
            continue
        table = f"the table {look_up.name} ({look_up.num_rows} rows)"
        if num_tokens == 0:
            raise CaptureError(f"The first position looks up a row that {table} does not have.")
        limit = LengthLimit(num_tokens, f"{table}, which positions look up, ends")
    return limit


def _num_tokens_within(look_up: LookUp, longest: int) -> int | None:
    """The first of `longest` positions whose row is not there; None: all are there, or ids choose the row, or the
    number of tokens does, which is for the audit to say.

    An index that is made of values which are not here (of a buffer on the meta device) cannot be told.
    """
    if token_dims(look_up.table) or len(token_dims(look_up.index)) not in (1, 2):
        return None
    nodes = ancestors(look_up.index)
    if depends_on_tokens(nodes, look_up.index):
        return None
    if _is_of_pairs(look_up.index):
        return _num_tokens_of_pairs(look_up, nodes, longest)
    rows = _rows(look_up, nodes, longest)
    if rows is None:
        return None
    positions = ((rows < look_up.lowest) | (rows >= look_up.num_rows)).any(1).nonzero()
    if not len(positions):
        return None
    shorter = _rows(look_up, nodes, max(longest // 2, 1))
    return int(positions[0]) if shorter is not None and torch.equal(rows[: len(shorter)], shorter) else None


def _rows(look_up: LookUp, nodes: list[Node], num_tokens: int) -> torch.Tensor | None:
    """[num_tokens, ..] of a sequence; None: not known."""
    try:
        rows = Values(nodes, num_tokens).vectors().get(look_up.index)
    except MaskNotProven:
        return None
    (dim,) = token_dims(look_up.index)
    return None if rows is None else rows.movedim(dim, 0).reshape(num_tokens, -1)


def _is_of_pairs(index: Node) -> bool:
    """Has it two token dimensions, or one of all pairs?"""
    dims = token_dims(index)
    return len(dims) == 2 or sympy.degree(val(index).shape[dims[0]].node.expr) == 2


def _num_tokens_of_pairs(look_up: LookUp, nodes: list[Node], longest: int) -> int | None:
    """The same for an index over pairs of tokens, of a bias for example, whose proof runs all of it: the first and
    last tokens of a sequence are furthest apart."""

    def is_within(num_tokens: int) -> bool:
        ends = torch.tensor(sorted({0, num_tokens // 2, num_tokens - 1}), device="cpu")
        values = Values(nodes, num_tokens)
        try:
            rows = values.whole(look_up.index) if is_flat else values.at(look_up.index, ends, ends)
        except IndexError:  # of another table before
            return False
        return bool(((rows >= look_up.lowest) & (rows < look_up.num_rows)).all())

    is_flat = len(token_dims(look_up.index)) == 1
    if is_flat and longest > LONGEST_FLAT:
        return None  # whose numbers take gigabytes
    longest = longest if is_flat else max(longest, FAR_SIZE)
    try:
        if is_within(longest):
            return None
        return bisect.bisect_left(range(1, longest), True, key=lambda num_tokens: not is_within(num_tokens))
    except (MaskNotProven, NotPointwise, RuntimeError):
        return None


def _input_ids(graph: Graph) -> Node:
    return next(n for n in graph.nodes if n.op == "placeholder" and n.target == "input_ids")
