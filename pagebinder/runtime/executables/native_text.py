"""Calls of a graph as the text of a native program, which custom_ops/cpu/binding_program.cpp reads.

    linear(getitem, weight)    ->    op pagebinder_cpu::linear - values new 1 7  3 L5 K2 -

An operand is written by the type that the op's schema gives it. Calls that have no such form are named with a reason.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

# As the dispatcher numbers them (c10/core/ScalarType.h), which is fixed: it is part of torch's file formats.
DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
    torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15, torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
}  # fmt: skip


# Ops whose results have sizes that depend on values: a run with one is not replayed.
RESULTS_BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class NotNative(Exception):
    """Why a call has no form in a native program."""


def is_size(node: Node) -> bool:
    """Does a node stand for a number, a size of a tensor for example?"""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def problem_of(node: Node) -> str | None:
    """Why a native program cannot make this call; None: it can."""
    try:
        _Writer().write(node)
    except NotNative as why:
        return str(why)
    return None


@dataclass(frozen=True)
class NativeText:
    """A program: its text, its tensors that are the same in every run, and what a run is given and returns."""

    text: str
    constants: list[Node]  # get_attr nodes
    tensors: list[Node]
    sizes: list[Node]
    outputs: list[Node]


def write_program(calls: Sequence[Node], results: Sequence[Node]) -> NativeText:
    """The program that makes `calls`, of which problem_of(...) is None, and returns what the nodes `results` are."""
    writer = _Writer()
    inputs = dict.fromkeys(n for call in calls for n in call.all_input_nodes if n not in set(calls))
    tensors = [n for n in inputs if n.op != "get_attr" and not is_size(n)]
    for node in tensors:
        writer.new_slot(node)
    sizes = [n for n in inputs if is_size(n)]
    writer.sizes = {n: i for i, n in enumerate(sizes)}
    kept = set(results)
    last: dict[Node, Node] = {}  # element of a list or tuple -> it, others -> the last call that reads it
    for call in calls:
        if not is_element(call):
            last.update(dict.fromkeys(call.all_input_nodes, call))
    lines = []
    for call in calls:
        if is_element(call):
            continue
        elements = _elements(call)
        for node in elements:
            if node is not None:
                writer.new_slot(node)
        given = [n for n in _operands_of(call) if last[n] is call and n not in kept]
        writer.last = {n for n in given if given.count(n) == 1}  # its handle can be given away only once
        lines.append(writer.write(call, elements))
    slots = [writer.slots[n] for n in results]
    recorded = not any(RESULTS_BY_VALUE.intersection(c.target.tags) for c in calls if not is_element(c))
    head = f"{len(tensors)} {len(sizes)} {len(writer.slots)} {int(recorded)} {len(lines)}"
    text = "\n".join([head, *lines, _numbers(slots)])
    return NativeText(text, list(writer.constants), tensors, sizes, list(results))


def is_element(node: Node) -> bool:
    """Does a node pick one of the results of a call?"""
    return node.target is operator.getitem


def _memory_of(op: torch._ops.OpOverload) -> str:
    """Whose memory results are: operands that it writes into, maybe that of operands (views), or new."""
    aliases = [r.alias_info for r in op._schema.returns if r.alias_info is not None]
    if any(alias.is_write for alias in aliases):
        return "writes"
    return "views" if aliases else "new"


def _elements(call: Node) -> list[Node | None]:
    """Who stands for each result of a call: itself for one tensor, else its getitem nodes; None: nobody reads it."""
    value = call.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [call]
    if value is None:
        return []
    elements: list[Node | None] = [None] * len(value)
    for user in call.users:
        if not is_element(user) or not isinstance(user.args[1], int):
            raise NotNative("its results are read as a whole")
        elements[user.args[1]] = user
    return elements


def _operands_of(call: Node) -> list[Node]:
    """The nodes that a call reads, as often as it does."""
    found: list[Node] = []
    torch.fx.node.map_arg((call.args, call.kwargs), found.append)
    return found


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, (len(values), *values)))


@dataclass
class _Writer:
    slots: dict[Node, int] = field(default_factory=dict)
    sizes: Mapping[Node, int] = field(default_factory=dict)
    constants: dict[Node, int] = field(default_factory=dict)
    last: set[Node] = field(default_factory=set)

    def new_slot(self, node: Node) -> None:
        self.slots[node] = len(self.slots)

    def write(self, call: Node, elements: Sequence[Node | None] | None = None) -> str:
        """One call. Raises NotNative. `elements`: None where only that is asked."""
        op = call.target
        if not isinstance(op, torch._ops.OpOverload):
            raise NotNative("it is a function of Python, not an op")
        returns = [str(r.type) for r in op._schema.returns]
        if returns != ["List[Tensor]"] and set(returns) - {"Tensor"}:
            raise NotNative(f"it returns {', '.join(returns)}")
        found = _elements(call)  # refuses what it cannot name
        places = [
            -1 if n is None else self.slots.get(n, -1) for n in (found if elements is None else elements)
        ]
        operands = [
            self._operand(_given(call, a, i), a.real_type) for i, a in enumerate(op._schema.arguments)
        ]
        kind = "list" if returns == ["List[Tensor]"] else "values"
        name = op._schema.overload_name or "-"
        head = f"op {op._schema.name} {name} {kind} {_memory_of(op)}"
        return f"{head} {_numbers(places)} {len(operands)} {' '.join(operands)}"

    def _operand(self, value: Any, of_type: Any) -> str:
        kind = of_type.kind()
        if kind == "OptionalType":
            return "-" if value is None else "? " + self._operand(value, of_type.getElementType())
        if kind == "ListType" and isinstance(value, (list, tuple)):
            items = [self._operand(item, of_type.getElementType()) for item in value]
            return " ".join([f"[{len(items)}", *items])
        if isinstance(value, Node):
            return self._node(value, kind)
        if kind in ("IntType", "SymIntType") and isinstance(value, int):
            return f"N{int(value)}"
        if kind == "FloatType" and isinstance(value, (int, float)):
            return f"F{float(value)!r}"
        if kind == "BoolType" and isinstance(value, bool):
            return f"B{int(value)}"
        if kind == "StringType" and isinstance(value, str):
            return f"S{len(value.encode())} {value}"
        if kind == "ScalarTypeType" and value in DTYPES:
            return f"Y{DTYPES[value]}"
        raise NotNative(f"an operand {value!r} for {of_type}")

    def _node(self, node: Node, kind: str) -> str:
        if kind == "TensorType" and isinstance(node.meta.get("val"), torch.Tensor):
            if node.op == "get_attr":
                return f"K{self.constants.setdefault(node, len(self.constants))}"
            return f"{'L' if node in self.last else 'T'}{self.slots.get(node, -1)}"
        if kind in ("IntType", "SymIntType") and is_size(node):
            return f"V{self.sizes.get(node, -1)}"
        raise NotNative(f"{node.name} is no {kind}")


def _given(call: Node, argument: Any, position: int) -> Any:
    """An argument of a call, or its default."""
    if position < len(call.args) and not argument.kwarg_only:
        return call.args[position]
    if argument.name in call.kwargs:
        return call.kwargs[argument.name]
    return argument.default_value
