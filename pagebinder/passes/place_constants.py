"""Values on another device than the model's that are known before any step lie on the model's device, made once.

Matches:
    f(x, .., c)                 x or the result on a GPU, c on the CPU: arange(16) / 16, a number in the model's code
    index_put(x, [mask], c) | masked_fill(x, mask, c)       c of one entry, or scalar_tensor(number)
Replaces with:
    f(x, .., c')                c' an attribute of the graph; a copy of c' to where it lies is left to `simplify`
    masked_fill(x, mask, number)

A CUDA graph holds what the device is told: nothing that the CPU computes, no copy from ordinary memory of the host,
no call for which the host waits. The last two would be some: `masked_fill` asks the device for c', `index_put` for
the number of a mask's entries, unless it is given one number on the CPU. Values are those of the device they were on.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pagebinder.graph_tools import (
    arg,
    aten,
    attach,
    attribute,
    calls,
    describe,
    device_of,
    devices,
    finish,
    insert_call,
    is_call,
    read_attribute,
    source_line,
    tensors,
    val,
)
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "constant_elsewhere"
MAX_BYTES = 16 << 20  # a larger table may lie in the host's memory because the device's is full


def place_constants(gm: GraphModule) -> PassResult:
    """Put what is known before any step, and read on the model's device, there."""
    result, device = PassResult(name="place_constants"), device_of(gm.graph)
    for node, value in values_elsewhere(gm).items():
        readers = [user for user in node.users if device in devices(user)]
        if not readers:
            continue
        if isinstance(value, str):
            where = {"source_line": source_line(node), **describe(node)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=value, **where))
            continue
        placed = None
        for reader in readers:
            detail = str(reader.target)
            filled = _with_number(gm, reader, node, value.item()) if value.numel() == 1 else None
            if filled is None:
                placed = placed or _attribute(gm, node, value.to(device))
                reader.replace_input_with(node, placed)
            result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(filled or reader)))
    for node in calls(gm.graph, aten.scalar_tensor.default):  # what a meta device makes of `x[mask] = number`
        for reader in list(node.users) if not isinstance(node.args[0], Node) else ():
            detail = str(reader.target)
            if filled := _with_number(gm, reader, node, node.args[0]):
                result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(filled)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def values_elsewhere(gm: GraphModule) -> dict[Node, torch.Tensor | str]:
    """What each node on another device than the model's is in every step, or why that is not known before it."""
    found: dict[Node, torch.Tensor | str] = {}
    device = device_of(gm.graph)
    for node in gm.graph.nodes:
        if node.op in ("get_attr", "call_function") and any(t.device != device for t in tensors(node)):
            found[node] = _value(gm, node, found)
    return found


def _value(gm: GraphModule, node: Node, found: dict[Node, torch.Tensor | str]) -> torch.Tensor | str:
    if any(_schema(user).is_mutable for user in node.users if _schema(user)):
        return "it is written to"
    if not isinstance(val(node), torch.Tensor):
        return "it is one of several results"
    for operand in node.all_input_nodes:
        if not isinstance(known := found.get(operand), torch.Tensor):
            return known or f"it depends on {operand.name}"
    num_bytes = val(node).numel() * val(node).element_size()
    if num_bytes > MAX_BYTES:
        return f"it takes {num_bytes / 2**20:,.0f} MiB, more than the {MAX_BYTES >> 20} MiB that are moved unasked"
    if node.op == "get_attr":
        return attribute(gm, node.target)
    if not _schema(node) or _schema(node).is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return f"{node.target} is not known to give the same in every step"
    with torch.no_grad():
        return node.target(*map_arg(node.args, found.get), **map_arg(node.kwargs, found.get))


def _schema(node: Node):
    return getattr(node.target, "_schema", None)


def _with_number(gm: GraphModule, reader: Node, node: Node, number: float) -> Node | None:
    """What a fill of masked entries with `node`, which is a number, becomes; None: the reader is no such fill."""
    if not is_call(reader, aten.index_put.default, aten.masked_fill.Tensor):
        return None
    x, mask, filled_with = reader.args[:3]
    if filled_with is not node:
        return None
    if is_call(reader, aten.index_put.default):
        mask = mask[0] if len(mask) == 1 and not arg(reader, 3, "accumulate") else None
        if not isinstance(mask, Node) or val(mask).dtype is not torch.bool:
            return None
        for _ in range(val(mask).dim(), val(x).dim()):
            mask = insert_call(gm.graph, reader, aten.unsqueeze.default, (mask, -1))
    args = (x, mask, number)
    filled = insert_call(gm.graph, reader, aten.masked_fill.Scalar, args, value=val(reader))
    reader.replace_all_uses_with(filled)
    gm.graph.erase_node(reader)
    return filled


def _attribute(gm: GraphModule, node: Node, value: torch.Tensor) -> Node:
    """A node that reads this value, ahead of the one that made it."""
    attach(gm, f"constant_{node.name}", value)
    with gm.graph.inserting_before(node):
        return read_attribute(gm, gm.graph.get_attr(f"constant_{node.name}"))
