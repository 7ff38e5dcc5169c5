"""Attention written out, found from its softmax and walked outwards to the scores and to the values.

Matches:
    scores = q @ k^T * scale, soft-capped, masked, biased                    see score_chain.py
    weights = softmax(scores) or softmax(cat(scores, sinks))[..., :-1]       see sinks.py
    (the softmax as one op, or written out: written_softmax.py)
    scores and weights times what a row or a head has one number of          see row_factors.py
    out = weights @ v                                     matmul, bmm, baddbmm or einsum, heads grouped or repeated
Replaces with:
    pagebinder.attention(q [T, H, D], k [T, G, D], v [T, G, Dv], sinks, alibi_slopes, scale, window, chunk, soft_cap)
    pagebinder.relative_attention(q, k, v, bias [H, N], sinks, scale, num_behind, window), for a bias by distance

What the masks leave visible, and that a bias is ALiBi or by distance, is proven by running their subgraphs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.alibi_proof import classify_bias
from pagebinder.frontend.distance_proof import DistanceBias, Slopes, prove_bias
from pagebinder.frontend.mask_proof import MaskFacts, MaskNotProven, MaskTerm, prove_terms, require_served
from pagebinder.frontend.mask_values import by_shape_only, is_size
from pagebinder.frontend.recognise.bias_constants import BiasConstants
from pagebinder.frontend.recognise.operands import (
    DROPS,
    PRODUCTS,
    SCALINGS,
    SOFTMAXES,
    NotAttention,
    Operand,
    Product,
    ProductWithValues,
    flat_heads,
    from_flat_heads,
    in_one_dtype,
    num_heads,
    product_with_values,
    stripped,
    unrepeated,
)
from pagebinder.frontend.recognise.row_factors import RowFactor, is_of_rows, multiplied
from pagebinder.frontend.recognise.rows_before_heads import exchange_rows_and_heads
from pagebinder.frontend.recognise.score_chain import Chain, read_chain
from pagebinder.frontend.recognise.selected_heads import take_heads_first
from pagebinder.frontend.recognise.sinks import Sinks, cuts_column
from pagebinder.frontend.recognise.summed_products import merge_summed_products
from pagebinder.frontend.recognise.summed_weights import distribute_summed_weights
from pagebinder.frontend.recognise.written_softmax import rewrite_written_softmaxes
from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    arg,
    aten,
    calls,
    describe,
    finish,
    insert_call,
    is_call,
    source_line,
    val,
)
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "attention"


def recognise_raw_attention(gm: GraphModule) -> PassResult:
    """Rewrite every softmax over tokens that is an attention; refuse the others."""
    result = PassResult(name="recognise_raw_attention")
    merged = merge_summed_products(gm) | exchange_rows_and_heads(gm)
    written_out, result.refusals = rewrite_written_softmaxes(gm)
    rearranged = take_heads_first(gm) | distribute_summed_weights(gm)
    result.changed = merged or bool(written_out) or rearranged
    anchors = [n for n in calls(gm.graph, *SOFTMAXES) if _is_over_tokens(n)]
    if not anchors:
        return result
    tainted = _of_token_values(gm.graph)
    layer = _Layer(gm, tainted, written_out)
    for softmax in anchors:
        try:
            result.matches.append(layer.rewrite(softmax))
        except (NotAttention, MaskNotProven) as miss:
            where = describe(softmax)
            result.refusals.append(
                Refusal(pattern=PATTERN, reason=str(miss), source_line=source_line(softmax), **where)
            )
    if result.matches:
        result.changed = True
        finish(gm)
    return result


def _is_over_tokens(softmax: Node) -> bool:
    shape = val(softmax).shape
    return isinstance(shape[softmax.args[1] % len(shape)], torch.SymInt)


def _of_token_values(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that depend on the values of input_ids (or of an encoder's states), and not only on their number."""
    tainted: set[Node] = set()
    for node in graph.nodes:
        is_source = node.op == "placeholder" and node.target != "positions"
        if is_source or (not by_shape_only(node) and any(n in tainted for n in node.all_input_nodes)):
            tainted.add(node)
    return tainted


class _Layer:
    """Rewrites the attention around one softmax after the other; masks that layers share are proven once."""

    def __init__(self, gm: GraphModule, tainted: set[Node], written_out: set[Node]):
        self.gm, self.tainted, self.written_out = gm, tainted, written_out
        self._facts: dict[tuple[MaskTerm, ...], MaskFacts | MaskNotProven] = {}
        self._proven: dict[tuple, Slopes | DistanceBias] = {}
        self._constants = BiasConstants(gm)
        self._bias = functools.cache(classify_bias)

    def rewrite(self, softmax: Node) -> Match:
        rank = val(softmax).dim()
        if softmax.args[1] % rank != rank - 1:
            raise NotAttention("the softmax is over another dimension than the last")
        chain = read_chain(softmax, self.tainted)
        weights = _weights_of(softmax, chain.sinks, self.tainted)
        product = next(iter(weights.node.users))
        chain.nodes |= {softmax}
        _require_private(chain, softmax)
        of_scores, of_values = chain.product, product_with_values(product, weights.node)
        q, k, v, leading, sizes = _operands(of_scores, of_values, val(weights.node))
        biases = [self._bias(*bias) for bias in chain.biases]
        facts = self._facts_of((*chain.masks, *(b.mask for b in biases if b.mask is not None)))
        bias = self._bias_of([b for b in biases if b.node is not None], facts, chain, sizes)
        factors = chain.row_factors + chain.learned
        q = (multiplied(self.gm, product, q[0], factors, chain.anchor, of_scores.labels), *q[1:])
        op = self._emit(product, chain, facts, (q, k, v), bias, weights, of_values, leading, sizes)
        for node in reversed(weights.path):  # a dropout in between would be kept by torch
            node.graph.erase_node(node)
        detail = _detail(facts, op) + (", softmax written out" if softmax in self.written_out else "")
        return Match(pattern=PATTERN, detail=detail, **describe(op))

    def _facts_of(self, terms: tuple[MaskTerm, ...]) -> MaskFacts:
        if not terms:
            return MaskFacts(causal=False)
        if terms not in self._facts:
            try:
                self._facts[terms] = prove_terms(terms)
            except MaskNotProven as miss:
                self._facts[terms] = miss
        facts = self._facts[terms]
        if isinstance(facts, MaskNotProven):
            raise facts
        require_served(facts)
        return facts

    def _bias_of(
        self, biases: list, facts: MaskFacts, chain: Chain, sizes: dict
    ) -> Slopes | DistanceBias | None:
        """ALiBi's slopes [H] or a bias by distance, proven; None if there is none."""
        if not biases:
            return None
        if len(biases) > 1:
            raise NotAttention("several biases are added to the scores")
        if biases[0].node in chain.before_learned:
            raise NotAttention("a bias is added to the scores before they are multiplied with a parameter")
        total = functools.reduce(lambda a, b: a * b, sizes.values(), 1)
        near_fill = not all(floor.is_far for floor in chain.floors)
        shifts = chain.sinks is None and not near_fill
        key = (biases[0].node, biases[0].factor, facts, total, shifts, near_fill)
        if key not in self._proven:
            self._proven[key] = prove_bias(biases[0], facts, total, shifts=shifts, near_fill=near_fill)
        if isinstance(self._proven[key], DistanceBias) and chain.soft_cap is not None:
            raise NotAttention("a bias by distance is added to soft-capped scores")
        return self._proven[key]

    def _emit(self, product, chain, facts, qkv, bias, weights, of_values, leading, sizes) -> Node:
        (row, width), (inner, column) = qkv[0][1:], qkv[1][1:]
        gm, graph = self.gm, self.gm.graph
        q, k, v = (x for x, *_ in qkv)
        flat = [
            flat_heads(gm, product, q, row, leading, width),
            flat_heads(gm, product, k, inner, leading, column),
            flat_heads(gm, product, v, qkv[2][1], of_values.weight_leading, qkv[2][2]),
        ]
        flat = in_one_dtype(gm, product, flat)
        sinks = None if chain.sinks is None else chain.sinks.emit(gm, product)
        constant = None if bias is None else self._constants.node_of(bias, val(product).device)
        by_distance = isinstance(bias, DistanceBias)
        optional = [constant, sinks] if by_distance else [sinks, constant]
        while optional and optional[-1] is None:
            optional.pop()
        options = {
            "scale": chain.scale * float(q.factor * k.factor),
            "window": facts.window,
            "chunk": facts.chunk,
            "soft_cap": None if chain.soft_cap is None else float(chain.soft_cap),
            "causal": None if facts.causal else False,
            "num_behind": bias.num_behind if by_distance else None,
        }
        options = {name: value for name, value in options.items() if value is not None}
        ours = torch.ops.pagebinder
        target = ours.relative_attention.default if by_distance else ours.attention.default
        op = insert_call(graph, product, target, (*flat, *optional), options)
        out = from_flat_heads(
            gm, product, op, dict(zip(of_values.weight_leading, sizes.values())), of_values.out_labels
        )
        if val(out).dtype is not val(product).dtype:
            out = insert_call(graph, product, aten.to.dtype, (out, val(product).dtype))
        rows = [*of_values.weight_leading, "tokens", "columns"]
        of_rows = Operand(out, of_values.out_labels)
        out = multiplied(gm, product, of_rows, weights.row_factors, weights.node, rows).node
        product.replace_all_uses_with(out)
        graph.erase_node(product)
        return op


def _detail(facts: MaskFacts, op: Node) -> str:
    parts = [facts.describe()]
    parts += [f"soft_cap={op.kwargs['soft_cap']:g}"] if "soft_cap" in op.kwargs else []
    if op.target is torch.ops.pagebinder.relative_attention.default:
        parts += ["a bias by distance"] + (["sinks"] if arg(op, 4, "sinks") is not None else [])
        return ", ".join(parts)
    parts += ["sinks"] if arg(op, 3, "sinks") is not None else []
    return ", ".join(parts + (["ALiBi"] if arg(op, 4, "alibi_slopes") is not None else []))


def _only_user(node: Node) -> Node:
    if len(node.users) != 1:
        raise NotAttention("the weights of the attention are used in several places")
    return next(iter(node.users))


@dataclass
class _Weights:
    """What multiplies the values, and the nodes on the way to it from the softmax."""

    node: Node
    path: list[Node] = field(default_factory=list)
    row_factors: list[RowFactor] = field(default_factory=list)


def _weights_of(softmax: Node, sinks: Sinks | None, tainted: set[Node]) -> _Weights:
    """The softmax, cast, without the sink column, times factors of rows; a dropout of zero is nothing."""
    weights, waits_for_cut = _Weights(softmax), sinks is not None
    while not is_call(user := _only_user(weights.node), *PRODUCTS):
        if is_call(user, aten.dropout.default):
            if arg(user, 2, "train") and arg(user, 1, "p"):
                raise NotAttention(DROPS)
        elif is_call(user, aten.slice.Tensor):
            if not waits_for_cut or not cuts_column(user, sinks):
                raise NotAttention("the weights of the attention are cut")
            waits_for_cut = False
        elif is_call(user, *SCALINGS) and (factor := _row_factor(user, weights.node, tainted)) is not None:
            weights.row_factors.append(factor)
        elif not val(user).is_floating_point() or not (
            is_call(user, *CASTS, *IDENTITIES) or _keeps_matrices(user)
        ):
            raise NotAttention(f"{user.target} stands between the softmax and the product with the values")
        weights.node = user
        weights.path.append(user)
    if waits_for_cut:
        raise NotAttention("a column was appended to the scores and is not dropped after the softmax")
    return weights


def _row_factor(scaling: Node, weights: Node, tainted: set[Node]) -> RowFactor | None:
    """What a product or quotient does to each row of the weights; None: more than that."""
    divides = is_call(scaling, aten.div.Tensor, aten.div.Scalar)
    x, factor = scaling.args[:2]
    if x is not weights and not divides:
        x, factor = factor, x
    if x is not weights or scaling.kwargs or not is_of_rows(factor, weights, tainted):
        return None
    return RowFactor(factor, divides, weights)


def _keeps_matrices(view: Node) -> bool:
    """A view of the weights that keeps [.., T, T] at the end."""
    if not is_call(
        view, aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default
    ):
        return False
    before, after = val(view.args[0]).shape, val(view).shape
    symbolic = [
        [i - len(s) for i, size in enumerate(s) if isinstance(size, torch.SymInt)] for s in (before, after)
    ]
    sizes = [functools.reduce(lambda a, b: a * b, s[:-2], 1) for s in (before, after)]
    return symbolic == [[-2, -1], [-2, -1]] and sizes[0] == sizes[1]


def _require_private(chain: Chain, softmax: Node) -> None:
    for node in chain.nodes - {softmax}:
        if any(user not in chain.nodes and not is_size(user) for user in node.users):
            raise NotAttention("the scores are used in other places than the softmax")


def _operands(of_scores: Product, of_values: ProductWithValues, weights: torch.Tensor):
    """((q, row, width), (k, column, width), (v, column, width), leading labels, their sizes), operands stripped."""
    *leading, row, column = of_scores.labels
    q, k = of_scores.a, of_scores.b
    if row not in q.labels:
        q, k = k, q
    inner = [label for label in q.labels if label in k.labels and label not in of_scores.labels]
    if (
        row not in q.labels
        or column not in k.labels
        or row in k.labels
        or column in q.labels
        or len(inner) != 1
    ):
        raise NotAttention("the scores are not a product of queries and keys over one dimension")
    scores_sizes = {label: _broadcast(q.size(label), k.size(label)) for label in leading}
    sizes = dict(zip(of_values.weight_leading, weights.shape[:-2]))
    if [s for s in scores_sizes.values() if s != 1] != [s for s in sizes.values() if s != 1]:
        raise NotAttention("the heads are cut differently before and after the softmax")
    if any(not isinstance(s, int) for s in (*scores_sizes.values(), q.size(inner[0]))):
        raise NotAttention("the product is not over heads of a fixed width")
    q, k = (stripped(x, fold_factors=True) for x in (q, k))
    v = stripped(of_values.values, fold_factors=False)
    whole = functools.reduce(lambda a, b: a * b, scores_sizes.values(), 1)
    k, v = _grouped(k, leading, scores_sizes, v, of_values.weight_leading, sizes)
    if num_heads(q, leading, list(scores_sizes.values())) != whole:
        raise NotAttention("the queries have fewer heads than the scores")
    tokens = [x.size(label) for x, label in ((q, row), (k, column), (v, of_values.inner))]
    if any(not isinstance(t, torch.SymInt) for t in tokens) or len({t.node.expr for t in tokens}) > 1:
        raise NotAttention("queries and keys are not of the same tokens")
    return (q, row, inner[0]), (k, column, inner[0]), (v, of_values.inner, of_values.width), leading, sizes


def _grouped(
    k: Operand, k_leading: list[str], k_sizes: dict, v: Operand, v_leading: list[str], v_sizes: dict
):
    """Keys and values before their heads were repeated, if both were in the same way."""
    once = [  # the scores take a factor of the keys; a factor of the values stays with them
        unrepeated(k, _heads_label(k, k_leading), fold_factors=True),
        unrepeated(v, _heads_label(v, v_leading), fold_factors=False),
    ]
    for pair in (once, (k, v)):
        counts = (
            num_heads(pair[0], k_leading, list(k_sizes.values())),
            num_heads(pair[1], v_leading, list(v_sizes.values())),
        )
        if counts[0] is not None and counts[0] == counts[1]:
            return tuple(pair)
    raise NotAttention("keys and values do not have matching heads")


def _heads_label(x: Operand, leading: list[str]) -> str:
    """The dimension of heads: the last leading one that is not of size one."""
    return next((label for label in reversed(leading) if x.size(label) != 1), "")


def _broadcast(a, b):
    return b if isinstance(a, int) and a == 1 else a
