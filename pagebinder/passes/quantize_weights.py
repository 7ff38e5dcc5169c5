"""Weights of linear layers and experts in 8 or 4 bits (`CompileConfig.quantization`). It changes numbers: opt-in.

Matches:
    linear(x [..., K], W [N, K], b)           W a parameter, N and K multiples of what the format packs
    moe_experts(x, ids, weights, up [E, N, K], down [E, N, K], ...)     or [E, K, N], transposed: each of both so
Replaces with:
    w = dequantize_weight(codes, scale, format=, dtype=)     codes, scale: buffers of this graph
    linear(x, w, b)  |  moe_experts(x, ids, weights, up, down, ..., transposed=False)

This graph runs, and is what later passes are compared with: fuse_quantized_linear.py makes one op of the two. The
source model keeps its weights; they are quantised one at a time, and one that several layers share only once. The
table of an embedding is read a row at a time and stays as it is: a tied LM head gets codes of its own. Those of 4
bits have a scale for 32 there in any case, which loses a quarter less than one for 64 (docs/measurements.md).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.linear import weight_numbers
from pagebinder.custom_ops.linear.weight_formats import scale_dtype, size_problem, weight_format
from pagebinder.custom_ops.linear.weight_stacks import (
    matrices,
    packed_parts_shapes,
    quantize_stack,
    sizes_of,
)
from pagebinder.errors import VerificationError
from pagebinder.graph_tools import (
    aten,
    attach,
    attribute,
    calls,
    describe,
    finish,
    insert_call,
    read_attribute,
    source_line,
    val,
)
from pagebinder.report import Certificate, Match, PassResult, Refusal

PATTERN = "linear"
ours = torch.ops.pagebinder
LINEARS = (aten.linear.default, ours.linear.default)
EXPERTS = ours.moe_experts.default
# Products of activations with weights that are not linear layers.
OTHERS = {
    aten.addmm.default: "the weight is [K, N], not [N, K]",
    ours.expert_linear.default: "weights of experts whose projections are single ops are not quantised (yet)",
    ours.inverse_rope_grouped_linear.default: "weights of grouped linear layers are not quantised (yet)",
}
CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.argmax.default)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LM_HEAD_FORMAT = "int4_g32"  # where the others have 4 bits
META = "quantized"  # of a get_attr node: a QuantizedPart


@dataclass(frozen=True)
class QuantizedPart:
    """What a buffer was made of: the weight's name in the graph, and 0 for its codes, 1 for their scale.

    `transposed`: the weight is [E, K, N].
    """

    weight: str
    format: str
    part: int
    transposed: bool = False


def quantize_weights(gm: GraphModule, *, format: str) -> PassResult:
    """Quantise the weights of all linear layers and experts that can be; others are refused with the reason."""
    result = PassResult(name="quantize_weights", changes_numbers=True)
    made: dict[tuple[int, str, bool], tuple[Node, Node]] = {}
    head, format_of_head = (
        lm_head(gm.graph, *LINEARS),
        LM_HEAD_FORMAT if weight_format(format).bits == 4 else format,
    )
    for node in calls(gm.graph, *LINEARS, EXPERTS, *OTHERS):
        own = format_of_head if node is head else format
        pattern = "moe_experts" if node.target is EXPERTS else PATTERN
        reason = OTHERS.get(node.target) or _reason_against(node, own)
        if reason:
            where = {"source_line": source_line(node), **describe(node)}
            result.refusals.append(Refusal(pattern=pattern, reason=reason, **where))
            continue
        _read_from_codes(gm, node, own, made)
        result.matches.append(Match(pattern=pattern, detail=own, **describe(node)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _packed_parts(weight: torch.Tensor, format: str, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of a weight or a stack of them; of one on the meta device, there."""
    if not weight.is_meta:
        return quantize_stack(weight.detach(), format, transposed)
    shapes = packed_parts_shapes(weight, format, transposed)
    dtypes = (torch.uint8, scale_dtype(format))
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes))


def _read_from_codes(gm: GraphModule, node: Node, format: str, made: dict) -> None:
    """The weights of a linear layer or of experts as values of codes; `made`: of those that were met before."""
    transposed = node.kwargs.get("transposed", False)
    for position in _weight_positions(node):
        weight = node.args[position]
        key = id(attribute(gm, weight.target)), format, transposed
        if key not in made:
            parts = _packed_parts(attribute(gm, weight.target), format, transposed)
            made[key] = _attached(gm, weight, node, parts, format, transposed)
        options = {"format": format, "dtype": val(weight).dtype}
        values = insert_call(gm.graph, node, ours.dequantize_weight.default, made[key], options)
        node.update_arg(position, values)
    if transposed:
        node.update_kwarg("transposed", False)


def lm_head(graph: torch.fx.Graph, *linears) -> Node | None:
    """The only call of one of these ops that the result follows from without another one between; None if there are
    several."""
    found, seen = set(), set()
    waiting = [n for n in graph.nodes if n.op == "output"]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source in seen:
                continue
            seen.add(source)
            (found.add if source.target in linears else waiting.append)(source)
    return found.pop() if len(found) == 1 else None


def _weight_positions(node: Node) -> tuple[int, ...]:
    return (3, 4) if node.target is EXPERTS else (1,)


def _reason_against(node: Node, format: str) -> str | None:
    if node.target is not EXPERTS and _chooses(node):
        return "it chooses experts: another choice costs more than its few bytes"
    reasons = (_reason_against_weight(node, node.args[i], format) for i in _weight_positions(node))
    return next(filter(None, reasons), None)


def _reason_against_weight(node: Node, weight: Node, format: str) -> str | None:
    if weight.op != "get_attr":
        return "the weight is computed"
    shape = "[E, N, K]" if node.target is EXPERTS else "[N, K]"
    if val(weight).dim() != shape.count(",") + 1:
        return f"the weight is not {shape}"
    if val(weight).dtype not in FLOATS:
        return f"the weight is {val(weight).dtype}"
    return size_problem(*sizes_of(val(weight), node.kwargs.get("transposed", False)), format)


def _chooses(node: Node) -> bool:
    """Does the result decide, without another layer between, which are the largest? A router's does."""
    waiting, seen = [node], set()
    while waiting:
        for user in waiting.pop().users:
            if user.target in CHOICES:
                return True
            is_layer = user.target in LINEARS or str(user.target).startswith("pagebinder")
            if user.op == "call_function" and not is_layer and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _attached(
    gm: GraphModule, weight: Node, before: Node, parts: tuple, format: str, transposed: bool
) -> tuple[Node, Node]:
    """get_attr nodes of the codes and the scale of a weight, ahead of `before`."""
    nodes = []
    for index, (kind, part) in enumerate(zip(("codes", "scale"), parts)):
        name = f"{weight.target}_{format}_{kind}"
        attach(gm, name, part)
        with gm.graph.inserting_before(before):
            node = read_attribute(gm, gm.graph.get_attr(name), device=val(weight).device)
        node.meta[META] = QuantizedPart(weight.target, format, index, transposed)
        nodes.append(node)
    return tuple(nodes)


# ---- verification ----------------------------------------------------------------------------------------------


def add_quantized(gm: GraphModule, weights: MutableMapping[str, torch.Tensor]) -> None:
    """Add to `weights`, which a graph takes in place of its own, the codes and scales that are made of them."""
    for node in _parts(gm):
        part = node.meta[META]
        if part.weight in weights and node.target not in weights:
            made = quantize_stack(weights[part.weight].detach(), part.format, part.transposed)
            weights[node.target] = made[part.part]


def certify_weights(before: GraphModule, after: GraphModule, result: PassResult) -> list[Certificate]:
    """One certificate for all weights: each within what its format promises of the weight it stands for.

    This takes the place of a comparison of both sides, which differ on purpose; `max_rel_error` is the largest error
    of a whole weight, relative to it (root mean square).

    Raises:
        VerificationError: a weight is further off than its format explains.
    """
    largest = relative = 0.0
    codes = {n.target: n for n in _parts(after) if n.meta[META].part == 0}
    for name, node in codes.items():
        part = node.meta[META]
        for weight, errors in _errors(before, after, name, part):
            if not (errors <= weight_numbers.error_bound(weight, part.format)).all():
                raise VerificationError(
                    f"{result.name}: {part.format} of {part.weight} is off by {float(errors.max()):.3g}, more than "
                    "the format explains.",
                    pass_name=result.name,
                    level=result.level,
                    error=float(errors.max()),
                    places=(part.weight,),
                )
            largest = max(largest, float(errors.max()))
            relative = max(relative, float(errors.norm() / weight.norm().clamp(min=1e-30)))
    first = result.matches[0]
    return [
        Certificate(
            pattern=first.pattern,
            node=first.node,
            module_path=first.module_path,
            count=len(result.matches),
            max_abs_error=largest,
            max_rel_error=relative,
        )
    ]


def _errors(before: GraphModule, after: GraphModule, name: str, part: QuantizedPart):
    """(weight [N, K] in float32, how far each value of its codes is off), of each expert if there are some."""
    weights = matrices(attribute(before, part.weight).detach(), part.transposed)
    codes, scale = attribute(after, name), attribute(after, name.removesuffix("_codes") + "_scale")
    each = zip(codes, scale, strict=True) if codes.dim() == 5 else ((codes, scale),)
    for matrix, own in zip(weights, each, strict=True):
        weight = matrix.float()
        yield weight, (weight_numbers.dequantize(*own, part.format) - weight).abs()


def _parts(gm: GraphModule) -> Iterator[Node]:
    return (n for n in gm.graph.nodes if n.op == "get_attr" and META in n.meta)
