"""How far a mask can tell tokens apart, read off the ops and literals that make it: a bound, if all of them compare,
choose, move or scale. What a graph makes of its numbers is not known here (`mask_proof.py` looks at far sequences).
"""

from __future__ import annotations

import itertools
import math

import sympy
import torch
from torch.fx import Node

from pagebinder.frontend.mask_values import constant_of, is_size, token_dims
from pagebinder.graph_tools import aten

LEAST_FRACTION = 1e-5  # less is there to avoid a division by zero
HIDDEN = 1e4  # an additive mask hides with -1e4 or less: exp of it is 0 beside any visible score

# Their literal is the value of a mask's entry, not a distance.
_FILLS = {
    aten.masked_fill.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, aten.full.default,
    aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default, aten.mul.Tensor, aten.mul.Scalar,
}  # fmt: skip
_DIVISIONS = {
    aten.div.Tensor, aten.div.Tensor_mode, aten.div.Scalar, aten.div.Scalar_mode, aten.floor_divide.default,
    aten.floor_divide.Scalar, aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar,
}  # fmt: skip
# Ops that compare, choose, move or scale: the literals beside them bound what a mask made of them reaches.
_STRAIGHT = {
    aten.abs, aten.add, aten.alias, aten.arange, aten.bitwise_and, aten.bitwise_not, aten.bitwise_or,
    aten.bitwise_right_shift, aten.bitwise_xor, aten.cat, aten.ceil, aten.clamp, aten.clamp_max, aten.clamp_min,
    aten.clone, aten.contiguous, aten.detach, aten.div, aten.empty_like, aten.eq, aten.expand, aten.expand_as,
    aten.fill, aten.floor, aten.floor_divide, aten.fmod, aten.full, aten.full_like, aten.ge, aten.greater,
    aten.greater_equal, aten.gt, aten.le, aten.less, aten.less_equal, aten.lift_fresh_copy, aten.logical_and,
    aten.logical_not, aten.logical_or, aten.logical_xor, aten.lt, aten.masked_fill, aten.maximum, aten.minimum,
    aten.mul, aten.multiply, aten.ne, aten.neg, aten.new_full, aten.new_ones, aten.new_zeros, aten.not_equal,
    aten.ones, aten.ones_like, aten.permute, aten.remainder, aten.reshape, aten.round, aten.rsub, aten.scalar_tensor,
    aten.select, aten.slice, aten.squeeze, aten.stack, aten.sub, aten.subtract, aten.t, aten.to, aten.transpose,
    aten.tril, aten.triu, aten.trunc, aten.type_as, aten.unsqueeze, aten.view, aten.where, aten.zeros,
    aten.zeros_like, aten._to_copy, aten._unsafe_view, aten.__and__, aten.__or__, aten.__rshift__, aten.__xor__,
    aten.mT, aten.numpy_T,
}  # fmt: skip
_COARSE = (torch.float16, torch.bfloat16)  # which know whole numbers up to 2048 and 256
_PRODUCTS = {aten.mul, aten.multiply}
_QUOTIENTS = {aten.div, aten.floor_divide, aten.fmod, aten.remainder}
_SHIFTS = {aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar}
# Their literals are dimensions, not distances.
_DIMENSION_ARGUMENTS = {
    aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.view.default, aten.reshape.default, aten.select.int,
}  # fmt: skip


def numbers_in(nodes: list[Node]) -> tuple[int, set[int], set[int]]:
    """A bound, in tokens, on the distances that the mask can tell apart, and the numbers and divisors behind it.

    A position divided by c makes every later number count c times: (p // 16 - j // 16) < 4 reaches 64 tokens.
    """
    numbers, divisors = {8}, {1}
    for node in nodes:
        if node.op == "get_attr":
            constant = constant_of(node)
            found = _numbers_of(constant)
            divisors |= _inverses(constant.tolist()) if constant.dim() == 0 else set()
        elif is_size(node):
            found = {abs(int(n)) for n in node.meta["val"].node.expr.atoms(sympy.Integer)}
        elif node.target in _DIMENSION_ARGUMENTS:
            continue
        else:
            literals = {a for a in itertools.chain(node.args, node.kwargs.values()) if _is_number(a)}
            found = {int(abs(n)) for n in literals if not (node.target in _FILLS and n <= -HIDDEN)}
            divisors |= _inverses(*literals)
        if node.target in _SHIFTS:
            found = {1 << n for n in found if n < 62}
        is_divisor = node.target in _DIVISIONS or node.target in _SHIFTS
        (divisors if is_divisor else numbers).update(n for n in found if 2 <= n < 1 << 62)
    return reach_of(numbers, divisors), numbers, divisors


def reach_of(numbers: set[int], divisors: set[int]) -> int:
    """The bound that follows from these, in tokens."""
    return sum(numbers) * math.prod(divisors) if numbers != {8} else max(8, math.prod(divisors))


def _inverses(*numbers: float) -> set[int]:
    """What positions are divided by if they are multiplied by fractions."""
    return {math.ceil(1 / abs(n)) for n in numbers if LEAST_FRACTION < abs(n) < 1}


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


def is_straight(node: Node) -> bool:
    """Do its literals, if it has some, bound the distances that a mask made of it can tell apart?"""
    if node.op != "call_function" or is_size(node):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    op = node.target.overloadpacket
    of_tokens = [n for n in node.all_input_nodes if not is_size(n) and token_dims(n)]
    if _dtype(node) in _COARSE and (op is aten.arange or any(map(_may_count, of_tokens))):
        return False
    if op in _PRODUCTS and len(of_tokens) > 1:  # which may overflow
        return False
    return op in _STRAIGHT and not (op in _QUOTIENTS and set(of_tokens) & set(node.all_input_nodes[1:]))


def _may_count(node: Node) -> bool:
    """Could it hold positions that 16 bits of floating point round? Where it has them so, that was told before."""
    return _dtype(node) not in (torch.bool, *_COARSE)


def _dtype(node: Node) -> torch.dtype | None:
    """None: it is several tensors."""
    value = node.meta["val"]
    return value.dtype if isinstance(value, torch.Tensor) else None
