"""Weights of linear layers and experts in the order in which matrix units read them (linear/packed_weights.py).

Matches:
    linear(x, W, b) | linears(x, [W, ...], ...) | gated_linear(x, Wg, Wu, ...)     of the provider cpu, W [N, K] bf16
    moe_experts(x, ids, w, up, down, ...) | moe_routed_experts(...)                where there are no matrix tiles,
                                                                                   W [E, N, K] bf16
Replaces with:
    the same op on W packed, or packed and coded                                   W packed: of this graph alone

Made where graphs meet the machine that runs them, after everything that compares graphs. Numbers stay; sums are in
another order than for plain weights, and in the same for any number of rows. A weight that other ops read as well
(the table of an embedding that is the LM head, too) stays beside its packed form.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Collection, Sequence

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.cpu.huge_pages import MOST_SHARE, MemoryFor, has_room
from pagebinder.custom_ops.cpu.pack import code_all, coded_shape, pack_all
from pagebinder.custom_ops.linear.packed_weights import CODED_INNER, can_be_coded, can_be_packed, in_place_of
from pagebinder.graph_tools import (
    attach,
    attribute,
    calls,
    describe,
    finish,
    read_attribute,
    recipe_of,
    source_line,
)
from pagebinder.report import Match, PassResult, Refusal

PATTERN, PATTERN_OF_EXPERTS = "packed weights", "packed experts"
MOST_OF_PACKED = 0.85  # of its bytes that codes may take
LINEARS = ("linear", "linears", "gated_linear")
EXPERTS = ("moe_experts", "moe_routed_experts")


def pack_weights(
    gm: GraphModule,
    *,
    keep: Collection[int] = (),
    coded: bool = False,
    share_for_experts: float = MOST_SHARE,
    memory_for: MemoryFor | None = None,
) -> PassResult:
    """Pack the weights of a graph that runs on kernels for x86 processors; no other machine should be asked to.

    Args:
        keep: data pointers of weights that stay as they are: somebody else holds them in memory anyway.
        coded: code what can be coded, too; an op's weights all are, or none.
        share_for_experts: how much of the free memory packed experts may take. What they were packed from stays.
        memory_for: gives the memory that they are packed into; None: new memory.
    """
    result = PassResult(name="pack_weights")
    users = []
    kernels = torch.ops.pagebinder_cpu
    for node in calls(gm.graph, *(getattr(kernels, op).default for op in (*LINEARS, *EXPERTS))):
        reason = _reason_against(gm, node, keep)
        if reason is None:
            users.append(node)
        else:
            result.refusals.append(_refusal(node, reason))
    linears, mixtures = ([n for n in users if _is_moe(n) == is_moe] for is_moe in (False, True))
    plain = _plain(gm, linears)
    made = _made(gm, linears, plain, coded, memory_for)
    if made is None:
        users = _without(
            linears, users, result, "packed weights would take more than half of the free memory"
        )
    of_experts = _plain(gm, mixtures)
    has_room_for_experts = has_room(of_experts.values(), share_for_experts)
    stacks = _made(gm, mixtures, of_experts, coded, memory_for) if has_room_for_experts else None
    if stacks is None:
        reason = f"packed ones beside them would take more than {share_for_experts:g} of the free memory"
        users = _without(mixtures, users, result, reason)
    names, plain = {}, plain | of_experts
    for name, (tensor, form) in ((made or {}) | (stacks or {})).items():
        names[name] = f"{name}_{form}"
        attach(gm, names[name], in_place_of(plain[name], tensor))
    for node in users:
        read = _weights(node)
        for weight in dict.fromkeys(read):
            node.replace_input_with(weight, _read(gm, names[weight.target], node))
        detail = "coded" if names[read[0].target].endswith("_coded") else ""
        if coded and not detail:
            detail = _reason_against_codes([plain[weight.target] for weight in read])
        result.matches.append(Match(pattern=_pattern(node), detail=detail, **describe(node)))
    result.changed = bool(users)
    finish(gm)
    _drop_derived(gm, plain)
    return result


def _drop_derived(gm: GraphModule, plain: dict[str, torch.Tensor]) -> None:
    """Plain weights that passes made (turn_weights.py) are nobody's but the graph's, which reads packed ones now."""
    read = {n.target for n in gm.graph.nodes if n.op == "get_attr"}
    for name, tensor in plain.items():
        if recipe_of(tensor) is not None and name not in read:
            owner, _, leaf = name.rpartition(".")
            delattr(gm.get_submodule(owner), leaf)


def _plain(gm: GraphModule, users: Sequence[Node]) -> dict[str, torch.Tensor]:
    return {w.target: attribute(gm, w.target) for node in users for w in _weights(node)}


def _without(refused: Sequence[Node], users: Sequence[Node], result: PassResult, reason: str) -> list[Node]:
    result.refusals += [_refusal(node, reason) for node in refused]
    return [node for node in users if node not in refused]


def _to_code(gm: GraphModule, users: Sequence[Node]) -> dict[str, tuple[int, ...]]:
    """Names of weights that are coded, and the shapes of their codes: an op takes weights of one form."""
    shapes = {}
    for name in dict.fromkeys(w.target for node in users for w in _weights(node)):
        weight = attribute(gm, name)
        if can_be_coded(weight):
            shape = coded_shape(weight)
            if math.prod(shape) <= MOST_OF_PACKED * weight.numel() * weight.element_size():
                shapes[name] = shape  # few of its weights have rare exponents
    while mixed := [n for n in users if 0 < sum(w.target in shapes for w in _weights(n)) < len(_weights(n))]:
        for weight in (w for node in mixed for w in _weights(node)):
            shapes.pop(weight.target, None)
    return shapes


def _reason_against_codes(weights: Sequence[torch.Tensor]) -> str:
    """Why an op reads packed weights where coded ones were asked for."""
    if not all(map(can_be_coded, weights)):
        return f"rows are no multiples of {CODED_INNER}"
    return f"codes would take more than {MOST_OF_PACKED:g} of the bytes: too many exponents are rare"


def _made(
    gm: GraphModule,
    users: Sequence[Node],
    plain: dict[str, torch.Tensor],
    coded: bool,
    memory_for: MemoryFor | None,
) -> dict[str, tuple[torch.Tensor, str]] | None:
    """name -> the weight in another form, and which, "packed" or "coded"; None if memory is short."""
    shapes = _to_code(gm, users) if coded else {}
    packed = [name for name in plain if name not in shapes]
    made = {}
    for names, form, make in (
        (packed, "packed", functools.partial(pack_all, memory_for=memory_for)),
        ([*shapes], "coded", functools.partial(code_all, shapes=[*shapes.values()], memory_for=memory_for)),
    ):
        tensors = make([plain[name] for name in names]) if names else []
        if tensors is None:
            return None
        made |= {name: (tensor, form) for name, tensor in zip(names, tensors, strict=True)}
    return made


def _refusal(node: Node, reason: str) -> Refusal:
    return Refusal(pattern=_pattern(node), reason=reason, source_line=source_line(node), **describe(node))


def _is_moe(node: Node) -> bool:
    return node.target._opname in EXPERTS


def _pattern(node: Node) -> str:
    return PATTERN_OF_EXPERTS if _is_moe(node) else PATTERN


def describe_packing(results: Sequence[PassResult]) -> list[str]:
    """Lines for the report: how many layers read packed weights, and why others do not."""
    matches = collections.Counter(match.pattern for result in results for match in result.matches)
    coded = collections.Counter(
        match.pattern for result in results for match in result.matches if match.detail == "coded"
    )
    packed = collections.Counter(
        (match.pattern, match.detail)
        for result in results
        for match in result.matches
        if match.detail not in ("", "coded")
    )
    reasons = collections.Counter(
        (refusal.pattern, refusal.reason) for result in results for refusal in result.refusals
    )
    whose = {PATTERN: "linear layers", PATTERN_OF_EXPERTS: "mixtures of experts"}
    lines = [
        f"{matches[pattern]} {what} read packed weights"
        + (f", {coded[pattern]} of them in about 12 of 16 bits, without loss" if coded[pattern] else "")
        for pattern, what in whose.items()
        if matches[pattern]
    ]
    lines += [
        f"{count} {whose[pattern]} read packed weights, not coded ones: {why}"
        for (pattern, why), count in packed.items()
    ]
    return lines + [
        f"{count} {whose[pattern]} read theirs as they are: {reason}"
        for (pattern, reason), count in reasons.items()
    ]


def _weights(node: Node) -> list[Node]:
    if _is_moe(node):
        return list(node.args[3:5])
    name = node.target._opname
    return (
        list(node.args[1]) if name == "linears" else list(node.args[1 : 3 if name == "gated_linear" else 2])
    )


def _reason_against_experts(node: Node) -> str | None:
    kernels = torch.ops.pagebinder_cpu
    if kernels.has_matrix_tiles() or not kernels.reads_packed_experts():
        return "only an x86 processor without matrix tiles reads packed experts"
    if node.kwargs["transposed"]:
        return "weights are transposed: [E, K, N]"
    if node.kwargs["interleaved"]:
        return "columns of gates and values take turns"
    return None


def _reason_against(gm: GraphModule, node: Node, keep: Collection[int]) -> str | None:
    if _is_moe(node) and (reason := _reason_against_experts(node)):
        return reason
    for weight in _weights(node):
        if weight.op != "get_attr":
            return "the weight is computed"
        tensor = attribute(gm, weight.target)
        if tensor.data_ptr() in keep:
            return "the model that was given holds the weight, and would hold it twice"
        if not can_be_packed(tensor):
            return f"the weight is {tuple(tensor.shape)} of {tensor.dtype}: bf16 in multiples of 32 is packed"
        if tensor.stride(-1) != 1:
            return "rows of the weight are not contiguous"
    return None


def _read(gm: GraphModule, name: str, before: Node) -> Node:
    with gm.graph.inserting_before(before):
        return read_attribute(gm, gm.graph.get_attr(name))
