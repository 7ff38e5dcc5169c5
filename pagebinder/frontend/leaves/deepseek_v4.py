"""Leaf: DeepSeek-V4 of transformers. Attention over a window and compressed entries, and its hyper-connections.

    the source                                            while capturing
    window's mask, entries appended to the keys           compress, index_topk -> compressed_attention
    Sinkhorn's iterations, written out                    hyper_connection, hyper_mix, hyper_head
    projections, weighted norms, routers, experts         traced as they are, under their own module paths

Without it the source accepts our attention function and is wrong in silence: what hides later entries from a query is
joined to a mask that is then None. Rotations and the weightless norm of the query heads are emitted as our ops; both
round once, where the source rounds its factors to the activations' dtype first.

T tokens, C width, H heads, D head width, S streams. Before the capture the whole model is proven on a miniature, see
`deepseek_v4_proof.py`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.attention_interface import IMPLEMENTATION
from pagebinder.frontend.leaves import latent_ops as ops
from pagebinder.frontend.leaves.base import Leaf, swapped
from pagebinder.frontend.leaves.deepseek_v4_proof import Miniature, reason_against_parts
from pagebinder.frontend.leaves.functions import require_no_state, require_plain

OPS = torch.ops.pagebinder


def attention(
    self, hidden_states, position_embeddings, position_ids, attention_mask, cache=None, **kwargs
):  # fmt: skip
    """DeepseekV4Attention.forward: [1, T, C] -> ([1, T, C], None)."""
    name = type(self).__name__
    require_plain(name, hidden_states, kwargs)
    require_no_state(name, cache, False)
    if attention_mask is not None:
        raise CaptureError(f"{name} is given an attention mask during capture, which runs without one.")
    tokens, (cos, sin) = hidden_states.shape[:-1], position_embeddings[self.rope_layer_type]
    of_heads = cos.unsqueeze(2), sin.unsqueeze(2)
    q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
    q = self.q_b_norm(self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim)))
    q = ops.rotate(q, *of_heads)
    kv = ops.rotate(self.kv_norm(self.kv_proj(hidden_states)), cos, sin)
    entries, indices, ratio = None, None, 1
    if self.compressor is not None:
        entries, indices = self.compressor(
            hidden_states, q_residual, position_ids, None, self.layer_idx, rotation=of_heads
        )
        ratio = self.compressor.compress_rate
    out = ops.compressed_attention(
        q, kv, entries, indices, self.sinks.float(), scale=self.scaling, window=self.sliding_window, ratio=ratio
    )  # fmt: skip
    out = ops.rotate(out, cos.unsqueeze(2), -sin.unsqueeze(2))  # values are keys: they were rotated, too
    out = self.o_a_proj(out.reshape(*tokens, self.config.o_groups, -1)).flatten(2)
    return self.o_b_proj(out), None


def heavy_compressor(self, hidden_states, q_residual, position_ids, cache, layer_idx, **given):
    """DeepseekV4HCACompressor.forward: -> (entries [1, T, D], no choice among them)."""
    return _entries(self, hidden_states, overlap=False), None


def sparse_compressor(self, hidden_states, q_residual, position_ids, cache, layer_idx, **given):
    """DeepseekV4CSACompressor.forward: -> (entries [1, T, D], those that each query sees [1, T, K])."""
    entries = _entries(self, hidden_states, overlap=True)
    return entries, self.indexer(hidden_states, q_residual, position_ids, None, layer_idx, **given)


def indexer(self, hidden_states, q_residual, position_ids, cache, layer_idx, **given):
    """DeepseekV4Indexer.forward: -> [1, T, K]. `rotation`: the attention's cos and sin, of the same frequencies."""
    keys = _entries(self, hidden_states, overlap=True)
    q = self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim))
    q, scorer = ops.rotate(q, *given["rotation"]), self.scorer
    weights = scorer.weights_proj(hidden_states).float() * scorer.weights_scaling
    return ops.index_topk(
        q, keys, weights, topk=self.index_topk, ratio=self.compress_rate, scale=scorer.softmax_scale
    )


def _entries(self, hidden_states, *, overlap: bool) -> torch.Tensor:
    rotary, kind = self.rotary_emb, self.rope_layer_type
    return ops.compress(
        self.kv_proj(hidden_states),
        self.gate_proj(hidden_states),
        self.position_bias,
        self.kv_norm.weight,
        getattr(rotary, f"{kind}_inv_freq").float(),
        ratio=self.compress_rate,
        overlap=overlap,
        eps=self.kv_norm.variance_epsilon,
        rope_scale=getattr(rotary, f"{kind}_attention_scaling"),
    )


def unweighted_norm(self, x):
    """DeepseekV4UnweightedRMSNorm.forward."""
    return OPS.rms_norm(x, None, eps=float(self.eps), tail="none")


def norm_that_rounds_last(self, hidden_states):
    """DeepseekV4RMSNorm.forward, as transformers has it since the weight is kept in float32.

    5.17 rounds before it multiplies: a float32 weight makes a float32 row of it, and its linear layers, of bf16,
    cannot take that.
    """
    dtype, x = hidden_states.dtype, hidden_states.float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    if self.weight.dtype is dtype:
        return self.weight * normed.to(dtype)
    return (self.weight * normed).to(dtype)


def _rounds_first(norm: type[torch.nn.Module]) -> bool:
    with torch.device("cpu"), torch.no_grad():
        return norm(2)(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.float32


def hyper_connection(self, hidden_streams):
    """DeepseekV4HyperConnection.forward: [1, T, S, C] -> post [1, T, S], comb [1, T, S, S], [1, T, C]."""
    return ops.hyper_connection(
        hidden_streams, self.fn, self.base, self.scale,
        sinkhorn_iters=self.hc_sinkhorn_iters, norm_eps=self.input_norm.eps, eps=self.hc_eps,
    )  # fmt: skip


def hyper_head(self, x):
    """DeepseekV4HyperHead.forward: [1, T, S, C] -> [1, T, C]."""
    options = {"norm_eps": self.input_norm.eps, "eps": self.eps}
    return ops.hyper_head(x, self.hc_fn, self.hc_base, self.hc_scale, **options)


def decoder_layer(self, hidden_states, input_ids=None, **kwargs):
    """DeepseekV4DecoderLayer.forward: streams [1, T, S, C] -> the same."""
    post, comb, collapsed = self.attn_hc(hidden_states)
    update, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
    hidden_states = ops.hyper_mix(hidden_states, post, comb, update)
    post, comb, collapsed = self.ffn_hc(hidden_states)
    update = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids)
    return ops.hyper_mix(hidden_states, post, comb, update)


class DeepseekV4Leaf(Leaf):
    """Each class emits its own ops. Proven on a miniature with the model's own config before it is believed."""

    EMITTED = {
        "DeepseekV4Attention": (OPS.compressed_attention.default,),
        "DeepseekV4HCACompressor": (OPS.compress.default,),
        "DeepseekV4CSACompressor": (OPS.compress.default,),
        "DeepseekV4Indexer": (OPS.compress.default, OPS.index_topk.default),
        "DeepseekV4HyperConnection": (OPS.hyper_connection.default,),
        "DeepseekV4HyperHead": (OPS.hyper_head.default,),
        "DeepseekV4DecoderLayer": (OPS.hyper_mix.default,) * 2,
    }

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        """As `Leaf.patched`.

        Raises:
            CaptureError: a module or the config holds what nobody here reads; or the model in miniature computes
                something else than these functions.
        """
        with Leaf.patched(self, model):
            pass  # the functions are there, and take these arguments
        if reason := reason_against_parts(model):
            raise CaptureError(self._changed(reason))
        miniature = Miniature(model)
        expected = self._hidden_states(miniature, "eager")
        with Leaf.patched(self, model), self._norms(model):
            if reason := miniature.reason_against(expected, self._hidden_states(miniature, IMPLEMENTATION)):
                raise CaptureError(self._changed(reason))
            yield

    @contextlib.contextmanager
    def _norms(self, model: torch.nn.Module) -> Iterator[None]:
        norms = {type(m) for m in model.modules() if type(m).__name__ == "DeepseekV4RMSNorm"}
        with contextlib.ExitStack() as stack:
            for norm in filter(_rounds_first, norms):
                stack.enter_context(swapped(norm, "forward", norm_that_rounds_last))
            yield

    def _hidden_states(self, miniature: Miniature, implementation: str) -> torch.Tensor:
        try:
            return miniature.run(implementation)
        except CaptureError:
            raise
        except Exception as error:
            what = f"a small model with this config cannot be run: {type(error).__name__}: {error}"
            raise CaptureError(self._changed(what)) from error

    def expected(self, module: torch.nn.Module) -> Counter:
        return Counter(self.EMITTED.get(type(module).__name__, ()))


DEEPSEEK_V4 = DeepseekV4Leaf(
    name="compressed attention and hyper-connections",
    classes=tuple(DeepseekV4Leaf.EMITTED),
    functions={
        "DeepseekV4Attention.forward": attention,
        "DeepseekV4HCACompressor.forward": heavy_compressor,
        "DeepseekV4CSACompressor.forward": sparse_compressor,
        "DeepseekV4Indexer.forward": indexer,
        "DeepseekV4UnweightedRMSNorm.forward": unweighted_norm,
        "DeepseekV4HyperConnection.forward": hyper_connection,
        "DeepseekV4HyperHead.forward": hyper_head,
        "DeepseekV4DecoderLayer.forward": decoder_layer,
    },
    emits=tuple({op: None for ops_of_class in DeepseekV4Leaf.EMITTED.values() for op in ops_of_class}),
    seen_on=("5.23", "5.24"),
)
