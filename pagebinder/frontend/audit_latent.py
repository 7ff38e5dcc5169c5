"""Rules of the token-mixing audit for ops over latent rows, and for the streams of hyper-connections.

compress, index_topk, compressed_attention,
indexed_attention, mla_attention              relate tokens as their paged forms do: rows are positions
hyper_connection, hyper_mix, hyper_head       every token alone

All take operands [tokens, ...], rows of the same tokens, and weights that depend on no token.
"""

from __future__ import annotations

import torch
from torch.fx import Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.token_dims import token_dims

OPS = torch.ops.pagebinder
# op -> (positions of the operands of tokens, positions of weights); those that are None are left out
LATENT = {
    OPS.compress.default: ((0, 1), (2, 3, 4)),
    OPS.index_topk.default: ((0, 1, 2), ()),
    OPS.compressed_attention.default: ((0, 1, 2, 3), (4,)),
    OPS.indexed_attention.default: ((0, 1, 2, 3), ()),
    OPS.mla_attention.default: ((0, 1, 2, 3, 6), (4, 5, 7)),
    OPS.hyper_connection.default: ((0,), (1, 2, 3)),
    OPS.hyper_mix.default: ((0, 1, 2, 3), ()),
    OPS.hyper_head.default: ((0,), (1, 2, 3)),
}


def reason_against_latent(node: Node) -> str | None:
    """Why a node with a target in LATENT may relate tokens otherwise than its op says, or None."""
    per_token, weights = (
        [node.args[i] for i in positions if i < len(node.args) and isinstance(node.args[i], Node)]
        for positions in LATENT[node.target]
    )
    if any(token_dims(operand) != [0] for operand in per_token):
        return "it takes [tokens, ...] of every operand"
    return "its weights depend on tokens" if any(map(token_dims, weights)) else None
