"""Branches and loops of a model's code that leave out work where a mask chooses nothing.

    if mask.any():                               traced as if it chose something; harmless, as nothing is done
        y[mask] += expert(x[mask])               to no rows
    else: y = y + 1                              refused

What is asked is found while the model is traced (mask_questions.py), and answered as if experts were chosen. Whether
the other way does nothing is not seen in a trace: the source is run with short inputs, and the program with the same.
Both must compute the same numbers, and each question must have had no for an answer, or it is not known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Interpreter, Node

from pagebinder.errors import CaptureError
from pagebinder.frontend.mask_questions import place_of, questions_in
from pagebinder.frontend.source import ModelSource
from pagebinder.frontend.tidy import ASSERTIONS
from pagebinder.graph_tools import is_call

MOST_RUNS = 64
LENGTHS = (1, 2, 1, 3)  # of few tokens most experts have none
MOST_DIFFERENT = 16  # units of rounding of the largest value: both run the same ops


def require_harmless(
    source: ModelSource, wrapper: torch.nn.Module, examples: tuple[torch.Tensor, ...], gm: GraphModule
) -> None:
    """`wrapper` calls the source's module, and `gm` is the program that was traced, with questions.

    Raises:
        CaptureError: what the model does where a mask chooses nothing is something, or is not known.
    """
    asking = _Asking(gm)
    first, name = next(iter(asking.seen)), type(source.module).__name__
    if any(t.is_meta for t in (*wrapper.parameters(), *examples)):
        _refuse(name, first, "that cannot be told of weights without values")
    for inputs in _few_tokens(examples, source.vocab_size):
        try:
            expected, got = wrapper(*inputs), asking.run(*inputs)
        except Exception as error:
            _refuse(name, first, f"with no rows there is an error ({type(error).__name__}: {error})")
        if not _is_same(got, expected):
            _refuse(name, asking.denied or first, "it computes something else then than with no rows")
        if all(asking.seen.values()):
            return
    never = next(node for node, was_seen in asking.seen.items() if not was_seen)
    _refuse(name, never, f"that did not happen in {MOST_RUNS} runs with few tokens")


class _Asking(Interpreter):
    """Runs a program. `seen`: of each question, whether a run denied it; `denied`: the first one of the last run."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.seen = dict.fromkeys(questions_in(gm.graph), False)
        self.denied: Node | None = None

    @torch.no_grad()
    def run(self, *args, **kwargs):
        self.denied = None
        return super().run(*args, **kwargs)

    def run_node(self, n: Node):
        if n in self.seen:
            if not self.env[n.args[0]]:
                self.seen[n] = True
                self.denied = self.denied or n
            return None
        return None if is_call(n, *ASSERTIONS) else super().run_node(n)


def _is_same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    got, expected = got.nan_to_num(), expected.nan_to_num()
    if torch.equal(got, expected) or not expected.is_floating_point():
        return torch.equal(got, expected)
    rounding = MOST_DIFFERENT * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return bool((got - expected).abs().max() <= rounding)


def _few_tokens(examples: tuple[torch.Tensor, ...], vocab_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    ids, *others = examples
    generator = torch.Generator().manual_seed(0)
    for run in range(MOST_RUNS):
        length = min(LENGTHS[run % len(LENGTHS)], len(ids))
        tokens = torch.randint(vocab_size, (length,), generator=generator, device="cpu").to(ids.device)
        yield tokens, *(other[:length] for other in others)


def _refuse(name: str, question: Node, why: str) -> None:
    raise CaptureError(
        f"{name} branches on whether a mask chooses anything ({place_of(question)}), and it is not known to do "
        f"nothing where it does not: {why}. Leave the branch out: of no rows nothing is computed anyway."
    )
