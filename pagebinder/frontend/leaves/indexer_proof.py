"""Do an indexer's own code and ours choose the same? On random rows, of which it must leave some out.

    a fresh module of the same class and options, with random weights and a small budget
        the source's forward      -> the tokens that each query sees --+
        ours, with index_topk     -> the tokens that each query sees --+-- equal, where the scores are clear

It runs on the CPU in float32 and reads none of the model's weights: a model on the meta device is proven as well, and
one of bfloat16 is no other model for its roundings.

T tokens, N groups of tokens, Hi index heads, d their width.
"""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.attention.indexed import visible_tokens
from pagebinder.custom_ops.sparse.semantic import aligned_entries, index_scores, num_visible
from pagebinder.frontend.attention_interface import ChosenKeys
from pagebinder.frontend.leaves.fresh_modules import numeric_options

PROBED_GROUPS, PROBED_TOPK = 12, 2
CLEAR = 1e-4  # of the largest score: what is nearer is not told apart in float32


def proof_key(indexer: torch.nn.Module) -> tuple:
    """Indexers of a model that have the same are proven by one of them."""
    return (type(indexer), *sorted(numeric_options(indexer).items()))


def random_rows(ratio: int, *widths: int) -> list[torch.Tensor]:
    """[1, T, width] each, of complete groups of `ratio` tokens and half a one."""
    num_tokens, generator = PROBED_GROUPS * ratio + ratio // 2, torch.Generator().manual_seed(0)
    return [torch.randn(1, num_tokens, width, generator=generator) for width in widths]


def chooses_alike(theirs_TT, chosen: ChosenKeys, operands, scale: float) -> bool:
    """Is what we chose what the source's code did, and was there something to choose?

    theirs_TT: bool, the tokens that each query sees. operands: (q [1, T, Hi, d], entries [1, T, d], weights
    [1, T, Hi]) of `index_topk`, and its scale.
    """
    num_tokens, ratio = len(theirs_TT), chosen.ratio
    p = torch.arange(num_tokens)
    ours_TT = visible_tokens(p, num_tokens, chosen.indices[0], ratio)
    q, entries, weights = (x[0] for x in operands)
    scores = index_scores(q, aligned_entries(entries, ratio), weights, scale)
    clear, cut = _clear(scores, num_visible(p, ratio))
    return bool((clear & cut).any()) and torch.equal(theirs_TT[clear], ours_TT[clear])


def _clear(scores_TN, num_visible_T) -> tuple[torch.Tensor, torch.Tensor]:
    """(is the last chosen score clearly above the first that is left out? is one left out?) of each query."""
    hidden = torch.arange(scores_TN.shape[1]) >= num_visible_T[:, None]
    best = scores_TN.masked_fill(hidden, float("-inf")).topk(PROBED_TOPK + 1).values
    cut = num_visible_T > PROBED_TOPK
    gap = best[:, PROBED_TOPK - 1] - best[:, PROBED_TOPK]
    return ~cut | (gap > CLEAR * scores_TN.abs().max()), cut
