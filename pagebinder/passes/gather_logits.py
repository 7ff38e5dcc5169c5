"""Logits only for the rows that need them: the last token of each request in a step.

Matches:
    logits = f(linear(x [1, T, C], w))                  f: ops that treat each token alone
Replaces with:
    logits = f(linear(index_select(x, 1, rows), w))     rows [L] int64, a new input `logits_rows`
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import (
    CASTS,
    aten,
    describe,
    finish,
    insert_call,
    is_call,
    set_val,
    skip_casts,
    val,
)
from pagebinder.passes.step_inputs import add_step_input
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "gather_logits"
LOGITS_ROWS = "logits_rows"


def gather_logits(gm: GraphModule) -> PassResult:
    """Add the input `logits_rows`; where the LM head is not found, gather the finished logits instead."""
    result = PassResult(name="gather_logits", changed=True)
    rows = add_step_input(gm, LOGITS_ROWS, ("num_logits",), torch.int64)
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    logits = output.args[0]
    head = _find_head(logits)
    if head is None:
        gathered = insert_call(gm.graph, output, aten.index_select.default, (logits, 0, rows))
        output.args = (gathered,)
        reason = "no linear behind the logits; all rows are computed and then gathered"
        result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **describe(logits)))
    else:
        x = head.args[0]
        gathered = insert_call(gm.graph, head, aten.index_select.default, (x, val(x).dim() - 2, rows))
        head.update_arg(0, gathered)
        _refresh_after(gm, head)
        result.matches.append(Match(pattern=PATTERN, detail=f"before {head.name}", **describe(head)))
    finish(gm)
    return result


def _find_head(node: Node) -> Node | None:
    """Walk up from the logits through ops on single values to the LM head."""
    while not is_call(node, aten.linear.default):
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        # A bias of the vocabulary is the same for all rows; anything else that is added may not be.
        inputs = [n for n in node.all_input_nodes if skip_casts(n).op != "get_attr"]
        if not (pointwise or is_call(node, aten.select.int, *CASTS)) or len(inputs) != 1:
            return None
        node = inputs[0]
    is_rows = [isinstance(size, torch.SymInt) for size in val(node.args[0]).shape]
    return node if is_rows[-2:] == [True, False] and sum(is_rows) == 1 and len(node.users) == 1 else None


def _refresh_after(gm: GraphModule, start: Node) -> None:
    """Recompute fake values from `start` on: the number of rows changed from T to L."""
    reached = False
    for node in gm.graph.nodes:
        reached = reached or node is start
        if reached and node.op == "call_function":
            set_val(node)
