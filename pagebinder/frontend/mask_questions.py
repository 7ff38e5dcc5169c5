"""What code asks of masks before it computes with the rows that they choose, answered while it is traced.

    if mask.any(), if mask.sum() > 0, if idx.numel() == 0, if counts[i] == 0      as if every mask chose a row
    for i in (one_hot.sum((0, 1)) > 0).nonzero(), for i in ids.unique()           every expert in turn
    counts = bincount(ids, minlength=E).tolist()                                  E counts

A graph has one way for all values, that of experts which somebody chose. Where code asks, the graph gets an assertion
that this is so (MARK), which empty_masks.py runs to see what happens where it is not.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from pagebinder.frontend.asking_code import asking_place
from pagebinder.frontend.node_numbers import is_of_data
from pagebinder.frontend.traced_values import node_of
from pagebinder.frontend.weight_values import known_by_weights
from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, calls, is_call, val

MARK = "pagebinder: a mask chooses something at "
COUNTS = (1, 2, 3, 7, 1000)  # of rows that a mask may choose, if any
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # which are not traced
_COMPARISONS = {
    aten.eq.Scalar: operator.eq, aten.ne.Scalar: operator.ne, aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge, aten.lt.Scalar: operator.lt, aten.le.Scalar: operator.le,
    aten.greater.Scalar: operator.gt, aten.less.Scalar: operator.lt, aten.not_equal.Scalar: operator.ne,
}  # fmt: skip
_NOT = (aten.logical_not.default, aten.bitwise_not.default)
_RESHAPES = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.squeeze.default,
             aten.squeeze.dim, aten.unsqueeze.default)  # fmt: skip
_PARTS = (operator.getitem, aten.unbind.int, aten.select.int, aten.slice.Tensor)
_UNIQUE = (aten._unique2.default, aten._unique.default, aten.unique_dim.default)


@contextlib.contextmanager
def taken_as_chosen() -> Iterator[None]:
    """While a model is traced: every mask chooses something."""
    asked = _Asked()
    of_both = {"bincount": asked.bincount} | dict.fromkeys(
        ("nonzero", "argwhere", "where", "unique"), asked.found
    )
    with contextlib.ExitStack() as undo:
        for holder, name, make in (
            (torch.Tensor, "__bool__", asked.of_tensor),
            (torch.SymBool, "__bool__", asked.of_size),
            (torch.SymInt, "__bool__", asked.of_size),
            (torch.Tensor, "__iter__", asked.loop),
            (torch.Tensor, "tolist", asked.listed),
            (FakeTensor, "tolist", asked.listed),
            *((holder, name, make) for name, make in of_both.items() for holder in (torch.Tensor, torch)),
        ):
            if name in vars(holder):
                undo.callback(setattr, holder, name, vars(holder)[name])
            else:
                undo.callback(delattr, holder, name)
            setattr(holder, name, make(getattr(holder, name)))
        yield


def questions_in(graph: Graph) -> list[Node]:
    return [n for n in calls(graph, aten._assert_async.msg) if n.args[1].startswith(MARK)]


def place_of(question: Node) -> str:
    """Where code asks ("file:line")."""
    return question.args[1].removeprefix(MARK)


class _Asked:
    """Functions in place of torch's own, which are their arguments. They answer code outside of torch."""

    def __init__(self) -> None:
        self.inputs: dict[Node, torch.Tensor] = {}

    def of_tensor(self, ask: Callable) -> Callable:
        def asked(tensor: torch.Tensor) -> bool:
            if type(tensor) in _PLAIN:
                return ask(tensor)
            if (known := known_by_weights(tensor)) is not None:
                return known
            node, place = node_of(tensor), asking_place()
            answer = None if node is None or place is None else _answer(node)
            if answer is None:
                return ask(tensor)
            _note(tensor if answer else tensor.logical_not(), place)
            return answer

        return asked

    def of_size(self, ask: Callable) -> Callable:
        def asked(number: torch.SymBool | torch.SymInt) -> bool:
            place, answer = asking_place(), _answer_of_size(number)
            if answer is None or place is None:
                return ask(number)
            condition = number != 0 if isinstance(number, torch.SymInt) else number
            one = torch.sym_ite(condition, *((1, 0) if answer else (0, 1)))
            _note(torch.scalar_tensor(one), place)
            return answer

        return asked

    def loop(self, ask: Callable) -> Callable:
        def asked(tensor: torch.Tensor) -> Iterator:
            hits = self._hits(tensor)
            if hits is None:
                return ask(tensor)
            # Constants, which code may make numbers of.
            return iter([torch.tensor([n] if tensor.dim() == 2 else n, dtype=tensor.dtype) for n in hits])

        return asked

    def listed(self, ask: Callable) -> Callable:
        def asked(tensor: torch.Tensor) -> Any:
            hits = self._hits(tensor)
            if hits is None:
                return ask(tensor)
            return [[n] for n in hits] if tensor.dim() == 2 else list(hits)

        return asked

    def bincount(self, ask: Callable) -> Callable:
        def asked(input: torch.Tensor, weights=None, minlength: int = 0) -> torch.Tensor:
            if type(input) in _PLAIN or weights is not None or type(minlength) is not int or minlength < 1:
                return ask(input, weights, minlength)
            numbers = torch.arange(minlength, dtype=input.dtype, device=input.device)
            return (input[:, None] == numbers).sum(0)

        return asked

    def found(self, find: Callable) -> Callable:
        """Remembers of what entries were found."""

        @functools.wraps(find)
        def finding(*args, **kwargs):
            result = find(*args, **kwargs)
            first = result[0] if isinstance(result, tuple) and len(result) == 1 else result
            node = node_of(first) if isinstance(first, torch.Tensor) and len(args) == 1 else None
            if node is not None and type(args[0]) not in _PLAIN:
                self.inputs[node] = args[0]
            return result

        return finding

    def _hits(self, tensor: torch.Tensor) -> range | None:
        """All experts, if a tensor has the numbers of those that were chosen."""
        node = None if type(tensor) in _PLAIN or tensor.dim() not in (1, 2) else node_of(tensor)
        whole = None if node is None else self.inputs.get(_strip(node))
        place = asking_place()
        if whole is None or place is None or not is_of_data(tensor.shape[0]):
            return None
        if is_call(_strip(node), operator.getitem) and is_call(_strip(node).args[0], *_UNIQUE):
            num_experts = _num_experts(node_of(whole))
            if num_experts is None:
                return None
            are_chosen = (whole.reshape(-1, 1) == torch.arange(num_experts, device=whole.device)).any(0)
        else:
            are_chosen = whole != 0
        if are_chosen.dim() != 1 or type(are_chosen.shape[0]) is not int:
            return None
        _note(are_chosen.all(), place)
        return range(are_chosen.shape[0])


def _note(is_so: torch.Tensor, place: str) -> None:
    aten._assert_async.msg(is_so, f"{MARK}{place}")


def _answer(node: Node) -> bool | None:
    """What a value is where every mask chooses something. None: it may be either, or is no such question."""
    if is_call(node, *_NOT):
        answer = _answer(node.args[0])
        return None if answer is None else not answer
    if is_call(node, *CASTS, *IDENTITIES):
        return _answer(node.args[0])
    if is_call(node, aten.any.default):
        return True
    if node.target in _COMPARISONS and _is_count(node.args[0]):
        answers = {_COMPARISONS[node.target](count, node.args[1]) for count in COUNTS}
        return answers.pop() if len(answers) == 1 else None
    return True if _is_count(node) else None


def _is_count(node: Node) -> bool:
    """Is it how many rows something chose?"""
    while is_call(node, *_PARTS, *_RESHAPES, *CASTS, *IDENTITIES):
        node = node.args[0]
    if is_call(node, aten.count_nonzero.default, aten.count_nonzero.dim_IntList):
        return True
    if not is_call(node, aten.sum.default, aten.sum.dim_IntList):
        return False
    added = node.args[0]
    while is_call(added, *_PARTS, *_RESHAPES, *CASTS, *IDENTITIES, aten.permute.default, aten.transpose.int):
        added = added.args[0]
    return val(added).dtype is torch.bool or is_call(added, aten.one_hot.default) or _is_count(added)


def _answer_of_size(number: torch.SymBool | torch.SymInt) -> bool | None:
    """Of an expression of numbers that the data alone knows: what it is where they are at least one."""
    expression = number.node.expr
    symbols = expression.free_symbols
    if not symbols or not all(str(symbol).startswith("u") for symbol in symbols):
        return None
    ranges, truths = number.node.shape_env.var_to_range, set()
    for count in COUNTS:  # of a truth that was read, 1
        truth = expression.subs({s: min(count, ranges[s].upper) for s in symbols})
        truths.add(bool(truth != 0) if isinstance(truth, sympy.Integer) else truth)
    answer = truths.pop() if len(truths) == 1 else None
    return bool(answer) if answer in (True, False) else None


def _strip(node: Node) -> Node:
    """Before it was reshaped, or the only column taken."""
    while is_call(node, *_RESHAPES, *CASTS, *IDENTITIES) or _is_only_column(node):
        node = node.args[0]
    return node


def _is_only_column(node: Node) -> bool:
    size = val(node.args[0]).shape[node.args[1]] if is_call(node, aten.select.int) else None
    return type(size) is int and size == 1


def _num_experts(ids: Node) -> int | None:
    """Over how many entries topk, sort or argmax has chosen ids."""
    ids = _strip(ids)
    while is_call(ids, aten.slice.Tensor):
        ids = _strip(ids.args[0])
    best = ids.args[0] if is_call(ids, operator.getitem) else ids
    place = {aten.topk.default: 2, aten.sort.default: 1, aten.argmax.default: 1}.get(best.target)
    if place is None:
        return None
    size = val(best.args[0]).shape[arg(best, place, "dim", -1)]
    return size if type(size) is int else None
