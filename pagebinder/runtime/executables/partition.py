"""Cuts a fused graph into runs for an engine builder (TensorRT) and the calls between them that stay in torch.

    embed, norm, linears | write, attention | linear, norm, gated linear, ..., linears | write, attention | ...
    engine                 torch              engine                                     torch

Calls keep their order: writes to caches and the reads after them are not connected by values, and only their order
makes them right. A call may go to an engine by what it is, not by its name:

    torch's ops     that are core ATen or decompose into it, draw no random numbers and have shapes that follow from
                    shapes; no float64 or complex values
    ours            if they write nothing, read no cache, and their reference runs without looking at values; in an
                    engine they are their reference

Sizes that an engine needs are read from its own inputs, as engines take tensors only, and weights are its own.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from pagebinder.custom_ops.library import NAMESPACE as OURS
from pagebinder.custom_ops.library import op_info
from pagebinder.graph_tools import attach, attribute, is_view_op, written_by

TORCHS = ("aten", "prims")
NOT_IN_ENGINES = (torch.float64, torch.complex64, torch.complex128)
VALUE_DEPENDENT = (
    torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output,
)  # fmt: skip


@dataclass
class Partition:
    """A run of calls. `module` is what torch runs; `in_torch`: why each op of it cannot be in an engine."""

    name: str
    module: GraphModule
    is_candidate: bool
    in_torch: dict[str, str] = field(default_factory=dict)

    @property
    def calls(self) -> list[Node]:
        return [n for n in self.module.graph.nodes if _computes(n)]

    @property
    def inputs(self) -> list[Node]:
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    def lowered(self) -> GraphModule:
        """The run in ops of torch alone: our ops are their references."""
        gm = GraphModule(self.module, copy.deepcopy(self.module.graph))
        for node in gm.graph.nodes:
            if _is_ours(node):
                node.target = op_info(node.target._opname).reference
        gm.recompile()
        return gm


@dataclass
class Partitioned:
    """A graph whose calls are in submodules. `partitions` are in order."""

    module: GraphModule
    partitions: list[Partition]

    @property
    def candidates(self) -> list[Partition]:
        return [p for p in self.partitions if p.is_candidate]

    def describe(self) -> str:
        """Counts, and which calls stay in torch and why, in a line."""
        total = sum(len(p.calls) for p in self.partitions)
        inside = sum(len(p.calls) for p in self.candidates)
        names = Counter(_name(n) for p in self.partitions if not p.is_candidate for n in p.calls)
        reasons = {name: why for p in self.partitions for name, why in p.in_torch.items()}
        stays = ", ".join(
            f"{count} {name}" + (f" ({reasons[name]})" if name in reasons else "")
            for name, count in names.items()
        )
        return (
            f"{len(self.candidates)} partitions for engines with {inside} of {total} calls; "
            f"in torch: {stays or 'nothing'}"
        )


def partition(gm: GraphModule) -> Partitioned:
    """Cut a fused graph; it is left as it is."""
    gm = GraphModule(gm, copy.deepcopy(gm.graph))
    _results_behind_calls(gm)
    mutated = _mutated(gm)
    reasons = {
        n: why for n in gm.graph.nodes if n.op == "call_function" and (why := reason_against(n, mutated))
    }
    runs = _runs(gm, reasons)
    numbers = {node: number for number, (_, nodes) in enumerate(runs) for node in nodes}
    for node in _sizes_of_their_own(gm, numbers):
        numbers[node] = numbers[node.next]
    gm.graph.lint()
    gm.recompile()
    top = split_module(gm, None, numbers.__getitem__, keep_original_order=True)
    _weights_into_runs(top)
    partitions = []
    for number, (is_candidate, nodes) in enumerate(runs):
        name = f"submod_{number}"
        why = {_name(n): reasons[n] for n in nodes if n in reasons}
        partitions.append(Partition(name, getattr(top, name), is_candidate, why))
    return Partitioned(top, partitions)


def reason_against(node: Node, mutated: set[Node]) -> str | None:
    """Why a call cannot be in an engine; None: it can."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None if target is operator.getitem or _is_size(node) else "it is no op"
    if target._schema.is_mutable:
        return "writes to its arguments"
    if mutated.intersection(node.all_input_nodes):
        return "reads a cache"
    values = [v for n in (node, *node.all_input_nodes) for v in _tensors(n.meta.get("val"))]
    wide = next((v.dtype for v in values if v.dtype in NOT_IN_ENGINES), None)
    if wide is not None:
        return f"has values of {wide}"
    if target.namespace in TORCHS:
        if any(tag in target.tags for tag in VALUE_DEPENDENT):
            return "depends on values or random numbers"
        known = (
            torch.Tag.core in target.tags or target._can_decompose() or target in core_aten_decompositions()
        )
        return None if known or _is_size(node) else "is no core op of torch"
    if _is_ours(node):
        return _reference_problem(node)
    return "is neither torch's nor ours"


def _reference_problem(node: Node) -> str | None:
    """Run an op's reference on example sizes without values: one that looks at values cannot be in an engine."""
    mode = FakeTensorMode()
    try:
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda n: _example(n.meta["val"], mode)
        )
        with mode, torch.no_grad():
            op_info(node.target._opname).reference(*args, **kwargs)
    except Exception as error:  # whatever a reference does with values that are not there
        return f"its reference cannot be traced: {type(error).__name__}"
    return None


def _example(value: Any, mode: FakeTensorMode) -> Any:
    """A value of the graph with the sizes that it was traced with, apart from the graph's own symbols."""
    if isinstance(value, torch.Tensor):
        size, stride = ([_number(s) for s in sizes] for sizes in (value.shape, value.stride()))
        with mode:
            return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    if isinstance(value, (list, tuple)):
        return type(value)(_example(v, mode) for v in value)
    return _number(value)


def _number(size: Any) -> Any:
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def _is_ours(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace.startswith(OURS)


def _is_size(node: Node) -> bool:
    """Is it a number of the step, computed on the host?"""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _computes(node: Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and not _is_size(node)
        and not is_view_op(node.target)
    )


def _name(node: Node) -> str:
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else str(node.target)


def _mutated(gm: GraphModule) -> set[Node]:
    """Nodes that some call writes to."""
    return {n for node in gm.graph.nodes for n in written_by(node)}


def _results_behind_calls(gm: GraphModule) -> None:
    """Move each element of a call's results directly behind it."""
    for node in gm.graph.nodes:
        for user in reversed(list(node.users)):
            if user.target is operator.getitem and user.args[0] is node:
                node.append(user)


def _runs(gm: GraphModule, reasons: dict[Node, str]) -> list[tuple[bool, list[Node]]]:
    """(may be an engine, nodes) in order. A run without a computation is no engine, and joins the one before."""
    runs: list[tuple[bool, list[Node]]] = []
    candidate: dict[Node, bool] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        of_call = node.target is operator.getitem
        candidate[node] = (
            candidate[node.args[0]] if of_call and node.args[0] in candidate else node not in reasons
        )
        if not runs or runs[-1][0] != candidate[node]:
            runs.append((candidate[node], []))
        runs[-1][1].append(node)
    merged: list[tuple[bool, list[Node]]] = []
    for is_candidate, nodes in runs:
        is_candidate = is_candidate and any(_computes(n) for n in nodes)
        if merged and merged[-1][0] == is_candidate:
            merged[-1][1].extend(nodes)
        else:
            merged.append((is_candidate, nodes))
    return merged


def _weights_into_runs(top: GraphModule) -> None:
    """Runs read the weights that they are called with from themselves; no weight is copied."""
    for call in [n for n in top.graph.nodes if n.op == "call_module"]:
        module = getattr(top, call.target)
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        assert not call.kwargs and len(inputs) == len(call.args)
        for inner, outer in zip(inputs, call.args):
            if outer.op == "get_attr":
                attach(module, outer.target, attribute(top, outer.target))
                with module.graph.inserting_before(inner):
                    weight = module.graph.get_attr(outer.target)
                weight.meta = dict(outer.meta)
                inner.replace_all_uses_with(weight)
                module.graph.erase_node(inner)
        call.args = tuple(a for a in call.args if a.op != "get_attr")
        module.recompile()
    top.graph.eliminate_dead_code()
    top.recompile()


def _sizes_of_their_own(gm: GraphModule, numbers: dict[Node, int]) -> Iterator[Node]:
    """In each run, read sizes that come from elsewhere from a tensor that the run has; yields the new nodes."""
    for node in list(numbers):
        for size in [n for n in node.all_input_nodes if n in numbers and _is_size(n)]:
            if numbers[size] == numbers[node]:
                continue
            place = _place_of(size.meta["val"], node, numbers)
            if place is not None:
                with gm.graph.inserting_before(node):
                    own = gm.graph.call_function(torch.ops.aten.sym_size.int, place)
                own.meta["val"] = size.meta["val"]
                node.replace_input_with(size, own)
                yield own


def _place_of(size: Any, node: Node, numbers: dict[Node, int]) -> tuple[Node, int] | None:
    """A tensor that is there before `node`, in its run or as an input of its call, and a dimension of that size."""
    nearby = [n for n in node.all_input_nodes if not _is_size(n)]
    nearby += [n for n in numbers if numbers[n] == numbers[node] and n < node]
    for tensor in nearby:
        value = tensor.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(size, torch.SymInt):
            for dim, other in enumerate(value.shape):
                if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr:
                    return tensor, dim
    return None
