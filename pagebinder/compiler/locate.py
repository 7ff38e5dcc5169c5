"""Finds the first node at which two runs part: source model and captured graph, two graphs, or two ways of one graph.

capture      modules of the source model, in the order in which they finish, against the values in the captured
             graph that leave the same module path: children finish first, so the first one is the innermost
a pass       values that both graphs have, in execution order
packing      the same node for the same sequence, run alone and run with others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from pagebinder.compiler.verify_runs import Runs, World, call_source, source_encoder_states
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import module_path, val
from pagebinder.passes.rewrite_cones import Cone, Diff, cones, writes_before
from pagebinder.passes.trail import ENCODER
from pagebinder.passes.verifier import Difference, difference


@dataclass(frozen=True)
class Divergence:
    """The first node that differs, and what shows it: a subgraph with its inputs, and what it should return.

    graph: takes `inputs` in order. expected_graph, or module (called with module_args, module_kwargs), or expected:
    where the right value comes from.
    """

    node: Node
    graph: GraphModule
    inputs: list
    expected: torch.Tensor | None = None
    expected_graph: GraphModule | None = None
    module: torch.nn.Module | None = None
    module_args: tuple = ()
    module_kwargs: dict = field(default_factory=dict)
    widen: bool = False

    @property
    def module_path(self) -> str:
        return module_path(self.node)


def in_capture(
    runs: Runs, source: ModelSource, chain: str, gm: GraphModule, index: int, tolerance: float
) -> Divergence | None:
    """The first module of the source model whose output the captured graph does not reproduce."""
    values = _values(lambda see: runs.alone(gm, index, see))
    inside = _nodes_by_module(gm.graph)
    wrong = []
    for call in _module_calls(runs, source, chain, index):
        nodes = inside.get(call.path, [])
        node, found = _nearest(_leaving(nodes), call.output, values)
        if node is not None and found.relative > tolerance:
            own = _needed(node, nodes)
            # A submodule may be handed a wrong value that its parent computed: then the parent is to blame.
            given = _nearest(_entering(own), call.first_input, values)[1].relative <= tolerance
            wrong.append((given, call, node, found, own))
            if given:
                break
    if not wrong:
        return None
    _, call, node, found, own = wrong[-1] if wrong[-1][0] else wrong[0]
    graph, inputs = _cut(own, node, values)
    return Divergence(
        node=_telling(own, call.path, node), graph=graph, inputs=inputs, expected=call.output,
        module=call.module, module_args=call.args, module_kwargs=call.kwargs, widen=runs.world.widen,
    )  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """What a module of the source model was given and returned; `output` is the first tensor of that."""

    path: str
    module: torch.nn.Module
    args: tuple
    kwargs: dict
    output: torch.Tensor

    @property
    def first_input(self) -> torch.Tensor | None:
        return next((x for x in (*self.args, *self.kwargs.values()) if isinstance(x, torch.Tensor)), None)


def _module_calls(runs: Runs, source: ModelSource, chain: str, index: int) -> Iterator[_Call]:
    """Calls of all modules that the source model calls once, in the order in which they end."""
    calls: dict[str, list] = {}

    def record(path: str):
        def hook(module, args, kwargs, output):
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            first = getattr(first, "last_hidden_state", getattr(first, "logits", first))
            if isinstance(first, torch.Tensor):
                calls.setdefault(path, []).append(_Call(path, module, args, kwargs, first.clone()))

        return hook

    model = runs.world.module
    handles = [
        m.register_forward_hook(record(path), with_kwargs=True) for path, m in model.named_modules() if path
    ]
    try:
        ids = runs.sequences.ids[index]
        states = None if runs.encoder_states is None else runs.encoder_states[index]
        if chain == ENCODER:
            source_encoder_states(model, ids)
        else:
            call_source(model, source, ids, states)
    finally:
        for handle in handles:
            handle.remove()
    yield from (of[0] for of in calls.values() if len(of) == 1)


def _nodes_by_module(graph: Graph) -> dict[str, list[Node]]:
    """Nodes of each module path, those of its submodules included."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        path = module_path(node) if node.op == "call_function" else ""
        while path:
            found.setdefault(path, []).append(node)
            path = path.rpartition(".")[0]
    return found


def _leaving(nodes: list[Node]) -> list[Node]:
    """Values of a module that are used outside of it."""
    own = set(nodes)
    return [n for n in nodes if not all(u in own for u in n.users)]


def _entering(nodes: list[Node]) -> list[Node]:
    """Values that are used by a module and come from outside."""
    own = set(nodes)
    return list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in own))


def _nearest(
    nodes: list[Node], wanted: torch.Tensor | None, values: dict[Node, Any]
) -> tuple[Node | None, Difference]:
    """The value that stands for a tensor of the source model, and how far it is off; none is not off at all.

    It has the tensor's dtype, and its shape but for sizes of 1. Where several do, as for a module that returns a
    pair, the nearest is taken: a wrong one would be called a divergence.
    """
    best = (None, Difference())
    for node in nodes:
        value = values[node]
        if wanted is None or not isinstance(value, torch.Tensor) or value.dtype is not wanted.dtype:
            continue
        if [n for n in value.shape if n != 1] == [n for n in wanted.shape if n != 1]:
            found = difference(value.reshape(wanted.shape), wanted, node.name)
            if best[0] is None or found.relative <= best[1].relative:
                best = (node, found)
    return best


def _needed(output: Node, inside: list[Node]) -> list[Node]:
    """Nodes inside a module that its output is computed from, in order."""
    allowed, needed, queue = set(inside), set(), [output]
    while queue:
        node = queue.pop()
        if node in allowed and node not in needed:
            needed.add(node)
            queue += node.all_input_nodes
    return [n for n in inside if n in needed]


def _telling(nodes: list[Node], path: str, output: Node) -> Node:
    """The node to name: the last of our ops that belongs to the module itself, or its output."""
    ours = [n for n in nodes if str(n.target).startswith("pagebinder") and module_path(n) == path]
    return ours[-1] if ours else output


def in_pass(
    runs: Runs, before: GraphModule, after: GraphModule, index: int, tolerance: float
) -> Divergence | None:
    """The first value of `after` that differs from the one in `before` that it stands for, one sequence alone."""
    old = _values(lambda see: runs.alone(before, index, see))
    new = _values(lambda see: runs.alone(after, index, see))
    diff = Diff(before.graph, after.graph)
    partners: dict[Node, list[Node]] = {}
    for b, a in (*diff.kept.items(), *diff.pairs):
        partners.setdefault(a, []).append(b)
    for node in after.graph.nodes:
        for other in partners.get(node, ()):
            if not (_is_data(new.get(node)) and _is_data(old.get(other))) or node.op == "placeholder":
                continue
            if new[node].shape != old[other].shape:
                continue
            found = difference(new[node], old[other], node.name)
            if found.relative > tolerance:
                cone = next((c for c in cones(diff) if c.output == (other, node)), None)
                if cone is None:
                    return _one_node(runs.world, node, new, old[other])
                return of_cone(cone, _cone_inputs(cone, old, new), node, runs.world.widen)
    return None


def of_cone(cone: Cone, inputs: list, node: Node, widen: bool) -> Divergence:
    """A rewrite whose two sides differ on these inputs."""
    expected, graph = cone.graphs()
    return Divergence(node=node, graph=graph, inputs=inputs, expected_graph=expected, widen=widen)


def _cone_inputs(cone: Cone, old: dict[Node, Any], new: dict[Node, Any]) -> list:
    return [new[a] if a is not None else old[b] for b, a in cone.inputs]


def in_packing(runs: Runs, gm: GraphModule, way: str, tolerance: float) -> Divergence | None:
    """The first node whose rows of some sequence are not those that the sequence has alone."""
    alone = [_values(lambda see, i=i: runs.alone(gm, i, see)) for i in range(len(runs.packed_ids))]
    calls: list[tuple[list, dict[Node, Any]]] = []

    def observe(call: int, spans: list):
        calls.append((spans, {}))
        return _recorder(calls[-1][1])

    runs.packed(gm, way, observe)
    rows = _row_sizes(gm)
    for node in gm.graph.nodes:
        if node.op != "call_function" or not _is_data(calls[-1][1].get(node)):
            continue
        dim = next((d for d, n in enumerate(val(node).shape) if str(n) in rows), None)
        if dim is None:
            continue
        for spans, values in calls:
            parts = [alone[i][node].narrow(dim, s, e - s) for i, (s, e) in enumerate(spans)]
            found = difference(values[node], torch.cat(parts, dim), f"{node.name}, {way}")
            if found.relative > tolerance:
                return _one_node(runs.world, node, values, torch.cat(parts, dim))
    return None


def _row_sizes(gm: GraphModule) -> set[str]:
    names = ("input_ids", "logits_rows")
    return {str(val(n).shape[0]) for n in gm.graph.nodes if n.op == "placeholder" and n.target in names}


def _one_node(world: World, node: Node, values: dict[Node, Any], expected: torch.Tensor) -> Divergence:
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    graph, inputs = _cut([*writes_before(node, order), node], node, values)
    return Divergence(node=node, graph=graph, inputs=inputs, expected=expected, widen=world.widen)


def _values(run: Callable) -> dict[Node, Any]:
    """Values of all nodes in one run; tensors that may be written to later are copied."""
    values: dict[Node, Any] = {}
    run(_recorder(values))
    return values


def _recorder(values: dict[Node, Any]):
    def see(node: Node, value: Any) -> None:
        written = node.op == "placeholder" and isinstance(value, torch.Tensor)
        values[node] = value.clone() if written else value

    return see


def _is_data(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cut(nodes: list[Node], output: Node, values: dict[Node, Any]) -> tuple[GraphModule, list]:
    """These nodes as a module of their own, and the values of what they read from outside."""
    graph, new, inputs = Graph(), {}, []
    own = set(nodes)
    for node in nodes:
        for outer in node.all_input_nodes:
            if outer not in own and outer not in new:
                new[outer] = graph.placeholder(f"input_{len(inputs)}")
                inputs.append(values[outer])
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(new[output])
    return GraphModule(torch.nn.Module(), graph), inputs
