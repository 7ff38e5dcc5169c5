"""Paged attention -> attention in parts, which reads a prefix that several requests share once for all of them.

Matches:
    out = paged_attention(q, kv_cache_i, block_table_g, seq_lens, query_start_loc, sinks, slopes, ...)     causal
Replaces with:
    out = unified_attention(q, kv_cache_i, block_table_g, seq_lens, query_start_loc,
                            shared_lens_g, shared_leaders_g, shared_tokens_g, sinks, slopes, phases="-su", ...)

g is the layer's KV group. A step in which nobody shares anything runs paged attention, to the bit. New tokens are
read from the cache, where the step has just written them: their keys are not there as values once norms and rotations
are fused with the write.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.graph_tools import arg, calls, describe, finish, insert_call, source_line
from pagebinder.passes.step_inputs import add_step_input
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "cascade_attention"
PHASES = "-su"
TABLE = "block_table_"
ours = torch.ops.pagebinder
# Forms that have no kernel in parts, and what sets them apart.
OTHER_FORMS = {
    ours.quantized_paged_attention.default: "its cache holds codes",
    ours.paged_relative_attention.default: "its scores have a bias by distance",
    ours.paged_lookahead_attention.default: "some of its queries see on",
    ours.paged_indexed_attention.default: "each query chooses its keys",
    ours.paged_attention_fp8_quant.default: "its output is quantised in the same op",
    ours.quantized_paged_attention_fp8_quant.default: "its cache holds codes",
    ours.paged_mla_attention.default: "its cache holds latents",
    ours.sparse_mla_attention.default: "its cache holds latents",
}


def cascade_attention(gm: GraphModule) -> PassResult:
    """Rewrite every causal attention over plain K and V."""
    result = PassResult(name="cascade_attention")
    for node in calls(gm.graph, ours.paged_attention.default, *OTHER_FORMS):
        reason = OTHER_FORMS.get(node.target) or _reason_against(node)
        if reason:
            refusal = Refusal(pattern=PATTERN, reason=reason, source_line=source_line(node), **describe(node))
            result.refusals.append(refusal)
            continue
        new = _in_parts(gm, node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        result.matches.append(Match(pattern=PATTERN, **describe(new)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _reason_against(node: Node) -> str | None:
    if not node.kwargs.get("causal", True):
        return "it is not causal"
    if node.kwargs.get("chunk") is not None:
        return "requests see chunks of their own, not a common prefix"
    return None


def _in_parts(gm: GraphModule, node: Node) -> Node:
    group = arg(node, 2, "block_table").target.removeprefix(TABLE)
    names = (f"shared_lens_{group}", f"shared_leaders_{group}")
    lens, leaders = (add_step_input(gm, name, ("num_reqs",), torch.int32) for name in names)
    tokens = add_step_input(gm, f"shared_tokens_{group}", ("num_tokens",), torch.int32)
    options = {key: value for key, value in node.kwargs.items() if key not in ("chunk", "causal")}
    operands = (*node.args[:5], lens, leaders, tokens, *node.args[5:])
    return insert_call(
        gm.graph, node, ours.unified_attention.default, operands, {**options, "phases": PHASES}
    )
