"""What an op of a graph costs one request's step: arithmetic and bytes, as formulas.

    T   tokens that the step computes            S   tokens that are in the cache already (T + S: context after it)
    E   the request's encoder tokens             N   rows of encoder states that this step writes

    flops         a multiply-add is two. Attention and recurrences count their products, not the softmax.
    weight bytes  read once a step, whoever shares it        cache bytes   read and written in the KV cache
    activation bytes   operands read and results written once, as if nothing were fused

Bytes are what must move at least; a real kernel moves more. Views cost nothing. An op that no rule knows gets its
bytes, and `counted` is False: a page can then say whose arithmetic is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.layer_state import ENCODER_TOKENS, TOKENS
from pagebinder.custom_ops.linear.packed_weights import dtype_of_numbers, is_coded, plain_shape
from pagebinder.graph_tools import CASTS, aten, is_view_op, tensors

CONTEXT = sympy.Symbol("S", integer=True, nonnegative=True)
NEW_ENCODER_TOKENS = sympy.Symbol("N", integer=True, positive=True)
ZERO = sympy.Integer(0)
# One request runs: graph inputs whose first size that fixes, and the inputs whose first size is a symbol of ours.
OF_ONE_REQUEST = {"logits_rows": 1, "seq_lens": 1, "query_start_loc": 2, "encoder_lens": 1, "table_rows": 1}
SIZES_OF_INPUTS = {"input_ids": TOKENS, "encoder_states": NEW_ENCODER_TOKENS}

PRODUCTS = (aten.mm.default, aten.bmm.default, aten.matmul.default)
COPIES = (
    aten.cat.default, aten.stack.default, aten.index_select.default, aten.index.Tensor, aten.gather.default,
    aten.clone.default, aten.contiguous.default, aten.constant_pad_nd.default, aten.repeat.default,
)  # fmt: skip
REDUCTIONS = (
    aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.max.dim, aten.softmax.int,
    aten._softmax.default, aten.log_softmax.int, aten.linalg_vector_norm.default, aten.cumsum.default,
    aten.layer_norm.default,
)  # fmt: skip
FILLS = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.zeros.default,
    aten.ones.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
)  # fmt: skip
NOT_IN_INFERENCE = (aten.dropout.default,)
COMPARISONS = (aten.topk.default, aten.sort.default, aten.argmax.default, aten.eq.Scalar)


@dataclass(frozen=True, kw_only=True)
class OpCost:
    """Costs of one call, as sympy expressions of T, S, E and N."""

    flops: sympy.Expr = ZERO
    weight_bytes: sympy.Expr = ZERO
    activation_bytes: sympy.Expr = ZERO
    cache_bytes: sympy.Expr = ZERO
    counted: bool = True

    @property
    def bytes(self) -> sympy.Expr:
        return self.weight_bytes + self.activation_bytes + self.cache_bytes

    @property
    def is_free(self) -> bool:
        return self.counted and self.flops == 0 and self.bytes == 0


class CostModel:
    """Reads sizes and costs off the nodes of one graph. `rules`: op name -> cost of an op of ours. `decoded`: coded
    weights count as what they stand for."""

    def __init__(
        self,
        gm: GraphModule,
        rules: Mapping[str, Callable[[CostModel, Node], OpCost]],
        decoded: bool = False,
    ) -> None:
        self.rules = rules
        self.decoded = decoded
        self.symbols: dict[sympy.Symbol, sympy.Expr] = {}
        self.constants: set[Node] = set()
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self._name_size(node)
            elif node.op == "get_attr" or (
                node.all_input_nodes and self.constants.issuperset(node.all_input_nodes)
            ):
                self.constants.add(node)

    def _name_size(self, node: Node) -> None:
        value = node.meta.get("val")
        names = {**SIZES_OF_INPUTS, **OF_ONE_REQUEST}
        if (
            isinstance(value, torch.Tensor)
            and node.target in names
            and isinstance(value.shape[0], torch.SymInt)
        ):
            self.symbols.setdefault(value.shape[0].node.expr, sympy.sympify(names[node.target]))

    def cost(self, node: Node) -> OpCost:
        """The cost of a call node."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not tensors(node):
            name = _our_name(target)
            return self.rules[name](self, node) if name in self.rules else OpCost()
        if target.namespace.startswith("pagebinder"):
            rule = self.rules.get(_our_name(target))
            return self.unknown(node) if rule is None else rule(self, node)
        if target is aten.linear.default or target in PRODUCTS:
            return self.product(node)
        if target is aten.addmm.default:
            return self.product(node, left=1)
        if target is aten.embedding.default:
            ids = self.bytes_of(node.args[1])
            return OpCost(activation_bytes=ids + self.out_bytes(node), weight_bytes=self.out_bytes(node))
        if target in CASTS:
            same = tensors(node)[0].dtype == tensors(node.args[0])[0].dtype
            return OpCost() if same else self.moved(node)
        if target in COPIES:
            return OpCost(activation_bytes=2 * self.out_bytes(node))
        if target in FILLS:
            return OpCost(activation_bytes=self.out_bytes(node))
        if target in REDUCTIONS:
            return self.moved(node, flops=self.numel(node.args[0]))
        if torch.Tag.pointwise in target.tags:
            return self.moved(node, flops=self.numel(node))
        if target in COMPARISONS:
            return self.moved(node)
        return OpCost() if is_view_op(target) or target in NOT_IN_INFERENCE else self.unknown(node)

    def product(self, node: Node, left: int = 0) -> OpCost:
        """2 M K N, and M N for a bias."""
        inner = self.shape(node.args[left])[-1]
        bias = self.numel(node) if left or (len(node.args) > 2 and node.args[2] is not None) else ZERO
        return self.moved(node, flops=2 * inner * self.numel(node) + bias)

    def moved(self, node: Node, *, flops=ZERO, counted: bool = True) -> OpCost:
        """All operands read, split into weights and activations, and all results written."""
        weights, others = ZERO, self.out_bytes(node)
        for operand in node.all_input_nodes:
            size = self.bytes_of(operand)
            if operand in self.constants:
                weights += size
            else:
                others += size
        return OpCost(flops=flops, weight_bytes=weights, activation_bytes=others, counted=counted)

    def unknown(self, node: Node) -> OpCost:
        return self.moved(node, counted=False)

    def shape(self, value: Any) -> tuple[sympy.Expr, ...]:
        """The sizes of a node's (first) tensor in T, S, E, N."""
        return self._dims(tensors(value)[0])

    def _dims(self, tensor: torch.Tensor) -> tuple[sympy.Expr, ...]:
        return tuple(
            d.node.expr.xreplace(self.symbols) if isinstance(d, torch.SymInt) else sympy.Integer(d)
            for d in tensor.shape
        )

    def numel(self, value: Any) -> sympy.Expr:
        return math.prod(self.shape(value), start=sympy.Integer(1))

    def bytes_of(self, value: Any) -> sympy.Expr:
        return sum((self._bytes_of_tensor(t) for t in tensors(value)), ZERO)

    def _bytes_of_tensor(self, tensor: torch.Tensor) -> sympy.Expr:
        if self.decoded and is_coded(tensor):
            return sympy.Integer(math.prod(plain_shape(tensor)) * dtype_of_numbers(tensor).itemsize)
        return math.prod(self._dims(tensor), start=tensor.dtype.itemsize)

    out_bytes = bytes_of


def _our_name(target: Any) -> str:
    return target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else ""


def scenario(tokens: int, context: int, encoder: int = 0, new_encoder: int = 1) -> dict[sympy.Symbol, int]:
    """Values of the symbols: a step of `tokens` tokens after `context` tokens."""
    return {TOKENS: tokens, CONTEXT: context, ENCODER_TOKENS: encoder, NEW_ENCODER_TOKENS: new_encoder}
