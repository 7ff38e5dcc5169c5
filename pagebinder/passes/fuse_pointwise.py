"""Torch's operations on one element at a time, many in one call of `pagebinder::pointwise`.

Matches:
    v0 = add(x0, x1); v1 = mul(v0, 0.5); v2 = tanh(v1)          any run of such operations over results of one shape
Replaces with:
    v0, v2 = pointwise([x0, x1], "add:bfloat16 x0 x1; mul:bfloat16 v0 0.5; tanh:bfloat16 v1 -> v0 v2")

What an operation reads may be smaller and broadcast: it is made where it is read, if nobody else reads it. Each
operation rounds as torch's does, so nothing changes but the last bit of exp and its kin. On a CPU only, where torch's
calls cost more than what they compute and a compiler takes seconds for each model; a GPU's launches are fused by
inductor. Operations without a form here are left to torch, and nothing is said about them: they are no near miss.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.pointwise.program import COMPARISONS, DTYPES, Operand, Program, Statement
from pagebinder.graph_tools import (
    CASTS,
    arg,
    aten,
    describe,
    dtype_name,
    finish,
    insert_call,
    size_text,
    tensors,
)
from pagebinder.report import Match, PassResult

PATTERN = "pointwise"
# Of a call: what its kernel holds in registers fits the first-level cache.
MOST_STATEMENTS, MOST_INPUTS = 40, 16

Step = tuple[str, tuple]  # operation and operands: nodes, numbers, or how many steps back

_UNARY = {
    aten.abs.default: "abs", aten.clone.default: "copy", aten.contiguous.default: "copy",
    aten.exp.default: "exp", aten.expm1.default: "expm1", aten.floor.default: "floor",
    aten.log.default: "log", aten.log1p.default: "log1p",
    aten.log_sigmoid.default: "log_sigmoid", aten.neg.default: "neg",
    aten.reciprocal.default: "reciprocal",
    aten.relu.default: "relu", aten.rsqrt.default: "rsqrt", aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu", aten.sqrt.default: "sqrt", aten.square.default: "square", aten.tanh.default: "tanh",
}  # fmt: skip
_BINARY = {
    aten.add.Tensor: "add", aten.add.Scalar: "add", aten.sub.Tensor: "sub", aten.sub.Scalar: "sub",
    aten.subtract.Tensor: "sub", aten.rsub.Scalar: "rsub", aten.rsub.Tensor: "rsub", aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul", aten.multiply.Tensor: "mul", aten.div.Tensor: "div", aten.div.Scalar: "div",
    aten.divide.Tensor: "div", aten.maximum.default: "maximum", aten.minimum.default: "minimum",
    aten.max.other: "maximum", aten.min.other: "minimum", aten.clamp_min.default: "clamp_min",
    aten.clamp_max.default: "clamp_max", aten.eq.Scalar: "eq", aten.ne.Scalar: "ne", aten.gt.Scalar: "gt",
    aten.ge.Scalar: "ge", aten.lt.Scalar: "lt", aten.le.Scalar: "le", aten.gt.Tensor: "gt", aten.ge.Tensor: "ge",
    aten.lt.Tensor: "lt", aten.le.Tensor: "le",
}  # fmt: skip
_LOGIC = {
    aten.__and__.Tensor: "and", aten.__or__.Tensor: "or",
    aten.bitwise_not.default: "not", aten.logical_not.default: "not", aten.bitwise_and.Tensor: "and",
    aten.logical_and.default: "and", aten.bitwise_or.Tensor: "or", aten.logical_or.default: "or",
}  # fmt: skip
_WHERE = (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther)


def fuse_pointwise(gm: GraphModule) -> PassResult:
    """Gather the pointwise operations of a graph into calls, each at the place of its last operation."""
    result = PassResult(name="fuse_pointwise")
    for group in _groups(gm.graph):
        fused, statements = _rewrite(gm.graph, group)
        detail = f"{len(group.nodes)} operations: {', '.join(dict.fromkeys(s.operation for s in statements))}"
        result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


# ---- which operations ------------------------------------------------------------------------------------------


def steps_of(node: Node) -> list[Step] | None:
    """What a call computes as operations of `program.py`, the last one its value; None: it has no such form."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if not _has_values(node) or not all(map(_has_values, node.all_input_nodes)):
        return None
    steps = _steps(node)
    if steps is None or not node.all_input_nodes or _storage_order(tensors(node)[0]) is None:
        return None
    operands = [o for _, read in steps for o in read]
    if any(
        (isinstance(o, float) and math.isnan(o)) or not isinstance(o, (Node, float, int)) for o in operands
    ):
        return None
    made = tensors(node)[0]
    others = [n for n in node.all_input_nodes if tensors(n)[0].dim() == 0]
    # torch takes such for numbers: they do not widen the result, and may be rounded to its dtype first
    return None if made.dim() and any(tensors(n)[0].dtype is not made.dtype for n in others) else steps


def _has_values(node: Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and dtype_name(value) in DTYPES
        and value.device.type in ("cpu", "meta")
    )


def _storage_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Its dimensions from the one with the longest steps to that with the shortest, as if it was contiguous so; None:
    it is not dense. A value that lies like a transposed operand may be viewed in ways that need it so."""
    wide = [d for d in range(tensor.dim()) if size_text(tensor.shape[d]) != "1"]
    found: list[int] = []
    numel: int | torch.SymInt = 1
    while len(found) < len(wide):
        next_dims = [d for d in wide if d not in found and size_text(tensor.stride(d)) == size_text(numel)]
        if not next_dims:
            return None
        found.insert(0, next_dims[-1])
        numel = numel * tensor.shape[found[0]]
    if found == sorted(found):
        return tuple(range(tensor.dim()))
    return (*(d for d in range(tensor.dim()) if d not in found), *found)


def _steps(node: Node) -> list[Step] | None:
    target, args = node.target, node.args
    is_bool = tensors(node)[0].dtype is torch.bool
    floats = all(tensors(n)[0].dtype is not torch.bool for n in node.all_input_nodes)
    if target in _LOGIC:
        return [(_LOGIC[target], tuple(args))] if is_bool and not floats else None
    if target in _WHERE or target is aten.masked_fill.Scalar:
        mask, yes, no = args if target in _WHERE else (args[1], args[2], args[0])
        return None if is_bool else [("where", (mask, *map(_plain, (yes, no))))]
    if not floats:
        return None
    if target in CASTS:
        return None if is_bool or not _casts_alone(node) else [("to", args[:1])]
    if target in _UNARY:
        return [(_UNARY[target], args[:1])] if _is_contiguous_copy(node) else None
    if target in _BINARY:
        return _binary(node, _BINARY[target])
    if target is torch.ops.pagebinder.gated_activation.default:
        name = node.kwargs["activation"]  # operations have the same names, but for relu2
        active = [("relu", args[:1]), ("square", (-1,))] if name == "relu2" else [(name, args[:1])]
        return [*active, ("mul", (-1, args[1]))]
    if target is aten.pow.Tensor_Scalar:
        return _power(*args)
    if target is aten.gelu.default:
        return [("gelu_tanh" if arg(node, 1, "approximate", "none") == "tanh" else "gelu", args[:1])]
    if target is aten.softplus.default:
        return [("softplus", (args[0], float(arg(node, 1, "beta", 1)), float(arg(node, 2, "threshold", 20))))]
    if target is aten.leaky_relu.default:
        return [("leaky_relu", (args[0], float(arg(node, 1, "negative_slope", 0.01))))]
    if target is aten.clamp.default:
        limits = [("clamp_min", arg(node, 1, "min")), ("clamp_max", arg(node, 2, "max"))]
        x, steps = args[0], []
        for name, limit in limits:
            if limit is not None:
                steps.append((name, (-1 if steps else x, _plain(limit))))
        return steps or None
    return None


def _binary(node: Node, name: str) -> list[Step] | None:
    if set(node.kwargs) - {"alpha"} or arg(node, 2, "alpha", 1) != 1 or len(node.args) < 2:
        return None  # a rounding mode, a factor
    given = [n for n in node.args[:2] if isinstance(n, Node)]
    if not given or not all(
        isinstance(x, (Node, int, float)) and not isinstance(x, bool) for x in node.args[:2]
    ):
        return None
    return [(name, tuple(map(_plain, node.args[:2])))]


def _promoted(nodes: Iterable[Node]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (tensors(n)[0].dtype for n in nodes))


def _power(x: Node, exponent) -> list[Step] | None:
    if exponent == 2:
        return [("square", (x,))]
    if exponent == 0.5:
        return [("sqrt", (x,))]
    if exponent == 3:  # torch's loop over bfloat16 rounds the square
        is_bfloat16 = tensors(x)[0].dtype is torch.bfloat16
        return [("square", (x,)), ("mul", (-1, x))] if is_bfloat16 else [("cube", (x,))]
    return None


def _casts_alone(node: Node) -> bool:
    """Is a cast to a dtype all that it does?"""
    x, y = tensors(node.args[0])[0], tensors(node)[0]
    return x.device == y.device and not any(isinstance(a, torch.memory_format) for a in node.args)


def _is_contiguous_copy(node: Node) -> bool:
    """Results are contiguous; who asked for another layout may count on it."""
    asked = node.kwargs.get("memory_format")
    return asked in (None, torch.contiguous_format) and not node.args[1:]


def _plain(x):
    """A number as a float; what else it is as it is."""
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


# ---- which of them together ------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Group:
    """Operations for one call. `layout`: of what others read of them; `end`: the number of the last one."""

    layout: _Layout
    nodes: dict[Node, list[Step]]
    end: int

    def inputs(self) -> dict[Node, None]:
        read = (o for steps in self.nodes.values() for _, operands in steps for o in operands)
        return dict.fromkeys(o for o in read if isinstance(o, Node) and o not in self.nodes)

    def results(self) -> list[Node]:
        return [n for n in self.nodes if any(user not in self.nodes for user in n.users)]

    def outside(self) -> Iterator[Node]:
        """Calls of others that read what it makes."""
        return (user for n in self.nodes for user in n.users if user not in self.nodes)

    def fits(self) -> bool:
        return sum(map(len, self.nodes.values())) <= MOST_STATEMENTS and len(self.inputs()) <= MOST_INPUTS


def _groups(graph: torch.fx.Graph) -> list[_Group]:
    order = {node: at for at, node in enumerate(graph.nodes)}
    group_of: dict[Node, _Group] = {}
    groups: list[_Group] = []
    for node, at in order.items():
        steps = steps_of(node)
        if steps is None:
            continue
        group = _Group(_layout(node), {node: steps}, at)
        for other in [*dict.fromkeys(group_of[n] for n in node.all_input_nodes if n in group_of)]:
            joined = _joined(other, group, order)
            if joined is not None:
                groups.remove(other)
                group = joined
        group_of.update(dict.fromkeys(group.nodes, group))
        groups.append(group)
    return _side_by_side([g for g in groups if g.layout.shape and _is_worth_it(g)], order)


def _joined(first: _Group, second: _Group, order: dict[Node, int]) -> _Group | None:
    """Both at the place of the second, or None: others read the first before, or need what is no longer made."""
    nodes = {**first.nodes, **second.nodes}
    group = _Group(second.layout, dict(sorted(nodes.items(), key=lambda item: order[item[0]])), second.end)
    if any(order[user] < group.end for user in group.outside()):
        return None
    if any(_layout(n) != group.layout for n in group.results()):
        return None
    return group if group.fits() else None


def _side_by_side(groups: list[_Group], order: dict[Node, int]) -> list[_Group]:
    """Neighbours of one shape that do not read each other, in one call."""
    found: list[_Group] = []
    for group in sorted(groups, key=lambda g: g.end):
        last = found[-1] if found else None
        if last is not None and last.layout == group.layout:
            both = _joined(last, group, order)
            if both is not None:
                found[-1] = both
                continue
        found.append(group)
    return found


def _is_worth_it(group: _Group) -> bool:
    """Not where nothing is computed: a cast or a copy of a weight is left to those who look for it."""
    names = {name for steps in group.nodes.values() for name, _ in steps}
    return bool(names - {"copy", "to"}) or any(n.op != "get_attr" for n in group.inputs())


class _Layout(NamedTuple):
    """Sizes as text, and the dimensions in the order in which they lie."""

    shape: tuple[str, ...]
    order: tuple[int, ...]


def _layout(node: Node) -> _Layout:
    value = tensors(node)[0]
    return _Layout(tuple(map(size_text, value.shape)), _storage_order(value))


# ---- as a call -------------------------------------------------------------------------------------------------


def _rewrite(graph: torch.fx.Graph, group: _Group) -> tuple[Node, Sequence[Statement]]:
    # What a group before this one makes has other names now.
    group = dataclasses.replace(group, nodes={n: steps_of(n) for n in group.nodes})
    inputs = list(group.inputs())
    names: dict[Node, Operand] = {node: f"x{i}" for i, node in enumerate(inputs)}
    statements: list[Statement] = []
    for node, steps in group.nodes.items():
        for name, operands in steps:
            dtype = _dtype_of(name, node)
            written = tuple(_operand(o, names, len(statements)) for o in operands)
            statements.append(Statement(name, dtype, written))
        names[node] = f"v{len(statements) - 1}"
    results, last, order = group.results(), list(group.nodes)[-1], group.layout.order
    program = Program(tuple(statements), tuple(int(str(names[n])[1:]) for n in results))
    lies_otherwise = order != tuple(range(len(order)))
    if lies_otherwise:
        inputs = [_permuted(graph, last, x, order) for x in inputs]
    shapes = [[tensors(n)[0].shape[d] for d in order] for n in results]
    made = [tensors(n)[0].new_empty(shape) for n, shape in zip(results, shapes)]
    call = torch.ops.pagebinder.pointwise.default
    fused = insert_call(graph, last, call, (inputs, str(program)), value=made)
    for place, node in enumerate(results):
        element = insert_call(graph, last, operator.getitem, (fused, place), value=made[place])
        if lies_otherwise:
            back = [order.index(d) for d in range(len(order))]
            element = insert_call(graph, last, aten.permute.default, (element, back))
        element.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        node.replace_all_uses_with(element, delete_user_cb=lambda user: user not in group.nodes)
        for reshaped in element.users:
            if (
                reshaped.target is aten._unsafe_view.default and not lies_otherwise
            ):  # of the copy that this is now
                reshaped.target = aten.view.default
    for node in reversed(group.nodes):
        graph.erase_node(node)
    return fused, statements


def _dtype_of(operation: str, node: Node) -> str:
    """By name, that a step of a call is computed in."""
    if operation in COMPARISONS:
        return str(_promoted(node.all_input_nodes)).removeprefix("torch.")
    return dtype_name(tensors(node)[0])


def _permuted(graph: torch.fx.Graph, like: Node, x: Node, order: tuple[int, ...]) -> Node:
    """An operand as it broadcasts to results that lie in this order."""
    for _ in range(tensors(x)[0].dim(), len(order)):
        x = insert_call(graph, like, aten.unsqueeze.default, (x, 0))
    return insert_call(graph, like, aten.permute.default, (x, list(order)))


def _operand(operand, names: dict[Node, Operand], count: int) -> Operand:
    if isinstance(operand, Node):
        return names[operand]
    return f"v{count - 1}" if operand == -1 and isinstance(operand, int) else float(operand)
