"""Where a graph must be cut to be captured, and the cutting.

    norm  qkv  rope | attention | proj  norm  mlp  norm  qkv  rope | attention | proj ...
    `--- captured --'  `- called -'  `--------- captured ----------'

A node is a *break* where its launches depend on values that only the host knows, or where it is not the device that
computes. That is a property of the op as it is registered, and of the tensors it is for, never a name:

    ours       `OpInfo.capture` of a reference, `Provider.capture_of` of a provider's overload
    anybody's  torch.Tag.cudagraph_unsafe, data_dependent_output; a result whose size is only known at run time
    tensors    an operand or a result elsewhere than the graph's inputs are; a mask among the indices of a lookup

"uniform_decode" ops break mixed steps alone. A graph without a break is one piece: the whole step is captured.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from pagebinder.custom_ops.library import NAMESPACE, op_info
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.graph_tools import device_of, devices, tensors
from pagebinder.runtime.graphs.buckets import DECODE

UNSAFE_TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output)


@dataclass(frozen=True)
class Break:
    """A node that cannot be captured, and why."""

    node: str
    op: str
    reason: str


@dataclass
class Piece:
    """Nodes that run together. `inputs` and `outputs` are names of nodes of the whole graph; `breaks` is empty for a
    piece that is captured. `run`: what runs it, the graph itself unless something else is put there, and `runs_as`
    what that is; `is_compiled`: it cannot be seen op by op."""

    gm: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_captured: bool
    breaks: list[Break] = field(default_factory=list)
    run: Callable | None = None
    runs_as: str = "op by op"
    is_compiled: bool = False

    def __post_init__(self) -> None:
        self.run = self.run or self.gm


def capture_level(target) -> tuple[str, str]:
    """("always" | "uniform_decode" | "never", why) of an op, from how it is registered."""
    if not isinstance(target, torch._ops.OpOverload):
        return "always", ""
    unsafe = [tag.name for tag in UNSAFE_TAGS if tag in target.tags]
    if unsafe:
        return "never", f"{target} is tagged {', '.join(unsafe)}"
    if target.namespace == NAMESPACE:
        level = op_info(target._opname).capture
        return level, f"the reference of {target._opname} is registered with capture={level!r}"
    provider = providers_by_namespace().get(target.namespace)
    if provider is None:
        return "always", ""
    level = provider.capture_of(target._opname)
    return level, f"provider {provider.name} serves {target._opname} with graph_capture={level!r}"


def providers_by_namespace() -> dict:
    return {provider.namespace: provider for provider in registered_providers().values()}


def find_breaks(gm: GraphModule, kind: str) -> list[Break]:
    """Nodes of a graph that cannot be captured for steps of a kind, in order."""
    found = []
    level_of, device = functools.cache(capture_level), device_of(gm.graph)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        level, reason = level_of(node.target)
        if level == "always" or (level == "uniform_decode" and kind == DECODE):
            reason = _why_for_its_tensors(node, device)
        if reason:
            found.append(Break(node.name, str(node.target), reason))
    return found


def _why_for_its_tensors(node: Node, device: torch.device | None) -> str:
    """Why a call cannot be captured on a device for the tensors it is for, "" if it can be.

    What lies elsewhere is never captured: a copy from or to ordinary memory of the host is an error there, what the
    CPU computes would be computed once, and a number that a kernel is given from the CPU would stay what it was.
    """
    if device is not None and (elsewhere := devices(node) - {device}):
        return f"it has data on {', '.join(sorted(map(str, elsewhere)))}, where the model is not"
    if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()) and _has_unknown_size(node):
        return "the size of its result is known at run time only"
    return "the host waits for the number of entries that its mask has" if _counts_mask(node) else ""


def _counts_mask(node: Node) -> bool:
    """Is a mask among the indices of a call (a list of tensors that may be left out, as ATen's schemas say it)?

    ATen turns a mask into places first, by `nonzero`. It does not where one number of the host's is put at the places
    of one mask and not added: that is `masked_fill`.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    arguments = node.target._schema.arguments
    given = dict(zip((a.name for a in arguments), node.args)) | node.kwargs
    lists = (given.get(a.name) or () for a in arguments if str(a.type) == "List[Optional[Tensor]]")
    indices = [tensor for index in lists for one in index for tensor in tensors(one)]
    if not any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return False
    is_fill = len(indices) == 1 and any(map(_is_host_number, tensors(given.get("values"))))
    return not is_fill or bool(given.get("accumulate"))


def _is_host_number(value: torch.Tensor) -> bool:
    return value.device.type == "cpu" and all(isinstance(size, int) and size == 1 for size in value.shape)


def _has_unknown_size(node: Node) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports compilers

    return any(free_unbacked_symbols(value) for value in tensors(node))


def split_at_breaks(gm: GraphModule, breaks: Sequence[Break]) -> list[Piece]:
    """Cut a graph into pieces, in order. They share its weights; running them one after the other is running it."""
    by_name = {one.node: one for one in breaks}
    segments: list[tuple[list[Node], list[Break]]] = []
    for node in _picked_where_made(gm.graph):
        found = by_name.get(node.name)
        if found is not None:
            if not segments or not segments[-1][1]:
                segments.append(([], []))
            segments[-1][1].append(found)
        elif not segments or (segments[-1][1] and not _belongs_to(node, segments[-1][0])):
            segments.append(([], []))
        segments[-1][0].append(node)
    segments = _without_empty_captures(segments)
    segment_of = {node: i for i, (nodes, _) in enumerate(segments) for node in nodes}
    return [_piece(gm, i, nodes, found, segment_of) for i, (nodes, found) in enumerate(segments)]


def _picked_where_made(graph: Graph) -> Iterator[Node]:
    """All calls, each with what is picked of its results right behind it: several results in a tuple or list have no
    address, so none may pass to another piece, where a capture would keep those of its first run."""
    for node in graph.nodes:
        if node.op == "call_function" and not _is_picked(node):
            yield from _with_picked(node)


def _with_picked(node: Node) -> Iterator[Node]:
    yield node
    for user in node.users:
        if _is_picked(user):
            yield from _with_picked(user)


def _is_picked(node: Node) -> bool:
    return node.target is operator.getitem and node.args[0].op == "call_function"


def _belongs_to(node: Node, nodes: Sequence[Node]) -> bool:
    """One of several results of a break is picked where they were made."""
    return node.target is operator.getitem and node.args[0] in nodes


def _without_empty_captures(segments):
    """A piece that launches nothing (views, sizes) joins the break before or after it: an empty graph is an error."""
    joined: list[tuple[list[Node], list[Break]]] = []
    for nodes, found in segments:
        is_idle = not found and all(_is_view(node) for node in nodes)
        if joined and joined[-1][1] and (found or is_idle):
            joined[-1][0].extend(nodes)
            joined[-1][1].extend(found)
        elif joined and found and not joined[-1][1] and all(_is_view(node) for node in joined[-1][0]):
            joined[-1] = (joined[-1][0] + nodes, found)
        else:
            joined.append((list(nodes), list(found)))
    return joined


def _is_view(node: Node) -> bool:
    """Whether a node launches nothing: it gives views of its operands, or numbers, and writes nowhere."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    schema = node.target._schema
    makes_tensors = any("Tensor" in str(r.type) and r.alias_info is None for r in schema.returns)
    return not schema.is_mutable and not makes_tensors


def _piece(gm: GraphModule, index: int, nodes: Sequence[Node], found: list[Break], segment_of) -> Piece:
    graph, copies, inputs = Graph(), {}, []
    here = set(nodes)
    needed = dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in here)
    for node in needed:
        if node.op == "get_attr":
            continue
        inputs.append(node.name)
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in needed:
        if node.op == "get_attr":
            copies[node] = graph.node_copy(node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [n for n in nodes if any(segment_of.get(user, -1) != index for user in n.users)]
    graph.output(tuple(copies[n] for n in outputs))
    piece = GraphModule(gm, graph, class_name=f"Piece{index}")
    return Piece(piece, tuple(inputs), tuple(n.name for n in outputs), not found, found)
