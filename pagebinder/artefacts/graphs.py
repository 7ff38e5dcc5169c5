"""A GraphModule as JSON and back: nodes, what they call by qualified name, and what reports need to know of them.

    {"symbols": {"s26": {...}},                                  see artefacts/sizes.py
     "schemas": {"pagebinder_cpu::linear": "(Tensor x, ...) -> Tensor"},
     "nodes": [{"op": "call_function", "name": "linear", "target": "pagebinder_cpu::linear.default",
                "args": [{"node": "rms_norm"}, ...], "kwargs": {}, "val": {"tensor": [...]},
                "module": "model.layers.0.mlp", "line": "models/llama/modeling_llama.py:176 in forward"}, ...]}

A call's target is an op that is registered with torch (of aten, ours, a provider's, the user's own) or one of a few
functions of Python: names are looked up in these tables, and nothing else is called or imported. Weights are not part
of it: a get_attr node names one, and `graph_from_json` is given them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node

from pagebinder.artefacts.sizes import SYMBOLIC, SizeReader, SizeWriter
from pagebinder.artefacts.values import from_json, to_json
from pagebinder.errors import ArtefactError
from pagebinder.graph_tools import TORCHS, attach, attribute, graph_module, module_path, source_line

OURS = "pagebinder"
NAMESPACES = ("aten", "prims", OURS)
_OF_OPERATOR = (
    "getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge",
    "and_", "or_", "not_",
)  # fmt: skip
_OF_MATH = ("ceil", "floor", "trunc", "sqrt")
_OF_TORCH = ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int", "sym_ite")
FUNCTIONS: dict[str, Callable] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in ((operator, _OF_OPERATOR), (math, _OF_MATH), (torch, _OF_TORCH))
    for name in names
}
_NAMES = {function: name for name, function in FUNCTIONS.items()}
# Plain facts that passes leave in a node's meta.
FACTS = ("size_names", "layer_indices", "max_tokens", "max_tokens_reason")


def graph_to_json(gm: GraphModule) -> dict:
    """A graph as JSON-ready data.

    Raises:
        ArtefactError: a node, an argument or a value of a kind that an artefact cannot hold.
    """
    sizes = SizeWriter()
    schemas: dict[str, str] = {}
    nodes = []
    for node in gm.graph.nodes:
        data = {"op": node.op, "name": node.name, "target": _target_name(gm, node, schemas)}
        if node.args:
            data["args"] = [to_json(a, _node_tag) for a in node.args]
        if node.kwargs:
            data["kwargs"] = {key: to_json(a, _node_tag) for key, a in node.kwargs.items()}
        val = node.meta.get("val")
        if val is not None:
            data["val"] = to_json(val, lambda value: _value_tag(value, sizes))
        data |= {"module": module_path(node)} if module_path(node) else {}
        data |= {"line": source_line(node)} if source_line(node) else {}
        facts = {key: to_json(node.meta[key]) for key in FACTS if key in node.meta}
        nodes.append(data | ({"facts": facts} if facts else {}))
    return {"symbols": sizes.symbols, "schemas": schemas, "nodes": nodes}


def graph_from_json(
    data: Mapping, weights: Mapping[str, torch.Tensor], class_name: str, *, to_run: bool = False
) -> GraphModule:
    """The GraphModule of `graph_to_json`'s data, with `weights` under the names that its nodes have for them.

    Args:
        to_run: it is only run. What its nodes stand for then says whether that is a tensor, a number or a list of
            them, and nothing of shapes, whose symbols take torch seconds to import.
    Raises:
        ArtefactError: an op that is not there, or has another schema now; a name or a tag that is not known.
    """
    for op, schema in data["schemas"].items():
        _check_schema(op, schema)
    graph, root, by_name = torch.fx.Graph(), torch.nn.Module(), {}
    nodes = {"node": lambda name: _look_up(by_name, name)}
    values = _KINDS if to_run else _values(data["symbols"])
    for record in data["nodes"]:
        op, name = record["op"], record["name"]
        args = tuple(from_json(a, nodes) for a in record.get("args", ()))
        kwargs = {key: from_json(a, nodes) for key, a in record.get("kwargs", {}).items()}
        if op == "get_attr":
            attach(root, record["target"], _look_up(weights, record["target"]))
        target = find_function(record["target"]) if op == "call_function" else record["target"]
        node = graph.create_node(op, target, args, kwargs, name)
        if node.name != name:
            raise ArtefactError(f"the node {name!r} is there twice")
        by_name[name] = node
        node.meta.update({key: from_json(value) for key, value in record.get("facts", {}).items()})
        if "val" in record:
            node.meta["val"] = from_json(record["val"], values)
        _place(node, record.get("module"), record.get("line"))
    graph.lint()
    return graph_module(root, graph, class_name)


def weight_names(gm: GraphModule) -> list[str]:
    """The tensors that a graph reads, by their names in it."""
    return list(dict.fromkeys(n.target for n in gm.graph.nodes if n.op == "get_attr"))


def _target_name(gm: GraphModule, node: Node, schemas: dict[str, str]) -> str:
    if node.op in ("placeholder", "output"):
        return node.target
    if node.op == "get_attr":
        if not isinstance(attribute(gm, node.target), torch.Tensor):
            raise ArtefactError(f"{node.name} reads {node.target!r}, which is no tensor")
        return node.target
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        name = str(node.target)
        namespace, _, rest = name.partition(".")
        schema = node.target._schema
        schemas[f"{namespace}::{rest}"] = str(schema)[len(schema.name) :]
        return f"{namespace}::{rest}"
    if node.op == "call_function" and node.target in _NAMES:
        return _NAMES[node.target]
    raise ArtefactError(f"{node.name} is a {node.op} of {node.target}, which an artefact cannot hold")


def find_function(name: str) -> Callable:
    """What a call node's target stands for. Raises ArtefactError: nothing here."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    namespace, _, rest = str(name).partition("::")
    packet, _, variant = rest.partition(".")
    of_torch = namespace in TORCHS and namespace not in NAMESPACES
    if of_torch or not (namespace and packet and variant):
        raise ArtefactError(
            f"it calls {name!r}, which is none of the ops and functions that a graph may call"
        )
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), variant, None)
    if not isinstance(found, torch._ops.OpOverload):
        hint = "" if namespace in NAMESPACES else f": import what registers torch.ops.{namespace} first"
        raise ArtefactError(f"there is no op {name!r} here{hint}")
    return found


def _check_schema(op: str, schema: str) -> None:
    found = find_function(op)._schema
    now = str(found)[len(found.name) :]
    if now != schema:
        raise ArtefactError(f"the op {op} takes {now} here, and took {schema} when the graph was saved")


def _node_tag(value: Any) -> dict | None:
    return {"node": value.name} if isinstance(value, Node) else None


def _value_tag(value: Any, sizes: SizeWriter) -> dict | None:
    """What a node stands for: a fake tensor, or a symbolic size."""
    if isinstance(value, torch.Tensor):
        shape, strides = ([sizes.size(s) for s in part] for part in (value.shape, value.stride()))
        return {"tensor": [shape, strides, str(value.dtype).removeprefix("torch."), str(value.device)]}
    return {"size": sizes.size(value)} if isinstance(value, SYMBOLIC) else None


_A_TENSOR = torch.empty(0, device="meta")
_KINDS: dict[str, Callable[[Any], Any]] = {"tensor": lambda parts: _A_TENSOR, "size": lambda tree: 0}


def _values(symbols: Mapping) -> dict[str, Callable[[Any], Any]]:
    """Readers of what nodes stand for."""
    sizes = SizeReader(symbols)
    mode = FakeTensorMode(shape_env=sizes.env)
    return {"tensor": lambda parts: _fake(mode, sizes, parts), "size": sizes.size}


def _fake(mode: FakeTensorMode, sizes: SizeReader, parts: list) -> torch.Tensor:
    shape, strides, dtype, device = parts
    shape, strides = ([sizes.size(s) for s in part] for part in (shape, strides))
    with mode:
        dtype = from_json({"dtype": dtype})
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _look_up(table: Mapping, name: str) -> Any:
    if name not in table:
        raise ArtefactError(f"it uses {name!r}, which is not there")
    return table[name]


def _place(node: Node, module: str | None, line: str | None) -> None:
    """Put module path and source line where `graph_tools` reads them."""
    if module:
        node.meta["nn_module_stack"] = {module: (module, None)}
    if line:
        file, _, rest = line.rpartition(":")
        number, _, function = rest.partition(" in ")
        node.meta["stack_trace"] = f'  File "{file}", line {number}, in {function}\n'
