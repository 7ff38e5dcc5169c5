"""Rules of the token-mixing audit for look-ups: rows of a table, entries of every token's values, writes to some."""

from __future__ import annotations

import torch
from torch.fx import Node

from pagebinder.frontend.token_dims import token_dims
from pagebinder.graph_tools import arg, aten

# op -> (position of the table, position of the indices)
TABLE_LOOKUPS = {
    aten.embedding.default: (0, 1),
    aten.index_select.default: (0, 2),
    aten.index.Tensor: (0, 1),
}


def reason_against_lookup(node: Node) -> str | None:
    table, indices = (node.args[i] for i in TABLE_LOOKUPS[node.target])
    if node.target is aten.index_select.default and token_dims(table):
        return "it picks tokens" if node.args[1] % table.meta["val"].dim() in token_dims(table) else None
    if node.target is aten.index.Tensor and token_dims(table):
        return _reason_against_pick(table, indices)
    if token_dims(table):
        return "it looks up rows of a table that depends on tokens"
    if isinstance(indices, (list, tuple)) and sum(i is not None for i in indices) > 1:
        return "it looks up a table by several indices at once"
    return None


def _reason_against_pick(values: Node, indices) -> str | None:
    """values[..., [2, 0], :]: the same entries of every token's values, in another order."""
    picked = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(picked) > 1:
        return "it looks up a table that depends on tokens by several indices at once"
    dim, index = picked[0]
    if token_dims(index):
        return "it looks up rows of a table that depends on tokens"
    return "it picks tokens" if dim in token_dims(values) else None


def reason_against_write(node: Node) -> str | None:
    """values[mask] = scalar, mask of the values' own tokens, or values[..., [2, 0]] = scalar: the same of each."""
    values, indices, new = node.args[:3]
    places = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(places) != 1 or new.meta["val"].numel() != 1:
        return "it writes to entries that other values choose"
    dim, index = places[0]
    is_mask = index.meta["val"].dtype == torch.bool
    of_tokens = token_dims(index) or dim in token_dims(values)
    if len(indices) > 1 if is_mask else of_tokens:
        return "it writes to entries that other values choose"
    if is_mask and token_dims(index) != token_dims(values):
        return "it writes to the entries of other tokens"
    if arg(node, 3, "accumulate", False):
        return "it adds to entries as often as they are named"
    return "it writes a value of tokens" if token_dims(new) else None
