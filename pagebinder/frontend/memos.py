"""Tables that a model keeps and makes again when a sequence has another length, or is longer: they are memos.

    if T != self.length: self.length, self.cos = T, table(T)              served: made in the graph
    if self.mask is None or self.mask.shape[0] < T: self.mask = ...       served
    if T not in self.cache: self.cache[T] = table(T)                      served, names as keys, too
    self.total += T; out = x + self.last; self.last = x[0, -1]            refused, see python_state.py

What calls leave are memos if it is made of a call's length alone, and if what the model computes does not depend on
it. Of the second, the real model is run: at three lengths, each after each, with other ids, results are those of a
first call, bit for bit, and so is what it leaves. Of the first, the trace is proof (memo_trace.py).

The trace begins with memos that are emptied, so that it makes them all, whatever calls have filled them with. Emptied
so, the model must compute the same, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagebinder.frontend.layer_observer import written_operands
from pagebinder.frontend.memo_state import (
    NotAMemo,
    Path,
    changed,
    empty,
    equal,
    put,
    same_bits,
    state_of,
    tensors_of,
    value_at,
)
from pagebinder.frontend.own_code import is_known
from pagebinder.frontend.python_state import MISSING, Change, evaluation_mode, put_back, refused_changes
from pagebinder.frontend.size_keys import differ_in_numbers
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import storage_of

LENGTHS = ((7, 97, 33), (5, 23, 11), (3, 7, 5))  # in tokens; the first whose longest the model takes
LONGER, LONGEST = 9, 256  # than what a trace ended at, and up to how many tokens a call is made for that
ORDER = (0, 0, 1, 1, 2, 2, 0, 2, 1, 0)  # each length after each
# What numbers and tensors become, as code asks: T > length or mask.shape[0] < T; mask is None; length is None.
EMPTY = (
    (True, lambda tensor: tensor.new_empty([0] * tensor.dim())),
    (True, lambda tensor: None),
    (False, lambda tensor: None),
    (True, lambda tensor: tensor),
)


@dataclass(frozen=True)
class Memos:
    """Of a model: what its memos are when they are emptied, and by its length what a call leaves in them then.

    `written`: places that hold what is made of tokens; nothing may read it.
    """

    emptied: dict[Path, Any]
    left: dict[int, dict[Path, Any]]
    written: frozenset[Path]


def find_memos(source: ModelSource, wrapper: torch.nn.Module, ended_at: int | None) -> Memos | None:
    """Run `wrapper`, which calls the source's module with flat ids and positions, and put all back.

    Args:
        ended_at: up to how many tokens a graph holds that was traced without this.
    Returns:
        None: calls change nothing, or not only memos, or there are no values to run with.
    """
    model = source.module
    if any(t.is_meta for t in model.parameters()) or is_known(model):
        return None
    lengths = LENGTHS
    if ended_at is not None and ended_at + LONGER <= LONGEST:
        lengths = ((LENGTHS[0][0], max(ended_at + LONGER, LENGTHS[0][1]), LENGTHS[0][2]), *LENGTHS)
    with put_back(model), evaluation_mode(model), torch.no_grad():
        for some in lengths:
            runs = _Runs(model, wrapper, source, [min(n, source.max_model_len) for n in some])
            if runs.takes_longest():
                try:
                    return runs.memos()
                except NotAMemo:
                    return None
    return None


def refuse_changes_of_call(
    model: torch.nn.Module, wrapper: torch.nn.Module, args: list[torch.Tensor]
) -> None:
    """For a graph that does not show what a call changes. Raises CaptureError: it changes what the model holds."""
    if any(t.is_meta for t in model.parameters()) or is_known(model):
        return
    quiet = contextlib.suppress(
        Exception
    )  # a write into a tensor that is kept; the graph has it, for the audit
    with put_back(model), evaluation_mode(model), torch.no_grad():
        before = state_of(model)
        with quiet, _NoWrites(_storages(model)):
            wrapper(*args)
        values = changed(before, state_of(model))
    if values:
        names = {path: ".".join(map(str, (p for p in path[1:] if p != "buffer"))) for path in values}
        raise refused_changes(
            model,
            [Change(p[0], names[p], value_at(before, p), now) for p, now in sorted(values.items(), key=str)],
        )


class _Runs:
    """Calls of a model with two sequences of ids for each length."""

    def __init__(
        self, model: torch.nn.Module, wrapper: torch.nn.Module, source: ModelSource, lengths: list[int]
    ) -> None:
        self.model, self.wrapper, self.lengths = model, wrapper, lengths
        generator = torch.Generator().manual_seed(0)
        draw = [torch.randint(source.vocab_size, (2, n), generator=generator, device="cpu") for n in lengths]
        self.ids = {n: ids.to(source.device) for n, ids in zip(lengths, draw)}
        self.start = state_of(model)

    def takes_longest(self) -> bool:
        try:
            with put_back(self.model):
                self._call(max(self.lengths))
        except NotAMemo:
            return False
        return True

    def memos(self) -> Memos:
        """Raises NotAMemo: results or what is left depend on more than a call's length."""
        first = {(n, w): self._first(n, w) for n in self.lengths for w in (0, 1)}
        touched = frozenset(path for _, left in first.values() for path in left)
        if not touched:
            raise NotAMemo("nothing changes")
        left = {
            key: {p: values.get(p, value_at(self.start, p)) for p in touched}
            for key, (_, values) in first.items()
        }
        written = frozenset(
            p for p in touched for n in self.lengths if not equal(left[n, 0][p], left[n, 1][p], same_bits)
        )
        if not all(isinstance(left[n, 0][p], torch.Tensor) for p in written for n in self.lengths):
            raise NotAMemo("it is made of tokens, and no tensor")
        results = {key: result for key, (result, _) in first.items()}
        self._require_same_in_any_order(results, {n: left[n, 0] for n in self.lengths}, written)
        last = {p: left[self.lengths[0], 0][p] for p in written}
        for emptied in self._emptied(touched - written, last):
            try:
                return Memos(emptied, self._left_by_emptied(emptied, results, written), written)
            except NotAMemo:
                continue
        raise NotAMemo("it cannot be emptied")

    def _first(self, length: int, which: int) -> tuple[torch.Tensor, dict[Path, Any]]:
        with put_back(self.model):
            return self._call(length, which), changed(self.start, state_of(self.model))

    def _require_same_in_any_order(self, results: dict, left: dict, written: frozenset[Path]) -> None:
        seen: list[dict[Path, Any]] = []
        with put_back(self.model):
            for number, place in enumerate(ORDER):
                length, which = self.lengths[place], number % 2
                if not same_bits(self._call(length, which), results[length, which]):
                    raise NotAMemo("results depend on the calls before")
                seen.append(left[length])
                now = state_of(self.model)
                for path in (left[length].keys() | changed(self.start, now).keys()) - written:
                    value = value_at(now, path)
                    if not any(path in values and equal(value, values[path], same_bits) for values in seen):
                        raise NotAMemo(f"{path} depends on the calls before")

    def _emptied(
        self, memos: frozenset[Path], written: dict[Path, torch.Tensor]
    ) -> Iterator[dict[Path, Any]]:
        of_written = {path: torch.zeros_like(tensor) for path, tensor in written.items()}
        for zeros, of_tensor in EMPTY:
            places = {path: self.start.get(path) for path in memos | self._of_other_lengths(memos)}
            yield of_written | {
                path: MISSING if place is None or place.is_entry else empty(place.value, zeros, of_tensor)
                for path, place in places.items()
            }

    def _of_other_lengths(self, memos: frozenset[Path]) -> set[Path]:
        """Entries of dicts by lengths that earlier calls had."""
        return {
            path
            for path, place in self.start.items()
            if place.is_entry
            and any(path[:-1] == m[:-1] and differ_in_numbers(path[-1], m[-1]) for m in memos)
        }

    def _left_by_emptied(self, emptied: dict, results: dict, written: frozenset[Path]) -> dict[int, dict]:
        """What each length leaves, if results are the same with memos that were emptied."""
        left = {}
        for length in self.lengths:
            with put_back(self.model):
                put(self.model, emptied)
                before = state_of(self.model)
                if not same_bits(self._call(length), results[length, 0]):
                    raise NotAMemo("another result from emptied memos")
                values = changed(before, state_of(self.model))
                left[length] = {path: value for path, value in values.items() if path not in written}
        return left

    def _call(self, length: int, which: int = 0) -> torch.Tensor:
        """Raises NotAMemo: the model does not take it, or would write into what it keeps."""
        ids = self.ids[length][which]
        try:
            with _NoWrites(_storages(self.model)):
                return self.wrapper(ids.clone(), torch.arange(length, device=ids.device))
        except Exception as error:  # whatever its code raises
            raise NotAMemo("a call failed") from error


def _storages(model: torch.nn.Module) -> set[int]:
    """Of all tensors that it holds."""
    held = [t for place in state_of(model).values() for t in tensors_of(place.value)]
    return {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers(), *held)}


class _NoWrites(TorchDispatchMode):
    """Nothing is written into these storages."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(storage_of(tensor) in self.storages for tensor in written_operands(func, args, kwargs)):
            raise NotAMemo("written in place")
        return func(*args, **kwargs)
