"""Symbolic sizes of a graph as JSON and back: the expressions between its inputs' sizes survive.

s26            "s26"                          a symbol, listed with its example value and its range
40             40
256 * s26      ["Mul", 256, "s26"]            a tree of functions from the table below; nothing is parsed
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions as torch_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from pagebinder.errors import ArtefactError

_OF_SYMPY = ("Add", "Mul", "Pow", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Not", "And", "Or")
_OF_TORCH = (
    "FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing", "Max", "Min", "Where", "IntTrueDiv",
    "FloatTrueDiv", "ToFloat", "TruncToInt", "FloorToInt", "CeilToInt", "PowByNatural",
)  # fmt: skip
FUNCTIONS = {getattr(sympy, name).__name__: getattr(sympy, name) for name in _OF_SYMPY} | {
    name: getattr(torch_functions, name) for name in _OF_TORCH
}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
UNBACKED = "u"  # how torch names sizes that only the data knows


def size_to_json(value: Any) -> int | str | list:
    """A size (int, or a torch.SymInt or its expression) as a tree."""
    if isinstance(value, SYMBOLIC):
        value = value.node.expr
    if isinstance(value, sympy.logic.boolalg.BooleanAtom):
        return bool(value)
    if isinstance(value, (int, sympy.Integer)):
        return int(value)
    if isinstance(value, sympy.Symbol):
        return value.name
    if isinstance(value, sympy.Rational):
        return ["Rational", int(value.p), int(value.q)]
    name = type(value).__name__
    if name not in FUNCTIONS:
        raise ArtefactError(f"a size is computed by {name}, which an artefact cannot hold: {value}")
    return [name, *(size_to_json(a) for a in value.args)]


class SizeWriter:
    """Writes sizes and remembers their symbols: `symbols` maps a name to its example and its range."""

    def __init__(self) -> None:
        self.symbols: dict[str, dict] = {}

    def size(self, value: Any) -> int | str | list:
        if isinstance(value, SYMBOLIC):
            env = value.node.shape_env
            for symbol in value.node.expr.free_symbols:
                if symbol.name not in self.symbols:
                    self.symbols[symbol.name] = _facts(env, symbol)
        return size_to_json(value)


def _facts(env: ShapeEnv, symbol: sympy.Symbol) -> dict:
    """`example`: None of a size that only the data knows. `range`: None is without end."""
    example = env.backed_var_to_val.get(symbol)
    bounds = env.var_to_range.get(symbol)
    low, high = (0, int_oo) if bounds is None else (bounds.lower, bounds.upper)
    return {
        "example": None if example is None else int(example),
        "range": [None if abs(end) == int_oo else int(end) for end in (low, high)],
    }


class SizeReader:
    """The symbols of a graph, made anew in a ShapeEnv of their own; `size` turns trees into ints and SymInts."""

    def __init__(self, symbols: dict[str, dict]) -> None:
        self.env = ShapeEnv()
        self._symbols = {name: self._symbol(name, facts) for name, facts in symbols.items()}
        self._sizes: dict[str, Any] = {}

    def _symbol(self, name: str, facts: dict) -> sympy.Symbol:
        from torch._dynamo.source import ConstantSource

        low, high = facts["range"]
        if facts["example"] is None:
            symbol = self.env.create_unbacked_symint().node.expr
        else:
            source = ConstantSource(f"size_{name}")
            symbol = self.env.create_symbol(facts["example"], source, DimDynamic.DYNAMIC)
        bounds = ValueRanges(-int_oo if low is None else low, int_oo if high is None else high)
        self.env.var_to_range[symbol] = bounds
        return symbol

    def size(self, tree: int | str | list) -> Any:
        """An int, or a torch.SymInt (SymBool of a comparison)."""
        if isinstance(tree, int):
            return tree
        key = str(tree)
        if key not in self._sizes:
            self._sizes[key] = self._node(self._expression(tree))
        return self._sizes[key]

    def _node(self, expression: sympy.Basic) -> Any:
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if isinstance(expression, sympy.logic.boolalg.BooleanAtom):
            return bool(expression)
        if expression.is_Boolean or expression.is_Relational:
            return self.env.create_symboolnode(expression)
        value = expression.xreplace(self.env.backed_var_to_val)
        hint = int(value) if value.is_Integer else None
        return self.env.create_symintnode(expression, hint=hint)

    def _expression(self, tree: int | str | list) -> sympy.Basic:
        if isinstance(tree, int):
            return sympy.Integer(tree)
        if isinstance(tree, str):
            if tree not in self._symbols:
                raise ArtefactError(f"a size is called {tree!r}, which is none of the graph's symbols")
            return self._symbols[tree]
        name, *arguments = tree
        if name == "Rational":
            return sympy.Rational(*arguments)
        if name not in FUNCTIONS:
            raise ArtefactError(f"a size is computed by {name!r}, which is not known here")
        return FUNCTIONS[name](*(self._expression(a) for a in arguments))
