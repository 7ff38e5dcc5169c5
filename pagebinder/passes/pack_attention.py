"""Attention of one sequence -> attention of many sequences that lie one after the other.

Matches:
    out = attention(q [T, H, D], k [T, G, D], v [T, G, Dv], sinks, slopes, scale, window, chunk, soft_cap, causal)
Replaces with:
    out = packed_attention(q, k, v, query_start_loc [R+1], sinks, slopes, ...)

Matches:
    out = relative_attention(q, k, v, bias, scale, num_behind, causal)
Replaces with:
    out = packed_relative_attention(q, k, v, query_start_loc [R+1], bias, ...)

For encoders, which are given their sequences whole. The audit has shown that nothing else relates tokens, so after
this the graph computes any number of sequences of any lengths, without padding.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import UnsupportedLayerError
from pagebinder.graph_tools import calls, describe, finish, insert_call, module_path, val
from pagebinder.passes.layer_states import BUILDERS
from pagebinder.passes.step_inputs import add_step_input
from pagebinder.report import Match, PassResult

PATTERN = "packed_attention"
STARTS = "query_start_loc"
PACKED_FORMS = {
    torch.ops.pagebinder.attention.default: torch.ops.pagebinder.packed_attention.default,
    torch.ops.pagebinder.relative_attention.default: torch.ops.pagebinder.packed_relative_attention.default,
}


def pack_attention(gm: GraphModule) -> PassResult:
    """Rewrite every attention op.

    Raises:
        UnsupportedLayerError: a layer relates tokens by something else, of which there is no packed form.
    """
    result = PassResult(name="pack_attention")
    for node in calls(gm.graph, *(op for op in BUILDERS if op not in PACKED_FORMS)):
        raise UnsupportedLayerError(
            f"{module_path(node) or node.name} is a {node.target._opname} inside an encoder: only attention can be "
            "computed over many sequences at once here."
        )
    starts = add_step_input(gm, STARTS, ("num_reqs_plus_1",), torch.int32)
    for node in calls(gm.graph, *PACKED_FORMS):
        q, k, v, *optional = node.args
        heads = f"{int(val(q).shape[1])} heads of {int(val(q).shape[2])}"
        window = node.kwargs.get("window")
        detail = heads if window is None else f"{heads}, window {window}"
        result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(node)))
        target = PACKED_FORMS[node.target]
        packed = insert_call(gm.graph, node, target, (q, k, v, starts, *optional), dict(node.kwargs))
        node.replace_all_uses_with(packed)
        gm.graph.erase_node(node)
    result.changed = bool(result.matches)
    finish(gm)
    return result
