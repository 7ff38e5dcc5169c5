"""Python values as JSON and back, for artefacts: no pickle, and no text that is evaluated.

    None, bool, int, float, str, list     as they are
    tuple                                 {"tuple": [...]}          and so on for the other tags below
    dataclass                             {"AttentionState": {field: value, ...}}

What has no tag is refused. Reading makes nothing but what the tables here name, and calls no constructor of a
record, so that what was checked and normalised once comes back bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pagebinder import config, report
from pagebinder.custom_ops.layer_state import LayerState
from pagebinder.errors import ArtefactError
from pagebinder.frontend.numbering import Numbering
from pagebinder.frontend.sentence_dir import SentenceRecipe
from pagebinder.frontend.source import EncoderFacts
from pagebinder.runtime.kv import alternatives, plan, specs, workload

TORCH_NAMES = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}


def _family(base: type) -> list[type]:
    """A class and all that derive from it."""
    return [base] + [c for child in base.__subclasses__() for c in _family(child)]


@functools.cache
def _records() -> dict[str, type]:
    """The dataclasses that an artefact may hold, by name."""
    single = (
        config.CompileConfig, report.CompileReport, report.PassResult, report.Match, report.Refusal,
        report.Certificate, report.VerifiedStep, report.ProviderChoice, plan.KVPlan, plan.LayerPage,
        specs.KVCacheGroup, alternatives.NextBest, alternatives.ConstraintCost, workload.Workload, EncoderFacts,
        Numbering, SentenceRecipe,
    )  # fmt: skip
    return {cls.__name__: cls for cls in (*single, *_family(LayerState), *_family(specs.KVCacheSpec))}


def to_json(value: Any, tag: Callable[[Any], dict | None] = lambda value: None) -> Any:
    """A value as JSON-ready data. `tag`: gives the tagged form of values that are only known to the caller.

    Raises:
        ArtefactError: a value of a type that has no form here.
    """
    known = tag(value)
    if known is not None:
        return known
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list):
        return [to_json(v, tag) for v in value]
    if dataclasses.is_dataclass(value) and type(value).__name__ in _records():
        fields = {f.name: to_json(getattr(value, f.name), tag) for f in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    form = _tagged(value, tag)
    if form is None:
        raise ArtefactError(
            f"an artefact cannot hold a {type(value).__module__}.{type(value).__name__}: {value!r:.80}"
        )
    return form


def _tagged(value: Any, tag: Callable) -> dict | None:
    for name, kind in TORCH_NAMES.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    match value:
        case tuple():
            return {"tuple": [to_json(v, tag) for v in value]}
        case frozenset():
            return {"frozenset": [to_json(v, tag) for v in sorted(value)]}
        case dict():
            return {"dict": [[to_json(k, tag), to_json(v, tag)] for k, v in value.items()]}
        case slice():
            return {"slice": [to_json(v, tag) for v in (value.start, value.stop, value.step)]}
        case complex():
            return {"complex": [value.real, value.imag]}
        case torch.device():
            return {"device": str(value)}
    return {"ellipsis": True} if value is ... else None


def from_json(data: Any, tags: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """The value of `to_json`'s data. `tags`: readers of the forms that the caller's `tag` made.

    Raises:
        ArtefactError: an unknown tag, or a record with fields that its class does not have here.
    """
    tags = tags or {}
    if isinstance(data, list):
        return [from_json(v, tags) for v in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ArtefactError(f"a value with {len(data)} tags: {sorted(data)[:5]}")
    ((name, content),) = data.items()
    if name in tags:
        return tags[name](content)
    if name in TORCH_NAMES:
        return _torch_name(name, content)
    if name in _READERS:
        return _READERS[name]([from_json(v, tags) for v in content] if isinstance(content, list) else content)
    return _record(name, content, tags)


def _torch_name(kind: str, name: str) -> Any:
    value = getattr(torch, str(name), None)
    if not isinstance(value, TORCH_NAMES[kind]):
        raise ArtefactError(f"torch has no {kind} {name!r}")
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "tuple": tuple,
    "frozenset": frozenset,
    "dict": dict,
    "slice": lambda parts: slice(*parts),
    "complex": lambda parts: complex(*parts),
    "device": torch.device,
    "ellipsis": lambda _: ...,
}


def _record(name: str, content: Any, tags: Mapping) -> Any:
    """A dataclass; a field that it has only got since takes its default."""
    cls = _records().get(name)
    if cls is None or not isinstance(content, dict):
        raise ArtefactError(f"unknown kind of value {name!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    without = [f for f in fields if f not in content and not _has_default(fields[f])]
    if unknown := [*(set(content) - set(fields)), *without]:
        raise ArtefactError(f"{name} has other fields here: {sorted(unknown)}")
    record = object.__new__(cls)
    for field in fields.values():
        value = from_json(content[field.name], tags) if field.name in content else _default(field)
        object.__setattr__(record, field.name, value)
    return record


def _has_default(field: dataclasses.Field) -> bool:
    return not (field.default is field.default_factory is dataclasses.MISSING)


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
