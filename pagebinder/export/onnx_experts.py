"""Rows times their experts' matrices, as a model-local function of standard operators.

    ExpertRows(x [S, C], ids [S], weight [E, O, C]) -> [S, O]      y[s] = weight[ids[s]] x[s]

A loop over the experts that some row chose, so no other expert's weights are read; rows of no expert are zeros. It is
written in ONNX and not traced, as which rows an expert gets is a size that no trace knows.
"""

from __future__ import annotations

import torch
from torch.onnx.ops import symbolic

from pagebinder.export.onnx_functions import DOMAIN

_TEXT = """
<opset_import: ["" : {opset}], domain: "pagebinder">
{name} (x, ids, weight) => (y) {{
    zero = Constant <value = int64 {{0}}> ()
    true = Constant <value = bool {{1}}> ()
    one = Constant <value_ints = [1]> ()
    minus_one = Constant <value_ints = [-1]> ()
    num_experts = Shape <start = 0, end = 1> (weight)
    outputs = Shape <start = {out}, end = {end}> (weight)
    num_rows = Shape <start = 0, end = 1> (x)
    shape = Concat <axis = 0> (num_rows, outputs)
    zeros = ConstantOfShape (shape)
    typed_zeros = CastLike (zeros, x)
    unique = Unique <sorted = 1> (ids)
    not_below = GreaterOrEqual (unique, zero)
    not_above = Less (unique, num_experts)
    valid = And (not_below, not_above)
    chosen = Compress <axis = 0> (unique, valid)
    num_chosen = Size (chosen)
    y = Loop (num_chosen, true, typed_zeros) <body = each (int64 i, bool go_on, acc) => (bool again, next) {{
        again = Identity (go_on)
        expert = Gather <axis = 0> (chosen, i)
        its_own = Equal (ids, expert)
        found = NonZero (its_own)
        slots = Transpose <perm = [1, 0]> (found)
        rows = GatherND (x, slots)
        matrix = Gather <axis = 0> (weight, expert)
        products = Gemm <transB = {trans_b}> (rows, matrix)
        next = ScatterND (acc, slots, products)
    }}>
}}
"""


def expert_rows(x, *, ids, weight, bias, transposed):
    """Each row [S, C] by the expert of its id [S]; weight [E, O, C], or [E, C, O] if `transposed`; bias [E, O]."""
    name = "ExpertRowsTransposed" if transposed else "ExpertRows"
    shape = (x.shape[0], weight.shape[2 if transposed else 1])
    out = symbolic(f"{DOMAIN}::{name}", [x, ids, weight], dtype=x.dtype, shape=shape, version=1)
    if bias is None:
        return out
    added = bias[ids.clamp(0, bias.shape[0] - 1)]
    return out + torch.where(((ids >= 0) & (ids < bias.shape[0]))[:, None], added, 0.0)


def definition(name: str, opset: int):
    """The FunctionProto of a function that a model calls by `name`."""
    import onnx.parser

    transposed = name == "ExpertRowsTransposed"
    out = 2 if transposed else 1
    text = _TEXT.format(name=name, opset=opset, out=out, end=out + 1, trans_b=0 if transposed else 1)
    return onnx.parser.parse_function(text)
