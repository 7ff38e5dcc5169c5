"""What the inputs of an ONNX decoder mean, and the proof that its caches are nothing but caches.

A decoder is imported as what it computes for a whole sequence from its first token on, with nothing cached before:

    input_ids [b, L]                the tokens                b = 1, L = T
    position_ids [b, L]             their positions
    attention_mask [b, L + P]       ones: nothing is padded
    past [b, G, P, D]               P = 0, if it is joined with the new keys or values        "grows"
    past [b, G, S, D]               S = T, if they are written into it at their positions     "slots"

So a cache disappears: the keys of all tokens are the new ones. That is right if a later call sees the same keys from
its cache, which follows from the graph: a cache is read by one operator alone, which appends or writes the new rows,
and what that operator returns is given out as the next cache, under the name, or in the place, of the same one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pagebinder.errors import CaptureError
from pagebinder.frontend.onnx_file import OnnxGraph, OnnxNode, OnnxValue

ATTENTION_PAST = {4: 1, 5: 2}  # inputs of Attention that are caches -> outputs that are the next ones
WRITE_INDICES, NUM_KEYS = ("TensorScatter", 2), ("Attention", 6)
CONTRIB = "com.microsoft::"


@dataclass(frozen=True)
class Cache:
    """A cache among the inputs. kind: "grows" or "slots". axis: of tokens. present: the output that follows it."""

    value: OnnxValue
    kind: str
    axis: int
    present: str


@dataclass
class Inputs:
    """Names by meaning. zeros: where to begin to write; lengths: how many rows of a cache are filled."""

    ids: str
    logits: str
    positions: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)
    lengths: list[str] = field(default_factory=list)
    caches: dict[str, Cache] = field(default_factory=dict)


def inputs_of(graph: OnnxGraph) -> Inputs:
    """Sort a graph's inputs and outputs.

    Raises:
        CaptureError: one of them has no place in a decoder, or a cache is used for something else.
    """
    inputs = Inputs(ids=_ids_of(graph), logits=_logits_of(graph))
    for name, value in graph.inputs.items():
        if name == inputs.ids:
            continue
        if value.dtype.is_floating_point and len(value.shape or ()) > 3 and "mask" not in name:
            inputs.caches[name] = _cache_of(graph, value)
        else:
            _meaning_of(graph, value, inputs).append(name)
    for name in (inputs.ids, *inputs.positions, *inputs.masks):
        _require_dynamic(graph.inputs[name])
    _check_pairs(graph, list(inputs.caches.values()))
    return inputs


def _ids_of(graph: OnnxGraph) -> str:
    if "input_ids" in graph.inputs:
        return "input_ids"
    matrices = [
        v.name for v in graph.inputs.values() if not v.dtype.is_floating_point and len(v.shape or ()) == 2
    ]
    ids = [n for n in matrices if "mask" not in n and "position" not in n]
    if len(ids) != 1:
        raise CaptureError(
            f"{graph.path} has no input input_ids; its inputs are {', '.join(graph.inputs)}. A decoder takes ids "
            "[batch, length]; encoders, and decoders that read an encoder, cannot be imported."
        )
    return ids[0]


def _logits_of(graph: OnnxGraph) -> str:
    if "logits" in graph.outputs:
        return "logits"
    floats = [v for v in graph.outputs.values() if v.dtype.is_floating_point]
    others = [v.name for v in floats if len(v.shape or ()) != 4 and not v.name.startswith("present")]
    if len(others) != 1:
        raise CaptureError(f"{graph.path} has no output logits; its outputs are {', '.join(graph.outputs)}.")
    return others[0]


def _meaning_of(graph: OnnxGraph, value: OnnxValue, inputs: Inputs) -> list[str]:
    rank, name = len(value.shape or ()), value.name
    places = {(n.op, i) for n in graph.users.get(name, ()) for i, used in enumerate(n.inputs) if used == name}
    if places and places <= {WRITE_INDICES}:
        return inputs.zeros
    if places and places <= {NUM_KEYS}:
        return inputs.lengths
    if "position" in name and rank in (1, 2):
        return inputs.positions
    if "mask" in name and rank == 2:
        return inputs.masks
    if "mask" in name and rank > 2:
        raise CaptureError(
            f"The input {name} is a mask of {rank} dimensions, which says from outside which tokens see each other: "
            "export the model with its causal mask inside and attention_mask [batch, length]."
        )
    raise CaptureError(
        f"The input {name} ({str(value.dtype).removeprefix('torch.')}, shape {value.shape}) has no meaning here. A "
        "decoder takes input_ids, position_ids, attention_mask, and caches of keys and values. Embeddings in place "
        "of ids, states of an encoder and of recurrences cannot be imported."
    )


def _require_dynamic(value: OnnxValue) -> None:
    sizes = value.shape or ()
    if sizes and isinstance(sizes[-1], int):
        raise CaptureError(
            f"The input {value.name} has a fixed length of {sizes[-1]}: export the model with a dynamic one."
        )
    if len(sizes) > 1 and isinstance(sizes[0], int) and sizes[0] != 1:
        raise CaptureError(
            f"The input {value.name} has a fixed batch of {sizes[0]}: export the model with a dynamic one, or with 1."
        )


def _cache_of(graph: OnnxGraph, value: OnnxValue) -> Cache:
    """The proof that an input is a cache and nothing else."""
    users = [n for n in graph.users.get(value.name, ()) if n.op != "Shape"]
    if not users:
        raise CaptureError(
            f"The input {value.name} is read by no operator: it is no cache that attention uses."
        )
    if len(users) > 1:
        raise CaptureError(
            f"{value.name} is read in several places ({', '.join(map(str, users))}). A cache may only be joined with "
            "the new keys or values, once."
        )
    (user,) = users
    found = _read_by(user, value)
    if found is None and user.op.startswith(CONTRIB):
        raise CaptureError(
            f"{user}: ONNX Runtime's own operators are not read back. Export the model with those of the standard "
            "(pagebinder export: without --contrib), or compile the checkpoint that it was exported from."
        )
    if found is None:
        raise CaptureError(
            f"{user} reads {value.name}. A cache may only be the past of an Attention, the first part of a Concat "
            "with the new keys or values along its tokens, or what a TensorScatter writes them into."
        )
    kind, axis, present = found
    if present not in graph.outputs:
        raise CaptureError(
            f"{value.name} is joined with new rows by {user}, but the result is no output: what is cached could not "
            "be what attention sees."
        )
    if value.shape and isinstance(value.shape[axis], int):
        raise CaptureError(
            f"{user} joins {value.name} with new rows along dimension {axis}, whose size is fixed "
            f"({value.shape[axis]}): export the model with a dynamic number of cached tokens."
        )
    return Cache(value, kind, axis, present)


def _check_pairs(graph: OnnxGraph, caches: list[Cache]) -> None:
    """A caller gives an output back as the input of its name, or of its place: that must be the one it continues."""
    marks = [(_mark(cache.value.name), _mark(cache.present)) for cache in caches]
    for cache, (past, present) in zip(caches, marks, strict=True):
        if past[0] and present[0] and past != present:
            raise CaptureError(
                f"{cache.value.name} is continued by {cache.present}, which by its name is given back as another "
                "cache: what a layer sees would not be what it has cached."
            )
    if not all(past[0] and present[0] for past, present in marks):
        outputs = list(graph.outputs)
        order = [outputs.index(cache.present) for cache in caches]
        if order != sorted(order):
            names = ", ".join(cache.present for cache in caches)
            raise CaptureError(
                f"The caches {', '.join(cache.value.name for cache in caches)} are continued by {names}, which are "
                "not in that order among the outputs, and names do not say which belong together."
            )


def _mark(name: str) -> tuple[tuple[str, ...], str]:
    """(numbers, "key", "value" or "") in a cache's name: what an input and its output have in common."""
    name = name.replace("key_values", "").lower()
    kinds = [kind for kind in ("key", "value") if kind in name]
    return tuple(re.findall(r"\d+", name)), kinds[0] if len(kinds) == 1 else ""


def _read_by(user: OnnxNode, value: OnnxValue) -> tuple[str, int, str] | None:
    places, rank = [i for i, name in enumerate(user.inputs) if name == value.name], len(value.shape)
    if user.op == "Concat" and places == [0] and len(user.inputs) == 2:
        return "grows", user.attributes["axis"] % rank, user.outputs[0]
    if user.op == "TensorScatter" and places == [0]:
        linear = user.attributes.get("mode", "linear") == "linear"
        return ("slots", user.attributes.get("axis", -2) % rank, user.outputs[0]) if linear else None
    if user.op == "Attention" and len(places) == 1 and places[0] in ATTENTION_PAST and rank == 4:
        output = ATTENTION_PAST[places[0]]
        return "grows", 2, user.outputs[output] if len(user.outputs) > output else ""
    return None
