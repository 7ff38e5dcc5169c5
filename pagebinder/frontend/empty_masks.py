"""Branches of a model's code that leave out work where a mask chooses nothing.

    if mask.any():                               traced as if it chose something; harmless, as nothing is done
        y[mask] += expert(x[mask])               to no rows
    else: y = y + 1                              refused

A graph has one way for all values. While it is traced, `mask.any()` is answered with yes, and the question left in
the graph as an assertion, for `chosen_rows.py` to see that the mask is one of rows. Whether the other way does
nothing is not seen in a trace: the source is run with short inputs, as it is and with yes to every question. Both
must compute the very same numbers, and each question must have had no for an answer, or it is not known.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch.fx import Node

from pagebinder.errors import CaptureError
from pagebinder.frontend.source import ModelSource
from pagebinder.frontend.weight_values import known_by_weights
from pagebinder.graph_tools import aten, is_call

MARK = "pagebinder: a mask that chooses something"
MOST_RUNS = 64
LENGTHS = (1, 2, 1, 3)  # of few tokens most experts have none
PLAIN = (torch.Tensor, torch.nn.Parameter)  # which are not traced
_TORCH = os.path.dirname(torch.__file__) + os.sep


@contextlib.contextmanager
def asked_of_masks(answer: Callable[[torch.Tensor, str], bool]) -> Iterator[None]:
    """Code outside of torch that makes a bool of `mask.any()` is given answer(the tensor, "file:line")."""
    whole: dict[int, torch.Tensor] = {}  # kept, so that no other tensor gets its id

    def any_of(ask_any):
        def any_in(*args, **kwargs):
            result = ask_any(*args, **kwargs)
            if len(args) == 1 and not kwargs and isinstance(result, torch.Tensor):
                whole[id(result)] = result
            return result

        return any_in

    ask = torch.Tensor.__bool__

    def asked(self) -> bool:
        if type(self) not in PLAIN and (known := known_by_weights(self)) is not None:
            return known
        frame = sys._getframe(1)
        if id(self) not in whole or frame.f_code.co_filename.startswith(_TORCH):
            return ask(self)
        return answer(self, f"{'/'.join(frame.f_code.co_filename.split(os.sep)[-3:])}:{frame.f_lineno}")

    with contextlib.ExitStack() as undo:
        for holder, name, new in (
            (torch.Tensor, "any", any_of(torch.Tensor.any)),
            (torch, "any", any_of(torch.any)),
            (torch.Tensor, "__bool__", asked),
        ):
            if name in vars(holder):
                undo.callback(setattr, holder, name, vars(holder)[name])
            else:
                undo.callback(delattr, holder, name)
            setattr(holder, name, new)
        yield


@contextlib.contextmanager
def taken_as_not_empty(places: list[str], *, hidden: bool = False) -> Iterator[None]:
    """While a model is traced: every mask chooses something. Sets `places` to where code asks ("file:line").

    `hidden`: dynamo reads the model's code itself, and would read ours; so nothing is answered.
    """
    places.clear()
    if hidden:
        yield
        return

    def answer(mask: torch.Tensor, place: str) -> bool:
        if type(mask) in PLAIN:
            return mask.item()
        aten._assert_async.msg(mask, MARK)
        places.append(place)
        return True

    with asked_of_masks(answer):
        yield


def mask_of_question(node: Node) -> Node | None:
    """The mask that a call asks about, if it is a question."""
    if not is_call(node, aten._assert_async.msg) or node.args[1] != MARK:
        return None
    return node.args[0].args[0] if is_call(node.args[0], aten.any.default) else None


def require_harmless(
    places: list[str], source: ModelSource, wrapper: torch.nn.Module, examples: tuple[torch.Tensor, ...]
) -> None:
    """`wrapper` calls the source's module.

    Raises:
        CaptureError: what the model does where a mask chooses nothing is something, or is not known.
    """
    if not places:
        return
    name = type(source.module).__name__
    if any(t.is_meta for t in (*wrapper.parameters(), *examples)):
        _refuse(name, places[0], "that cannot be told of weights without values")
    seen = [False] * len(places)
    for inputs in _few_tokens(examples, source.vocab_size):
        try:
            expected, got, answers = _both_ways(wrapper, inputs, places)
        except Exception as error:
            _refuse(name, places[0], f"with no rows there is an error ({type(error).__name__}: {error})")
        if len(answers) != len(places):
            _refuse(name, places[0], "it asks more, or less, than when it was traced")
        if not torch.equal(expected.nan_to_num(), got.nan_to_num()):
            at = next((place for place, answer in zip(places, answers) if not answer), places[0])
            _refuse(name, at, "it computes something else then than with no rows")
        seen = [before or not answer for before, answer in zip(seen, answers)]
        if all(seen):
            return
    _refuse(name, places[seen.index(False)], f"that did not happen in {MOST_RUNS} runs with few tokens")


def _few_tokens(examples: tuple[torch.Tensor, ...], vocab_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    ids, *others = examples
    generator = torch.Generator().manual_seed(0)
    for run in range(MOST_RUNS):
        length = min(LENGTHS[run % len(LENGTHS)], len(ids))
        tokens = torch.randint(vocab_size, (length,), generator=generator, device="cpu").to(ids.device)
        yield tokens, *(other[:length] for other in others)


def _both_ways(
    wrapper: torch.nn.Module, inputs: tuple, places: list[str]
) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """What is computed as it is, and with yes to every question at these places; the true answers in the latter."""
    answers: list[bool] = []

    def yes(mask: torch.Tensor, place: str) -> bool:
        answer = bool(mask.item())
        if place in places:
            answers.append(answer)
        return answer or place in places

    expected = wrapper(*inputs)
    with asked_of_masks(yes):
        return expected, wrapper(*inputs), answers


def _refuse(name: str, place: str, why: str) -> None:
    raise CaptureError(
        f"{name} branches on whether a mask chooses anything ({place}), and it is not known to do nothing where it "
        f"does not: {why}. Leave the branch out: of no rows nothing is computed anyway."
    )
