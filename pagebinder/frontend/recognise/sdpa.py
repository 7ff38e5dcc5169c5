"""Attention written as torch's scaled_dot_product_attention: the second route into a model.

Matches:
    sdpa(q [1, H, T, D], k, v, mask, is_causal)     mask None and is_causal, or a mask that is proven
Replaces with:
    pagebinder.attention(q [T, H, D], k [T, G, D], v [T, G, Dv], scale, window, causal)

Keys that were repeated for grouped heads are unwrapped, so that the cache stores each KV head once.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.mask_proof import MaskFacts, MaskNotProven, prove_mask
from pagebinder.frontend.recognise.operands import Operand, flat_heads, from_flat_heads, stripped, unrepeated
from pagebinder.graph_tools import arg, aten, calls, describe, finish, insert_call, source_line, val
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "attention"
LABELS = ("batch", "heads", "tokens", "width")


def recognise_sdpa(gm: GraphModule) -> PassResult:
    """Rewrite every scaled_dot_product_attention whose mask is understood; refuse the others."""
    result = PassResult(name="recognise_sdpa")
    proofs: dict[Node, MaskFacts | MaskNotProven] = {}
    for sdpa in calls(gm.graph, aten.scaled_dot_product_attention.default):
        try:
            facts = _mask_of(sdpa, proofs)
            match = _rewrite(gm, sdpa, facts)
        except MaskNotProven as miss:
            result.refusals.append(
                Refusal(pattern=PATTERN, reason=str(miss), source_line=source_line(sdpa), **describe(sdpa))
            )
            continue
        result.matches.append(match)
    result.changed = bool(result.matches)
    if result.changed:
        finish(gm)
    return result


def _mask_of(sdpa: Node, proofs: dict[Node, MaskFacts | MaskNotProven]) -> MaskFacts:
    """What the layer's mask means. `proofs`: what is known already, since layers share masks."""
    if arg(sdpa, 4, "dropout_p", 0.0):
        raise MaskNotProven("attention with dropout: call model.eval() before compiling")
    mask = arg(sdpa, 3, "attn_mask")
    if arg(sdpa, 5, "is_causal", False):
        if mask is not None:
            raise MaskNotProven("both is_causal and a mask are given")
        return MaskFacts(causal=True)
    if mask is None:
        return MaskFacts(causal=False)
    if mask not in proofs:
        try:
            proofs[mask] = prove_mask(mask)
        except MaskNotProven as miss:
            proofs[mask] = miss
    if isinstance(proofs[mask], MaskNotProven):
        raise proofs[mask]
    return proofs[mask]


def _rewrite(gm: GraphModule, sdpa: Node, facts: MaskFacts) -> Match:
    q, k, v = sdpa.args[:3]
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        if not _is_heads_by_tokens(val(x)):
            raise MaskNotProven(f"{name} of shape {tuple(val(x).shape)} are not [1, heads, tokens, width]")
    if len({val(x).shape[2].node.expr for x in (q, k, v)}) > 1:
        raise MaskNotProven("queries and keys are not of the same tokens")
    q, k, v = (stripped(Operand(x, list(LABELS)), fold_factors=False) for x in (q, k, v))
    once = [unrepeated(x, "heads") for x in (k, v)]
    if once[0].size("heads") == once[1].size("heads"):
        k, v = once
    if k.size("heads") != v.size("heads") or q.size("heads") % k.size("heads"):
        raise MaskNotProven("queries, keys and values do not have matching numbers of heads")
    scale = arg(sdpa, 6, "scale")
    scale = float(scale) if scale is not None else q.size("width") ** -0.5
    flat = [flat_heads(gm, sdpa, x, "tokens", ["heads"], "width") for x in (q, k, v)]
    options = {"scale": scale, "window": facts.window, "chunk": facts.chunk}
    options = {name: value for name, value in options.items() if value is not None}
    options |= {} if facts.causal else {"causal": False}
    op = insert_call(gm.graph, sdpa, torch.ops.pagebinder.attention.default, tuple(flat), options)
    out = from_flat_heads(gm, sdpa, op, {"batch": 1, "heads": q.size("heads")}, list(LABELS))
    if val(out).dtype is not val(sdpa).dtype:
        out = insert_call(gm.graph, sdpa, aten.to.dtype, (out, val(sdpa).dtype))
    sdpa.replace_all_uses_with(out)
    gm.graph.erase_node(sdpa)  # it may use dropout, so dead-code elimination takes it for impure
    return Match(pattern=PATTERN, detail=facts.describe(), **describe(op))


def _is_heads_by_tokens(x: torch.Tensor) -> bool:
    """[1, H, T, D], T the only symbolic size: over anything else, "attention" would not be over tokens."""
    symbolic = [isinstance(size, torch.SymInt) for size in x.shape]
    return symbolic == [False, False, True, False] and x.shape[0] == 1
