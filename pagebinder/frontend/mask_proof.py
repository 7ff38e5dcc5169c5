"""What an attention mask means, found by running the graph that makes it.

The subgraph behind a mask is evaluated at several lengths, the largest more than twice every number that occurs
in it, and compared element by element with the masks of the known family:

    visible(p, j) = (j <= p if causal) and (p - window < j if window) and (j // chunk == p // chunk if chunk)

A mask that depends on anything but the number of tokens and the positions, or that differs in one element, is
not proven, and the reason says which.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.graph_tools import aten

SMALL_SIZES = (2, 3, 17, 64)
LARGEST_SIZE = 12_288
HIDDEN = 1e4  # an additive mask hides with -1e4 or less: exp of it is 0 beside any visible score

# The value of these ops does not depend on the values of their operand, only on its shape.
_SHAPE_ONLY = {
    aten.ones_like.default, aten.zeros_like.default, aten.full_like.default, aten.empty_like.default,
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default,
}  # fmt: skip
# Their literal is the value of a mask's entry, not a distance.
_FILLS = {
    aten.masked_fill.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, aten.full.default,
    aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default, aten.mul.Tensor, aten.mul.Scalar,
}  # fmt: skip
_DIVISIONS = {
    aten.div.Tensor, aten.div.Tensor_mode, aten.div.Scalar, aten.div.Scalar_mode, aten.floor_divide.default,
    aten.floor_divide.Scalar, aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar,
}  # fmt: skip
_SHIFTS = {aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar}
# Their literals are dimensions, not distances.
_DIMENSION_ARGUMENTS = {
    aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.view.default, aten.reshape.default, aten.select.int,
}  # fmt: skip


class MaskNotProven(Exception):
    """The reason why an attention layer was refused."""


@dataclass(frozen=True, kw_only=True)
class MaskFacts:
    """A proven mask: window and chunk in tokens, None = unlimited."""

    causal: bool
    window: int | None = None
    chunk: int | None = None

    def describe(self) -> str:
        parts = ["causal" if self.causal else "bidirectional"]
        parts += [f"window={self.window}"] if self.window is not None else []
        parts += [f"chunk={self.chunk}"] if self.chunk is not None else []
        return ", ".join(parts)


def prove_mask(mask: Node) -> MaskFacts:
    """Classify the mask that `mask` computes ([.., T, T], bool or additive float).

    Raises:
        MaskNotProven: with the reason.
    """
    subgraph = _ancestors(mask)
    _require_independent_of_token_values(subgraph, mask)
    reach = _longest_reach(subgraph)
    largest = 2 * reach + 3
    if largest > LARGEST_SIZE:
        raise MaskNotProven(
            f"the mask's numbers reach {reach} tokens, too many to evaluate at twice that size"
        )
    sizes = sorted({*SMALL_SIZES, largest})
    seen = {size: _evaluate(subgraph, mask, size) for size in sizes}
    for facts in _candidates(seen[largest]):
        if all(torch.equal(_expected(facts, size), seen[size]) for size in sizes):
            return facts
    raise MaskNotProven(f"the mask is none of causal, window, chunk, full at sizes {sizes}")


def _ancestors(mask: Node) -> list[Node]:
    """The nodes behind a mask, in execution order; not those behind a size, which is a function of T alone."""
    needed, queue = set(), [mask]
    while queue:
        node = queue.pop()
        if node not in needed:
            needed.add(node)
            queue.extend(() if _is_size(node) else node.all_input_nodes)
    return [n for n in mask.graph.nodes if n in needed]


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _require_independent_of_token_values(nodes: list[Node], mask: Node) -> None:
    """The values of input_ids must not reach the mask; their number may."""
    tainted: set[Node] = set()
    for node in nodes:
        is_source = node.op == "placeholder" and node.target == "input_ids"
        passes_on = not _is_size(node) and node.target not in _SHAPE_ONLY
        if is_source or (passes_on and any(n in tainted for n in node.all_input_nodes)):
            tainted.add(node)
    if mask in tainted:
        raise MaskNotProven("the mask depends on the values of the tokens")


def _longest_reach(nodes: list[Node]) -> int:
    """A bound, in tokens, on the distances that the mask can tell apart: from its literals and constants.

    A position divided by c makes every later number count c times: (p // 16 - j // 16) < 4 reaches 64 tokens.
    """
    numbers, divisors = {8}, {1}
    for node in nodes:
        if node.op == "get_attr":
            found = _numbers_of(_constant(node))
        elif node.target in _DIMENSION_ARGUMENTS or _is_size(node):
            continue
        else:
            literals = {a for a in itertools.chain(node.args, node.kwargs.values()) if _is_number(a)}
            found = {int(abs(n)) for n in literals if not (node.target in _FILLS and n <= -HIDDEN)}
        if node.target in _SHIFTS:
            found = {1 << n for n in found}
        is_divisor = node.target in _DIVISIONS or node.target in _SHIFTS
        (divisors if is_divisor else numbers).update(n for n in found if 2 <= n < 1 << 62)
    return sum(numbers) * math.prod(divisors) if numbers != {8} else max(8, math.prod(divisors))


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _numbers_of(constant: torch.Tensor) -> set[int]:
    """The largest value and the largest size of a buffer that takes part in a mask."""
    if constant.dtype is torch.bool:
        return set(constant.shape)
    values = constant[constant.isfinite()]
    if constant.is_floating_point():
        values = values[values > -HIDDEN]  # the others are the values of hidden entries
    return {int(values.abs().max()) if values.numel() else 0, *constant.shape}


def _evaluate(nodes: list[Node], mask: Node, size: int) -> torch.Tensor:
    """Run the subgraph for a sequence of `size` tokens; returns a boolean [size, size], True = visible."""
    try:
        out = _run(nodes, mask, size)
        out = out.reshape(-1, *out.shape[-2:])
        heads = [_as_visible(head.expand(size, size)) for head in out]
    except (RuntimeError, IndexError) as error:
        raise MaskNotProven(f"the mask cannot be evaluated for {size} tokens: {error}") from error
    if not all(torch.equal(heads[0], other) for other in heads[1:]):
        raise MaskNotProven("the mask differs between heads")
    return heads[0]


def _run(nodes: list[Node], mask: Node, size: int) -> torch.Tensor:
    env: dict[Node, object] = {}
    last_use = {n: node for node in nodes for n in node.all_input_nodes}
    for node in nodes:
        if _is_size(node):
            env[node] = _size_at(node, size)
        elif node.op == "placeholder":
            if node.target == "positions":
                env[node] = torch.arange(size)
            elif node.target == "input_ids":
                env[node] = torch.zeros(size, dtype=torch.int64)
            else:
                raise MaskNotProven(f"the mask depends on the input {node.target}")
        elif node.op == "get_attr":
            env[node] = _constant(node)
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*_on_cpu(args), **_on_cpu(kwargs))
            for used in node.all_input_nodes:  # [size, size] tensors are large: keep none too long
                if last_use[used] is node:
                    env.pop(used, None)
    return env[mask]


def _size_at(node: Node, size: int) -> int:
    """The value of a symbolic size when the sequence has `size` tokens."""
    expr = node.meta["val"].node.expr
    tokens = {
        n.meta["val"].shape[0].node.expr
        for n in node.graph.nodes
        if n.op == "placeholder" and n.target in ("input_ids", "positions")
    }
    if not expr.free_symbols <= tokens:
        raise MaskNotProven(
            f"the mask depends on the size {expr}, which is not a function of the number of tokens"
        )
    return int(expr.subs(dict.fromkeys(tokens, size)))


def _constant(node: Node) -> torch.Tensor:
    """A weight or buffer by name; masks may use small constants, not parameters of unknown value."""
    tensor = node.graph.owning_module
    for part in node.target.split("."):
        tensor = getattr(tensor, part)
    if tensor.device.type == "meta":
        raise MaskNotProven(
            f"the mask depends on the values of {node.target}, which has none on the meta device"
        )
    return tensor.detach().cpu()


def _on_cpu(arguments):
    """Arguments with every device replaced by the CPU."""
    return torch.utils._pytree.tree_map(
        lambda a: torch.device("cpu") if isinstance(a, torch.device) else a, arguments
    )


def _as_visible(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= -HIDDEN
    if not bool(((mask == 0) | hidden).all()):
        raise MaskNotProven("the mask adds a bias that is neither 0 nor a large negative number")
    return ~hidden


def _expected(facts: MaskFacts, size: int) -> torch.Tensor:
    p = torch.arange(size)
    return visible_keys(p[:, None], p[None, :], window=facts.window, chunk=facts.chunk, causal=facts.causal)


def _candidates(visible: torch.Tensor):
    """The masks of the family that the largest evaluation leaves possible; each is then compared in full."""
    size = visible.shape[0]
    causal = not bool(visible[0, 1:].any())
    yield MaskFacts(causal=causal)
    reach = int(visible.sum(1).max()) if causal else int(visible[0].sum())
    if reach < size:
        yield MaskFacts(causal=causal, window=reach)
    breaks = (~visible.diagonal(-1)).nonzero()  # a token that does not see its predecessor begins a chunk
    if len(breaks):
        chunk = int(breaks[0]) + 1
        yield MaskFacts(causal=causal, chunk=chunk)
        yield MaskFacts(causal=causal, chunk=chunk, window=reach)
