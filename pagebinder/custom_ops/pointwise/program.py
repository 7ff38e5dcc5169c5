"""What a pointwise op computes, as text that its kernels, graphs and people read.

    add:bfloat16 x0 x1; mul:bfloat16 v0 0.125; tanh:float32 x2; mul:float32 v1 v2 -> v0 v3

A statement is an operation, the dtype of its result, and operands: x0, x1, ... are the op's inputs, v0, v1, ... what
the statements before have made, others are numbers. Behind the arrow stand the results of the op. Each statement is
computed in float32 and rounded to its dtype, as torch's op of that name does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

# As kernels hold them in registers: bool as 0.0 and 1.0.
DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "bool": torch.bool,
}  # fmt: skip

Operand = str | float
WIDE_NUMBERS = (
    "div",
    "leaky_relu",
    "mul",
    "softplus",
)  # which torch takes in float32 beside values of 16 bits
OF_THREE = ("softplus", "where")
OF_TWO = (
    "add", "and", "clamp_max", "clamp_min", "div", "leaky_relu", "maximum", "minimum", "mul", "or", "rsub", "sub",
)  # fmt: skip
COMPARISONS = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))


def _softplus(x, beta, threshold):
    return functional.softplus(x, beta, threshold)


def _leaky_relu(x, slope):
    return functional.leaky_relu(x, slope)


# Operation -> the same by torch. Kernels: custom_ops/cpu/pointwise/operations.h, which has the same names.
OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs,
    "add": torch.add,
    "and": torch.logical_and,
    "clamp_max": lambda x, most: torch.clamp(x, max=most),
    "clamp_min": lambda x, least: torch.clamp(x, min=least),
    "copy": lambda x: x.contiguous(),
    "cube": lambda x: x.pow(3),
    "div": torch.div,
    "eq": torch.eq,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "ge": torch.ge,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gt": torch.gt,
    "le": torch.le,
    "leaky_relu": _leaky_relu,
    "log": torch.log,
    "log1p": torch.log1p,
    "log_sigmoid": functional.logsigmoid,
    "lt": torch.lt,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": torch.mul,
    "ne": torch.ne,
    "neg": torch.neg,
    "not": torch.logical_not,
    "or": torch.logical_or,
    "reciprocal": torch.reciprocal,
    "relu": functional.relu,
    "rsqrt": torch.rsqrt,
    "rsub": torch.rsub,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "softplus": _softplus,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "sub": torch.sub,
    "tanh": torch.tanh,
    "to": lambda x: x,  # the dtype of its result is what it does
    "where": torch.where,
}


@dataclass(frozen=True)
class Statement:
    """`dtype`: that it is computed in. Comparisons have that of what they compare, and their result is bool."""

    operation: str
    dtype: str
    operands: tuple[Operand, ...]

    @property
    def result_dtype(self) -> torch.dtype:
        return torch.bool if self.operation in COMPARISONS else DTYPES[self.dtype]

    def numbers_rounded(self) -> list[Operand]:
        """The operands, numbers as torch rounds them: spelt out, as inductor would compare with what was written."""
        dtype = DTYPES[self.dtype]
        if self.operation in WIDE_NUMBERS or dtype in (torch.bool, torch.float32):
            return list(self.operands)
        return [o if isinstance(o, str) else _rounded(o, dtype) for o in self.operands]

    def __str__(self) -> str:
        return " ".join((f"{self.operation}:{self.dtype}", *(map(_written, self.operands))))


@dataclass(frozen=True)
class Program:
    """`results`: the numbers of the statements whose values the op returns."""

    statements: tuple[Statement, ...]
    results: tuple[int, ...]

    def __str__(self) -> str:
        return f"{'; '.join(map(str, self.statements))} -> {' '.join(f'v{n}' for n in self.results)}"

    def dtypes(self) -> list[torch.dtype]:
        """Of the results."""
        return [self.statements[n].result_dtype for n in self.results]

    def widened(self) -> Program:
        """The same computed in float32."""
        wide = (
            dataclasses.replace(s, dtype="bool" if s.dtype == "bool" else "float32") for s in self.statements
        )
        return Program(tuple(wide), self.results)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What torch makes of it, op by op; results have the shapes that come out of theirs."""
        values: list[torch.Tensor] = []
        for statement in self.statements:
            operands = [_value(o, inputs, values) for o in statement.numbers_rounded()]
            values.append(OPERATIONS[statement.operation](*operands).to(statement.result_dtype))
        return [values[n] for n in self.results]


def read_program(text: str) -> Program:
    """Raises ValueError: it is no program."""
    body, arrow, results = text.partition(" -> ")
    try:
        statements = tuple(_read_statement(part) for part in body.split("; "))
        numbers = tuple(int(word.removeprefix("v")) for word in results.split())
    except (KeyError, ValueError) as error:
        raise ValueError(f"not a pointwise program: {text!r} ({error})") from error
    if not arrow or not numbers or any(n >= len(statements) for n in numbers):
        raise ValueError(f"not a pointwise program: {text!r} names no results")
    return Program(statements, numbers)


def _operands_of(operation: str) -> int:
    """How many it takes."""
    return 3 if operation in OF_THREE else 2 if operation in OF_TWO or operation in COMPARISONS else 1


def _read_statement(text: str) -> Statement:
    head, *operands = text.split()
    operation, _, dtype = head.partition(":")
    if operation not in OPERATIONS or dtype not in DTYPES:
        raise ValueError(f"unknown {head}")
    if len(operands) != _operands_of(operation):
        raise ValueError(f"{operation} takes {_operands_of(operation)} operands")
    return Statement(operation, dtype, tuple(o if o[0] in "xv" else float(o) for o in operands))


@functools.cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).double())


def _written(operand: Operand) -> str:
    return operand if isinstance(operand, str) else repr(float(operand))


def _value(operand: Operand, inputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]):
    if isinstance(operand, str):
        return (inputs if operand[0] == "x" else values)[int(operand[1:])]
    return operand
