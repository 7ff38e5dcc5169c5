"""Leaves: attention with ALiBi that is written out, with a bias that the model builds from the number of tokens.

    BLOOM   alibi [H, 1, T] = slope * j, joined to the scores by baddbmm
    MPT     alibi [H, 1, max_seq_len] = slope * (j - max_seq_len + 1), cut to the last T columns

In a softmax both are slope * (j - p). The slopes come from the modeling file's own functions, and the bias they make
is checked to be linear in the distance before it is believed. The causal mask that these models always build is
left out with the bias: our op is causal.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf

PROBED_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class AlibiLeaf(Leaf):
    """`forward(module, slopes [H], ...)` stands in for the source's; `bias_of(module)` is [H, PROBED_TOKENS]."""

    forward: Callable
    bias_of: Callable[[torch.nn.Module], torch.Tensor]

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for module in self.modules(model).values():
                ours = partial(self.forward, module, self._slopes(module))
                module.forward = self._fitting_method(module, "forward", ours)
                undo.callback(delattr, module, "forward")
            yield

    def _slopes(self, module: torch.nn.Module) -> torch.Tensor:
        """[H] float32 of a bias that is slope * (key + constant).

        Raises:
            CaptureError: it is something else.
        """
        try:
            bias_HT = self.bias_of(module).double()
        except (AttributeError, TypeError) as error:
            raise CaptureError(self._changed(f"its bias cannot be built: {error}")) from error
        slopes_H = (bias_HT[:, -1] - bias_HT[:, 0]) / (PROBED_TOKENS - 1)
        straight = bias_HT[:, :1] + slopes_H[:, None] * torch.arange(PROBED_TOKENS, dtype=torch.float64)
        if not torch.allclose(bias_HT, straight, rtol=1e-5, atol=1e-6):
            raise CaptureError(f"The bias of {type(module).__name__} is not linear in the distance (ALiBi).")
        return slopes_H.float().to(next(module.parameters()).device)


def bloom_attention(self, slopes, hidden_states, residual, alibi, attention_mask, layer_past=None, use_cache=False,
                    output_attentions=False, **kwargs):  # fmt: skip
    """hidden, residual [1, T, C] -> ([1, T, C], None). Projections and residual as in the source."""
    _require_plain(self, hidden_states, layer_past, kwargs, dropout=self.attention_dropout.p)
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    out = _attention(q, k, v, slopes, self.inv_norm_factor * self.beta)
    if self.pretraining_tp > 1 and self.slow_but_exact:
        raise CaptureError("BLOOM with slow_but_exact adds its output slice by slice; set it to False.")
    out = sys.modules[type(self).__module__].dropout_add(
        self.dense(out), residual, self.hidden_dropout, self.training
    )
    return out, None


def mpt_attention(self, slopes, hidden_states, position_bias, cache=None, attention_mask=None, **kwargs):
    """hidden [1, T, C] -> ([1, T, C], None)."""
    _require_plain(self, hidden_states, cache, kwargs, dropout=self.attn_dropout_p)
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    q, k, v = (x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    return self.out_proj(_attention(q, k, v, slopes, self.softmax_scale)), None


def _require_plain(module, hidden_states, cache, unread: dict, *, dropout: float) -> None:
    """One sequence, no cache of the source's, and no argument that nobody here reads."""
    name = type(module).__name__
    unread = sorted(key for key, value in unread.items() if value is not None and key != "position_ids")
    if unread:
        raise CaptureError(f"{name} was given {', '.join(unread)}, which are not understood here.")
    if hidden_states.shape[0] != 1 or cache is not None or (dropout and module.training):
        raise CaptureError(f"{name} is traced for one sequence without a cache or dropout.")


def _attention(q, k, v, slopes, scale: float) -> torch.Tensor:
    """q, k, v [1, H, T, D] -> [1, T, H * D]."""
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
    out = torch.ops.pagebinder.attention(q_THD, k_THD, v_THD, None, slopes, scale=float(scale), causal=True)
    return out.flatten(1).unsqueeze(0)


def _bloom_bias(module: torch.nn.Module) -> torch.Tensor:
    """As with a padding mask of ones: the same bias as without a mask."""
    file, ones = sys.modules[type(module).__module__], torch.ones(1, PROBED_TOKENS)
    return file.build_alibi_tensor(ones, module.num_heads, torch.float32)[:, 0]


def _mpt_bias(module: torch.nn.Module) -> torch.Tensor:
    return sys.modules[type(module).__module__].build_mpt_alibi_tensor(module.n_heads, PROBED_TOKENS)[:, 0]


BLOOM_ALIBI = AlibiLeaf(
    name="ALiBi attention",
    classes=("BloomAttention",),
    functions={},
    forward=bloom_attention,
    bias_of=_bloom_bias,
    emits=(torch.ops.pagebinder.attention.default,),
    seen_on=("5.23", "5.24"),
)
MPT_ALIBI = AlibiLeaf(
    name="ALiBi attention",
    classes=("MptAttention",),
    functions={},
    forward=mpt_attention,
    bias_of=_mpt_bias,
    emits=(torch.ops.pagebinder.attention.default,),
    seen_on=("5.23", "5.24"),
)
