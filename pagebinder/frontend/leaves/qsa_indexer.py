"""Leaf: Qwen4's sparse attention (QSA), where an indexer chooses groups of keys by the mean of their index keys.

    source    for every query by itself: means of `ratio` raw keys -> norm -> RoPE -> scores -> top-k -> mask
    here      compress (equal weights: a mean), index_topk, and an attention that is told the chosen groups

    index keys   | raw raw raw raw | raw raw raw raw | raw raw       ratio = 4; the tail is seen by all that follows
                 \\____ mean ______/ \\____ mean _____/   tail
                    entry 0            entry 1

`compress` rotates the trailing channels in pairs, the source the leading ones in halves: channels of queries and keys
are brought into the other order, which changes no product. The indexer's own code runs beside ours before the
capture (`indexer_proof.py`).

T tokens, Hi index heads, d their width.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.attention_interface import CausalMask, ChosenKeys
from pagebinder.frontend.leaves import latent_ops as ops
from pagebinder.frontend.leaves.base import Leaf, restore_forward
from pagebinder.frontend.leaves.fresh_modules import fresh
from pagebinder.frontend.leaves.indexer_proof import PROBED_TOPK, chooses_alike, proof_key, random_rows
from pagebinder.frontend.leaves.sparse_indexer import with_mask

ROTARY = "Qwen4ExpTextRotaryEmbedding"
ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # whose frequencies do not depend on the length


def pairs_last(x: torch.Tensor, rotated: int) -> torch.Tensor:
    """[..., d] with `rotated` leading channels in halves -> the same channels behind the others, pair by pair."""
    low, high, kept = x.split([rotated // 2, rotated // 2, x.shape[-1] - rotated], dim=-1)
    return torch.cat([kept, torch.stack([low, high], dim=-1).flatten(-2)], dim=-1)


def index_operands(self, rotary, hidden_states, position_embeddings):
    """(q [1, T, Hi, d], entries [1, T, d], weights [1, T, Hi]) of `index_topk`."""
    rotated = 2 * len(rotary.inv_freq)
    cos, sin = position_embeddings
    width, ratio = self.index_head_dim, self.compress_ratio
    q, keys = self.index_qk_proj(hidden_states).split([self.index_n_heads * width, width], dim=-1)
    q = self.q_layernorm(q.unflatten(-1, (-1, width)))
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    q = pairs_last(rotate(q, cos=cos, sin=sin, unsqueeze_dim=2), rotated)
    keys, norm_weight = pairs_last(keys, rotated), pairs_last(1.0 + self.k_layernorm.weight.float(), rotated)
    entries = ops.compress(
        keys,
        torch.zeros_like(keys),
        torch.zeros((ratio, width), dtype=torch.float32, device=keys.device),
        norm_weight,
        rotary.inv_freq.float(),
        ratio=ratio,
        overlap=False,
        eps=self.k_layernorm.eps,
        rope_scale=float(rotary.attention_scaling),
    )
    return q, entries, torch.ones_like(q[..., 0])


def choose(self, rotary, hidden_states, position_embeddings, attention_mask, cache) -> ChosenKeys:
    """Qwen4ExpTextQSAIndexer.forward."""
    if cache is not None or not isinstance(attention_mask, CausalMask):
        raise CaptureError(
            f"{type(self).__name__} is given a cache, or a mask, which says more than causality."
        )
    operands = index_operands(self, rotary, hidden_states, position_embeddings)
    indices = ops.index_topk(
        *operands, topk=self.block_topk, ratio=self.compress_ratio, scale=self.index_head_dim**-0.5
    )
    return ChosenKeys(indices, self.compress_ratio)


@dataclass(frozen=True, kw_only=True)
class QsaIndexer(Leaf):
    """For the indexers; the attention around them is told a mask that says causality alone."""

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        rotary, proven = self._rotary(model), set()
        with contextlib.ExitStack() as undo:
            for attention in model.modules():
                indexer = attention._modules.get("indexer")
                if type(indexer).__name__ not in self.classes:
                    continue
                ours = self._fitting_method(indexer, "forward", partial(choose, indexer, rotary))
                if proof_key(indexer) not in proven:
                    self._prove(attention, rotary)
                    proven.add(proof_key(indexer))
                hook = attention.register_forward_pre_hook(with_mask, with_kwargs=True)
                undo.callback(hook.remove)
                undo.callback(restore_forward, indexer, indexer.__dict__.get("forward"))
                indexer.forward = ours
            yield

    def _rotary(self, model: torch.nn.Module) -> torch.nn.Module:
        """What rotates queries and keys of this model."""
        found = [m for m in model.modules() if type(m).__name__ == ROTARY]
        if len(found) != 1:
            raise CaptureError(
                self._changed(f"the model has {len(found)} modules of the class {ROTARY}, not one")
            )
        if found[0].rope_type not in ROPE_TYPES:
            raise CaptureError(
                f"rope_type={found[0].rope_type!r}: frequencies that depend on the length are not understood for "
                f"index keys; known: {', '.join(ROPE_TYPES)}."
            )
        return found[0]

    def _prove(self, attention: torch.nn.Module, rotary: torch.nn.Module) -> None:
        """Do the indexer's own code and ours choose the same?

        Raises:
            CaptureError: they do not.
        """
        indexer, ratio = attention.indexer, attention.indexer.compress_ratio
        budget = {"block_topk": PROBED_TOPK, "token_budget": PROBED_TOPK * ratio}
        small = fresh(indexer, attention.config, indexer.layer_idx, **budget)
        rotary = fresh(rotary, rotary.config)  # the model's frequencies may be on meta
        (hidden,) = random_rows(ratio, small.index_qk_proj.in_features)
        p = torch.arange(hidden.shape[1])
        causal = p <= p[:, None]
        with torch.no_grad():
            operands = hidden, rotary(hidden, p.view(1, 1, -1))
            theirs = type(indexer).forward(small, *operands, causal[None, None], None)[0, 0] & causal
            chosen = choose(small, rotary, *operands, CausalMask(), None)
            scored = index_operands(small, rotary, *operands)
        if not chooses_alike(theirs, chosen, scored, small.index_head_dim**-0.5):
            raise CaptureError(self._changed("it chooses other keys than its formula says"))


QSA_INDEXER = QsaIndexer(
    name="QSA indexer",
    classes=("Qwen4ExpTextQSAIndexer",),
    functions={},
    emits=(torch.ops.pagebinder.compress.default, torch.ops.pagebinder.index_topk.default),
    seen_on=("5.23", "5.24"),
)
