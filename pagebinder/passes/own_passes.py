"""A user's own passes (`CompileConfig.passes`): run like ours, and checked for what they leave behind.

    CompileConfig(passes={"fused": [fuse_squared_relu]})      a function GraphModule -> PassResult, in place

Behind each of them the graph must be whole: the same inputs, ops of torch or of a library of the user's, results of
the same sizes and dtypes. What new nodes stand for is found by running their fake kernels; so is what changed behind.
Values are the verifier's to judge (`CompileConfig.verify`), as for every pass.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import operator
import re
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from pagebinder.errors import PassError
from pagebinder.graph_tools import (
    attribute,
    attributes,
    device_of,
    fake_mode_of,
    finish,
    is_view_op,
    read_attribute,
    set_val,
    tensors,
    written_by,
)
from pagebinder.passes.manager import Pass, run_passes
from pagebinder.passes.trail import DECODER, Trail
from pagebinder.report import CompileReport, Match, PassResult, Refusal

FUNCTIONS = {operator.getitem, math.ceil, math.floor, math.trunc, torch.sym_max, torch.sym_min, torch.sym_not}
SAMPLED = 64  # values of a weight that are compared
# What results of ours are called that are no module of this room.
TAKEN = {"audit", "capture", "leaves", "experts", "attention"}


def run_own_passes(
    gm: GraphModule, level: str, passes: Mapping[str, Sequence[Pass]], report: CompileReport, trail: Trail, *,
    chain: str = DECODER, graph: str | None = None,
) -> list[PassResult]:  # fmt: skip
    """Run the passes that a user has for a level, and tell the report of those that said nothing.

    Args:
        graph: the level that the trail files them under, None: `level`.
    Raises:
        PassError: a pass answers something else than a PassResult, or leaves a graph that cannot be run in place of
            the one it was given. What a pass raises itself goes through, with a note that names it.
    """
    fingerprint = _whole if trail.keep == "full" else _sample
    own = tuple(
        functools.partial(_checked, run=run, level=level, fingerprint=fingerprint)
        for run in passes.get(level, ())
    )
    results = run_passes(gm, own, after=trail.after(graph or level, chain=chain))
    for result in results:
        if not result.matches and not result.refusals:
            did = "changed the graph and says of no place that it did" if result.changed else "found nothing"
            report.notes.append(
                f"{result.name}, a pass of your own on the {level} graph, {did}: no match, no refusal."
            )
    return results


def may_change(passes: Mapping[str, Sequence[Pass]], *levels: str) -> str:
    """What to add to an error about a graph of these levels that differs from its source."""
    own = [pass_name(run) for level in levels for run in passes.get(level, ())]
    return f", or a pass of your own ({', '.join(own)}) may change what it computes" if own else ""


def pass_name(run: Callable) -> str:
    """What a pass is called in messages: its function's name, or that of its class."""
    if isinstance(run, functools.partial):
        options = [*map(_literal, run.args), *(f"{k}={_literal(v)}" for k, v in run.keywords.items())]
        return f"{pass_name(run.func)}({', '.join(options)})"
    return getattr(run, "__name__", type(run).__name__)


def _literal(value: object) -> str:
    """repr, without the addresses of objects: it is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


Fingerprint = Callable[[torch.Tensor], bytes]


def _checked(gm: GraphModule, *, run: Pass, level: str, fingerprint: Fingerprint) -> PassResult:
    where = f"{pass_name(run)}, a pass of your own on the {level} graph,"
    before, inputs, results = {n: _call(n) for n in gm.graph.nodes}, _inputs(gm), _results(gm, where)
    fixed, uses = _fixed_sizes(gm), _uses_of_inputs(gm)
    weights = {n: (tensor, _version(tensor), fingerprint(tensor)) for n, tensor in attributes(gm).items()}
    try:
        result = run(gm)
    except Exception as error:
        error.add_note(f"(raised in {where} of CompileConfig.passes)")
        raise
    _check_answer(result, where)
    try:
        gm.graph.lint()
    except Exception as error:
        raise PassError(f"{where} leaves a graph that is not whole: {str(error).splitlines()[0]}") from error
    if _inputs(gm) != inputs:
        raise PassError(
            f"{where} changes the graph's inputs from {inputs} to {_inputs(gm)}: an engine gives a step's inputs by "
            "these names. Leave them, and their meta; what a pass adds is a constant (graph_tools.insert_constant)."
        )
    _check_weights(gm, weights, where, fingerprint)
    _check_order(gm, uses, where)
    for node in gm.graph.nodes:
        _check_call(node, where)
        _check_writes(node, where)
    result.changed = result.changed or {n: _call(n) for n in gm.graph.nodes} != before
    _find_values(gm, before, where)
    if now := _fixed_sizes(gm) - fixed:
        raise PassError(
            f"{where}, or a fake kernel of what it puts in, makes {', '.join(sorted(now))}, a number of tokens, one "
            "number for all sequences: do not ask for int(...) of a size, or whether it equals one."
        )
    if _results(gm, where) != results:
        raise PassError(f"{where} makes the graph return {_results(gm, where)} instead of {results}.")
    finish(gm)
    return result


def _check_answer(result: object, where: str) -> None:
    if not isinstance(result, PassResult):
        raise PassError(
            f"{where} returned a {type(result).__name__}: a pass changes the graph in place and returns a "
            "pagebinder.report.PassResult that says what it matched, what it refused, and why."
        )
    if not (_are_all(result.matches, Match) and _are_all(result.refusals, Refusal)):
        raise PassError(
            f"{where} answers with something else than lists of Match and Refusal (pagebinder.report)."
        )
    for one in (*result.matches, *result.refusals):
        wrong = [f.name for f in dataclasses.fields(one) if not isinstance(getattr(one, f.name), str)]
        if wrong:
            value = getattr(one, wrong[0])
            raise PassError(
                f"{where} answers with a {type(one).__name__} whose {wrong[0]} is a {type(value).__name__} and no "
                "text: graph_tools.describe(node) gives node and module_path."
            )
    flags = ("changed", "changes_numbers", "rounds_values", "rounds_activations", "mixes_tokens")
    if wrong := [flag for flag in flags if not isinstance(getattr(result, flag), bool)]:
        raise PassError(f"{where} answers with {wrong[0]}={getattr(result, wrong[0])!r}: use True or False.")
    name = result.name
    if not isinstance(name, str) or not name.isidentifier():
        raise PassError(
            f"{where} calls itself {name!r}: PassResult(name=...) takes a name like a function's."
        )
    if (
        name in TAKEN
        or importlib.util.find_spec(f"pagebinder.passes.{name}")
        or name.startswith("recognise_")
    ):
        raise PassError(
            f"{where} calls itself {name!r}, as one of Pagebinder's does: give it a name of its own."
        )


def _are_all(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _check_weights(
    gm: GraphModule, before: Mapping[str, tuple], where: str, fingerprint: Fingerprint
) -> None:
    """Weights are the model's own, and constants those of the passes before: other values are other attributes."""
    remedy = "read a constant of another name instead (graph_tools.insert_constant, insert_derived)."
    for name, (tensor, version, sample) in before.items():
        if _attribute(gm, name) is not tensor:
            raise PassError(
                f"{where} puts another tensor in the place of {name!r}, which others read, too: {remedy}"
            )
        if _version(tensor) != version or fingerprint(tensor) != sample:
            raise PassError(
                f"{where} has written into {name!r}, the model's own tensor, which is changed now: {remedy}"
            )


def _version(tensor: torch.Tensor) -> int:
    """Counts writes; those of inference tensors are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensor: torch.Tensor) -> bytes:
    """Of some values: writes through `.data` are not counted. Empty where there is nothing to read."""
    if tensor.is_meta or not tensor.numel():
        return b""
    places = torch.arange(0, tensor.numel(), -(-tensor.numel() // SAMPLED), device=tensor.device)
    values = tensor.detach()[torch.unravel_index(places, tensor.shape)] if tensor.dim() else tensor.detach()
    return _as_bytes(values).tobytes()


def _whole(tensor: torch.Tensor) -> bytes:
    """Of all values."""
    return b"" if tensor.is_meta else zlib.crc32(_as_bytes(tensor.detach())).to_bytes(4)


def _as_bytes(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def _check_writes(node: Node, where: str) -> None:
    """A graph writes to what it is given, caches, and never to a weight or a view of one."""
    for written in map(_viewed, written_by(node)):
        if written.op == "get_attr":
            raise PassError(
                f"{where} leaves {node.name}, a call of {node.target} that writes into {written.target!r} with every "
                "step: use an op that returns a new tensor."
            )


Uses = dict[str, tuple[set[Node], list[Node]]]


def _uses_of_inputs(gm: GraphModule) -> Uses:
    """For each input by name, the calls that write to it, and all that read or write it, in order."""
    uses: Uses = {n.target: (set(), []) for n in gm.graph.nodes if n.op == "placeholder"}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        written = {w.target for w in map(_viewed, written_by(node)) if w.op == "placeholder"}
        for name in {n.target for n in map(_viewed, node.all_input_nodes) if n.op == "placeholder"}:
            uses[name][1].append(node)
            if name in written:
                uses[name][0].add(node)
    return uses


def _check_order(gm: GraphModule, before: Uses, where: str) -> None:
    """Caches are written by somebody, before the calls that read what is written; nothing else that a step is given
    is written to."""
    for name, (writers, now) in _uses_of_inputs(gm).items():
        writers_before, order = before[name]
        if writers and not writers_before:
            writer = next(iter(writers)).name
            raise PassError(
                f"{where} leaves {writer}, which writes into {name}: an input that nobody writes."
            )
        if writers_before and not writers:
            writer = next(iter(writers_before)).name
            raise PassError(
                f"{where} leaves nothing that writes to {name}, which {writer} did: what puts a step's state there "
                "says so in its schema (mutates_args)."
            )
        places, places_before = ({node: i for i, node in enumerate(nodes)} for nodes in (now, order))
        for writer in writers & writers_before:
            for other in places.keys() & places_before.keys() - {writer}:
                if (places[other] < places[writer]) != (places_before[other] < places_before[writer]):
                    raise PassError(
                        f"{where} moves {other.name} to the other side of {writer.name}, which writes to {name} "
                        "that it uses."
                    )


def _viewed(node: Node) -> Node:
    """What a node is a view of, or itself."""
    while node.op == "call_function" and is_view_op(node.target) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _check_call(node: Node, where: str) -> None:
    literals = []
    map_aggregate((node.args, node.kwargs), literals.append)
    if any(isinstance(value, torch.Tensor) for value in literals):
        raise PassError(
            f"{where} leaves {node.name} with a tensor as an operand: use graph_tools.insert_constant."
        )
    if node.op in ("call_module", "call_method"):
        what = f"{node.target!r} as a {node.op.removeprefix('call_')}"
    elif node.op == "call_function" and not (
        isinstance(node.target, torch._ops.OpOverload) or node.target in FUNCTIONS or _is_of_sizes(node)
    ):
        what = getattr(node.target, "__name__", str(node.target))
    else:
        return
    raise PassError(
        f"{where} leaves {node.name}, a call of {what}: a graph calls ops by their overloads, "
        "torch.ops.aten.relu.default for example, or torch.ops.mylib.op.default of your own."
    )


def _is_of_sizes(node: Node) -> bool:
    """Does a call compute with sizes alone, by a function of Python?"""
    return not any(tensors(n) for n in node.all_input_nodes) and node.target.__module__ in (
        "_operator",
        "math",
        "torch",
    )


def _find_values(gm: GraphModule, before: Mapping[Node, tuple], where: str) -> None:
    """meta["val"] of what is new, and of what reads something that has changed its size, dtype or strides."""
    changed: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr" and (before.get(node) != _call(node) or "val" not in node.meta):
            known = node.meta.get("val")
            _read(gm, node, where)
            if known is not None and _outline(known) != _outline(node.meta["val"]):
                changed.add(node)
        if node.op != "call_function":
            continue
        if (
            before.get(node) == _call(node)
            and "val" in node.meta
            and changed.isdisjoint(node.all_input_nodes)
        ):
            continue
        known = node.meta.get("val")
        try:
            set_val(node)
        except Exception as error:
            raise PassError(
                f"{where} leaves {node.name} = {node.target}({', '.join(map(str, node.args))}), which cannot be "
                f"called so, or has no fake kernel (torch.library.register_fake): {type(error).__name__}: {error}"
            ) from error
        if known is not None and _outline(known) == _outline(node.meta["val"]):
            node.meta["val"] = known
        else:
            changed.add(node)


def _fixed_sizes(gm: GraphModule) -> set[str]:
    """Symbols of sizes that somebody has made a number."""
    fake_mode = fake_mode_of(gm.graph)
    shape_env = None if fake_mode is None else fake_mode.shape_env
    if shape_env is None:
        return set()
    return {str(symbol) for symbol, value in shape_env.replacements.items() if value.is_number}


def _read(gm: GraphModule, node: Node, where: str) -> None:
    value = _attribute(gm, node.target)
    if value is None:
        raise PassError(f"{where} reads {node.target!r}, which the graph's module does not have.")
    if not isinstance(value, torch.Tensor):
        raise PassError(f"{where} reads {node.target!r}, a {type(value).__name__} and no tensor.")
    read_attribute(gm, node, device_of(gm.graph))


def _attribute(gm: GraphModule, name: str) -> object:
    """gm.<dotted name>, or None."""
    try:
        return attribute(gm, name)
    except AttributeError:
        return None


def _call(node: Node) -> tuple:
    kinds = []  # 1 is not 1.0
    map_aggregate((node.args, node.kwargs), lambda value: kinds.append(type(value)))
    return node.op, node.target, node.args, node.kwargs, kinds


def _inputs(gm: GraphModule) -> list[str]:
    nodes = (n for n in gm.graph.nodes if n.op == "placeholder")
    return [n.target if "val" in n.meta else f"{n.target} (without meta)" for n in nodes]


def _results(gm: GraphModule, where: str) -> str:
    outputs = gm.graph.find_nodes(op="output")
    if len(outputs) != 1:
        raise PassError(f"{where} leaves a graph with {len(outputs)} outputs instead of one.")
    return _outline(map_arg(outputs[0].args[0], lambda n: _Result(_outline(n.meta.get("val")))))


class _Result(str):
    """The outline of what a node stands for, among the literals of an output."""


def _outline(value: object) -> str:
    """Dtype, sizes and strides of what a node stands for, without asking whether symbolic sizes are equal."""
    if isinstance(value, torch.Tensor):
        sizes, strides = (", ".join(map(str, part)) for part in (value.shape, value.stride()))
        return (
            f"{str(value.dtype).removeprefix('torch.')}[{sizes}] with strides ({strides}) on {value.device}"
        )
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_outline, value))})"
    return str(value)
