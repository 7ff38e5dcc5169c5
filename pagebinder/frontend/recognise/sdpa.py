"""Attention written as torch's scaled_dot_product_attention: the second route into a model.

Matches:
    sdpa(q [1, H, T, D], k, v, mask, is_causal)     mask None and is_causal, or a mask that is proven, ALiBi added
Replaces with:
    pagebinder.attention(q [T, H, D], k [T, G, D], v [T, G, Dv], None, alibi_slopes, scale, window, causal)

Matches:
    sdpa(q [.., T, .., M, D], k [.., T, .., N, D], v, no mask)    each token attends to things of its own
Replaces with:
    softmax(q k' scale) v, as matmul and softmax

Keys that were repeated for grouped heads are unwrapped, so that the cache stores each KV head once.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.alibi_proof import classify_bias, is_learned
from pagebinder.frontend.distance_proof import DistanceBias, Slopes, prove_bias
from pagebinder.frontend.mask_proof import MaskFacts, MaskNotProven, prove_mask, prove_terms, require_served
from pagebinder.frontend.recognise.bias_constants import BiasConstants
from pagebinder.frontend.recognise.operands import (
    DROPS,
    NotAttention,
    Operand,
    flat_heads,
    from_flat_heads,
    in_one_dtype,
    stripped,
    unrepeated,
)
from pagebinder.frontend.token_dims import token_dims
from pagebinder.graph_tools import arg, aten, calls, describe, finish, insert_call, source_line, val
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "attention"
LABELS = ("batch", "heads", "tokens", "width")

Mask = tuple[MaskFacts, Slopes | DistanceBias | None]  # and ALiBi slopes [H], or a bias by distance


def recognise_sdpa(gm: GraphModule) -> PassResult:
    """Rewrite every scaled_dot_product_attention whose mask is understood; refuse the others."""
    result = PassResult(name="recognise_sdpa")
    proofs: dict[tuple[Node, int], Mask | MaskNotProven] = {}
    constants = BiasConstants(gm)
    for sdpa in calls(gm.graph, aten.scaled_dot_product_attention.default):
        try:
            if _is_within_tokens(sdpa):
                match = _rewrite_within_tokens(gm, sdpa)
            else:
                facts, bias = _mask_of(sdpa, proofs)
                match = _rewrite(gm, sdpa, facts, bias, constants)
        except (MaskNotProven, NotAttention) as miss:
            result.refusals.append(
                Refusal(pattern=PATTERN, reason=str(miss), source_line=source_line(sdpa), **describe(sdpa))
            )
            continue
        result.matches.append(match)
    result.changed = bool(result.matches)
    if result.changed:
        finish(gm)
    return result


def _mask_of(sdpa: Node, proofs: dict[tuple[Node, int], Mask | MaskNotProven]) -> Mask:
    """What the layer's mask means. `proofs`: what is known already, since layers share masks."""
    if arg(sdpa, 4, "dropout_p", 0.0):
        raise MaskNotProven(DROPS)
    mask = arg(sdpa, 3, "attn_mask")
    if arg(sdpa, 5, "is_causal", False):
        if mask is not None:
            raise MaskNotProven("both is_causal and a mask are given")
        return MaskFacts(causal=True), None
    if mask is None:
        return MaskFacts(causal=False), None
    key = mask, val(sdpa.args[0]).shape[1]
    if key not in proofs:
        try:
            proofs[key] = _proven(*key)
        except MaskNotProven as miss:
            proofs[key] = miss
    if isinstance(proofs[key], MaskNotProven):
        raise proofs[key]
    return proofs[key]


def _proven(mask: Node, num_heads: int) -> Mask:
    """A mask, or ALiBi or a bias by distance with or without one. Raises MaskNotProven."""
    try:
        if is_learned(mask):
            raise MaskNotProven("the mask depends on parameters")
        facts = prove_mask(mask)
    except MaskNotProven as miss:
        try:
            bias = classify_bias(mask, Fraction(1))
        except MaskNotProven:
            raise miss from None
        if bias.node is None:
            raise
    else:
        require_served(facts)
        return facts, None
    facts = MaskFacts(causal=False) if bias.mask is None else prove_terms((bias.mask,))
    require_served(facts)
    return facts, prove_bias(bias, facts, num_heads)


def _rewrite(
    gm: GraphModule,
    sdpa: Node,
    facts: MaskFacts,
    bias: Slopes | DistanceBias | None,
    constants: BiasConstants,
) -> Match:
    q, k, v = sdpa.args[:3]
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        if not _is_heads_by_tokens(val(x)):
            raise MaskNotProven(f"{name} of shape {tuple(val(x).shape)} are not [1, heads, tokens, width]")
    if 1 in (val(x).shape[3] for x in (q, k, v)):
        raise MaskNotProven("heads are one channel wide, which looks like a dimension that was added")
    if len({val(x).shape[2].node.expr for x in (q, k, v)}) > 1:
        raise MaskNotProven("queries and keys are not of the same tokens")
    q, k, v = (stripped(Operand(x, list(LABELS)), fold_factors=False) for x in (q, k, v))
    once = [unrepeated(x, "heads", fold_factors=False) for x in (k, v)]
    if once[0].size("heads") == once[1].size("heads"):
        k, v = once
    if k.size("heads") != v.size("heads") or q.size("heads") % k.size("heads"):
        raise MaskNotProven("queries, keys and values do not have matching numbers of heads")
    scale = arg(sdpa, 6, "scale")
    scale = float(scale) if scale is not None else q.size("width") ** -0.5
    flat = [flat_heads(gm, sdpa, x, "tokens", ["heads"], "width") for x in (q, k, v)]
    flat = in_one_dtype(gm, sdpa, flat)
    options = {"scale": scale, "window": facts.window, "chunk": facts.chunk}
    options = {name: value for name, value in options.items() if value is not None}
    options |= {} if facts.causal else {"causal": False}
    constant = None if bias is None else constants.node_of(bias, val(q.node).device)
    if isinstance(bias, DistanceBias):
        options["num_behind"] = bias.num_behind
        target, optional = torch.ops.pagebinder.relative_attention.default, [constant]
    else:
        target, optional = torch.ops.pagebinder.attention.default, [] if bias is None else [None, constant]
    op = insert_call(gm.graph, sdpa, target, (*flat, *optional), options)
    out = from_flat_heads(gm, sdpa, op, {"batch": 1, "heads": q.size("heads")}, list(LABELS))
    if val(out).dtype is not val(sdpa).dtype:
        out = insert_call(gm.graph, sdpa, aten.to.dtype, (out, val(sdpa).dtype))
    sdpa.replace_all_uses_with(out)
    gm.graph.erase_node(sdpa)  # it may use dropout, so dead-code elimination takes it for impure
    kind = "a bias by distance" if isinstance(bias, DistanceBias) else "ALiBi"
    detail = facts.describe() + ("" if bias is None else f", {kind}")
    return Match(pattern=PATTERN, detail=detail, **describe(op))


def _is_within_tokens(sdpa: Node) -> bool:
    """Are the tokens a dimension before queries and keys, which are then of one token, all of them seen?"""
    dims = [token_dims(x) for x in sdpa.args[:3]]
    before = dims[0] and dims[0] == dims[1] == dims[2] and max(dims[0]) < val(sdpa.args[0]).dim() - 2
    masked = arg(sdpa, 3, "attn_mask") is not None or arg(sdpa, 5, "is_causal", False)
    dropped, grouped = arg(sdpa, 4, "dropout_p", 0.0), arg(sdpa, 7, "enable_gqa", False)
    return bool(before and len({val(x).dim() for x in sdpa.args[:3]}) == 1) and not (
        masked or dropped or grouped
    )


def _rewrite_within_tokens(gm: GraphModule, sdpa: Node) -> Match:
    q, k, v = sdpa.args[:3]
    scale = arg(sdpa, 6, "scale")
    scale = val(q).shape[-1] ** -0.5 if scale is None else float(scale)
    across = insert_call(gm.graph, sdpa, aten.transpose.int, (k, -2, -1))
    scores = insert_call(gm.graph, sdpa, aten.matmul.default, (q, across))
    scores = insert_call(gm.graph, sdpa, aten.mul.Tensor, (scores, scale))
    weights = insert_call(gm.graph, sdpa, aten.softmax.int, (scores, -1))
    out = insert_call(gm.graph, sdpa, aten.matmul.default, (weights, v))
    sdpa.replace_all_uses_with(out)
    gm.graph.erase_node(sdpa)
    return Match(pattern=PATTERN, detail="within each token", **describe(out))


def _is_heads_by_tokens(x: torch.Tensor) -> bool:
    """[1, H, T, D], T the only symbolic size: over anything else, "attention" would not be over tokens."""
    symbolic = [isinstance(size, torch.SymInt) for size in x.shape]
    return symbolic == [False, False, True, False] and x.shape[0] == 1
