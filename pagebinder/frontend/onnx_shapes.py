"""ONNX operators that cut, join, look up and reshape, on tensors and on known sizes alike."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from pagebinder.frontend.onnx_host import (
    MOST_ENTRIES,
    as_host,
    broadcast_shape,
    filled,
    host,
    integers,
    is_host,
    number,
    operator,
    sizes,
)


@operator("Shape")
def shape(call, x, *, start=0, end=None):
    return sizes(list(call.shape(x))[start:end])


@operator("Size")
def size(call, x):
    return host(np.array(math.prod(call.shape(x)), dtype=object))


@operator("Range")
def range_of(call, start, limit, delta):
    """As many steps as there are tokens are the tokens' positions: 0, 1, ... of a sequence from its beginning."""
    start, limit, delta = (number(call.known(x, "a bound")) for x in (start, limit, delta))
    if start == 0 and delta == 1 and call.run.is_num_tokens(limit):
        return call.run.positions
    if not any(isinstance(x, torch.SymInt) for x in (start, limit, delta)):
        values = np.arange(start, limit, delta)
        return values if values.size <= MOST_ENTRIES else filled(values, call.run.device)
    return torch.arange(start, limit, delta, device=call.run.device)


@operator("ConstantOfShape")
def constant_of_shape(call, shape, *, value=None):
    shape = integers(call.known(shape, "a shape"))
    fill = np.zeros(1, np.float32) if value is None else as_host(value)
    if fill is None:
        return value.reshape(()).expand(shape)
    if (
        fill.dtype.kind in "ib"
        and all(isinstance(s, int) for s in shape)
        and math.prod(shape) <= MOST_ENTRIES
    ):
        return np.full(shape, fill.reshape(-1)[0])
    return torch.full(shape, number(fill), dtype=filled(fill, call.run.device).dtype, device=call.run.device)


@operator("Reshape")
def reshape(call, x, shape, *, allowzero=0):
    target = integers(call.known(shape, "a shape"))
    if not allowzero:
        given = call.shape(x)
        target = [given[i] if isinstance(s, int) and s == 0 else s for i, s in enumerate(target)]
    if is_host(x):
        return x.reshape(target)
    for form in (_turned(call, target), _grouped(call, x, target)):
        if form is not None:
            return form
    return x.reshape(target)


def _turned(call, target: list):
    """Reshape(Transpose(Reshape(y, [-1, L, D])), [.., D, L]), as torch writes y.mT."""
    transpose = call.maker(call.node.inputs[0], "Transpose")
    inner = None if transpose is None else call.maker(transpose.inputs[0], "Reshape")
    if inner is None or transpose.attributes.get("perm") != [0, 2, 1]:
        return None
    y, merged = call.value(inner.inputs[0]), call.value(transpose.inputs[0])
    if is_host(y) or y.dim() < 3 or str(y.shape[-2:]) != str(merged.shape[-2:]):
        return None
    wanted = [*y.shape[:-2], y.shape[-1], y.shape[-2]]
    return y.transpose(-1, -2) if str(wanted) == str(target) else None


def _grouped(call, x, target: list):
    """Reshape(Expand(Unsqueeze(y, 2)), [B, H * G, T, D]): every KV head for its group of query heads."""
    made = call.maker(call.node.inputs[0], "Expand") or call.maker(call.node.inputs[0], "Tile")
    once = None if made is None else call.value(made.inputs[0])
    if once is None or is_host(once) or x.dim() != 5 or once.dim() != 5:
        return None
    batch, heads, group, tokens, width = x.shape
    wanted = [str(s) for s in (batch, heads * group, tokens, width)]
    if [str(s) for s in once.shape] != [str(s) for s in (batch, heads, 1, tokens, width)]:
        return None
    said = len(target) == 4 and all(str(t) in (s, "-1") for t, s in zip(target, wanted))
    return repeated_heads(once.squeeze(2), group) if said else None


def repeated_heads(x, group: int):
    """[B, H, T, D] -> [B, H * group, T, D].

    Heads are repeated within a token: where T lies within a head, torch 2.11 asks for the smaller of two strides, a
    question about the number of tokens.
    """
    batch, heads, tokens, width = x.shape
    x = x.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, group, -1)
    return x.reshape(batch, tokens, heads * group, width).transpose(1, 2)


@operator("Flatten")
def flatten(call, x, *, axis=1):
    axis = axis % x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Transpose")
def transpose(call, x, *, perm=None):
    if is_host(x):
        return x.transpose(perm)
    perm = list(range(x.dim()))[::-1] if perm is None else perm
    moved = [i for i, p in enumerate(perm) if i != p]
    return x if not moved else x.transpose(*moved) if len(moved) == 2 else x.permute(perm)


@operator("Unsqueeze")
def unsqueeze(call, x, axes):
    axes = integers(call.known(axes, "axes"))
    if is_host(x):
        return np.expand_dims(x, tuple(axes))
    rank = x.dim() + len(axes)
    out = x
    for axis in sorted(a % rank for a in axes):
        out = out.unsqueeze(axis)
    return call.same_meaning(x, out)


@operator("Squeeze")
def squeeze(call, x, axes=None):
    axes = None if axes is None else integers(call.known(axes, "axes"))
    if axes is None:
        axes = [i for i, s in enumerate(call.shape(x)) if isinstance(s, int) and s == 1]
    if is_host(x):
        return np.squeeze(x, tuple(axes))
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.squeeze(axis)
    return x


@operator("Expand")
def expand(call, x, shape):
    target = broadcast_shape(call.shape(x), integers(call.known(shape, "a shape")))
    if is_host(x):
        if x.size == 1 and not all(isinstance(s, int) for s in target):
            return call.tensor(x).expand(target)
        return np.broadcast_to(x, target)
    if [str(s) for s in target] == [str(s) for s in x.shape]:
        return x
    return call.same_meaning(x, x.expand(target))


@operator("Tile")
def tile(call, x, repeats):
    repeats = integers(call.known(repeats, "repeats"))
    if is_host(x):
        return np.tile(x, repeats)
    if all(r == 1 or s == 1 for r, s in zip(repeats, x.shape, strict=True)):
        return x.expand([r if s == 1 else s for r, s in zip(repeats, x.shape)])  # of heads, for their group
    return x.repeat(repeats)


@operator("Concat")
def concat(call, *parts, axis):
    if call.run.is_cache(parts[0]):
        return parts[1]  # behind an empty cache: see onnx_inputs.py
    if all(map(is_host, parts)):
        return host(np.concatenate([p.astype(object) for p in parts], axis))
    return torch.cat(call.tensors(*parts), axis)


@operator("Split")
def split(call, x, lengths=None, *, axis=0, num_outputs=None):
    count = len(call.node.outputs) if num_outputs is None else num_outputs
    width = call.shape(x)[axis]
    if lengths is None:
        step = -(-width // count)
        lengths = [min(step, width - i * step) for i in range(count)]
    else:
        lengths = integers(call.known(lengths, "lengths"))
    if is_host(x):
        return tuple(np.split(x, np.cumsum(lengths)[:-1], axis))
    return torch.split(x, lengths[0] if len(set(lengths)) == 1 else lengths, dim=axis)


@operator("Slice")
def slice_of(call, x, starts, ends, axes=None, steps=None):
    starts, ends = (integers(call.known(v, "a bound")) for v in (starts, ends))
    rank = len(call.shape(x))
    axes = (
        list(range(len(starts))) if axes is None else [a % rank for a in integers(call.known(axes, "axes"))]
    )
    steps = [1] * len(starts) if steps is None else integers(call.known(steps, "steps"))
    cuts = [slice(None)] * rank
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        end = None if isinstance(end, int) and abs(end) >= (1 << 31) - 1 else end
        if step < 0 and not is_host(x):
            call.refuse("a slice that runs backwards")
        cuts[axis] = slice(start, end, step)
    if is_host(x):
        return x[tuple(cuts)]
    if call.run.is_positions(x) and (first := _first_position(axes, starts, ends)) is not None:
        return first
    for axis in axes:
        if cuts[axis] != slice(0, None, 1):
            x = x[(slice(None),) * axis + (cuts[axis],)]
    return x


def _first_position(axes, starts, ends) -> np.ndarray | None:
    """positions[:, :1] of a sequence from its beginning."""
    return np.zeros((1, 1), np.int64) if (axes, starts, ends) == ([1], [0], [1]) else None


@operator("Gather")
def gather(call, x, indices, *, axis=0):
    rank = len(call.shape(x))
    axis = axis % rank
    if is_host(x) and is_host(indices):
        return host(np.take(x, indices.astype(np.int64), axis))
    if is_host(indices) and indices.ndim == 0:
        index = number(indices)
        if call.run.is_positions(x) and axis == 1 and index == 0:
            return np.zeros(1, np.int64)  # of the first token
        return x.select(axis, index)
    if is_host(indices) and indices.size == 1 and indices.ndim == 1:
        index = number(indices)
        return x.narrow(axis, index if index >= 0 else index + x.shape[axis], 1)
    x, indices = call.tensor(x), call.tensor(indices)
    if axis == 0 and rank == 2:
        return F.embedding(indices, x)
    return x[(slice(None),) * axis + (indices,)]


@operator("GatherElements")
def gather_elements(call, x, indices, *, axis=0):
    return torch.gather(x, axis, call.tensor(indices))


@operator("GatherND")
def gather_nd(call, x, indices, *, batch_dims=0):
    if batch_dims:
        call.refuse("a look-up with batch dimensions")
    x = call.tensor(x)
    parts = _index_vectors(call)
    if parts is None:
        parts = list(call.tensor(indices).unbind(-1))
    while parts and is_host(parts[0]) and parts[0].size == 1 and len(parts) > 1:
        x, parts = x.select(0, number(parts[0])), parts[1:]
    return x[tuple(call.tensor(p) for p in parts)]


def _index_vectors(call) -> list | None:
    """The indices before they were expanded to one shape and joined, as torch's exporter writes x[i, j]."""
    joined = call.maker(call.node.inputs[1], "Concat")
    if joined is None or joined.attributes["axis"] != -1:
        return None
    parts = []
    for name in joined.inputs:
        unsqueeze = call.maker(name, "Unsqueeze")
        expand = None if unsqueeze is None else call.maker(unsqueeze.inputs[0], "Expand")
        if expand is None or integers(call.value(unsqueeze.inputs[1])) not in (
            [-1], [len(call.shape(call.value(expand.outputs[0])))],
        ):  # fmt: skip
            return None
        parts.append(call.value(expand.inputs[0]))
    ranks = {len(call.shape(p)) for p in parts}
    return parts if len(ranks) == 1 else None
