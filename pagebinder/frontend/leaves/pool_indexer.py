"""Leaf: GLM-5.3's sparse attention, where an indexer chooses pools of tokens by keys that it learns to pool.

    source    pool keys = sum of softmax(gate + ape) * k -> scores -> top-k -> their tokens, the tail -> mask
    here      compress (no norm, no RoPE), index_topk, and an attention that is told the chosen pools

    keys      | k k k k | k k k k | k k       ratio = 4; the tail is seen by all that follows
               \\_ pool _/ \\_ pool _/  tail

The indexer's own code, and what makes a mask of its choice, run beside ours before the capture (`indexer_proof.py`).
A layer without an indexer is given what the layer before it chose. The model makes no mask: it is given one for each
type of layer, and that of indexers says causality alone.

T tokens, Hi index heads, d their width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.attention_interface import IMPLEMENTATION, CausalMask, ChosenKeys
from pagebinder.frontend.leaves import latent_ops as ops
from pagebinder.frontend.leaves.base import Leaf, restore_forward
from pagebinder.frontend.leaves.fresh_modules import fresh
from pagebinder.frontend.leaves.indexer_proof import PROBED_TOPK, chooses_alike, proof_key, random_rows

MASK_METHOD = "build_attention_mask_from_topk"


def index_operands(self, hidden_states, q_resid):
    """(q [1, T, Hi, d], entries [1, T, d], weights [1, T, Hi]) of `index_topk`."""
    q = self.wq_b(q_resid).unflatten(-1, (-1, self.head_dim))
    keys = self.k_norm(self.wk(hidden_states))
    gate = torch.nn.functional.linear(hidden_states, self.index_kpool_compress_gate)
    entries = ops.compress(
        keys,
        gate,
        self.index_kpool_compress_ape,
        None,
        torch.zeros(0, dtype=torch.float32, device=keys.device),
        ratio=self.index_kpool,
        overlap=False,
        eps=0.0,
    )
    weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
    return q, entries, weights * self.n_heads**-0.5


def choose(self, hidden_states, q_resid, attention_mask, cache) -> ChosenKeys:
    """Glm5NextTextIndexer.forward."""
    if cache is not None or not isinstance(attention_mask, CausalMask):
        raise CaptureError(
            f"{type(self).__name__} is given a cache, or a mask, which says more than causality."
        )
    operands, pool = index_operands(self, hidden_states, q_resid), self.index_kpool
    indices = ops.index_topk(*operands, topk=self.index_topk // pool, ratio=pool, scale=self.softmax_scale)
    return ChosenKeys(indices, pool)


def chosen_as_mask(topk_indices, query_states, kv_length) -> ChosenKeys:
    """Glm5NextTextAttention.build_attention_mask_from_topk."""
    if not isinstance(topk_indices, ChosenKeys):
        raise CaptureError("An attention is given tokens that no indexer known here chose.")
    return topk_indices


def with_masks(module, args, kwargs):
    """attention_mask by type of layer, where the model is given none."""
    if args[1:] or kwargs.get("attention_mask") is not None:
        return None
    masks = {"indexed_attention": CausalMask(), "linear_attention": None}
    return args, {**kwargs, "attention_mask": masks}


@dataclass(frozen=True, kw_only=True)
class PoolIndexer(Leaf):
    """For the indexers; attentions: the classes around them, models: those that make masks."""

    attentions: tuple[str, ...]
    models: tuple[str, ...]

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        proven: set[tuple] = set()
        with contextlib.ExitStack() as undo:
            for module in self._tracing_ours(model, self.models):
                undo.callback(module.register_forward_pre_hook(with_masks, with_kwargs=True).remove)
            for attention in self._tracing_ours(model, self.attentions):
                if attention.indexer is not None:
                    self._patch_indexer(attention, proven, undo)
                ours = self._fitting_method(attention, MASK_METHOD, chosen_as_mask)
                undo.callback(delattr, attention, MASK_METHOD)
                setattr(attention, MASK_METHOD, ours)
            yield

    @staticmethod
    def _tracing_ours(model: torch.nn.Module, classes: tuple[str, ...]) -> list[torch.nn.Module]:
        """The modules of these classes, but where the source's own attention is traced (tests of recognisers)."""
        found = [module for module in model.modules() if type(module).__name__ in classes]
        return [module for module in found if module.config._attn_implementation == IMPLEMENTATION]

    def _patch_indexer(self, attention: torch.nn.Module, proven: set, undo: contextlib.ExitStack) -> None:
        indexer = attention.indexer
        if type(indexer).__name__ not in self.classes:
            raise CaptureError(self._changed(f"its indexer is {type(indexer).__name__}"))
        ours = self._fitting_method(indexer, "forward", partial(choose, indexer))
        if not indexer.index_kpool_always_select_tail:
            raise CaptureError(
                "index_kpool_always_select_tail=False: queries that do not see the tokens behind the last complete "
                "pool, not even their own, are not served."
            )
        if proof_key(indexer) not in proven:
            self._prove(attention)
            proven.add(proof_key(indexer))
        undo.callback(restore_forward, indexer, indexer.__dict__.get("forward"))
        indexer.forward = ours

    def _prove(self, attention: torch.nn.Module) -> None:
        """Do the source's own code and ours see the same?

        Raises:
            CaptureError: they do not.
        """
        indexer, pool = attention.indexer, attention.indexer.index_kpool
        small = fresh(indexer, indexer.config, indexer.layer_idx, index_topk=PROBED_TOPK * pool)
        hidden, q_resid = random_rows(pool, indexer.hidden_size, indexer.q_lora_rank)
        num_tokens = hidden.shape[1]
        with torch.no_grad():
            everything = torch.ones(1, num_tokens, dtype=torch.bool)
            listed = type(indexer).forward(small, hidden, q_resid, everything, None)
            method = getattr(type(attention), MASK_METHOD)
            mask = method(attention, listed, query_states=hidden[:, None], kv_length=num_tokens)[0, 0]
            theirs = mask if mask.dtype is torch.bool else mask == 0
            chosen = choose(small, hidden, q_resid, CausalMask(), None)
            operands = index_operands(small, hidden, q_resid)
        if not chooses_alike(theirs, chosen, operands, small.softmax_scale):
            raise CaptureError(self._changed("it chooses other keys than its formula says"))


POOL_INDEXER = PoolIndexer(
    name="pool indexer",
    classes=("Glm5NextTextIndexer",),
    attentions=("Glm5NextTextAttention",),
    models=("Glm5NextTextModel",),
    functions={},
    emits=(torch.ops.pagebinder.compress.default, torch.ops.pagebinder.index_topk.default),
    seen_on=("5.23", "5.24"),
)
