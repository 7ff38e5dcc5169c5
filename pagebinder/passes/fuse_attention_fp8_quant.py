"""Paged attention and the FP8 quantisation of its output in one op.

Matches:
    o = paged_attention(q, cache, ...) [T, H, Dv]             or quantized_paged_attention
    codes, s = scaled_fp8_quant(views(o) [T, H * Dv] or [1, T, H * Dv], static, granularity)
Replaces with:
    codes, s = paged_attention_fp8_quant(q, cache, ..., granularity, static)

Each value on the way is read by the next alone. The output is rounded as before, so nothing changes.
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.fp8.attention import FP8_QUANT_FORMS
from pagebinder.graph_tools import aten, calls, insert_call, is_call, val
from pagebinder.passes.quantised_outputs import (
    Quantisation,
    fuse_quantisations,
    insert_quantising,
    part_of,
    quantisation_of,
)
from pagebinder.report import PassResult

PATTERN = "attention_fp8_quant"
FORMS = {attention.overload: fused.overload for attention, fused in FP8_QUANT_FORMS.items()}
# Views that keep the order of values.
VIEWS = (
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten._unsafe_view.default,
    aten.flatten.using_ints, aten.contiguous.default,
)  # fmt: skip


def fuse_attention_fp8_quant(gm: GraphModule) -> PassResult:
    """Rewrite all paged attention whose output is only quantised; refused is what something else is done to."""
    return fuse_quantisations(gm, PATTERN, calls(gm.graph, *FORMS), _quantisation, _fuse)


def _quantisation(attention: Node) -> Quantisation | str:
    value = attention
    while len(value.users) == 1 and is_call(user := next(iter(value.users)), *VIEWS):
        value = user
    if len(value.users) > 1:
        return "its result is read more than once"
    found = quantisation_of(value)
    if isinstance(found, str):
        return f"{found}: {', '.join(user.name for user in value.users)} reads it"
    (tokens, heads, width), shape = val(attention).shape, val(value).shape
    if tuple(shape) not in ((tokens, heads * width), (1, tokens, heads * width)):
        return f"its rows are quantised as {list(shape)}, and not a token's heads together"
    return found


def _fuse(gm: GraphModule, attention: Node, quantisation: Quantisation) -> Node:
    options = dict(attention.kwargs)
    if quantisation.static_scale is not None:
        options["out_scale"] = quantisation.static_scale
    fused = insert_quantising(gm, attention, FORMS[attention.target], attention.args, options, quantisation)
    for index in (0, 1):
        old = part_of(quantisation.node, index)
        part = insert_call(gm.graph, attention, operator.getitem, (fused, index))
        for _ in range(val(old).dim() - val(part).dim()):  # a leading 1 of the source model's
            part = insert_call(gm.graph, attention, aten.unsqueeze.default, (part, 0), value=val(old))
        old.replace_all_uses_with(part)
    return fused
