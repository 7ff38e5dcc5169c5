"""Leaves: our own DeepSeek-V4 (`models/deepseek_v4.py`), whose functions give way to the ops that they stand for.

    models/deepseek_v4_mixing.py                       while capturing
    compress, index_topk, compressed_attention, hyper_*    the op of that name
    weighted_experts (models/deepseek_v4_experts.py)       moe_experts
    rms_norm, rotate, q_norm_rope                          rms_norm and rope
    inverse_rope_grouped_linear                            rope, and a product for each group of heads
    Rope.inverse_frequencies                               a constant, computed once

The result is the graph that the leaf of transformers' DeepSeek-V4 gives with the same weights, so whatever is done
to one of them later is done to the other.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.frontend.leaves import latent_ops as ops
from pagebinder.frontend.leaves.base import Leaf

OPS = torch.ops.pagebinder
LIBRARY = "pagebinder.models.deepseek_v4"
# Layers of the model that its forward does not run: they predict further tokens.
NOT_RUN = "NextTokens"


def rms_norm(x, weight, eps):
    """x [..., C], weight [C] or None -> the same shape and dtype, rounded once."""
    return OPS.rms_norm(x, weight, eps=float(eps), tail="none" if weight is None else "scale_cast")


def q_norm_rope(q_BTHD, cos, sin, *, eps):
    """q [1, T, H, D], cos and sin [1, T, r] -> [1, T, H, D]."""
    return ops.rotate(rms_norm(q_BTHD, None, eps), cos.unsqueeze(2), sin.unsqueeze(2))


def inverse_rope_grouped_linear(x_BTHD, cos, sin, weight, *, groups):
    """x [1, T, H, D], weight [groups * r, H * D / groups] -> [1, T, groups * r]."""
    x = ops.rotate(x_BTHD, cos.unsqueeze(2), -sin.unsqueeze(2))
    tokens, width = x.shape[:-2], weight.shape[-1]
    x_gTi = x.reshape(-1, groups, width).transpose(0, 1)
    weight_gir = weight.view(groups, -1, width).transpose(1, 2)
    return torch.bmm(x_gTi, weight_gir).transpose(0, 1).reshape(*tokens, -1)


def experts(x_TC, indices, weights, gate_up, down, *, limit):
    """x [T, C], indices and weights [T, K], gate_up [E, 2 I, C], down [E, C, I] -> [T, C]."""
    gate = Gate(limit=float(limit)).as_options()
    return OPS.moe_experts(x_TC, indices, weights, gate_up, down, None, None, transposed=False, **gate)


def shared_expert(self, x):
    """MLP.forward, without joining gate and up in one tensor first: [..., C] -> [..., C]."""
    up = self.up_proj(x).clamp(-self.limit, self.limit)
    return self.down_proj(torch.nn.functional.silu(self.gate_proj(x).clamp(max=self.limit)) * up)


class OwnDeepseekV4(Leaf):
    """Counts the ops of each class, in the layers that the model runs."""

    EMITTED = {
        "DecoderLayer": (OPS.hyper_mix.default,) * 2,
        "HyperConnection": (OPS.hyper_connection.default,),
        "HyperHead": (OPS.hyper_head.default,),
        "Compressor": (OPS.compress.default,),
        "SparseCompressor": (OPS.compress.default,),
        "Indexer": (OPS.compress.default,),
        "Experts": (OPS.moe_experts.default,),
    }

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        not_run = [f"{path}." for path, m in model.named_modules() if type(m).__name__ == NOT_RUN]
        found = Leaf.modules(self, model).items()
        return {path: module for path, module in found if not path.startswith(tuple(not_run))}

    def expected(self, module: torch.nn.Module) -> Counter:
        if type(module).__name__ == "Attention":
            chosen = (OPS.index_topk.default,) * (module.layer_type == "compressed_sparse_attention")
            return Counter((OPS.compressed_attention.default, *chosen))
        return Counter(self.EMITTED.get(type(module).__name__, ()))


class OwnAttention(OwnDeepseekV4):
    """Its frequencies are computed before the trace, which then holds them as constants."""

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        attentions = [m for m in self.modules(model).values() if type(m).__name__ == "Attention"]
        places = {(m.rope, m.sinks.device) for m in attentions}  # a compressor's are those of its attention
        known = {(rope, device): rope.inverse_frequencies(device) for rope, device in places}

        def inverse_frequencies(self, device=None):
            return known[self, torch.device(device)]

        leaf = Leaf(
            name=self.name, classes=self.classes, emits=self.emits, seen_on=self.seen_on, library=self.library,
            functions={**self.functions, "Rope.inverse_frequencies": inverse_frequencies},
        )  # fmt: skip
        with leaf.patched(model):
            yield


OWN_ATTENTION = OwnAttention(
    name="compressed attention and hyper-connections",
    classes=("Attention", "DecoderLayer"),
    functions={
        "mixing.compress": ops.compress,
        "mixing.index_topk": ops.index_topk,
        "mixing.compressed_attention": ops.compressed_attention,
        "mixing.hyper_connection": ops.hyper_connection,
        "mixing.hyper_mix": ops.hyper_mix,
        "mixing.hyper_head": ops.hyper_head,
        "mixing.rms_norm": rms_norm,
        "mixing.rotate": ops.rotate,
        "mixing.q_norm_rope": q_norm_rope,
        "mixing.inverse_rope_grouped_linear": inverse_rope_grouped_linear,
    },
    emits=(OPS.compressed_attention.default, OPS.index_topk.default, OPS.hyper_mix.default),
    seen_on=("0.1",),
    library=LIBRARY,
)
OWN_PARTS = OwnDeepseekV4(
    name="compressors and hyper-connections",
    classes=("Compressor", "SparseCompressor", "Indexer", "HyperConnection", "HyperHead"),
    functions={},
    emits=(OPS.compress.default, OPS.hyper_connection.default, OPS.hyper_head.default),
    seen_on=("0.1",),
    library=f"{LIBRARY}_parts",
)
OWN_EXPERTS = OwnDeepseekV4(
    name="experts",
    classes=("Experts", "MLP"),
    functions={"weighted_experts": experts, "MLP.forward": shared_expert},
    emits=(OPS.moe_experts.default,),
    seen_on=("0.1",),
    library=f"{LIBRARY}_experts",
)
