"""Norm of query and key heads + RoPE + the write to the KV cache in one op.

Matches:
    q' = rope(rms_norm(q), cos, sin);  k' = rope(rms_norm(k), cos, sin)      norms of both or of none; nothing
    kv_cache_write(k', v, cache, slots)                                      else reads what lies between
    paged_attention(q', cache, ...)                 q', k' [T, heads, D] by transpositions and views of rope's result
    or paged_lookahead_attention(q', cache, ...), paged_indexed_attention(q', cache, ...)
    or quantized_kv_cache_write(k', v, cache, slots, scales, codes), quantized_paged_attention(q', cache, ...)
    where rope(x) may be cat(rope(x[..., :C]), x[..., C:]), of heads whose leading channels turn
Replaces with:
    q' = qk_norm_rope_write(q [T, H, D], k [T, G, D], v, cos [T, C], sin, norms' weights, cache, slots)
    or qk_norm_rope_quantized_write(..., scales, codes)

It rounds where the ops round that it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.attention.qk_norm_rope_write import STYLES, turned_channels
from pagebinder.graph_tools import CASTS, arg, aten, calls, describe, finish, insert_call, is_call, val
from pagebinder.passes.trailing_rope import NotThisRope, refusal, require, table_rows
from pagebinder.report import Match, PassResult

PATTERN = "qk_norm_rope_write"
OURS = torch.ops.pagebinder
# write -> (what may read its cache, the fused op)
WRITES = {
    OURS.kv_cache_write.default: (
        (
            OURS.paged_attention.default,
            OURS.paged_lookahead_attention.default,
            OURS.paged_indexed_attention.default,
        ),
        OURS.qk_norm_rope_write.default,
    ),
    OURS.quantized_kv_cache_write.default: (
        (OURS.quantized_paged_attention.default,),
        OURS.qk_norm_rope_quantized_write.default,
    ),
}
ROPE = OURS.rope.default
NORM = OURS.rms_norm.default
COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default)
TOKENS, HEADS, CHANNELS = "tokens", "heads", "channels"
Dims = list[str | None]  # what each dimension of a value stands for; None: of size 1


def fuse_qk_norm_rope_write(gm: GraphModule) -> PassResult:
    """Rewrite every cache write of turned keys; a write of something else is refused with what was found."""
    result = PassResult(name="fuse_qk_norm_rope_write")
    for write in calls(gm.graph, *WRITES):
        try:
            attention = _attention_of(write)
            k, q = _turned(write.args[0], write), _turned(attention.args[0], attention)
            _check_pair(q, k, write)
        except NotThisRope as reason:
            result.refusals.append(refusal(PATTERN, write, reason))
            continue
        fused = _rewrite(gm.graph, write, attention, q, k)
        result.matches.append(Match(pattern=PATTERN, **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


@dataclass(frozen=True)
class Turned:
    """Heads that are turned: `source`, whose dimensions are `dims`, goes through `norm` (or none) and `rope`, which
    takes all channels or the leading ones."""

    source: Node
    dims: Dims
    norm: Node | None
    rope: Node

    def norm_options(self) -> tuple:
        return () if self.norm is None else (self.norm.kwargs["eps"], self.norm.kwargs["tail"])

    def weight(self) -> Node | None:
        return None if self.norm is None else arg(self.norm, 1, "weight")


def _attention_of(write: Node) -> Node:
    readers = [user for user in write.args[2].users if user is not write]
    attentions = WRITES[write.target][0]
    is_alone = len(readers) == 1 and is_call(readers[0], *attentions)
    require(is_alone, f"its cache is not read by one {attentions[0]._opname} alone")
    return readers[0]


def _turned(rows: Node, reader: Node) -> Turned:
    """What rows [T, heads, D] are made of, followed upwards: views, rope of some channels or all, views, norm.

    Raises:
        NotThisRope: something else is on the way, or what is on the way is read elsewhere.
    """
    dtype = val(rows).dtype
    top, dims = _up(rows, {reader}, [TOKENS, HEADS, CHANNELS], dtype)
    is_joined = is_call(top, aten.cat.default)
    rope, x, readers, dims = _of_parts(top, dims, dtype) if is_joined else _of_rope(top, dims)
    x, dims = _up(x, readers, dims, dtype)
    norm = None
    if is_call(x, NORM):
        norm, x = x, x.args[0]
        require(val(norm).dtype is dtype, "the norm's result has another dtype than its heads")
        weight = arg(norm, 1, "weight")
        require(
            weight is None or tuple(val(weight).shape) == (val(x).shape[-1],), "the norm's weight is not [D]"
        )
        require(weight is None or weight.op == "get_attr", "the norm's weight is computed")
        require(
            weight is None or val(weight).dtype is dtype, "the norm's weight has another dtype than its heads"
        )
    require(val(x).dtype is dtype, "the heads' dtype changes on the way")
    return Turned(x, dims, norm, rope)


Found = tuple[
    Node, Node, set[Node], Dims
]  # rope, what it turns, who reads that, and what its dimensions stand for


def _of_rope(rope: Node, dims: Dims) -> Found:
    require(is_call(rope, ROPE), "the heads are not turned")
    require(rope.kwargs["style"] in STYLES, f"the rotation has style {rope.kwargs['style']}")
    for table in rope.args[1:3]:
        _require_by_token(table, dims)
    return rope, rope.args[0], {rope}, dims


def _of_parts(joined: Node, dims: Dims, dtype: torch.dtype) -> Found:
    """Of cat(rope(x[..., :C]), x[..., C:]), x."""
    is_pair = len(joined.args[0]) == 2 and arg(joined, 1, "dim", 0) in (-1, len(dims) - 1)
    require(is_pair, "the heads are not turned")
    turned, kept = joined.args[0]
    rope, dims_of_rope = _up(turned, {joined}, dims, dtype)
    _, low, readers, dims_of_rope = _of_rope(rope, dims_of_rope)
    low, dims_of_low = _up(low, readers, dims_of_rope, dtype)
    high, dims_of_high = _up(kept, {joined}, dims, dtype)
    require(
        is_call(low, aten.slice.Tensor) and is_call(high, aten.slice.Tensor) and low.args[0] is high.args[0],
        "what turns and what does not are not parts of the same heads",
    )
    width, whole = val(low).shape[-1], val(low.args[0]).shape[-1]
    places = [_channels(part, len(dims_of_low)) for part in (low, high)]
    require(
        dims_of_low == dims_of_high and places == [(0, width), (width, whole)],
        "what turns are not the leading channels, and what does not the others",
    )
    return rope, low.args[0], {low, high}, dims_of_low


def _channels(part: Node, rank: int) -> tuple[int, int] | None:
    """The range of the last dimension that a slice takes."""
    dim, start, end, step = (
        arg(part, i, name) for i, name in enumerate(("dim", "start", "end", "step"), start=1)
    )
    if (dim or 0) % rank != rank - 1 or step not in (None, 1):
        return None
    width = val(part.args[0]).shape[-1]
    return start or 0, width if end is None else min(end, width)


def _up(node: Node, readers: set[Node], dims: Dims, dtype: torch.dtype) -> tuple[Node, Dims]:
    """The value that `node` is a view of, and what its dimensions stand for. dtype: of heads; float32 holds them."""
    dims = list(dims)
    while True:
        require(set(node.users) == readers, "heads on the way to the attention are read elsewhere, too")
        if is_call(node, *CASTS):
            kinds = {val(node).dtype, val(node.args[0]).dtype}
            require(kinds <= {dtype, torch.float32}, "the heads are rounded between rotation and norm")
        elif is_call(node, aten.transpose.int):
            a, b = node.args[1:]
            dims[a], dims[b] = dims[b], dims[a]
        elif is_call(node, aten.select.int) and val(node.args[0]).shape[node.args[1]] == 1:
            dims.insert(node.args[1] % (len(dims) + 1), None)
        elif is_call(node, aten.unsqueeze.default):
            del dims[node.args[1] % len(dims)]
        elif not is_call(node, *COPIES):
            return node, dims
        require(
            dims[-1] == CHANNELS and {TOKENS, HEADS} <= set(dims), "its channels are not the last dimension"
        )
        node, readers = node.args[0], {node}


def _require_by_token(table: Node, dims: Dims) -> None:
    """The table has a row for each token, and the same for every head."""
    sizes = list(val(table).shape)
    kinds = dims[len(dims) - len(sizes) :]
    fits = len(sizes) <= len(dims) and all(
        size == 1 or kind in (TOKENS, CHANNELS) for size, kind in zip(sizes, kinds)
    )
    require(fits and TOKENS in kinds and HEADS in dims, "angles do not go by token")


def _check_pair(q: Turned, k: Turned, write: Node) -> None:
    require(q.rope.args[1:3] == k.rope.args[1:3], "q and k are turned by different angles")
    require(q.rope.kwargs == k.rope.kwargs, "q and k are turned in different styles")
    require(q.norm_options() == k.norm_options(), "q and k are normed differently")
    cache, dtype, cos = val(write.args[2]), val(q.source).dtype, val(q.rope.args[1])
    require(val(k.source).dtype is dtype, "q and k differ in dtype")
    if "codes" not in write.kwargs:
        require(cache.dtype is dtype, "the cache has another dtype than the heads")
    require(cos.dtype in (dtype, torch.float32), f"the angles are {cos.dtype}")
    computed = {val(heads.rope).dtype for heads in (q, k)}
    is_known = computed in ({torch.promote_types(dtype, cos.dtype)}, {torch.float32})
    require(is_known, "the rotation is computed in another dtype")
    width, num_turned = val(q.rope.args[0]).shape[-1], turned_channels(cos, q.rope.kwargs["style"])
    is_whole = num_turned == width and val(q.rope.args[2]).shape[-1] == cos.shape[-1]
    require(is_whole, "not all channels of a rotation turn")
    require(val(k.rope.args[0]).shape[-1] == width, "q and k turn in different numbers of channels")


def _rewrite(graph: Graph, write: Node, attention: Node, q: Turned, k: Turned) -> Node:
    angles = [table_rows(graph, table) for table in q.rope.args[1:3]]
    _, v, *cache_and_slots = write.args  # and scales
    rows = [_rows(graph, attention, heads) for heads in (q, k)]
    options = dict(zip(("eps", "tail"), q.norm_options())) | {"style": q.rope.kwargs["style"], **write.kwargs}
    if val(q.rope).dtype is not torch.promote_types(val(q.source).dtype, val(q.rope.args[1]).dtype):
        options["in_float32"] = True
    operands = (*rows, v, *angles, q.weight(), k.weight(), *cache_and_slots)
    op = WRITES[write.target][1]
    fused = insert_call(graph, attention, op, operands, options, value=val(attention.args[0]))
    attention.replace_input_with(attention.args[0], fused)
    graph.erase_node(write)
    return fused


def _rows(graph: Graph, like: Node, heads: Turned) -> Node:
    """The source as [T, heads, D]."""
    node, dims = heads.source, list(heads.dims)
    while None in dims:
        dim = dims.index(None)
        node = insert_call(graph, like, aten.select.int, (node, dim, 0))
        del dims[dim]
    if dims[0] == HEADS:
        node = insert_call(graph, like, aten.transpose.int, (node, 0, 1))
    return node
