"""How a module that is not transformers' is called: what its forward takes besides token ids, by its signature.

    forward                                                      called with
    (input_ids, position_ids), (x, y), (*args)               ids, positions
    (input_ids, attention_mask=None, position_ids=None)      ids, position_ids=positions
    (positions, input_ids)                                   input_ids=ids, positions=positions
    (input_ids), (input_ids, mask=None), (x, causal=True)    ids: it counts rows (recognise/row_positions.py)
    (tokens, start_pos)                                      ids, start_pos=0
    (input_ids, cache)                                       refused
    (x) that fails for [1, T] and takes [T]                  flat ids (gpt-oss as it was published)
    (*args, **kwargs) around a transformers model            input_ids=ids, position_ids=positions, use_cache=False
    (*args, **kwargs) around another module                  as that is called

A second parameter means positions unless its name, or its default, says that it is something else, or it fails with
them, or it computes something else when it is left out (refused): a mask made of positions computes wrong tokens
without any error. A parameter that is named so is given 0, 1, 2, ... whatever the module does without it, unless it
fails with them: they stand for rows of a cache that is not there (litgpt).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import weakref
from dataclasses import dataclass

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.plain_modules import logits_in
from pagebinder.frontend.wrappers import transformers_inside

GUESS_TOKENS = 5
MORE_TOKENS = (64, 256)  # where they are taken: what is clamped, or wraps around, is the same of few
IDS = "input_ids"
POSITIONS = ("position_ids", "positions", "pos_ids", "input_pos", "pos")
STARTS = ("start_pos", "start_position", "start_index")  # tokens that came before, of which it keeps K and V
# Parts of the names of what is no position.
SOMETHING_ELSE = re.compile(
    r"mask|cache|past|type|segment|label|target|embed|state|hidden|memory|encoder|decoder|loss|return|output|start|"
    r"length|lens|seqlens|image|pixel|temperature|config|kwargs"
)


@dataclass(frozen=True)
class PlainCall:
    """Names of the parameters that take ids and positions; None: by order.

    `gives_positions`: does it take any? `is_guess`: by no name, and it need not be given them. `without_cache`: is
    use_cache=False said? `starts`: a parameter without a default that takes 0, as nothing came before. `flat`: are
    ids and positions [T]?
    """

    ids: str | None = None
    positions: str | None = None
    gives_positions: bool = True
    is_guess: bool = False
    without_cache: bool = False
    starts: str | None = None
    flat: bool = False

    def __call__(self, module: torch.nn.Module, input_ids: torch.Tensor, positions: torch.Tensor | None):
        """What `module` returns for ids and positions [1, T]."""
        if self.flat:
            input_ids, positions = input_ids[0], None if positions is None else positions[0]
        named: dict = {"use_cache": False} if self.without_cache else {}
        if self.starts is not None:
            named[self.starts] = 0
        if self.gives_positions and self.positions is not None:
            named[self.positions] = positions
        if self.ids is not None:
            named[self.ids] = input_ids
            return module(**named)
        if self.gives_positions and self.positions is None:
            return module(input_ids, positions, **named)
        return module(input_ids, **named)


def takes_positions(module: torch.nn.Module) -> bool:
    """Has the forward of this transformers model `position_ids`?"""
    return "position_ids" in inspect.signature(type(module).forward).parameters


def plain_call(module: torch.nn.Module) -> PlainCall:
    """How to call `module`. Raises CaptureError: it needs more than ids and positions."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # no Python function
        return PlainCall()
    takes = _Parameters.of(signature)
    inner = transformers_inside(module) if takes.any_order or takes.any_name else None
    children = list(module.children())
    if takes.anything and inner is None and len(children) == 1:
        return plain_call(children[0])
    ids = (
        IDS if takes.by_order[:1] != [IDS] and (IDS in takes.by_name or (inner and takes.anything)) else None
    )
    positions = next((name for name in POSITIONS if name in takes.by_name), None)
    if positions is None and inner is not None and takes.any_name and takes_positions(inner):
        positions = POSITIONS[0]
    is_second = positions is None and ids is None and inner is None and takes.second_is_positions(signature)
    if ids is None and takes.by_order[1:2] == [positions]:
        positions, is_second = None, True
    needed = {name for name in takes.by_name if signature.parameters[name].default is inspect.Parameter.empty}
    call = PlainCall(
        ids=ids,
        positions=positions,
        gives_positions=is_second or positions is not None,
        is_guess=is_second and takes.second_is_optional(signature),
        without_cache="use_cache" in takes.by_name or bool(inner and takes.any_name and _takes_cache(inner)),
        starts=next((name for name in STARTS if name in needed), None),
        flat=type(module) in _takes_flat_ids,
    )
    _refuse_others(module, signature, takes, call)
    return call


_takes_flat_ids: weakref.WeakSet[type] = weakref.WeakSet()


@torch.no_grad()
def takes_flat_ids(module: torch.nn.Module) -> bool:
    """Does it fail for ids [1, T] and return [T, V] for ids [T]? Then `plain_call` knows that from now on."""
    if type(module) in _takes_flat_ids or any(p.is_meta for p in module.parameters()):
        return False
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    ids, call = torch.zeros(1, GUESS_TOKENS, dtype=torch.int64, device=device), plain_call(module)
    positions = torch.arange(GUESS_TOKENS, device=device)[None]
    with contextlib.suppress(Exception):
        call(module, ids, positions)
        return False
    with contextlib.suppress(Exception):
        logits = logits_in(
            dataclasses.replace(call, flat=True)(module, ids, positions), type(module).__name__
        )
        if logits.dim() == 2 and len(logits) == GUESS_TOKENS:
            _takes_flat_ids.add(type(module))
            return True
    return False


@dataclass(frozen=True)
class _Parameters:
    """Names of the parameters that are given by order and by name, and whether it has *args and **kwargs."""

    by_order: list[str]
    by_name: set[str]
    any_order: bool
    any_name: bool

    @classmethod
    def of(cls, signature: inspect.Signature) -> _Parameters:
        kinds = {p.name: p.kind for p in signature.parameters.values()}
        either, order = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
        name = inspect.Parameter.KEYWORD_ONLY
        return cls(
            by_order=[n for n, kind in kinds.items() if kind in (order, either)],
            by_name={n for n, kind in kinds.items() if kind in (name, either)},
            any_order=inspect.Parameter.VAR_POSITIONAL in kinds.values(),
            any_name=inspect.Parameter.VAR_KEYWORD in kinds.values(),
        )

    @property
    def anything(self) -> bool:
        """Is it forward(*args, **kwargs)?"""
        return self.any_order and self.any_name and not self.by_order

    def second_is_positions(self, signature: inspect.Signature) -> bool:
        if len(self.by_order) < 2:
            return self.any_order
        second = signature.parameters[self.by_order[1]]
        told_else = isinstance(second.default, (bool, int, float, str))
        return not told_else and not SOMETHING_ELSE.search(second.name.lower())

    def second_is_optional(self, signature: inspect.Signature) -> bool:
        if len(self.by_order) < 2:
            return True
        second = signature.parameters[self.by_order[1]]
        return second.default is not second.empty and second.name not in POSITIONS


@torch.no_grad()
def checked_call(module: torch.nn.Module, call: PlainCall, vocab_size: int) -> PlainCall:
    """Positions by order may be left out, then they count from 0: both ways must compute the same, of few tokens and
    of many. Named ones are left out where the module fails with them alone.

    Returns:
        `call`, or one without positions: the module fails with them.
    Raises:
        CaptureError: they do not compute the same, so the parameter may be anything.
    """
    if any(p.is_meta for p in module.parameters()) or not (call.is_guess or _may_leave_out(module, call)):
        return call
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    ids = (torch.arange(GUESS_TOKENS, device=device) % vocab_size)[None]
    without = dataclasses.replace(call, gives_positions=False, is_guess=False)
    if not call.is_guess:
        return without if _fails(call, module, ids) and not _fails(without, module, ids) else call
    if _fails(without, module, ids):
        return call  # it needs them
    if _fails(call, module, ids):
        return without
    if all(_same(call, without, module, n, vocab_size) for n in (GUESS_TOKENS, *MORE_TOKENS)):
        return call
    kind = type(module).__name__
    second = _Parameters.of(inspect.signature(module.forward)).by_order[1:2]
    what = f"`{second[0]}`" if second else "its second argument"
    raise CaptureError(
        f"{kind}.forward computes something else when {what} is given positions than without it: it is not known "
        "what that is. Name the parameter for positions position_ids; give what is something else by keyword "
        "alone (after a *)."
    )


@torch.no_grad()
def width_of_logits(module: torch.nn.Module, call: PlainCall) -> int | None:
    """How many token ids there are by what the module computes, to try it with; None: it does not take so many."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    ids, positions = (torch.arange(GUESS_TOKENS, device=device)[None] for _ in range(2))
    for how in (call, dataclasses.replace(call, gives_positions=False)):
        with contextlib.suppress(Exception):  # whatever its code raises
            width = logits_in(how(module, ids * 0, positions), type(module).__name__).shape[-1]
            how(module, width - 1 - ids % width, positions)
            return width
    return None


def _may_leave_out(module: torch.nn.Module, call: PlainCall) -> bool:
    """Is it given positions, in a parameter that has a default?"""
    parameters = list(inspect.signature(module.forward).parameters.values()) if call.gives_positions else []
    named = [p for p in parameters if p.name == call.positions] if call.positions else parameters[1:2]
    return any(p.default is not p.empty for p in named)


def _fails(call: PlainCall, module: torch.nn.Module, ids: torch.Tensor) -> bool:
    try:
        logits_in(
            call(module, ids, torch.arange(ids.shape[1], device=ids.device)[None]), type(module).__name__
        )
    except Exception:  # whatever its code raises
        return True
    return False


def _same(
    call: PlainCall, without: PlainCall, module: torch.nn.Module, num_tokens: int, vocab_size: int
) -> bool:
    """Is the same computed with positions and without? So it is said where it is not known: where the module does not
    take so many tokens, or computes something else each time."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    positions, kind = torch.arange(num_tokens, device=device)[None], type(module).__name__
    try:
        given, alone, again = (
            logits_in(c(module, positions % vocab_size, positions), kind) for c in (call, without, without)
        )
    except Exception:  # whatever its code raises
        return True
    same = alone.shape == given.shape and torch.allclose(alone, given, 1e-2, 1e-3)
    return same or not torch.equal(alone, again)


def _takes_cache(inner: torch.nn.Module) -> bool:
    parameters = inspect.signature(type(inner).forward).parameters.values()
    return any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in parameters)


def _refuse_others(
    module: torch.nn.Module, signature: inspect.Signature, takes: _Parameters, call: PlainCall
) -> None:
    """Raises CaptureError: parameters without a default are given nothing."""
    num_by_order = 0 if call.ids else 1 + (call.gives_positions and call.positions is None)
    given = {*takes.by_order[:num_by_order], call.ids, call.positions, call.starts}
    optional = {p.name for p in signature.parameters.values() if p.default is not p.empty}
    needed = [
        name for name in signature.parameters if name in {*takes.by_order, *takes.by_name} - optional - given
    ]
    if needed:
        raise CaptureError(
            f"{type(module).__name__}.forward takes {', '.join(needed)} with every call, and it is given token ids "
            f"and positions ({', '.join(POSITIONS)}) alone: give the others a default."
        )
