"""ONNX operators that work entry by entry or along an axis, in torch. Names and meanings are ONNX's."""

from __future__ import annotations

import functools
import operator as py

import numpy as np
import torch
import torch.nn.functional as F

from pagebinder.frontend.onnx_host import cast, host, integers, is_host, number, operator, torch_dtype
from pagebinder.frontend.onnx_tensors import DTYPES


def _symbolic(function):
    """A function of numbers over arrays that may hold symbolic sizes."""
    return np.frompyfunc(function, 2, 1)


def _of_hosts(symbolic, plain):
    def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return host(symbolic(a, b) if object in (a.dtype, b.dtype) else plain(a, b))

    return both


def _truncated(a, b):
    return np.trunc(np.divide(a, b)).astype(a.dtype) if a.dtype.kind == "i" else a / b


def _divide(a, b):
    """Integers are divided towards zero. 1 / x is a reciprocal."""
    if isinstance(a, torch.Tensor) and not a.is_floating_point():
        return torch.div(a, b, rounding_mode="trunc")
    if isinstance(a, float) and a == 1.0:
        return torch.reciprocal(b)
    if not isinstance(a, torch.Tensor) and not b.is_floating_point():
        return torch.div(torch.full_like(b, a), b, rounding_mode="trunc")
    return a / b


def _logical(function):
    """And, Or, Xor of a tensor with a known bool."""

    def with_known(a, b):
        if isinstance(b, bool):
            a, b = b, a
        if not isinstance(a, bool):
            return function(a, b)
        known = {py.and_: (b, None), py.or_: (None, b), py.xor: (torch.logical_not(b), b)}[function][not a]
        return torch.full_like(b, a) if known is None else known

    return with_known


_BINARY = {
    "Add": (py.add, _of_hosts(py.add, np.add)),
    "Sub": (py.sub, _of_hosts(py.sub, np.subtract)),
    "Mul": (py.mul, _of_hosts(py.mul, np.multiply)),
    "Div": (_divide, _of_hosts(_symbolic(py.floordiv), _truncated)),
    "Equal": (py.eq, _of_hosts(_symbolic(py.eq), np.equal)),
    "Less": (py.lt, _of_hosts(_symbolic(py.lt), np.less)),
    "LessOrEqual": (py.le, _of_hosts(_symbolic(py.le), np.less_equal)),
    "Greater": (py.gt, _of_hosts(_symbolic(py.gt), np.greater)),
    "GreaterOrEqual": (py.ge, _of_hosts(_symbolic(py.ge), np.greater_equal)),
    "And": (_logical(py.and_), np.logical_and),
    "Or": (_logical(py.or_), np.logical_or),
    "Xor": (_logical(py.xor), np.logical_xor),
    "BitwiseAnd": (py.and_, np.bitwise_and),
    "BitwiseOr": (py.or_, np.bitwise_or),
}


def _binary(name: str) -> None:
    of_tensors, of_hosts = _BINARY[name]

    @operator(name)
    def translation(call, a, b):
        if is_host(a) and is_host(b):
            return host(of_hosts(a, b))
        return of_tensors(*call.operands(a, b))


for _name in _BINARY:
    _binary(_name)


@operator("Max", "Min", "Sum")
def extreme(call, *values):
    kinds = {
        "Max": (np.maximum, torch.maximum, torch.sym_max),
        "Min": (np.minimum, torch.minimum, torch.sym_min),
        "Sum": (np.add, torch.add, py.add),
    }
    plain, of_tensors, symbolic = kinds[call.node.op]
    if all(map(is_host, values)):
        return functools.reduce(_of_hosts(_symbolic(symbolic), plain), values)
    return functools.reduce(lambda a, b: of_tensors(*call.tensors(a, b)), values)


@operator("Pow")
def power(call, x, exponent):
    if is_host(x) and is_host(exponent):
        return host(np.power(x, exponent))
    return torch.pow(*call.operands(x, exponent))


@operator("Mod")
def mod(call, a, b, *, fmod=0):
    if is_host(a) and is_host(b):
        return host(a % b)
    return (torch.fmod if fmod else torch.remainder)(*call.operands(a, b))


@operator("Where")
def where(call, condition, yes, no):
    if is_host(condition) and is_host(yes) and is_host(no):
        return host(np.where(condition, yes, no))
    if (weights := _safe_softmax(call)) is not None:
        return weights
    dtype = torch_dtype(yes) if is_host(yes) else yes.dtype
    condition = call.tensor(condition)
    yes, no = (call.scalar(x, rank=condition.dim()) for x in (yes, no))
    return _typed(torch.where(condition, yes, no), dtype)


def _safe_softmax(call):
    """Where(IsNaN(weights), 0, weights), as torch writes a softmax in which a row may see nothing."""
    test, zero, weights = call.node.inputs
    nan, softmax = call.maker(test, "IsNaN"), call.maker(weights, "Softmax")
    if nan is None or softmax is None or nan.inputs[0] != weights or not is_host(call.value(zero)):
        return None
    if call.value(zero).size != 1 or number(call.value(zero)) != 0:
        return None
    return torch.ops.aten._safe_softmax.default(
        call.value(softmax.inputs[0]), softmax.attributes.get("axis", -1)
    )


def _typed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype else x.to(dtype)


@operator("Cast")
def cast_to(call, x, *, to, saturate=1, round_mode="up"):
    if to not in DTYPES:
        call.refuse("it casts to a type that torch does not compute in")
    if is_host(x):
        return cast(x, DTYPES[to]) if DTYPES[to] is not torch.bfloat16 else call.tensor(x).to(torch.bfloat16)
    return call.same_meaning(x, x.to(DTYPES[to]))


@operator("CastLike")
def cast_like(call, x, like, *, saturate=1, round_mode="up"):
    dtype = torch_dtype(like) if is_host(like) else like.dtype
    if is_host(x) and dtype is not torch.bfloat16:
        return cast(x, dtype)
    return call.tensor(x).to(dtype)


_UNARY = {
    "Neg": (py.neg, np.negative), "Abs": (torch.abs, np.abs), "Sqrt": (torch.sqrt, np.sqrt),
    "Reciprocal": (torch.reciprocal, np.reciprocal), "Exp": (torch.exp, np.exp), "Log": (torch.log, np.log),
    "Floor": (torch.floor, np.floor), "Ceil": (torch.ceil, np.ceil), "Round": (torch.round, np.round),
    "Not": (torch.logical_not, np.logical_not), "IsNaN": (torch.isnan, np.isnan), "IsInf": (torch.isinf, np.isinf),
    "Sign": (torch.sign, np.sign), "Identity": (lambda x: x, lambda x: x), "Cos": (torch.cos, np.cos),
    "Sin": (torch.sin, np.sin), "Erf": (torch.erf, None), "Tanh": (torch.tanh, np.tanh),
    "Sigmoid": (torch.sigmoid, None), "Relu": (torch.relu, None),
    "Softplus": (F.softplus, None), "BitwiseNot": (torch.bitwise_not, None),
}  # fmt: skip


def _unary(name: str) -> None:
    of_tensor, of_host = _UNARY[name]

    @operator(name)
    def translation(call, x):
        if is_host(x) and of_host is not None:
            try:
                return host(of_host(x))
            except TypeError:  # of numpy, whose functions ask a symbol for a method of their name
                call.refuse(
                    "it is taken of a number of tokens, of which only sums, products, quotients are traced"
                )
        return call.same_meaning(x, of_tensor(call.tensor(x)))


for _name in _UNARY:
    _unary(_name)


@operator("Gelu")
def gelu(call, x, *, approximate="none"):
    return F.gelu(x, approximate=approximate)


@operator("Swish", "Silu")
def swish(call, x, *, alpha=1.0):
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@operator("Dropout")
def dropout(call, x, ratio=None, training=None, *, seed=None):
    if training is not None and (not is_host(training) or number(training)):
        call.refuse("it drops values at random: export the model in evaluation mode")
    return x


@operator("Clip")
def clip(call, x, low=None, high=None):
    low, high = (None if bound is None else number(call.known(bound, "a bound")) for bound in (low, high))
    return x if low is high is None else torch.clamp(x, min=low, max=high)


@operator("Softmax", "LogSoftmax")
def softmax(call, x, *, axis=-1):
    return (torch.softmax if call.node.op == "Softmax" else torch.log_softmax)(x, axis)


@operator("CumSum")
def cumsum(call, x, axis, *, exclusive=0, reverse=0):
    if exclusive or reverse:
        call.refuse("a sum that is exclusive or backwards")
    if call.is_ones(x):  # positions, counted from a mask that hides nothing
        return call.run.positions.reshape(1, -1).to(x.dtype) + 1
    return torch.cumsum(x, integers(call.known(axis, "an axis"))[0])


@operator("Trilu")
def trilu(call, x, k=None, *, upper=1):
    diagonal = 0 if k is None else number(call.known(k, "a diagonal"))
    if is_host(x):
        return (np.triu if upper else np.tril)(x, diagonal)
    return (torch.triu if upper else torch.tril)(x, diagonal)


def _sum_square(x, dims, keepdim):
    return torch.sum(x * x, dims, keepdim)


_REDUCTIONS = {
    "ReduceMean": (torch.mean, np.mean), "ReduceSum": (torch.sum, np.sum), "ReduceMax": (torch.amax, np.max),
    "ReduceMin": (torch.amin, np.min), "ReduceProd": (None, np.prod), "ReduceSumSquare": (_sum_square, None),
    "ReduceL2": (lambda x, dims, keep: torch.linalg.vector_norm(x, dim=dims, keepdim=keep), None),
}  # fmt: skip


@operator(*_REDUCTIONS)
def reduction(call, x, given=None, *, axes=None, keepdims=1, noop_with_empty_axes=0):
    """Axes are an input, or before opset 18 an attribute."""
    of_tensor, of_host = _REDUCTIONS[call.node.op]
    dims = axes if given is None else integers(call.known(given, "axes"))
    if not dims and noop_with_empty_axes:
        return x
    if is_host(x) and of_host is not None:
        return host(of_host(x, axis=tuple(dims) if dims else None, keepdims=bool(keepdims)))
    if of_tensor is None:
        call.refuse("a product of tensors' values")
    if call.node.op == "ReduceSum" and call.is_ones(x) and dims in ([1], [-1]):
        return call.run.filled_rows(bool(keepdims))
    return of_tensor(x, dims or list(range(x.dim())), bool(keepdims))


@operator("ArgMax")
def argmax(call, x, *, axis=0, keepdims=1, select_last_index=0):
    return torch.argmax(x, axis, bool(keepdims))


@operator("TopK")
def topk(call, x, k, *, axis=-1, largest=1, sorted=1):
    return torch.topk(x, integers(call.known(k, "k"))[0], axis, bool(largest), bool(sorted))


@operator("Einsum")
def einsum(call, *values, equation):
    return torch.einsum(equation, *call.tensors(*values))
