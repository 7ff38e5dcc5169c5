"""Which tensors of a GGUF file the weights of a model are made of, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend.checkpoint_tensors import counted
from pagebinder.frontend.gguf.architecture import (
    AS_STORED,
    EXPERTS,
    LAYER,
    WHOLE,
    Architecture,
    Rule,
    architecture_of,
)
from pagebinder.frontend.gguf.file import FLOATS, NUMBERS, GgufFile, GgufTensor
from pagebinder.frontend.gguf.options import Options
from pagebinder.frontend.gguf.weights import Source, weights_of

OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
PART = re.compile(r"(.+?)(?:\.(weight|bias))?")  # llama.cpp gives some weights no ending
ENDINGS = (".weight", ".scale")
NO_WEIGHTS = frozenset(NUMBERS) - frozenset(FLOATS) | {"Q8_1", "Q8_K"}
HEAD = "lm_head.weight"


class Place(NamedTuple):
    """Where a tensor belongs: `parameter`, the `number` of its rows among those of others; `part`: of its name."""

    parameter: str
    number: int
    part: str


@dataclass
class Sources:
    """`of`: what each parameter is made of. `unread`: tensors that no model of transformers needs."""

    of: dict[str, Source] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def sources_of(file: GgufFile, model: torch.nn.Module) -> Sources:
    """What the parameters of a model on the meta device are made of.

    Raises:
        CheckpointError: a tensor has no place in the model, or another shape; a parameter has no tensor.
    """
    architecture, config = architecture_of(file), model.config
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(model).items()}
    rules, unread = architecture.rules(config), _unread(file, architecture, config, shapes)
    found = _found(file, architecture, config, shapes, unread)
    sources = Sources(unread=tuple(sorted(unread)))
    for parameter, tensors in found.items():
        of_experts = f".{architecture.experts}." in parameter
        part = tensors[min(tensors)][1]
        source = sources.of[parameter] = Source(
            tuple(tensors[number][0] for number in sorted(tensors)),
            _rule(part, parameter, rules, architecture),
            of_experts=of_experts,
            alternate=architecture.experts_alternate and len(tensors) > 1,
            transposed=architecture.experts_alternate and of_experts and len(shapes[parameter]) == 3,
        )
        found_shape = _shape(file, parameter, source)
        if not _is_alike(found_shape, shapes[parameter]):
            raise CheckpointError(
                f"{file.path}: {parameter} is {list(found_shape)} there, and {list(shapes[parameter])} in the model "
                "that the file describes."
            )
    if HEAD in shapes and HEAD not in sources.of:
        table = (WHOLE | dict(architecture.whole))["token_embd"]
        sources.of[HEAD] = sources.of[f"{table}.weight"]
    some = {bias for bias in architecture.no_biases if any(name.endswith(bias) for name in sources.of)}
    needed = (n for n in shapes if not n.endswith(architecture.no_biases) or n.endswith(tuple(some)))
    if missing := [name for name in needed if name not in sources.of]:
        raise CheckpointError(f"{file.path} lacks {counted(missing)} of its model, for example {missing[0]}.")
    return sources


def _shape(file: GgufFile, parameter: str, source: Source) -> tuple[int, ...]:
    try:
        return source.shape_of_parameter
    except (TypeError, RuntimeError, IndexError) as error:  # of its rule: too few tensors, or other sizes
        sizes = ", ".join(str(list(tensor.shape)) for tensor in source.tensors)
        raise CheckpointError(f"{file.path}: {parameter} cannot be made of {sizes}.") from error


def _unread(
    file: GgufFile, architecture: Architecture, config, shapes: Mapping[str, tuple[int, ...]]
) -> frozenset[str]:
    """Tensors of the layers behind the last one that guess tokens; those that the architecture may leave."""
    options, rules = Options(file), architecture.rules(config)
    layers = {str(layer) for layer in range(options.num_layers, options["block_count"])}
    matches = ((name, OF_LAYER.fullmatch(name)) for name in file.tensors)
    guessing = {name for name, match in matches if match is not None and match[1] in layers}
    places = {
        name: _place(name, architecture, rules) for name in file.tensors.keys() & architecture.unread(config)
    }
    return frozenset(
        guessing | {name for name, place in places.items() if place is None or place.parameter not in shapes}
    )


def _found(
    file: GgufFile,
    architecture: Architecture,
    config,
    shapes: Mapping[str, tuple[int, ...]],
    unread: frozenset[str],
) -> dict[str, dict[int, tuple[GgufTensor, str]]]:
    """Parameter -> number -> (tensor, part of its name)."""
    found: dict[str, dict[int, tuple[GgufTensor, str]]] = {}
    rules = architecture.rules(config)
    for name, tensor in _tensors(file, architecture):
        if name in architecture.frequencies or name in unread:
            continue
        place = _place(name, architecture, rules)
        if place is None or place.parameter not in shapes:
            raise CheckpointError(
                f"{file.path}: nothing in a {config.model_type} of transformers is its {name}."
            )
        if tensor.kind in NO_WEIGHTS:
            raise CheckpointError(f"{file.path}: {name} is stored in {tensor.kind}, which no weights are.")
        others = found.setdefault(place.parameter, {})
        is_made = place.part in rules and rules[place.part].make is not None
        of_experts = f".{architecture.experts}." in place.parameter
        if place.number in others or not (
            is_made or all(_stack(tensor, other, of_experts) for other, _ in others.values())
        ):
            raise CheckpointError(f"{file.path}: {name} does not go with others of {place.parameter}.")
        others[place.number] = tensor, place.part
    return found


def _tensors(file: GgufFile, architecture: Architecture) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors by their names; of one that is several matrices each of them, its number in its name."""
    for name, tensor in file.tensors.items():
        owner = name.removesuffix(".weight")
        if owner not in architecture.stacked or len(tensor.shape) != 3:
            yield name, tensor
            continue
        for number, data in enumerate(tensor.data):
            yield f"{owner}.{number}.weight", GgufTensor(tensor.kind, tensor.shape[1:], data)


def _rule(part: str, parameter: str, rules: Mapping[str, Rule], architecture: Architecture) -> Rule:
    if part in rules:
        return rules[part]
    is_more = architecture.norms_are_one_more and parameter.endswith("norm.weight")
    return Rule(make=lambda weight: weight - 1) if is_more else AS_STORED


def _is_alike(shape: tuple[int, ...], of_parameter: tuple[int, ...]) -> bool:
    """But for a dimension of 1 that llama.cpp drops, in front (of gates) or behind the first (of convolutions)."""
    return of_parameter in (shape, (1, *shape), (*shape[:1], 1, *shape[1:]))


def _stack(one: GgufTensor, other: GgufTensor, of_experts: bool) -> bool:
    """May rows of one stand behind those of the other?"""
    sizes = {(tensor.shape[:of_experts], tensor.shape[of_experts + 1 :]) for tensor in (one, other)}
    return len(sizes) == 1


def _place(name: str, architecture: Architecture, rules: Mapping[str, Rule]) -> Place | None:
    whole = WHOLE | dict(architecture.whole)
    owner, kind = PART.fullmatch(name).groups()
    if owner in whole and kind is not None:
        return Place(f"{whole[owner]}.{kind}", 0, owner)
    stack, _, number = owner.rpartition(".")
    if stack in architecture.stacked:
        return Place(f"{whole[stack]}.{number}.weight", 0, stack)
    match = OF_LAYER.fullmatch(name)
    if match is None:
        return None
    layer, part = f"{architecture.base}.layers.{match[1]}", match[2]
    if part in architecture.names and part.endswith(ENDINGS):
        return Place(f"{layer}.{architecture.names[part]}", 0, part)
    part, kind = PART.fullmatch(part).groups("weight")
    if part in EXPERTS and part not in architecture.names:
        parameter, number = EXPERTS[part]
        ending = "" if kind == "weight" else "_bias"
        return Place(f"{layer}.{architecture.experts}.{parameter}{ending}", number, part)
    where = architecture.names.get(part, LAYER.get(part))
    if where is None:
        return None
    module, number = where if isinstance(where, tuple) else (where, 0)
    is_bare = part in rules and rules[part].is_bare
    return Place(f"{layer}.{module}" + ("" if is_bare else f".{kind}"), number, part)
