"""Programs that hold for some numbers of tokens only, where a model's code says for how many.

    scores + self.mask[:T, :T]                        2 to 1024 tokens: the size of the buffer
    if position_ids.shape[1] != 2, x[:, 1:] * x[:, :-1]     3 and more: torch asks whether T or T - 1 is some number
    if T == 60; if T % 2                              the same, and another one at some lengths (other_lengths.py)
    if window >= T: causal(q, k, v) else masked(q, k, v)    up to the window, or more than it has: another program

torch finds the range (`Dim.DYNAMIC`). A model that takes more tokens than a program holds for is traced once more
with so many. A program that does not hold for few, or for some in between, is one for all lengths if the model
computes the same for those: it is run beside its graph with 1, 2, 3, ... tokens, up to where the program begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.utils._sympy.value_ranges import ValueRanges

from pagebinder.errors import CaptureError
from pagebinder.frontend.few_tokens import FewTokens, run_with_few_tokens
from pagebinder.frontend.mask_questions import taken_as_chosen
from pagebinder.frontend.other_lengths import before_tail, other_lengths, some_of
from pagebinder.frontend.python_state import put_back
from pagebinder.frontend.source import ModelSource

EXAMPLE_TOKENS = 40
FEW_TOKENS = 7  # of examples for models whose tables end before
MAX_STEP_TOKENS = 1 << 20
MIN_STEP_TOKENS = 2
Traced = Callable[[torch.nn.Module, torch.nn.Module, Callable[[], ExportedProgram]], ExportedProgram]
"""Calls the last argument, which traces the second one, and that calls the first (`traced_in_steady_state`)."""
LATER = "export from"  # the route to a program that begins with more tokens than a step may have
MOST_BRANCHES = 4  # windows and the like that a model's code compares the length with, one after the other


@dataclass(frozen=True)
class TracedInput:
    """An example of an input of the graph, and the name of its first size, which is dynamic."""

    example: torch.Tensor
    size_name: str = "num_tokens"


@dataclass(frozen=True)
class Limited:
    """A program that holds for `fewest` to `most` tokens, but for `others`. None: as many as one may ask for."""

    program: ExportedProgram
    fewest: int
    most: int | None
    others: tuple[int, ...] = ()

    @property
    def begins_later(self) -> bool:
        """Than with the fewest tokens that are traced."""
        return self.fewest > MIN_STEP_TOKENS

    @property
    def route(self) -> str:
        most = f"up to {self.most}" * (self.most is not None)
        first = f"{LATER} {self.fewest}" if self.begins_later else "export"
        return f"{first} {most}".rstrip() + " tokens"


def export_limited(
    source: ModelSource, wrapper: torch.nn.Module, inputs: dict[str, TracedInput],
    traced: Traced, graph_of: Callable[[ExportedProgram], GraphModule],
) -> tuple[Limited, list[FewTokens]] | None:  # fmt: skip
    """The program that holds for most tokens, and what the model computes for fewer. None: there is none.

    `traced`: see `Traced`. `graph_of`: what is served of a program.
    """
    if len({i.size_name for i in inputs.values()}) > 1:
        return None
    return _Attempts(source, wrapper, inputs, traced, graph_of).best()


@dataclass(frozen=True)
class _Attempts:
    """The arguments of `export_limited`."""

    source: ModelSource
    wrapper: torch.nn.Module
    inputs: dict[str, TracedInput]
    traced: Traced
    graph_of: Callable[[ExportedProgram], GraphModule]

    @property
    def compares(self) -> bool:
        """Can it be run with fewer tokens than a program begins with? That takes values."""
        return not self.source.is_transformers and self.source.device.type != "meta"

    def best(self) -> tuple[Limited, list[FewTokens]] | None:
        usual = len(next(iter(self.inputs.values())).example)
        found = self.exported(usual)
        if found is None and not self.runs(usual):
            found = self.exported(min(FEW_TOKENS, usual))
        if found is None and self.compares:
            found = self.exported(usual, MIN_STEP_TOKENS + 1)
        for _ in range(MOST_BRANCHES if self.compares and found is not None else 0):
            longer = self.longer(found)
            if longer is None:
                break
            found = replace(longer, others=(*found.others, *longer.others))
        if found is None:
            return None
        few = self.few(found) if self.compares else []
        if found.begins_later and not few:
            return None  # it needs so many tokens
        _forget_limit(found.program)
        return found, few

    def longer(self, found: Limited) -> Limited | None:
        """One that holds for more tokens than `found` and computes the same for few, if the model takes more."""
        if found.most is None or found.most + EXAMPLE_TOKENS > self.source.max_model_len:
            return None
        num_tokens = found.most + EXAMPLE_TOKENS
        if not self.runs(num_tokens):
            return None
        try:
            longer = self.exported(num_tokens)
            if longer is None or (longer.most is not None and longer.most <= found.most):
                return None
            for few in self.few(longer) if longer.begins_later or longer.others else []:
                few.require_same(self.graph_of(longer.program), type(self.source.module).__name__)
        except Exception:  # of a branch that is not needed, or as torch cannot make its graph functional
            return None
        return longer

    def few(self, found: Limited) -> list[FewTokens]:
        """What the model computes for fewer tokens than the program holds for, and for others.

        Where its tables end (`mask[:T]` asks if that is all) a last row alone says nothing that the audit does not.
        """
        with put_back(self.source.module):
            few = run_with_few_tokens(
                self.wrapper, self.examples, found.fewest - 1, found.others, self.source.vocab_size
            )
        return [f for f in few if not len(f.expected) == 1 < len(f.inputs[0]) == found.most]

    def examples(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Of ids and positions, as many."""
        ids, positions, *others = (i.example for i in self.inputs.values())
        return ids.new_zeros(num_tokens), torch.arange(num_tokens, device=positions.device), *others

    @torch.no_grad()
    def runs(self, num_tokens: int) -> bool:
        """Does the model take so many tokens at all?"""
        with put_back(self.source.module):
            try:
                self.wrapper(*self.examples(num_tokens))
            except Exception:  # whatever its code raises
                return False
        return True

    def exported(self, num_tokens: int, fewest: int | None = None) -> Limited | None:
        """A program and its range. `num_tokens`: of the examples. `fewest`: where torch may let it begin."""
        dim = Dim.DYNAMIC if fewest is None else Dim.DYNAMIC(min=fewest)
        exported = functools.partial(
            torch.export.export, self.wrapper, self.examples(num_tokens),
            dynamic_shapes=tuple({0: dim} for _ in self.inputs), strict=False,
        )  # fmt: skip
        try:
            with taken_as_chosen():
                program = self.traced(self.source.module, self.wrapper, exported)
        except CaptureError:
            raise
        except Exception:
            return None  # the first attempts have said why
        sizes = {str(n.meta["val"].shape[0]) for n in program.graph.nodes if n.name in self.inputs}
        ranges = [of for symbol, of in program.range_constraints.items() if not str(symbol).startswith("u")]
        if len(ranges) != 1 or len(sizes) != 1:
            return None
        fewest, upper = int(ranges[0].lower), ranges[0].upper
        last = self.source.max_model_len if upper >= MAX_STEP_TOKENS else int(upper)
        asked = min(last, self.source.max_model_len)
        others, known = other_lengths(program, fewest, asked)
        others, before = before_tail(others, last if known == asked else known)
        most = None if upper >= MAX_STEP_TOKENS and before == last else before
        found = Limited(program, fewest, most, tuple(some_of(others)))
        if found.begins_later:
            return found if self.compares else None
        return (
            None if found.most is None else found
        )  # without limits the first attempts failed for another reason


def _forget_limit(program: ExportedProgram) -> None:
    """A sequence is no longer than that; a step, which runs several, may be: so nothing may be specialised to it."""
    size = next(n.meta["val"].shape[0] for n in program.graph.nodes if n.name == "input_ids")
    environment = size.node.shape_env
    environment.var_to_range[size.node.expr] = ValueRanges(MIN_STEP_TOKENS, MAX_STEP_TOKENS)
    environment._update_version_counter()
