"""The token-mixing audit: outside our ops, no token of a semantic graph may learn of another.

Paging, batching and chunking are only right if every value that belongs to token t is a function of token t, its
position, and what the stateful ops return. So the audit follows the token dimension (the symbolic one) through
the graph and accepts only ops that are known to keep it apart. An op that nobody has classified is a violation
too: what is not proven is not assumed.

The decoder of an encoder-decoder has two such dimensions: its own tokens, and those of the encoder's states. Only
cross attention may relate them, and neither may be mixed within itself. An encoder is audited with
`bidirectional=True`: its attention sees all tokens of the prompt, which it is always given whole.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.recurrent.define import RECURRENCES
from pagebinder.frontend.audit_experts import ROUTING, reason_against_routing
from pagebinder.frontend.audit_latent import LATENT, reason_against_latent
from pagebinder.frontend.audit_lookups import (
    TABLE_LOOKUPS,
    reason_against_lookup,
    reason_against_write,
)
from pagebinder.frontend.token_dims import (
    misaligned,
    num_rows,
    sequences_of,
    size_before_tokens,
    symbolic_dims,
    tensor_inputs,
    tensors,
    token_dims,
)
from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    TORCHS,
    arg,
    aten,
    einsum_labels,
    module_path,
    source_line,
)
from pagebinder.report import Refusal

# Ops that only rename, broadcast or move dimensions; a token dimension that is cut, shifted or merged shows in
# the output's shape or in `_ALONG_DIM`.
_VIEWS = {
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int,
    aten.permute.default, aten.t.default, aten.mT.default, aten.swapaxes.default, aten.movedim.int,
    aten.movedim.intlist, aten.view_as_complex.default, aten.view_as_real.default, aten._conj.default,
    aten.resolve_conj.default, *CASTS, *IDENTITIES,
}  # fmt: skip
# Ops that read the elements in storage order and cut them anew: [T, C] -> [C, T] has a token dimension of the
# right size with the wrong values in it.
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.view_as.default, aten.reshape_as.default,
}  # fmt: skip
# Ops that copy a value along a dimension: the only way, besides a constant, to get a token dimension from nothing.
_REPEATS = {aten.expand.default, aten.expand_as.default, aten.repeat.default}

# Ops that look along one dimension: allowed unless it is the token dimension. op -> position of its dim argument.
_ALONG_DIM = {
    aten.softmax.int: 1, aten._softmax.default: 1, aten.log_softmax.int: 1, aten._log_softmax.default: 1,
    aten.mean.dim: 1, aten.sum.dim_IntList: 1, aten.amax.default: 1, aten.amin.default: 1, aten.var.correction: 1,
    aten.var.dim: 1, aten.logsumexp.default: 1, aten.std.correction: 1, aten.std.dim: 1, aten.std_mean.correction: 1,
    aten.var_mean.correction: 1, aten.var_mean.dim: 1, aten.std_mean.dim: 1,
    aten.prod.dim_int: 1, aten.any.dim: 1, aten.all.dim: 1, aten.argmin.default: 1,
    aten.norm.ScalarOpt_dim: 2, aten.cumprod.default: 1, aten.logcumsumexp.default: 1,
    aten.max.dim: 1, aten.min.dim: 1, aten.argmax.default: 1, aten.topk.default: 2, aten.sort.default: 1,
    aten.cumsum.default: 1, aten.cat.default: 1, aten.concat.default: 1, aten.concatenate.default: 1,
    aten.slice.Tensor: 1, aten.select.int: 1,
    aten.narrow.default: 1, aten.chunk.default: 2, aten.split.Tensor: 2, aten.split_with_sizes.default: 2,
    aten.unbind.int: 1, aten.flip.default: 1,
    aten.roll.default: 2, aten.linalg_vector_norm.default: 2, aten.repeat_interleave.self_int: 2,
    aten.glu.default: 1, aten.slice_scatter.default: 2, aten.select_scatter.default: 2,
}  # fmt: skip
_DEFAULT_DIM = {aten.chunk.default: 0, aten.split.Tensor: 0, aten.cat.default: 0, aten.sort.default: -1,
                aten.concat.default: 0, aten.concatenate.default: 0,
                aten.topk.default: -1, aten.slice.Tensor: 0, aten.glu.default: -1,
                aten.unbind.int: 0, aten.split_with_sizes.default: 0}  # fmt: skip

# Element by element, without the tag that says so.
_ELEMENTWISE = {
    aten.polar.default, aten.complex.default, aten.copy.default, aten.where.ScalarOther, aten.where.ScalarSelf,
    aten.where.Scalar, aten.__or__.Tensor, aten.__and__.Tensor, aten.__xor__.Tensor, aten.multiply.Tensor,
    aten.multiply.Scalar, aten.divide.Tensor, aten.divide.Scalar, aten.true_divide.Tensor, aten.subtract.Tensor,
    aten.negative.default, aten.absolute.default, aten.square.default, aten.isin.Tensor_Scalar,
    aten.floor_divide.default, aten.floor_divide.Scalar, aten.log_sigmoid.default, aten.hardswish.default,
    aten.prelu.default, aten.fill.Tensor, aten.fill.Scalar, aten.zero.default, aten.masked_fill.Tensor,
}  # fmt: skip
# op -> position of the first of the two factors
_CONTRACTIONS = {
    aten.matmul.default: 0, aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}  # fmt: skip
_LAST_DIMS = {aten.linear.default, aten.layer_norm.default, aten.rms_norm.default}
# op -> (positions of the operands of tokens, positions of weights)
_RECURRENCES = {
    torch.ops.pagebinder.short_conv.default: ((0,), (1, 2)),
    torch.ops.pagebinder.gated_delta_rule.default: ((0, 1, 2, 3, 4), ()),
    torch.ops.pagebinder.ssd.default: ((0, 1, 3, 4), (2, 5, 6)),
    **{op: (range(len(r.tokens)), range(len(r.tokens), r.num_operands)) for op, r in RECURRENCES.items()},
}
_FACTORIES = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.zeros.default,
    aten.ones.default, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.scalar_tensor.default, aten.empty.memory_format, aten.new_zeros.default, aten.new_ones.default,
    aten.lift_fresh_copy.default, aten.new_empty.default, aten.empty_like.default,
}  # fmt: skip
# op -> position of the value it fills its result with
_FILLS = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0}
# Ours that treat every token alone.
_STATELESS = (
    torch.ops.pagebinder.rms_norm.default,
    torch.ops.pagebinder.rope.default,
    torch.ops.pagebinder.gated_activation.default,
    torch.ops.pagebinder.quantized_linear.default,
)
_TAKE_SIZES = _RESHAPES | _REPEATS | _FACTORIES | _LAST_DIMS | {aten.slice.Tensor}


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A node that relates tokens, or that is not known not to."""

    node: str
    op: str
    reason: str
    module_path: str
    source_line: str

    def as_refusal(self) -> Refusal:
        return Refusal(
            pattern="audit",
            reason=self.reason,
            node=self.node,
            module_path=self.module_path,
            source_line=self.source_line,
        )

    def __str__(self) -> str:
        where = ", ".join(x for x in (self.module_path, self.source_line) if x)
        return f"{self.op} ({self.node}; {where}): {self.reason}"


def audit(
    gm: GraphModule, *, bidirectional: bool = False, tokenwise: frozenset[torch._ops.OpOverload] = frozenset()
) -> list[Violation]:
    """All violations of a semantic graph in execution order; an empty list is the proof.

    Args:
        tokenwise: ops of others that are taken to compute every token from itself alone.
    """
    symbols = _token_symbols(gm)
    found = []
    for node in gm.graph.nodes:
        reason = (
            _reason_against(node, symbols, bidirectional, tokenwise) if node.op == "call_function" else None
        )
        if reason:
            found.append(
                Violation(
                    node=node.name,
                    op=str(node.target).removesuffix(".default"),
                    reason=reason,
                    module_path=module_path(node),
                    source_line=source_line(node),
                )
            )
    return found


def reason_to_mix(node: Node, tokens) -> str | None:
    """Why one call may relate tokens, None if it does not; `tokens`: the symbol of their number."""
    return _reason_against(node, [tokens], False, frozenset())


def _token_symbols(gm: GraphModule) -> list:
    """The number of tokens, then, if the graph has it, the number of encoder tokens."""
    inputs = {n.target: n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"}
    assert "input_ids" in inputs, "a captured graph has an input_ids placeholder"
    names = ("input_ids", "encoder_states")
    return [inputs[name].shape[0].node.expr for name in names if name in inputs]


def _reason_against(node: Node, symbols: list, bidirectional: bool, tokenwise: frozenset) -> str | None:
    """Why this node may relate tokens, or None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return (
            None if target is operator.getitem or not tensor_inputs(node) else f"{target} is not a known op"
        )
    if target in (aten.sym_size.int, aten.sym_numel.default):
        return None
    if target is aten.embedding_renorm.default:  # as it was made functional
        return "it writes to its weight for the tokens that it looks up (max_norm); scale the weight before compiling"
    if target._schema.is_mutable:
        return "it writes to a tensor in place"
    if torch.Tag.nondeterministic_seeded in target.tags and not _is_unused_dropout(node):
        return "it draws numbers at random"
    inputs = tensor_inputs(node)
    input_dims = [token_dims(i) for i in inputs]
    if target is torch.ops.pagebinder.cross_attention.default:
        return _reason_against_cross(node, symbols)
    sequences = sequences_of(inputs, symbols)
    if len(sequences) > 1:
        return "it combines tokens of two sequences, the decoder's and the encoder's for example"
    if target is torch.ops.pagebinder.dequantize_weight.default:
        return "codes of a weight depend on tokens" if any(input_dims) else None
    if target.namespace == "pagebinder":
        if target not in _STATELESS and sequences - {symbols[0]}:
            return "it attends among, or keeps state of, other tokens than the decoder's"
        if target not in _STATELESS and target not in ROUTING and num_rows(inputs) - {symbols[0]}:
            return "it takes rows for tokens of which a token has several"
        return _reason_against_ours(node, inputs, input_dims, bidirectional)
    possible = [s for s in symbols if s in sequences] or symbols
    for out in tensors(node.meta.get("val")):
        dims = symbolic_dims(out)
        if len(dims) > 1:
            return "its result has two token dimensions: every token against every token"
        if not any(_is_of_tokens(node, out, symbol) for symbol in possible):
            return "it merges, cuts or extends the token dimension"
        if not dims and any(input_dims):
            return "it reduces over the tokens"
    if computes_with_sizes(node):
        return "it computes with the number of tokens in the batch"
    if not any(input_dims):
        if (
            not token_dims(node)
            or target in _REPEATS
            or (target in _FACTORIES and "arange" not in str(target))
        ):
            return None
        return "it counts the tokens of the batch: row i is not tied to position i"
    return None if target in tokenwise else _reason_by_class(node, inputs, input_dims)


def _reason_against_einsum(node: Node) -> str | None:
    """Sound if tokens have one letter, which is in the result."""
    labels = einsum_labels(node)
    if labels is None:
        return "an einsum whose result is not written out is not known to keep tokens apart"
    inputs, result = labels
    letters = {of_one[d] for of_one, n in zip(inputs, node.args[1]) for d in token_dims(n)}
    if len(letters) != 1:
        return "this einsum is not known to keep tokens apart"
    return None if letters <= set(result) else "it sums over the tokens"


def _is_unused_dropout(node: Node) -> bool:
    """Does the node drop nothing: outside of training, or attention without dropout?"""
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name in ("train", "training", "dropout_p"):
            return not arg(node, i, argument.name, argument.default_value)
    return False


def _reason_against_cross(node: Node, symbols: list) -> str | None:
    """Queries of the decoder, keys and values of its encoder, each [tokens, heads, width]."""
    if [token_dims(n) for n in node.args[:3]] != [[0]] * 3:
        return "cross attention takes [tokens, heads, width]"
    of_queries, *of_keys = (n.meta["val"].shape[0].node.expr for n in node.args[:3])
    if len(symbols) < 2 or of_queries != symbols[0] or set(of_keys) != {symbols[1]}:
        return "its keys are not those of the encoder's tokens, or its queries not the decoder's"
    return None


def _reason_against_ours(
    node: Node, inputs: list[Node], input_dims: list[list[int]], bidirectional: bool
) -> str | None:
    """Our ops are sound only on operands laid out as they expect."""
    target = node.target
    if target in (torch.ops.pagebinder.attention.default, torch.ops.pagebinder.relative_attention.default):
        by_token = target is torch.ops.pagebinder.relative_attention.default  # its bias and sinks may be
        extra = [token_dims(n) for n in node.args[3:] if isinstance(n, Node)]
        extra = [dims for dims in extra if not (by_token and dims == [0])]
        if [token_dims(n) for n in node.args[:3]] != [[0]] * 3 or any(extra):
            return "attention takes [tokens, heads, width], and sinks, slopes and biases of heads"
        if not node.kwargs.get("causal", True) and not bidirectional:
            return "it attends to later tokens (not causal), which a decoder with a cache cannot do"
        return None
    if target is torch.ops.pagebinder.lookahead_attention.default:
        dims = [token_dims(n) for n in node.args if isinstance(n, Node)]
        if dims[:4] != [[0]] * 4 or any(dims[4:]):
            return "attention takes [tokens, heads, width], a lookahead of tokens, and sinks of heads"
        return None
    if target in _RECURRENCES:
        per_token, weights = _RECURRENCES[target]
        if any(token_dims(node.args[i]) != [0] for i in per_token):
            return "a recurrence takes [tokens, ...] of every operand"
        others = [node.args[i] for i in weights if isinstance(node.args[i], Node)]
        return "a recurrence's weights depend on tokens" if any(map(token_dims, others)) else None
    if target in ROUTING:
        return reason_against_routing(node)
    if target in LATENT:
        return reason_against_latent(node)
    if target in _STATELESS:
        if inputs[0].meta["val"].dim() - 1 in input_dims[0]:
            return "it works along the token dimension"
        return misaligned(inputs, input_dims)
    return "this op is not known to keep tokens apart"


def _reason_by_class(node: Node, inputs: list[Node], input_dims: list[list[int]]) -> str | None:
    target = node.target
    if target in ROUTING:
        return reason_against_routing(node)
    if torch.Tag.pointwise in target.tags or target in _ELEMENTWISE:
        return misaligned(inputs, input_dims)
    if target in _VIEWS or target in _REPEATS or target in _FACTORIES or _is_whole(node):
        return None
    if target is aten.dropout.default:  # unused, or it had been refused
        return None
    if target is aten.stack.default:
        return misaligned(inputs, input_dims)
    if target in (aten.pad.default, aten.constant_pad_nd.default):
        rank, padded = inputs[0].meta["val"].dim(), len(node.args[1]) // 2
        return "it pads along the token dimension" if input_dims[0][-1] >= rank - padded else None
    if target is aten.einsum.default:
        return _reason_against_einsum(node)
    if target in _RESHAPES:
        before, after = (size_before_tokens(value) for value in (inputs[0].meta["val"], node.meta["val"]))
        return (
            None if before == after else "it cuts the values of all tokens anew, so that tokens swap places"
        )
    if target in _ALONG_DIM:
        rank = max(i.meta["val"].dim() for i in inputs)
        dims = arg(node, _ALONG_DIM[target], "dim", _DEFAULT_DIM.get(target))
        if dims is None or dims == []:
            return "it works along all dimensions"
        dims = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
        if target is aten.select_scatter.default:  # what is put in lacks the dimension
            (dim,), (whole, *part) = dims, input_dims
            input_dims = [whole, *([d + (d >= dim) for d in places] for places in part)]
        if dims & {d for ds in input_dims for d in ds}:
            return "it works along the token dimension"
        return None
    if target in _CONTRACTIONS:
        first = _CONTRACTIONS[target]
        a, b = node.args[first], node.args[first + 1]
        if first and token_dims(node.args[0]):
            return "it adds values of tokens to a product"
        contracted = a.meta["val"].dim() - 1 in token_dims(a) or max(
            b.meta["val"].dim() - 2, 0
        ) in token_dims(b)
        return "it sums over the tokens" if contracted else None
    if target in _LAST_DIMS:
        rank = node.args[0].meta["val"].dim()
        num_dims = 1 if target is aten.linear.default else len(node.args[1])
        return (
            "it works along the token dimension"
            if max(input_dims[0], default=-1) >= rank - num_dims
            else None
        )
    if target is aten.batch_norm.default:
        return "it computes means over the tokens" if node.args[5] else misaligned(inputs[:1], input_dims[:1])
    if target is aten.group_norm.default:
        return None if token_dims(node.args[0]) == [0] else "it computes means over the tokens"
    if target is aten.conv1d.default:
        return _reason_against_convolution(node)
    if target in TABLE_LOOKUPS:
        return reason_against_lookup(node)
    if target is aten.index_put.default:
        return reason_against_write(node)
    unknown = "this op is not known to keep tokens apart"
    if target is aten._transformer_encoder_layer_fwd.default:
        return (
            "torch's fast path computes a whole layer here; give nn.TransformerEncoder is_causal=True beside its "
            "mask, or call its layers one by one with the mask"
        )
    if target.namespace in TORCHS:
        return unknown
    name = target._schema.name
    return f'{unknown}; if it does, say so: CompileConfig(tokenwise_ops=["{name}"])'


def _reason_against_convolution(node: Node) -> str | None:
    """One with a single tap, over [.., C, tokens], is a product with the channels of each token."""
    of_tokens = token_dims(node.args[0]) == [node.args[0].meta["val"].dim() - 1]
    weights = [n for n in node.args[1:3] if isinstance(n, Node)]
    one_tap = node.args[1].meta["val"].shape[-1] == 1 and not any(map(token_dims, weights))
    plain = arg(node, 3, "stride", [1]) in (1, [1]) and arg(node, 4, "padding", [0]) in (0, [0])
    return None if of_tokens and one_tap and plain else "this op is not known to keep tokens apart"


def computes_with_sizes(node: Node) -> bool:
    """Does a number of tokens enter as a value, and not as the size of a result?"""
    if node.target not in _TAKE_SIZES:
        return any(_is_symbolic(n) for n in node.all_input_nodes)
    return node.target in _FILLS and _is_symbolic(node.args[_FILLS[node.target]])


def _is_symbolic(value) -> bool:
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(value, Node) and isinstance(value.meta.get("val"), kinds)


def _is_whole(node: Node) -> bool:
    """x[:] along the token dimension."""
    return node.target is aten.slice.Tensor and all(
        a.node.expr == b.node.expr if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) else a == b
        for a, b in zip(node.meta["val"].shape, node.args[0].meta["val"].shape)
    )


def _is_of_tokens(node: Node, out: torch.Tensor, symbol) -> bool:
    """Has `out` one row, or some rows in order, for each of the `symbol` tokens, if it has tokens at all?"""
    same = all(out.shape[d].node.expr == symbol for d in symbolic_dims(out))
    return same or _keeps_rows_apart(node, out, symbol)


def _keeps_rows_apart(node: Node, out: torch.Tensor, symbol) -> bool:
    """Is `out` [.., k * tokens, ..] with k rows of each token, in order: row r belongs to token r // k?

    A reshape makes such rows of [tokens, k, ...] (heads become rows, for a norm of each); other ops only pass
    them on. Where nothing before the tokens is merged is checked with all reshapes.
    """
    dims = symbolic_dims(out)
    rows = {out.shape[d].node.expr for d in dims}
    if len(dims) != 1 or not all((row / symbol).is_Integer for row in rows):
        return False
    if node.target in _RESHAPES:
        return True
    sizes = [t.shape[d].node.expr for i in tensor_inputs(node) for t in tensors(i.meta["val"])
             for d in symbolic_dims(t)]  # fmt: skip
    return bool(sizes) and set(sizes) == rows
