"""Numbers of tokens within a program's range for which the model's code takes another branch.

if T == 6; T % 2; T in (70, 77)           torch notes Ne(T, 6), Eq(Mod(T, 2), 0), ...: no range says so
if T * T > 2500                           nor this: every length behind 50 is another one
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._sympy.printers import PythonPrinter

MOST_TRIED = 8
EACH_UP_TO, SAMPLED = 1 << 16, 1024  # of more tokens so many lengths, and the last


def other_lengths(program: ExportedProgram, fewest: int, last: int) -> tuple[list[int], int]:
    """Of `fewest` to `last` tokens, and up to how many that is known: EACH_UP_TO, where some behind it do, too."""
    asked = _asked(program)

    def takes_another(length: int) -> bool:
        return not all(holds(length) for holds in asked)

    others = [n for n in range(fewest, min(last, EACH_UP_TO) + 1) if takes_another(n)]
    if last > EACH_UP_TO:
        if any(map(takes_another, range(EACH_UP_TO + 1, last, -(-(last - EACH_UP_TO) // SAMPLED)))):
            return others, EACH_UP_TO
        others += [last] * takes_another(last)
    return others, last


def before_tail(others: list[int], last: int) -> tuple[list[int], int]:
    """Without the many that a range ends with: the others, and the last one before. A few are tried as any other:
    `mask[:T]` asks whether T is all that the mask has."""
    kept, before = others, last
    while kept and kept[-1] == before:
        kept, before = kept[:-1], before - 1
    return (kept, before) if last - before > MOST_TRIED else (others, last)


def some_of(others: list[int]) -> list[int]:
    """To try, the first and the last among them."""
    if len(others) <= MOST_TRIED:
        return others
    return [others[k * (len(others) - 1) // (MOST_TRIED - 1)] for k in range(MOST_TRIED)]


def _asked(program: ExportedProgram) -> list[Callable[[int], bool]]:
    """What the code took to be so of the number of tokens, but for what is so of every number."""
    sizes = [n.meta["val"].shape[0] for n in program.graph.nodes if n.name == "input_ids"]
    if not sizes or not isinstance(sizes[0], torch.SymInt):
        return []
    size = sizes[0].node
    asked = {
        guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, size.expr)) for guard in size.shape_env.guards
    }
    return [_function(expr, size.expr) for expr in asked if expr.free_symbols == {size.expr}]


def _function(expr, symbol) -> Callable[[int], bool]:
    return eval(f"lambda {symbol.name}: bool({PythonPrinter().doprint(expr)})", dict(SYMPY_INTERP))
