"""Branches of a model's code for few tokens alone. A graph is traced for two and more, so it has the other side.

    if length == 1: x = x * 2                         refused
    if length > 1: mask = causal_mask(length)         served: of one token both sides are the same

Which code asks is found while it is traced; whether it matters, by running the source and the graph with one token,
and with more where a program does not hold for them (limited_export.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Interpreter

from pagebinder.errors import CaptureError
from pagebinder.frontend.asking_code import asking_place

MOST_DIFFERENT = (
    0.02  # of the largest value: both sides run the same ops in the same dtype, up to their order
)
MASKED = 1e4  # times the median: a logit of an id that may not be chosen
STRIDE = 7919  # between ids that are tried
ALL_UP_TO = 8  # tokens; of more every power of two and one
_PARTS = (
    "A step of a served model has parts of sequences, single tokens too: what it computes may not depend on how many "
    "there are."
)


@contextlib.contextmanager
def noting_branches(places: list[str]) -> Iterator[None]:
    """Adds where Python code outside of torch asks what is otherwise for a single token ("file:line")."""
    ask = torch.SymBool.__bool__

    def asked(self) -> bool:
        answer, place = ask(self), asking_place()
        if place is not None and _for_one_token(self) not in (None, answer):
            places.append(place)
        return answer

    torch.SymBool.__bool__ = asked
    try:
        yield
    finally:
        torch.SymBool.__bool__ = ask


def _for_one_token(condition: torch.SymBool) -> bool | None:
    """What it is if all sizes are 1; None: not known."""
    try:
        return bool(condition.node.expr.subs(dict.fromkeys(condition.node.expr.free_symbols, 1)))
    except (TypeError, AttributeError):
        return None


@dataclass(frozen=True)
class FewTokens:
    """What a source computed for few tokens, and which code may do something else for them."""

    inputs: tuple[torch.Tensor, ...]
    expected: torch.Tensor
    places: list[str]

    def require_same(self, gm: GraphModule, model: str) -> None:
        """Raises CaptureError unless the graph of `model` computes the same."""
        few = "a single token" if len(self.inputs[0]) == 1 else f"{len(self.inputs[0])} tokens"
        at = f" at {self.places[0]}" if self.places else ""
        try:
            with torch.no_grad():
                got = Interpreter(gm).run(
                    *self.inputs
                )  # a path may hold a word of Python's, which is no code
        except Exception as error:  # whatever an op says of these sizes
            raise CaptureError(
                f"{model} computes something for {few} that the graph of more cannot, as of a branch{at} "
                f"({str(error).splitlines()[0]}). {_PARTS}"
            ) from error
        # A model that gives the last row alone has a graph that gives all (last_row.py).
        expected, got = self.expected.double(), got[-len(self.expected) :].double()
        sizes = expected.abs().nan_to_num(0.0, 0.0)
        largest = float(sizes[sizes <= (MASKED * float(sizes.median()) or math.inf)].max())
        difference = float((got - expected).abs().masked_fill(got == expected, 0.0).max())
        if not difference <= MOST_DIFFERENT * largest:
            raise CaptureError(
                f"{model} computes something else for {few} than for more (off by {difference:.3g} where the "
                f"largest value is {largest:.3g}), as of a branch{at}. {_PARTS}"
            )


def run_with_one_token(
    wrapper: torch.nn.Module, examples: tuple[torch.Tensor, ...], vocab_size: int, places: list[str]
) -> list[FewTokens]:
    """Nothing if no code asks, there are no values to compute with, or results change from call to call."""
    if not places or any(t.is_meta for t in (*wrapper.parameters(), *examples)):
        return []
    ids, *others = (example[:1] for example in examples)
    found = _computed(wrapper, (ids, *others), places)
    with contextlib.suppress(IndexError):  # an encoder has ids of its own
        found += _computed(wrapper, (ids + STRIDE % vocab_size, *others), places)
    return found


@torch.no_grad()
def run_with_few_tokens(
    wrapper: torch.nn.Module, examples: Callable[[int], tuple[torch.Tensor, ...]], most: int,
    others: Iterable[int], vocab_size: int,
) -> list[FewTokens]:  # fmt: skip
    """With 1, 2, 3, ..., 8, 9, 17, ... and `most` tokens, and with `others`; those that it takes.

    `examples`: of ids and positions, as many.
    """
    doubled = ((1 << k) + 1 for k in range(most.bit_length()))
    numbers = {*range(1, ALL_UP_TO + 1), *doubled, most}
    found = []
    for num_tokens in sorted({n for n in numbers if n <= most} | {*others}):
        ids, *rest = examples(num_tokens)
        ids = torch.arange(num_tokens, device=ids.device) * STRIDE % vocab_size
        with contextlib.suppress(Exception):  # code that was made for more tokens says nothing of so few
            found += _computed(wrapper, (ids, *rest), [])
    return found


def _computed(
    wrapper: torch.nn.Module, inputs: tuple[torch.Tensor, ...], places: list[str]
) -> list[FewTokens]:
    expected, again = wrapper(*inputs), wrapper(*inputs)
    return [FewTokens(inputs, expected, places)] if torch.equal(expected, again) and expected.numel() else []
