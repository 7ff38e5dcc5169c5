"""What several layers compute alike from the same values is computed once.

    layer 0: repeat_interleave(cos, 2)        layer 1: repeat_interleave(cos, 2)        ...

Matches:
    a = f(x, ..);  b = f(x, ..)            f: an op of torch that reads its operands alone
Replaces with:
    a, and a wherever b is read

Models write out in each layer what depends on the positions alone. A compiler that sees the whole graph finds that.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import TORCHS, describe, finish
from pagebinder.report import Match, PassResult

PATTERN = "shared_value"


def share_values(gm: GraphModule) -> PassResult:
    """Merge equal calls; views too, so that what reads equal views is equal."""
    result = PassResult(name="share_values")
    first: dict[tuple, Node] = {}
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            key = ("get_attr", node.target)
        elif node.op == "call_function" and _reads_alone(node.target):
            key = (node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))))
        else:
            continue
        same = first.setdefault(key, node)
        if same is node:
            continue
        if node.op != "get_attr":
            result.matches.append(Match(pattern=PATTERN, detail=str(node.target), **describe(node)))
        node.replace_all_uses_with(same)
        gm.graph.erase_node(node)
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _reads_alone(target) -> bool:
    """Does an op give the same whenever it is given the same, and change nothing?"""
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in TORCHS:
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _key(value):
    """Something hashable that is equal for equal operands: 1, 1.0 and True are three."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, slice):
        return ("slice", _key((value.start, value.stop, value.step)))
    return (type(value), repr(value) if isinstance(value, float) else value)  # 0.0 is not -0.0
