"""Layers that do the same are traced once: torch.export takes milliseconds for each op, a graph is copied in none.

    layer 0            layer_begin(arguments) -> ... traced ... -> layer_end(results)
    layers 1 to 27     layer_again(arguments, weights)

Which layers those are is observed first (layer_observer.py). After the trace `layer_again` becomes a copy of what
lies between the other two, over its own arguments and weights, under its own module paths: the graph is the one that
a trace of every layer makes. Where anything is in doubt, every layer is traced.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx import Graph, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from pagebinder.frontend.layer_observer import Layer, replaced_forward, same_layers

_library = torch.library.Library("pagebinder_capture", "DEF")
_library.define("layer_begin(Tensor[] arguments, Tensor[] weights, str layer) -> Tensor[]")
_library.define("layer_end(Tensor[] results, str layer) -> Tensor[]")
_library.define("layer_again(Tensor[] arguments, Tensor[] weights, str layer, str leader) -> Tensor[]")
logger = logging.getLogger("pagebinder")
OPS = torch.ops.pagebinder_capture
BEGIN, END, AGAIN = OPS.layer_begin.default, OPS.layer_end.default, OPS.layer_again.default

_traced = threading.local()  # .results: path -> what a layer returned, of those that the last trace has met

PLAIN_SIZES = {
    torch.ops.aten.sym_size.int, operator.neg, operator.add, operator.sub, operator.mul,
}  # fmt: skip


class CannotRepeat(Exception):
    """The trace does not show what a layer's copies would be."""


def _like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


def _results() -> dict[str, list[torch.Tensor]]:
    return _traced.__dict__.setdefault("results", {})


@torch.library.register_fake("pagebinder_capture::layer_begin", lib=_library)
def _(arguments, weights, layer):
    return _like(arguments)


@torch.library.register_fake("pagebinder_capture::layer_end", lib=_library)
def _(results, layer):
    _results()[layer] = _like(results)
    return list(_results()[layer])


@torch.library.register_fake("pagebinder_capture::layer_again", lib=_library)
def _(arguments, weights, layer, leader):
    return _like(_results()[leader])


@dataclass(frozen=True)
class _Call:
    """How a layer was called in the trace, and what it returned."""

    leaves: list
    spec: TreeSpec
    out: list  # leaves: ("argument", i), ("result", i) or another value
    out_spec: TreeSpec


def repeated_layers(
    model: torch.nn.Module, call: torch.nn.Module, examples: Sequence[Callable[[], tuple]]
) -> list[tuple[Layer, Layer]]:
    """`same_layers`; none where the model cannot be run without values: then every layer is traced."""
    try:
        return same_layers(model, call, examples)
    except Exception as error:
        logger.debug("every layer is traced: %s: %s", type(error).__name__, error)
        return []


@contextlib.contextmanager
def traced_once(same: Sequence[tuple[Layer, Layer]]) -> Iterator[None]:
    """Within, each layer that is like an earlier one is traced as one `layer_again`."""
    calls: dict[str, _Call] = {}
    leaders = {leader.path: leader for _, leader in same}
    with contextlib.ExitStack() as stack:
        for leader in leaders.values():
            stack.enter_context(replaced_forward(leader.module, functools.partial(_first, leader, calls)))
        for layer, leader in same:
            again = functools.partial(_again, layer, leader, calls)
            stack.enter_context(replaced_forward(layer.module, again))
        yield


def _first(layer: Layer, calls: dict[str, _Call], forward: Callable) -> Callable:
    def traced(*args, **kwargs):
        leaves, spec = tree_flatten((args, kwargs))
        tensors = _tensors(leaves)
        inner = OPS.layer_begin(tensors, _weights(layer, layer), layer.path)
        exchanged = dict(zip(map(id, tensors), inner, strict=True))
        args, kwargs = tree_unflatten([exchanged.get(id(x), x) for x in leaves], spec)
        out, out_spec = tree_flatten(forward(*args, **kwargs))
        places = {id(t): ("argument", i) for i, t in enumerate(inner)}
        results = [t for t in _tensors(out) if id(t) not in places]
        places |= {id(t): ("result", i) for i, t in enumerate(results)}
        ended = OPS.layer_end(results, layer.path)
        form = [places.get(id(x), x) for x in out]
        calls[layer.path] = _Call(leaves, spec, form, out_spec)
        return tree_unflatten(_filled(form, tensors, ended), out_spec)

    return traced


def _again(layer: Layer, leader: Layer, calls: dict[str, _Call], forward: Callable) -> Callable:
    def traced(*args, **kwargs):
        leaves, spec = tree_flatten((args, kwargs))
        before = calls.get(leader.path)
        if before is None or spec != before.spec or not _called_alike(leaves, before.leaves):
            return forward(*args, **kwargs)
        tensors = _tensors(leaves)
        results = OPS.layer_again(tensors, _weights(layer, leader), layer.path, leader.path)
        return tree_unflatten(_filled(before.out, tensors, results), before.out_spec)

    return traced


def _tensors(leaves: Sequence) -> list[torch.Tensor]:
    """Each tensor once."""
    return list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())


def _weights(layer: Layer, leader: Layer) -> list[torch.Tensor]:
    """What the trace sees as the weights that the leader was seen to read."""
    return [functools.reduce(getattr, name.split("."), layer.module) for name in leader.used]


def _filled(form: list, arguments: list[torch.Tensor], results: list[torch.Tensor]) -> list:
    lists = {"argument": arguments, "result": results}
    return [lists[x[0]][x[1]] if isinstance(x, tuple) else x for x in form]


def _called_alike(a: list, b: list) -> bool:
    """Tensors of the same layouts in the same places, and equal values."""
    ids = [[id(t) for t in _tensors(leaves)] for leaves in (a, b)]
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return False
        if not isinstance(x, torch.Tensor):
            if x is not y and not _equal(x, y):
                return False
        elif ids[0].index(id(x)) != ids[1].index(id(y)) or not _same_layout(x, y):
            return False
    return True


def _same_layout(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.dtype is not y.dtype or x.device != y.device or x.dim() != y.dim():
        return False
    return all(map(_equal, (*x.shape, *x.stride()), (*y.shape, *y.stride())))


def _equal(x, y) -> bool:
    """Without a guard: sizes are equal if their expressions are."""
    if isinstance(x, torch.SymInt) or isinstance(y, torch.SymInt):
        both = isinstance(x, torch.SymInt) and isinstance(y, torch.SymInt)
        return both and bool(x.node.expr == y.node.expr)
    return type(x) is type(y) and (repr(x) == repr(y) if isinstance(x, float) else bool(x == y))


def expand(graph: Graph) -> None:
    """Replace `layer_again` by copies, in place, and take the marks out.

    Raises:
        CannotRepeat: a traced layer reads what is neither argument, weight nor constant.
    """
    nodes = list(graph.nodes)
    again = [n for n in nodes if n.target is AGAIN]
    begins, ends = ({_layer(n): n for n in nodes if n.target is mark} for mark in (BEGIN, END))
    for leader in {n.args[3] for n in again}:
        if leader not in begins or leader not in ends:
            raise CannotRepeat(f"{leader} left no marks")
        region = _between(nodes, begins[leader], ends[leader])
        _require_plain_sizes(region)
        for call in (n for n in again if n.args[3] == leader):
            _copy(graph, region, begins[leader], ends[leader], call)
    for node in (*begins.values(), *ends.values()):
        _dissolve(graph, node, dict(enumerate(node.args[0])))
    _results().clear()
    graph.lint()


def _layer(mark: Node) -> str:
    return mark.args[2] if mark.target is BEGIN else mark.args[1]


def _between(nodes: list[Node], begin: Node, end: Node) -> list[Node]:
    inner = nodes[nodes.index(begin) + 1 : nodes.index(end)]
    return [n for n in inner if not _is_part(n, begin)]


def _is_part(node: Node, of: Node) -> bool:
    return node.target is operator.getitem and node.args[0] is of


def _copy(graph: Graph, region: list[Node], begin: Node, end: Node, call: Node) -> None:
    to: dict[Node, Node] = {}
    path = re.compile(rf"(?<![^.]){re.escape(call.args[3])}(?![^.])")
    for node in begin.users:
        to[node] = call.args[0][node.args[1]]
    for weight, own in zip(begin.args[1], call.args[1], strict=True):
        if to.setdefault(weight, own) is not own:
            raise CannotRepeat(f"{call.args[2]} shares its weights otherwise than {call.args[3]}")

    def operand(node: Node) -> Node:
        if node not in to and not _is_for_all(node):
            raise CannotRepeat(f"{call.args[3]} reads {node}")
        return to.get(node, node)

    with graph.inserting_before(call):
        for node in region:
            if _is_size(node):
                to[node] = node
                continue
            to[node] = graph.node_copy(node, operand)
            to[node].meta = _moved(node.meta, path, call.args[2])
    _dissolve(graph, call, {i: to[node] for i, node in enumerate(end.args[0])})


def _is_for_all(node: Node) -> bool:
    """Sizes, and constants that the trace found."""
    return (
        _is_size(node) or node.op == "get_attr" or (node.op == "placeholder" and node.name.startswith("c_"))
    )


def _is_size(node: Node) -> bool:
    """A number: layers that are called alike have the same ones, and torch keeps one node for each."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _require_plain_sizes(region: list[Node]) -> None:
    """Sums and products of sizes that are equal at two lengths are equal at all; quotients need not be."""
    used = {n for node in region for n in (node, *node.all_input_nodes) if _is_size(n)}
    if odd := [n for n in used if n.op == "call_function" and n.target not in PLAIN_SIZES]:
        raise CannotRepeat(f"a layer computes {odd[0].target} of sizes")


def _moved(meta: dict, path: re.Pattern, layer: str) -> dict:
    """What is noted at a node, with the module paths of another layer, and a value of its own: values that are the
    same object tell the verifier which nodes replace one another."""
    meta = copy.copy(meta)
    meta["val"] = tree_map_only(FakeTensor, _alias, meta.get("val"))
    if stack := meta.get("nn_module_stack"):
        moved = {path.sub(layer, k): (path.sub(layer, v[0]), *v[1:]) for k, v in stack.items()}
        meta["nn_module_stack"] = moved
    return meta


def _alias(value: FakeTensor) -> FakeTensor:
    """Another object; a new tensor of symbolic sizes takes four times as long."""
    device = value.device  # within, all are on the meta device
    with in_kernel_invocation_manager(value.fake_mode):
        return FakeTensor(value.fake_mode, torch.ops.aten.alias.default(value), device)


def _dissolve(graph: Graph, node: Node, parts: dict[int, Node]) -> None:
    """Each of its parts becomes the node that is given for it."""
    for part in list(node.users):
        part.replace_all_uses_with(parts[part.args[1]])
        graph.erase_node(part)
    graph.erase_node(node)
