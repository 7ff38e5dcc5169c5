"""Numbers of rows that a model counts itself, in place of the positions that it is (or is not) given.

Matches:
    arange(T), arange(a, a + T), arange(a, a + b T, b) of whole numbers, T tokens in the call: what is left of them
    when masks are recognised
Replaces with:
    positions * b + a                            cast at last, if the numbers have another dtype

A model is captured on whole sequences, whose row i is position i: there both are the same numbers, so the graph means
what it meant. In a step that holds a part of a sequence, or several, only positions say it. What is done with them is
for the audit to judge, as with positions that a model is given.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import aten, calls, describe, finish, insert_call, val
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "row_positions"
ROUNDED = "numbers of 16 bits that do not begin with 0: torch rounds them in several ways; count in int64 and convert"
COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def recognise_row_positions(gm: GraphModule) -> PassResult:
    """Of a decoder's graph, whose inputs are input_ids [T] and positions [T]."""
    result = PassResult(name="recognise_row_positions")
    inputs = {n.target: n for n in gm.graph.nodes if n.op == "placeholder"}
    positions = inputs.get("positions")
    for node in calls(gm.graph, *COUNTS) if positions is not None else ():
        numbers = _start_and_step(node, positions)
        if numbers is None:
            continue
        same, (start, step) = positions, numbers
        if start != 0 and val(node).dtype in (torch.bfloat16, torch.float16):
            result.refusals.append(Refusal(pattern=PATTERN, reason=ROUNDED, **describe(node)))
            continue
        result.matches.append(Match(pattern=PATTERN, **describe(node)))
        if step != 1:
            same = insert_call(gm.graph, node, aten.mul.Tensor, (same, step))
        if start != 0:
            same = insert_call(gm.graph, node, aten.add.Tensor, (same, start))
        if val(node).dtype is not val(positions).dtype:
            same = insert_call(gm.graph, node, aten.to.dtype, (same, val(node).dtype))
        node.replace_all_uses_with(same)
        gm.graph.erase_node(node)
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _start_and_step(node: Node, positions: Node) -> tuple[int, int] | None:
    """Of whole numbers, one for each token; None: they are not."""
    numbers = node.args if node.target is not aten.arange.default else (0, *node.args)
    start, step = numbers[0], numbers[2] if len(numbers) > 2 else 1
    size, num_tokens = val(node).shape[0], val(positions).shape[0]
    by_token = isinstance(size, torch.SymInt) and size.node.expr == num_tokens.node.expr
    if by_token and type(start) is type(step) is int and val(node).device == val(positions).device:
        return start, step
    return None
