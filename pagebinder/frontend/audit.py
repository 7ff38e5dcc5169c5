"""The token-mixing audit: outside our ops, no token of a semantic graph may learn of another.

Paging, batching and chunking are only right if every value that belongs to token t is a function of token t, its
position, and what the stateful ops return. So the audit follows the token dimension (the symbolic one) through
the graph and accepts only ops that are known to keep it apart. An op that nobody has classified is a violation
too: what is not proven is not assumed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, module_path, source_line

# Ops that only rename, broadcast or move dimensions; a token dimension that is cut, shifted or merged shows in
# the output's shape or in `_ALONG_DIM`.
_VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int, aten.permute.default,
    aten.t.default, aten.flatten.using_ints, aten.unflatten.int, aten.expand_as.default, aten.view_as.default,
    aten.type_as.default, *CASTS, *IDENTITIES,
}  # fmt: skip

# Ops that look along one dimension: allowed unless it is the token dimension. op -> position of its dim argument.
_ALONG_DIM = {
    aten.softmax.int: 1, aten._softmax.default: 1, aten.log_softmax.int: 1, aten._log_softmax.default: 1,
    aten.mean.dim: 1, aten.sum.dim_IntList: 1, aten.amax.default: 1, aten.amin.default: 1, aten.var.correction: 1,
    aten.max.dim: 1, aten.min.dim: 1, aten.argmax.default: 1, aten.topk.default: 2, aten.sort.default: 1,
    aten.cumsum.default: 1, aten.cat.default: 1, aten.stack.default: 1, aten.slice.Tensor: 1, aten.select.int: 1,
    aten.narrow.default: 1, aten.chunk.default: 2, aten.split.Tensor: 2, aten.split_with_sizes.default: 2,
    aten.unbind.int: 1, aten.index_select.default: 1, aten.gather.default: 1, aten.flip.default: 1,
    aten.roll.default: 2, aten.linalg_vector_norm.default: 2, aten.repeat_interleave.self_int: 2,
    aten.glu.default: 1,
}  # fmt: skip
_DEFAULT_DIM = {aten.chunk.default: 0, aten.split.Tensor: 0, aten.cat.default: 0, aten.stack.default: 0,
                aten.sort.default: -1, aten.topk.default: -1, aten.slice.Tensor: 0, aten.glu.default: -1,
                aten.unbind.int: 0, aten.split_with_sizes.default: 0}  # fmt: skip

_CONTRACTIONS = {aten.matmul.default, aten.mm.default, aten.bmm.default}
_LAST_DIM = {aten.linear.default, aten.layer_norm.default, aten.rms_norm.default, aten.dropout.default}
_TABLE_LOOKUPS = {aten.embedding.default}
_FACTORIES = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.zeros.default,
    aten.ones.default, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.scalar_tensor.default, aten.empty.memory_format, aten.new_zeros.default, aten.new_ones.default,
    aten.lift_fresh_copy.default,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A node that relates tokens, or that is not known not to."""

    node: str
    op: str
    reason: str
    module_path: str
    source_line: str

    def __str__(self) -> str:
        where = ", ".join(x for x in (self.module_path, self.source_line) if x)
        return f"{self.op} ({self.node}; {where}): {self.reason}"


def audit(gm: GraphModule) -> list[Violation]:
    """All violations of a semantic graph in execution order; an empty list is the proof."""
    symbol = _token_symbol(gm)
    found = []
    for node in gm.graph.nodes:
        reason = _reason_against(node, symbol) if node.op == "call_function" else None
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


def _token_symbol(gm: GraphModule):
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.target == "input_ids":
            return node.meta["val"].shape[0].node.expr
    raise AssertionError("a captured graph has an input_ids placeholder")


def _reason_against(node: Node, symbol) -> str | None:
    """Why this node may relate tokens, or None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None if target is operator.getitem or not _tensor_inputs(node) else f"{target} is not a known op"
    if target.namespace.startswith("pagebinder") or target in (aten.sym_size.int, aten.sym_numel.default):
        return None
    if target._schema.is_mutable:
        return "writes to a tensor in place"
    inputs = _tensor_inputs(node)
    input_dims = [_token_dims(i) for i in inputs]
    for out in _tensors(node.meta.get("val")):
        dims = _symbolic_dims(out)
        if len(dims) > 1:
            return "its result has two token dimensions: every token against every token"
        if any(out.shape[d].node.expr != symbol for d in dims):
            return "it merges, cuts or extends the token dimension"
        if not dims and any(input_dims):
            return "it reduces over the tokens"
    if target in _FACTORIES:
        dims = [d for out in _tensors(node.meta.get("val")) for d in _symbolic_dims(out)]
        return "it counts the tokens of the batch" if dims and "arange" in str(target) else None
    if not any(input_dims):
        return None
    return _reason_by_class(node, inputs, input_dims)


def _reason_by_class(node: Node, inputs: list[Node], input_dims: list[list[int]]) -> str | None:
    target = node.target
    if torch.Tag.pointwise in target.tags:
        if any(isinstance(a, Node) and isinstance(a.meta.get("val"), torch.SymInt) for a in node.all_input_nodes):
            return "it computes with the number of tokens in the batch"
        return _misaligned(inputs, input_dims)
    if target in _VIEWS:
        return None
    if target in _ALONG_DIM:
        rank = max(i.meta["val"].dim() for i in inputs)
        dims = arg(node, _ALONG_DIM[target], "dim", _DEFAULT_DIM.get(target))
        if dims is None:
            return "it reduces over all dimensions"
        dims = [dims] if isinstance(dims, int) else dims
        if {d % rank for d in dims} & {d for ds in input_dims for d in ds}:
            return "it works along the token dimension"
        return None
    if target in _CONTRACTIONS:
        a, b = node.args[0], node.args[1]
        contracted = a.meta["val"].dim() - 1 in _token_dims(a) or max(b.meta["val"].dim() - 2, 0) in _token_dims(b)
        return "it sums over the tokens" if contracted else None
    if target in _LAST_DIM:
        data = inputs[0].meta["val"]
        return "it works along the token dimension" if data.dim() - 1 in input_dims[0] else None
    if target in _TABLE_LOOKUPS:
        return "it looks up rows of a table that depends on tokens" if input_dims[0] else None
    return "this op is not known to keep tokens apart"


def _misaligned(inputs: list[Node], input_dims: list[list[int]]) -> str | None:
    """Broadcasting must line token dimensions up, counted from the right."""
    from_right = {i.meta["val"].dim() - d for i, dims in zip(inputs, input_dims) for d in dims}
    return "it combines values of different tokens by broadcasting" if len(from_right) > 1 else None


def _tensor_inputs(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if any(True for _ in _tensors(n.meta.get("val")))]


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _tensors(v)


def _symbolic_dims(tensor: torch.Tensor) -> list[int]:
    return [d for d, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)]


def _token_dims(node: Node) -> list[int]:
    return [d for t in _tensors(node.meta.get("val")) for d in _symbolic_dims(t)]
