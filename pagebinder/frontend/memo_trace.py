"""A trace that makes a model's memos, and the proof that they are made of the number of tokens alone (memos.py).

self.length     an expression of the number of tokens, which at each length is what a call leaves there
self.cos        a tensor of the dtype and size that a call leaves, made of neither tokens nor what was there
self.built      what each call leaves there
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from pagebinder.errors import CaptureError
from pagebinder.frontend.limited_export import LATER
from pagebinder.frontend.memo_state import Path, changed, equal, holders, put, state_of, tensors_of, value_at
from pagebinder.frontend.memos import Memos, find_memos, refuse_changes_of_call
from pagebinder.frontend.python_state import MISSING, put_back, set_attribute
from pagebinder.frontend.size_keys import SIZES, SizeKey, SizeKeys
from pagebinder.frontend.source import ModelSource
from pagebinder.frontend.traced_values import node_of, nodes_behind
from pagebinder.graph_tools import storage_of

STRICT = "export strict"  # the route on which torch.export reads a model's code instead of running it


def past_memos(
    source: ModelSource,
    wrapper: torch.nn.Module,
    examples: list[torch.Tensor],
    export: Callable[..., tuple],
    decisions: Sequence = (),
) -> tuple:
    """What `export` returns: (program, route, .., limit or None), where memos or what calls change stood in the way
    once more with emptied memos.

    Args:
        wrapper: calls the source's module, with `examples`.
        export: takes a function as `traced_in_steady_state`, or nothing for that.
        decisions: which `export` adds to, see `weight_values.py`.
    Raises:
        CaptureError: as `export`; or calls change the model, in a way that its reading of the code does not show.
    """
    exported = refused = limit = None
    with put_back(source.module):
        try:
            *_, limit = exported = export()
            if exported[1].startswith(STRICT) or decisions:
                refuse_changes_of_call(source.module, wrapper, examples)
        except CaptureError as error:
            refused = error
    begins_later = exported is not None and exported[1].startswith(LATER)
    if refused is None and limit is None and not begins_later:
        return exported
    memos = find_memos(source, wrapper, limit) if len(examples) == 2 else None
    if memos is not None:
        with contextlib.suppress(CaptureError), put_back(source.module):
            *_, longer = again = export(functools.partial(traced_with_memos, memos))
            if limit is None or longer is None or longer > limit:
                return again
    if refused is not None and (memos is None or exported is None):
        raise refused
    return exported


def traced_with_memos(
    memos: Memos, model: torch.nn.Module, wrapper: torch.nn.Module, trace: Callable[[], ExportedProgram]
) -> ExportedProgram:
    """What `trace` returns, which traces `wrapper`, and that calls `model`; its memos are emptied before.

    Raises:
        CaptureError: the trace leaves something else than calls do, or reads what was there.
    """
    are_proven = []
    forward = wrapper.forward

    @functools.wraps(forward)
    def watched(*args, **kwargs):
        before = state_of(model)
        out = forward(*args, **kwargs)
        are_proven[:] = [_Trace(args, memos).leaves(changed(before, state_of(model)))]
        return out

    with put_back(model):
        put(model, memos.emptied)
        emptied = state_of(model)
        old = [t for path in memos.emptied for t in tensors_of(value_at(emptied, path))]
        entries = [path[:-1] for left in memos.left.values() for path in left]
        _take_sizes_as_keys(model, set(entries))
        with set_attribute(wrapper, "forward", watched):
            program = trace()
    if are_proven != [True] or _reads(program, old):
        raise CaptureError(f"{type(model).__name__} leaves something in its attributes that is no memo.")
    return program


class _Trace:
    """What a trace has left, if it was given `args`."""

    def __init__(self, args: tuple[torch.Tensor, ...], memos: Memos) -> None:
        self.given = {node_of(arg) for arg in args}
        num_tokens = args[0].shape[0]
        self.symbol = num_tokens.node.expr if isinstance(num_tokens, torch.SymInt) else None
        self.memos = memos

    def leaves(self, traced: dict[Path, Any]) -> bool:
        """Is it at each length what a call leaves?"""
        memos, written = self.memos.left, self.memos.written
        of_memos = {path: value for path, value in traced.items() if path not in written}
        if self.symbol is None or not all(self._is_of_length(value) for value in of_memos.values()):
            return False
        return all(self._leaves(of_memos, left, length) for length, left in memos.items())

    def _leaves(self, traced: dict[Path, Any], left: dict[Path, Any], length: int) -> bool:
        at_length = {self._at(path, length): value for path, value in traced.items()}
        if len(at_length) < len(traced) or at_length.keys() != left.keys():
            return False
        return all(self._is(value, left[path], length) for path, value in at_length.items())

    def _is_of_length(self, value: Any) -> bool:
        """Are its tensors made of no tokens?"""
        behind = [nodes_behind(tensor) for tensor in tensors_of(value)]
        return all(nodes is not None and not nodes & self.given for nodes in behind)

    def _at(self, key: Any, length: int) -> Any:
        """With the numbers that a traced path or key has at this length."""
        if isinstance(key, tuple):
            return tuple(self._at(part, length) for part in key)
        return self._number(key.expression, length) if isinstance(key, SizeKey) else key

    def _number(self, expression: Any, length: int) -> int | float | None:
        number = expression.subs(self.symbol, length)
        if number.free_symbols:  # it was read from a tensor
            return None
        return int(number) if number.is_integer else float(number)

    def _is(self, traced: Any, left: Any, length: int) -> bool:
        if isinstance(traced, SIZES):
            is_number = isinstance(left, (int, float)) and not isinstance(left, bool)
            return is_number and self._number(traced.node.expr, length) == left
        if isinstance(traced, torch.Tensor):
            sizes = [self._number(s.node.expr, length) if isinstance(s, SIZES) else s for s in traced.shape]
            is_tensor = isinstance(left, torch.Tensor) and list(left.shape) == sizes
            return is_tensor and (left.dtype, left.device) == (traced.dtype, traced.device)
        if isinstance(traced, tuple) and isinstance(left, tuple):
            return len(traced) == len(left) and all(self._is(a, b, length) for a, b in zip(traced, left))
        return equal(traced, left, lambda a, b: False)


def _take_sizes_as_keys(model: torch.nn.Module, paths: Iterable[Path]) -> None:
    """Dicts at these paths are replaced by such that take traced numbers as keys, wherever the model holds them."""
    for wanted in sorted(paths, key=len):
        held = next((h for path, h, _, is_dict in holders(model) if path == wanted and is_dict), None)
        if type(held) is not dict:
            continue
        replacement = SizeKeys(held)
        for _, holder, keys, _ in list(holders(model)):
            for key in keys:
                if holder.get(key, MISSING) is held:
                    holder[key] = replacement


def _reads(program: ExportedProgram, tensors: list[torch.Tensor]) -> bool:
    """Does something in the program read one of them?"""
    storages = {storage_of(tensor) for tensor in tensors}
    held = {**program.state_dict, **program.constants}
    held = {name: t for name, t in held.items() if isinstance(t, torch.Tensor) and storage_of(t) in storages}
    names = {spec.arg.name for spec in program.graph_signature.input_specs if spec.target in held}
    return any(node.users for node in program.graph.nodes if node.op == "placeholder" and node.name in names)
