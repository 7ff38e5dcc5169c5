"""Leaf: DeepSeek sparse attention (DSA), where an indexer chooses the tokens that each query sees.

    source    scores = relu(q.float() @ k.float()^T * scale)          [T, heads, T]
              topk(weights @ scores, masked causally)
    here      index_topk(q, k, weights, topk, ratio=1, scale)         one op

What leads to q, k and weights (projections, norms, RoPE, of which every family has its own) is traced as it is. To
find where it ends, the indexer runs with stand-ins: a cache that takes the keys, and for the first product with them
an object that only goes through the steps above. Any other step, or another order, is an error.

The attention gets the chosen tokens from its indexer, or from that of an earlier layer; see `latent_attention.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

import pagebinder.custom_ops.sparse.semantic  # noqa: F401  (registers the op)
from pagebinder.errors import CaptureError
from pagebinder.frontend.attention_interface import IMPLEMENTATION, CausalMask
from pagebinder.frontend.leaves.base import STATE, Leaf, renamed, restore_forward

# Seen to compute the above. Attention modules with other indexers (of pooled keys) are refused, see
# `unsupported.py`.
INDEXERS = (
    "AXK2Indexer",
    "DeepseekV32Indexer",
    "Dots3NoteTextIndexer",
    "GlmMoeDsaIndexer",
    "HYV4Indexer",
    "HYV4VLIndexer",
    "MistralLarge4TextIndexer",
)


class KeyTaker:
    """In place of a cache: takes the keys [1, T, d] of the call, which are all there are."""

    def __init__(self) -> None:
        self.keys = None

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self.keys = keys
        return keys


@dataclass
class Scores:
    """Scores [1, T, heads, T], then [1, T, T], that are never computed; see `_SCORED` for the steps.

    `said`: the steps so far.
    """

    leaf: Leaf
    q: torch.Tensor
    keys: torch.Tensor
    said: list[str] = field(default_factory=list)
    scale: float = 1.0
    weights: torch.Tensor | None = None

    # What `min(index_topk, scores.shape[-1])` must not depend on.
    shape = (1, sys.maxsize)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        scores = next(a for a in args if isinstance(a, Scores))
        if func is torch.nn.functional.relu:
            return scores._step("relu")
        if func in (torch.matmul, torch.Tensor.matmul) and args[1] is scores:
            scores.weights = args[0]
            return scores._step("weigh")
        raise CaptureError(scores.leaf._changed(f"its scores go through {func}"))

    def __mul__(self, scale: float) -> Scores:
        self.scale = float(scale)
        return self._step("scale")

    def squeeze(self, dim: int) -> Scores:
        return self._step("squeeze")

    def masked_fill(self, mask, value) -> Scores:
        if not isinstance(mask, CausalMask) or value != float("-inf"):
            raise CaptureError(self.leaf._changed("its scores are masked by something else than causality"))
        return self._step("mask")

    def topk(self, k: int, dim: int) -> SimpleNamespace:
        steps = [step for step in self.said if step != "scale"]
        if steps != ["relu", "weigh", "squeeze", "mask"] or dim != -1 or "scale" in self.said[1:]:
            raise CaptureError(self.leaf._changed(f"its scores go through {', '.join(self.said)}"))
        weights = self.weights.squeeze(-2)[0]
        chosen = torch.ops.pagebinder.index_topk(
            self.q[0], self.keys[0], weights, topk=int(k), ratio=1, scale=self.scale
        )
        return SimpleNamespace(indices=chosen.unsqueeze(0))

    def _step(self, name: str) -> Scores:
        self.said.append(name)
        return self


class _Scoring(TorchFunctionMode):
    """The first product with the keys becomes `Scores`; q and k are those before their cast to float32."""

    def __init__(self, leaf: Leaf, taker: KeyTaker) -> None:
        super().__init__()
        self.leaf, self.taker = leaf, taker
        self.before_cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.matmul and self.taker.keys is not None and not isinstance(args[1], Scores):
            q, keys = args[0], self.taker.keys
            tokens, width = keys.shape[1:]
            if q.dim() != 4 or tuple(args[1].shape) != (1, 1, width, tokens):
                raise CaptureError(self.leaf._changed("its first product is not that of queries and keys"))
            return Scores(self.leaf, self.before_cast.get(id(q), (q, q))[1], keys)
        out = func(*args, **kwargs)
        if func is torch.Tensor.float:
            self.before_cast[id(out)] = (out, args[0])  # kept alive, so that no other tensor has its id
        return out


@dataclass(frozen=True, kw_only=True)
class SparseIndexer(Leaf):
    """For the indexers, and for the attention around them: it is told a mask that says causality alone."""

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for attention in self._attentions(model):
                hook = attention.register_forward_pre_hook(with_mask, with_kwargs=True)
                undo.callback(hook.remove)
                if attention.indexer is not None:
                    self._patch(attention.indexer, undo)
            yield

    def _attentions(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """The attention modules that have an indexer, or None where they share another's, and call our function.

        Not so where the source's own attention is traced (tests of recognisers).
        """
        files = {type(m).__module__ for m in self.modules(model).values()}
        found = [m for m in model.modules() if hasattr(m, "indexer") and type(m).__module__ in files]
        return [m for m in found if m.config._attn_implementation == IMPLEMENTATION]

    def _patch(self, indexer: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        self._fitting_method(indexer, "forward", _taken)
        undo.callback(restore_forward, indexer, indexer.__dict__.get("forward"))
        indexer.forward = partial(self._index, indexer.forward)

    def _index(self, forward, *args, **kwargs):
        taker = KeyTaker()
        with _Scoring(self, taker):
            return forward(*args, **{**kwargs, renamed(STATE, inspect.signature(forward).parameters): taker})


def with_mask(module, args, kwargs):
    """attention_mask=CausalMask(), where the model made none: no mask function is registered for ours."""
    if kwargs.get("attention_mask") is not None:
        return None
    return args, {**kwargs, "attention_mask": CausalMask()}


def _taken(hidden_states, cache):
    """The arguments that the source's method must take."""


SPARSE_INDEXER = SparseIndexer(
    name="sparse indexer",
    classes=INDEXERS,
    functions={},
    emits=(torch.ops.pagebinder.index_topk.default,),
    seen_on=("5.23", "5.24"),
)
