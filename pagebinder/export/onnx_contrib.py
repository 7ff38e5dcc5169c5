"""Attention as ONNX Runtime's contrib operator `com.microsoft::GroupQueryAttention`, for `export_onnx(contrib=True)`.

    query [b, L, H * D], key, value [b, L, G * D], past_key, past_value [b, G, S, D], seqlens_k [b], total length
      -> output [b, L, H * D], present_key, present_value [b, G, S, D]

The operator writes the cache: a caller that binds a past and its present to one buffer has it written in place.
Inputs and outputs of the model are those of the standard one; lengths follow from position_ids. A step of several
tokens behind a context must be of one sequence (ONNX Runtime's rule), so batches give their prompts whole.

There is no PagedAttention here: ONNX Runtime has it for CUDA and WebGPU alone, and its block tables belong to a
scheduler, which a model file does not have.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.onnx.ops import symbolic_multi_out

from pagebinder.errors import ExportError
from pagebinder.export.onnx_signature import op_name
from pagebinder.graph_tools import module_path, val

RELATIVE = "pagebinder::relative_attention"
WIDTH_OF_HEADS = 8  # a multiple of this, says ONNX Runtime


def check_contrib(gm: GraphModule) -> None:
    """Raises ExportError: a layer is more than the operator computes (it is named), or there is none to replace."""
    names = [op_name(node) for node in gm.graph.nodes]
    if not {"pagebinder::attention", RELATIVE} & set(names):
        raise ExportError(
            "No layer of this model is attention over a cache of heads, which is all that contrib=True replaces: "
            "export it without contrib."
        )
    for node, name in zip(gm.graph.nodes, names):
        reason = "it adds a bias by distance" if name == RELATIVE else None
        if name == "pagebinder::attention":
            reason = _beyond(*(val(x) for x in node.args[1:3]), node)
        if reason:
            raise ExportError(
                f"{module_path(node) or node.name}: GroupQueryAttention cannot compute this layer, {reason}. Export "
                "without contrib."
            )


def _beyond(k, v, node) -> str | None:
    options, slopes = (
        node.kwargs,
        node.kwargs.get("alibi_slopes", node.args[4] if len(node.args) > 4 else None),
    )
    if not options.get("causal", True):
        return "it is not causal"
    if slopes is not None:
        return "it has ALiBi"
    if options.get("chunk") is not None:
        return "it sees chunks"
    if k.shape[2] != v.shape[2]:
        return f"its keys are {k.shape[2]} wide and its values {v.shape[2]}"
    if k.shape[2] % WIDTH_OF_HEADS:
        return f"its heads are {k.shape[2]} wide, and not a multiple of {WIDTH_OF_HEADS}"
    return None


def group_query_attention(step, q, k, v, sinks, *, scale, window, soft_cap):
    """`pagebinder::attention` [T, H, D] over the next two caches of the step."""
    past = (next(step.past), next(step.past))
    last = step.position_ids[:, -1]
    lengths = (last.to(torch.int32), (last.max() + 1).to(torch.int32))
    heads = (step.rows(x).flatten(2) for x in (q, k, v))
    attributes = {
        "num_heads": q.shape[1],
        "kv_num_heads": k.shape[1],
        "scale": float(scale),
        "do_rotary": 0,
        "local_window_size": -1 if window is None else int(window),
        "softcap": float(soft_cap or 0.0),
    }
    inputs = [*heads, *past, *lengths]
    if sinks is not None:
        inputs += [None, None, None, None, sinks.to(q.dtype)]  # tables of RoPE, positions, bias
    out, *present = symbolic_multi_out(
        "com.microsoft::GroupQueryAttention", inputs, attributes, dtypes=[q.dtype] * 3,
        shapes=[(*step.position_ids.shape, q.shape[1] * q.shape[2]), *(x.shape for x in past)], version=1,
    )  # fmt: skip
    step.present += present
    return step.flat(out, q).unflatten(1, (q.shape[1], q.shape[2]))
