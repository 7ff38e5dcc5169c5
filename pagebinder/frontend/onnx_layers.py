"""ONNX operators that are whole layers, written as PyTorch models write them, for the recognisers to read.

MatMul, Gemm with a weight    linear(x, W [N, K], b)
RMSNormalization              w * (h * rsqrt(mean(h ** 2, -1) + eps)).to(dtype)
RotaryEmbedding               x * cos + rotated(x) * sin, or in halves
Attention                     scaled_dot_product_attention, or written out around a soft cap
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebinder.frontend.onnx_host import integers, is_host, number, operator, shortest
from pagebinder.frontend.onnx_shapes import repeated_heads

HIDDEN = float("-inf")


@operator("MatMul")
def matmul(call, a, b):
    weight = _weight_of(call, call.node.inputs[1])
    return torch.matmul(*call.tensors(a, b)) if weight is None else F.linear(a, weight)


@operator("Gemm")
def gemm(call, a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    plain = alpha == 1.0 and not transA and (c is None or beta == 1.0)
    weight = None
    if plain and call.is_weight(call.node.inputs[1]):
        weight = b if transB else call.run.transposed(call.node.inputs[1])
    if weight is not None and (c is None or c.dim() == 1):
        return F.linear(a, weight, c)
    out = alpha * ((a.t() if transA else a) @ (b.t() if transB else b))
    return out if c is None else out + (c if beta == 1.0 else beta * c)


def _weight_of(call, name: str) -> torch.Tensor | None:
    """W [N, K] of x @ W^T, if the second factor is a weight [K, N] or a transposed one."""
    if call.is_weight(name):
        return call.run.transposed(name) if call.value(name).dim() == 2 else None
    transpose = call.maker(name, "Transpose")
    if transpose is None or not call.is_weight(transpose.inputs[0]):
        return None
    return call.value(transpose.inputs[0]) if transpose.attributes.get("perm", [1, 0]) == [1, 0] else None


def with_bias(call) -> torch.Tensor | None:
    """Add(MatMul(x, W), b) as one linear layer; None: it is another sum."""
    for i in (0, 1):
        product, bias = call.maker(call.node.inputs[i], "MatMul"), call.node.inputs[1 - i]
        if product is None or not call.is_weight(bias) or call.value(bias).dim() != 1:
            continue
        weight = _weight_of(call, product.inputs[1])
        if weight is not None and weight.shape[0] == call.value(bias).shape[0]:
            return F.linear(call.value(product.inputs[0]), weight, call.value(bias))
    return None


def silu_of(call) -> torch.Tensor | None:
    """Mul(x, Sigmoid(x)); None: it is another product."""
    for i in (0, 1):
        sigmoid = call.maker(call.node.inputs[i], "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] == call.node.inputs[1 - i]:
            return F.silu(call.value(sigmoid.inputs[0]))
    return None


@operator("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(call, x, weight, *, axis=-1, epsilon=1e-5, stash_type=1):
    if axis % x.dim() != x.dim() - 1:
        call.refuse("it normalises over several dimensions")
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + shortest(epsilon))
    return weight * wide.to(x.dtype)


@operator("LayerNormalization")
def layer_norm(call, x, weight, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    if axis % x.dim() != x.dim() - 1 or len(list(filter(None, call.node.outputs))) > 1:
        call.refuse("it normalises over several dimensions, or gives out the statistics")
    return F.layer_norm(x, x.shape[-1:], weight, bias, shortest(epsilon))


@operator("RotaryEmbedding")
def rotary_embedding(
    call, x, cos, sin, positions=None, *, interleaved=0, num_heads=0, rotary_embedding_dim=0
):
    flat = x.dim() == 3
    if flat:
        if not num_heads:
            call.refuse("without num_heads the heads of a 3-dimensional input are unknown")
        x = _heads(call, 0, num_heads)
    width = rotary_embedding_dim or x.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    wide = None if positions is not None or interleaved else _whole_tables(call)
    if wide is not None:
        out = _half(turned if kept.shape[-1] else x, *wide)
    else:
        cos, sin = (_rows_of_table(call, i, table, positions) for i, table in ((1, cos), (2, sin)))
        out = (_pairs if interleaved else _halves)(turned if kept.shape[-1] else x, cos, sin)
    out = torch.cat((out, kept), dim=-1) if kept.shape[-1] else out
    return _flat(call, out) if flat else out


def _rows_of_table(call, i: int, table: torch.Tensor, positions) -> torch.Tensor:
    """[1, 1, T, D / 2], once for all layers: queries and keys are seen to be turned by the same angles."""

    def rows() -> torch.Tensor:
        found = table if positions is None else F.embedding(call.tensor(positions), table)
        return found.unsqueeze(1)

    return call.run.once((call.node.inputs[i], *call.node.inputs[3:4]), rows)


def _halves(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _pairs(x, cos, sin):
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def _half(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _whole_tables(call) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines with a column for every channel, where the operator gets the first half of them.

    table = f(Concat(angles, angles)) [b, 1, L, D]; the operator's input is table[..., : D / 2][:, 0].
    """
    found = [_whole_table(call, name) for name in call.node.inputs[1:3]]
    return None if None in found else (call.value(found[0]), call.value(found[1]))


def _whole_table(call, name: str) -> str | None:
    gather = call.maker(name, "Gather")
    cut = None if gather is None else call.maker(gather.inputs[0], "Slice")
    if cut is None or len(cut.inputs) < 4 or gather.attributes.get("axis", 0) != 1:
        return None
    table = cut.inputs[0]
    if is_host(call.value(table)) or call.value(table).dim() != 4 or call.value(table).shape[1] != 1:
        return None
    start, end, axis = (integers(call.value(i)) for i in cut.inputs[1:4])
    width = call.value(table).shape[-1]
    if (
        (start, end) != ([0], [width // 2])
        or axis not in ([3], [-1])
        or number(call.value(gather.inputs[1])) != 0
    ):
        return None
    return table if _is_doubled(call, table) else None


def _is_doubled(call, name: str) -> bool:
    """Is it made, entry by entry, of one value joined with itself along the last dimension?"""
    node = call.run.graph.makers.get(name)
    while node is not None and node.op in ("Cos", "Sin", "Cast", "Unsqueeze", "Mul"):
        if node.op == "Mul":
            scalars = [is_host(call.value(i)) and call.value(i).size == 1 for i in node.inputs]
            if not any(scalars):
                return False
            name = node.inputs[1 if scalars[0] else 0]
        else:
            name = node.inputs[0]
        node = call.run.graph.makers.get(name)
    joined = node is not None and node.op == "Concat" and len(node.inputs) == 2
    return (
        joined
        and node.inputs[0] == node.inputs[1]
        and node.attributes["axis"] in (-1, call.value(name).dim() - 1)
    )


@operator("TensorScatter")
def tensor_scatter(call, cache, rows, indices=None, *, axis=-2, mode="linear"):
    """The rows of all tokens, written from the beginning of a cache that has as many slots."""
    if not call.run.is_cache(cache):
        call.refuse("it writes into something else than a cache among the model's inputs")
    if indices is not None and not (is_host(indices) and (indices == 0).all()):
        call.refuse("it does not begin to write at the position of the first token")
    return rows


@operator("Attention")
def attention(
    call, q, k, v, mask=None, past_key=None, past_value=None, num_keys=None, *, scale=None, is_causal=0,
    q_num_heads=None, kv_num_heads=None, softcap=0.0, softmax_precision=None, qk_matmul_output_mode=0,
    left_window_size=-1, right_window_size=-1,
):  # fmt: skip
    if len(call.node.outputs) > 3 and call.node.outputs[3]:
        call.refuse("it gives out the scores")
    if any(past is not None and not call.run.is_cache(past) for past in (past_key, past_value)):
        call.refuse("its past is something else than a cache among the model's inputs")
    if num_keys is not None and not call.run.is_full(num_keys):
        call.refuse("its number of keys is not that of the tokens so far")
    flat = q.dim() == 3
    if flat:
        q, k, v = (_heads(call, i, n) for i, n in enumerate((q_num_heads, kv_num_heads, kv_num_heads)))
    scale = q.shape[-1] ** -0.5 if scale is None else shortest(scale)
    if not (flat or softcap or is_causal) and (sinks := _sinks_of(call)) is not None:
        return _with_sinks(q, *sinks, scale), k, v
    mask = _mask(call, mask, is_causal, left_window_size, right_window_size, plain=not softcap)
    if softcap:
        out = _capped(q, k, v, mask, scale, shortest(softcap))
    else:
        causal = mask is None and bool(is_causal)
        k, v = _repeated(q, k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    if flat:
        out = _flat(call, out)
    return out, k, v


def _heads(call, i: int, num_heads: int) -> torch.Tensor:
    """Input i [1, L, heads * D] as [1, heads, L, D]; as it was, if a RotaryEmbedding has just made it flat."""
    x, before = call.value(call.node.inputs[i]), call.run.with_heads.get(id(call.value(call.node.inputs[i])))
    if before is not None and before.shape[1] == num_heads:
        return before
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def _flat(call, x: torch.Tensor) -> torch.Tensor:
    """[1, heads, L, D] -> [1, L, heads * D]"""
    out = x.transpose(1, 2).flatten(2)
    call.run.with_heads[id(out)] = x
    return out


def _mask(call, mask, is_causal, left: int, right: int, *, plain: bool):
    """All that hides keys as one mask; None where there is none, or (`plain`) where causal says it all."""
    mask = None if mask is None else call.tensor(mask)
    if plain and mask is None and left < 0 and right < 0:
        return None
    p, j = call.run.positions[:, None], call.run.positions[None, :]
    rules = [j <= p] if is_causal else []
    rules += [j >= p - left] if left >= 0 else []
    rules += [j <= p + right] if right >= 0 else []
    for rule in rules:
        if mask is None or mask.dtype is torch.bool:
            mask = rule if mask is None else mask & rule
        else:
            mask = torch.where(rule, mask, HIDDEN)
    return mask


def _sinks_of(call) -> tuple | None:
    """(keys, values, mask, sinks) where a sink is one more key of zeros, whose score is its column of the mask."""
    joined = [call.maker(name, "Concat") for name in call.node.inputs[1:4]]
    if len(joined) < 3 or None in joined or any(len(node.inputs) != 2 for node in joined):
        return None
    rows = [call.value(node.inputs[1]) for node in joined[:2]]
    if not all(is_host(x) and x.ndim == 4 and x.shape[2] == 1 and (x == 0).all() for x in rows):
        return None
    mask, column = (call.value(name) for name in joined[2].inputs)
    if is_host(mask) or is_host(column) or column.shape[-1] != 1 or not mask.is_floating_point():
        return None
    dims = [node.attributes["axis"] % 4 for node in joined]
    return (*(call.value(n.inputs[0]) for n in joined[:2]), mask, column) if dims == [2, 2, 3] else None


def _with_sinks(q, k, v, mask, column, scale: float):
    k, v = _repeated(q, k, v)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale + mask
    weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)
    return torch.matmul(weights[..., :-1], v)


def _repeated(q, k, v):
    """Keys and values, each head for its group of query heads."""
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else [repeated_heads(x, group) for x in (k, v)]


def _capped(q, k, v, mask, scale: float, cap: float):
    """Scores are capped between the scaling and the mask."""
    k, v = _repeated(q, k, v)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, HIDDEN) if mask.dtype is torch.bool else scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1), v)
