"""KV caches that a model keeps in tensors of its own, seen through: one call with all tokens reads what it wrote.

Matches:
    cache[:1, 0:T] = k                           in place, of a buffer or of an attribute that is a tensor
    keys = cache[:1, :T]                         the same part, read behind it
Replaces with:
    keys = k                                     in the cache's dtype; the write is dropped

Every step of a served model is given its cache by the engine, so what such a tensor held before must not matter: all
writes into it are made calls that return a new tensor (out_of_place.py), parts that are read back become what was
written there, and if then nothing reads the old contents any more, the graph is right without them. Else the program
stays as it was traced: the audit refuses the write into a buffer, and one into an attribute is refused here.
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Graph, Node

from pagebinder.errors import CaptureError
from pagebinder.frontend.out_of_place import SCATTERS, is_its_operand, write_out_of_place
from pagebinder.frontend.tidy import ASSERTIONS, narrow_as_slice
from pagebinder.graph_tools import arg, aten, insert_call, is_call, operands, size_text, val, written_by

KEPT = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def without_own_caches(program: ExportedProgram) -> bool:
    """In place. False: it writes into no buffer and no constant, or what a buffer held before is read.

    Raises:
        CaptureError: what a constant, an attribute that is no buffer, held before is read.
    """
    kept = {s.arg.name: s for s in program.graph_signature.input_specs if s.kind in KEPT}
    caches = {memory.name for memory in _written(program.graph) if memory.name in kept}
    if not caches:
        return False
    graph = _copied(program.graph)
    narrow_as_slice(graph)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    held = []
    for memory in [n for n in graph.find_nodes(op="placeholder") if n.name in caches]:
        held.append(insert_call(graph, first, aten.clone.default, (memory,)))
        memory.replace_all_uses_with(held[-1], delete_user_cb=lambda user: user is not held[-1])
    write_out_of_place(graph)
    _read_back(graph)
    graph.eliminate_dead_code()
    if left := [n for n in graph.nodes if n in held]:
        _refuse_constants([kept[n.args[0].name] for n in left])
        return False
    program.graph_module.graph = graph
    program.graph_module.recompile()
    return True


def _refuse_constants(specs: list[InputSpec]) -> None:
    names = [s.target.removeprefix("source.") for s in specs if s.kind is InputKind.CONSTANT_TENSOR]
    if names:
        raise CaptureError(
            f"{names[0]} is written while the model runs, and what it held before is read, too: so what the model "
            "computes depends on earlier calls. Of a cache of keys and values only what the same call wrote may be "
            "read, as the engine keeps them between calls."
        )


def _copied(graph: Graph) -> Graph:
    """With the names of nodes, which a program's signature gives, and without assertions, which read anything."""
    copy = Graph()
    returned = copy.graph_copy(graph, {})
    for node in list(copy.nodes):
        if is_call(node, *ASSERTIONS):
            copy.erase_node(node)
    (output,) = graph.find_nodes(op="output")
    new = copy.output(returned)
    new.name, new.meta = output.name, dict(output.meta)
    return copy


def _written(graph: Graph) -> set[Node]:
    """The first of each chain of views that a call writes into."""
    written = set()
    for node in itertools.chain.from_iterable(map(written_by, graph.nodes)):
        while node.op == "call_function" and (views := [n for a, n in operands(node) if _may_be(a, node)]):
            node = views[0]
        written.add(node)
    return written


def _may_be(argument: torch._C.Argument, node: Node) -> bool:
    """May a call's result be this operand's memory?"""
    return argument.alias_info is not None or is_its_operand(node)


def _read_back(graph: Graph) -> None:
    """In place of what is read where it was written: what was written."""
    for node in list(graph.nodes):
        if is_call(node, aten.copy.default):
            new = _as_copied(graph, node)
        elif is_call(node, *SCATTERS):
            new = _as_written(node)
        else:
            continue
        if new is not None:
            node.replace_all_uses_with(new)


def _as_copied(graph: Graph, node: Node) -> Node | None:
    """What copy(x, y) is, where y has x's sizes."""
    written = node.args[1]
    if list(map(size_text, val(written).shape)) != list(map(size_text, val(node).shape)):
        return None
    if val(written).dtype is val(node).dtype:
        return written
    return insert_call(graph, node, aten.to.dtype, (written, val(node).dtype))


def _as_written(node: Node) -> Node | None:
    """What a slice or an entry was written as; None: it was written otherwise, or only in part."""
    whole = node.args[0]
    while is_its_operand(whole):
        whole = whole.args[0]
    if is_call(node, aten.slice.Tensor):
        dim, *place = _place(node, 1)
        if place == ["0", size_text(val(whole).shape[dim]), "1"]:  # all of it
            return whole
    if not is_call(whole, SCATTERS[node.target]) or _place(node, 1) != _place(whole, 2):
        return None
    return whole.args[1]


def _place(node: Node, first: int) -> tuple:
    """Which part of `node.args[0]` a call takes, or writes, its arguments from the one at `first` on."""
    shape = val(node.args[0]).shape
    dim = arg(node, first, "dim", 0) % len(shape)
    if is_call(node, aten.select.int, aten.select_scatter.default):
        return dim, _text(node.args[first + 1])
    start, end = arg(node, first + 1, "start"), arg(node, first + 2, "end")
    ends = end is None or (type(end) is int and end == sys.maxsize)
    end = size_text(shape[dim]) if ends else _text(end)
    return dim, _text(start or 0), end, _text(arg(node, first + 3, "step", 1))


def _text(number: int | Node) -> str:
    return size_text(number.meta["val"] if isinstance(number, Node) else number)
