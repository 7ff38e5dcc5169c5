"""Where the tokens are in the values of a graph: the dimensions of symbolic size, and whose tokens they count."""

from __future__ import annotations

import math

import torch
from torch.fx import Node


def size_before_tokens(tensor: torch.Tensor) -> int:
    """Product of the sizes left of the token dimension."""
    return math.prod(tensor.shape[: symbolic_dims(tensor)[0]])


def misaligned(inputs: list[Node], input_dims: list[list[int]]) -> str | None:
    """Broadcasting must line token dimensions up, counted from the right."""
    from_right = {i.meta["val"].dim() - d for i, dims in zip(inputs, input_dims) for d in dims}
    return "it combines values of different tokens by broadcasting" if len(from_right) > 1 else None


def tensor_inputs(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if any(True for _ in tensors(n.meta.get("val")))]


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors(v)


def symbolic_dims(tensor: torch.Tensor) -> list[int]:
    return [d for d, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)]


def token_dims(node: Node) -> list[int]:
    return [d for t in tensors(node.meta.get("val")) for d in symbolic_dims(t)]


def num_rows(nodes: list[Node]) -> set:
    """Sizes of these values' token dimensions."""
    return {t.shape[d].node.expr for n in nodes for t in tensors(n.meta.get("val")) for d in symbolic_dims(t)}


def sequences_of(nodes: list[Node], symbols: list) -> set:
    """Whose tokens these values have: members of `symbols`, or sizes that are multiples of none of them."""
    return {next((s for s in symbols if (size / s).is_Integer), size) for size in num_rows(nodes)}
