"""Leaf: multi-head latent attention over the latent itself, not over the keys and values that are made of it.

    source    key, value = expand_kv(latent, k_rot)         attention(cat(q_nope, q_rot), key, value)
    here      expand_kv passes both on as they are          mla_attention(q_nope, q_rot, latent, k_rot, w_k, w_v)

w_k and w_v are the rows of `kv_b_proj.weight` [H * (N + V), L], head by head: views, no copies. What a layer keeps of
a token is then L + P values and not H * (N + P + V). Lists of keys and sinks go on to the op as they come.

All MLA families of transformers have the method `expand_kv(kv_nope, k_rot)`. One whose projection is not a plain
weight is traced expanded (`latent_expansion.py`), and the report says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.attention_interface import IMPLEMENTATION, LATENT_ATTENTIONS
from pagebinder.frontend.leaves.latent_expansion import (
    METHOD,
    LatentExpansion,
    expand_kv,
    require_known_expansion,
)


def reason_against(module: torch.nn.Module) -> str | None:
    """Why a module's keys and values are not plain products of one weight and the latent; None: they are."""
    projection = getattr(module, "kv_b_proj", None)
    if type(projection) is not torch.nn.Linear:
        return f"its kv_b_proj is {type(projection).__name__}, not a plain linear layer"
    if projection.bias is not None:
        return "its kv_b_proj has a bias"
    if not projection.weight.is_floating_point() or projection.weight.element_size() < 2:
        return f"its kv_b_proj is quantised ({projection.weight.dtype})"
    return None


def split_weight(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of kv_b_proj.weight: w_k [H, N, L], w_v [H, V, L]."""
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    return torch.split(module.kv_b_proj.weight.unflatten(0, (-1, sum(widths))), widths, dim=1)


def latent_attention(
    module, q_THD, latent_T1L, k_rope_T1P, sinks, *, scale, window, chunk, soft_cap, causal, indices=None, ratio=1
):  # fmt: skip
    """What a patched module's attention becomes: [T, H, V].

    sinks: [H] or None. indices: [1, T, K] int32 or None, of groups of `ratio` tokens.
    """
    options = {
        "chunks": chunk,
        "a soft cap": soft_cap,
        "no causality": None if causal else True,
    }
    unread = [what for what, value in options.items() if value is not None]
    if unread:
        raise CaptureError(
            f"{type(module).__name__} attends to latents with {', '.join(unread)}; not known here."
        )
    q_nope, q_rope = torch.split(q_THD, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    w_k, w_v = split_weight(module)
    return torch.ops.pagebinder.mla_attention(
        q_nope, q_rope, latent_T1L[:, 0], k_rope_T1P[:, 0], w_k, w_v, None if indices is None else indices[0],
        sinks, scale=scale, window=window, ratio=ratio,
    )  # fmt: skip


def _as_they_are(kv_nope, k_rot):
    return kv_nope, k_rot


@dataclass(frozen=True, kw_only=True)
class LatentAttention(LatentExpansion):
    """For every module with the method and a plain projection."""

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        return {p: m for p, m in LatentExpansion.modules(self, model).items() if reason_against(m) is None}

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        """Where the model does not call our attention function (tests of recognisers), expanded."""
        with contextlib.ExitStack() as undo:
            for path, module in self.modules(model).items():
                require_known_expansion(self, path, module)
                if module.config._attn_implementation == IMPLEMENTATION:
                    LATENT_ATTENTIONS[module] = partial(latent_attention, module)
                    undo.callback(LATENT_ATTENTIONS.pop, module)
                    setattr(module, METHOD, _as_they_are)
                else:
                    setattr(module, METHOD, partial(expand_kv, module))
                undo.callback(delattr, module, METHOD)
            yield


@dataclass(frozen=True, kw_only=True)
class UnplainExpansion(LatentExpansion):
    """For the other modules with the method."""

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        return {
            p: m for p, m in LatentExpansion.modules(self, model).items() if reason_against(m) is not None
        }

    def refused(self, model: torch.nn.Module) -> dict[str, str]:
        return {
            path: f"{reason_against(module)}; keys and values are cached expanded"
            for path, module in self.modules(model).items()
        }


LATENT_ATTENTION = LatentAttention(
    name="latent attention",
    classes=(),
    functions={},
    emits=(torch.ops.pagebinder.mla_attention.default,),
    seen_on=("5.23", "5.24"),
)
LATENT_EXPANSION = UnplainExpansion(
    name="latent expansion", classes=(), functions={}, emits=(), seen_on=("5.23", "5.24")
)
