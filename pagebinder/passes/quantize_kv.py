"""K and V of attention as a quantised cache gives them back (`CompileConfig.kv_dtype`). It changes numbers, so it is
opt-in.

Matches:
    attention(q, k [T, G, D], v [T, G, Dv], ...)
Replaces with:
    k', v' = quantized_kv(k, v, scales, codes=)          scales: a buffer [2, G], or none where each row has its own
    attention(q, k', v', ...)

What follows is compared with this graph: page_attention stores the codes of k and v where it finds their round trip.
Attention with a bias by distance and cross attention have no kernels for codes, and keep what they had.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.attention.quantized_cache import KV_FORMATS, KVFormat, error_bound
from pagebinder.errors import ConfigError
from pagebinder.graph_tools import (
    calls,
    describe,
    finish,
    insert_call,
    insert_constant,
    is_call,
    module_path,
    val,
)
from pagebinder.passes.rounding_check import RoundingCheck
from pagebinder.report import Certificate, Match, PassResult, Refusal

PATTERN = "quantized_kv"
FORMAT = "kv_format"  # of a round trip's node: its key of KV_FORMATS
ours = torch.ops.pagebinder
REFUSED = {
    ours.relative_attention.default: "attention with a bias by distance keeps K and V in the activations' dtype",
    ours.lookahead_attention.default: "attention that sees on keeps K and V in the activations' dtype",
    ours.indexed_attention.default: "attention to chosen keys keeps K and V in the activations' dtype",
    ours.cross_attention.default: "cross attention keeps the encoder's K and V in the activations' dtype",
}
NUM_ROWS = 64
MAGNITUDES = (1.0, 1e-3)


def quantize_kv(
    gm: GraphModule, *, format: str, scales: Mapping[str, torch.Tensor] | None = None
) -> PassResult:
    """Put the round trip before every attention op.

    Args:
        format: a key of KV_FORMATS. scales: module path of an attention layer -> [2, G] float32, for formats with
            fixed scales; None: 1.
    Raises:
        ConfigError: `scales` lack a layer, or are of another shape.
    """
    result = PassResult(name="quantize_kv", changes_numbers=True, rounds_values=True)
    spec = KV_FORMATS[format]
    for node in calls(gm.graph, ours.attention.default, *REFUSED):
        if node.target in REFUSED:
            result.refusals.append(Refusal(pattern=PATTERN, reason=REFUSED[node.target], **describe(node)))
            continue
        q, k, v, *rest = node.args
        fixed = () if not spec.has_fixed_scales else (_scales(gm, node, spec, scales, len(result.matches)),)
        pair = insert_call(gm.graph, node, ours.quantized_kv.default, (k, v, *fixed), {"codes": spec.codes})
        pair.meta[FORMAT] = format
        back = [insert_call(gm.graph, node, operator.getitem, (pair, i)) for i in (0, 1)]
        node.args = (q, *back, *rest)
        result.matches.append(Match(pattern=PATTERN, detail=format, **describe(node)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def quantized_source(attention: Node) -> Node | None:
    """The round trip that an attention op's K and V come from; None if they are as they were computed."""
    k = attention.args[1]
    if is_call(k, operator.getitem) and is_call(k.args[0], ours.quantized_kv.default):
        return k.args[0]
    return None


def _scales(
    gm: GraphModule, node: Node, spec: KVFormat, scales: Mapping[str, torch.Tensor] | None, index: int
) -> Node:
    """The get_attr node of a layer's fixed scales, ahead of it."""
    layer, shape = module_path(node), (2, val(node.args[1]).shape[1])
    if scales is None:
        tensor = torch.ones(shape, device="cpu")
    elif layer not in scales or scales[layer].shape != shape:
        got = f"have {list(scales[layer].shape)} for" if layer in scales else "lack"
        raise ConfigError(f"kv_scales {got} the attention layer {layer!r}, which needs {list(shape)} (K, V).")
    else:
        tensor = scales[layer].float()
    if spec.scales == "tensor":
        tensor = tensor.amax(1, keepdim=True).expand(shape)
    name = f"kv_scales_{index}"
    tensor = tensor.contiguous().to(next(iter(gm.parameters()), tensor).device)
    return insert_constant(gm, node, name, tensor)


def certify_kv(before: GraphModule, after: GraphModule, result: PassResult) -> list[Certificate]:
    """One certificate: random rows of every layer's shapes come back within what the format promises.

    `max_rel_error` is the largest error of a row, relative to it (root mean square).

    Raises:
        VerificationError: a value is further off than the format explains.
    """
    check = RoundingCheck(result)
    generator = torch.Generator().manual_seed(0)
    for node in calls(after.graph, ours.quantized_kv.default):
        fixed = getattr(after, node.args[2].target) if len(node.args) > 2 else None
        codes = node.kwargs["codes"]
        for magnitude in MAGNITUDES:
            shapes = [(NUM_ROWS, *val(x).shape[1:]) for x in node.args[:2]]
            rows = [torch.randn(shape, generator=generator, device="cpu") * magnitude for shape in shapes]
            back = ours.quantized_kv(*rows, fixed, codes=codes)
            for i, (x, y) in enumerate(zip(rows, back)):
                check.add(node, codes, x, y, error_bound(x, codes, None if fixed is None else fixed[i]))
    return check.certificates()
