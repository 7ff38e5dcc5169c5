"""Pieces of DeepSeek-V4's attention as functions, captured on their own, for tests of its fusions."""

from __future__ import annotations

import torch
from torch import nn

from pagebinder.passes.simplify import simplify
from tests.graphs import captured, clone, run

OPS = torch.ops.pagebinder
ROPE, NORM = OPS.rope.default, OPS.rms_norm.default
FUSED_Q, FUSED_OUT = OPS.q_norm_rope.default, OPS.inverse_rope_grouped_linear.default
WRITE, FUSED_KV = OPS.latent_cache_write.default, OPS.kv_rope_quant_store.default
HEADS, HEAD_DIM, PAIRS, GROUPS = 4, 64, 8, 2
WIDTH = HEADS * HEAD_DIM
DTYPES = [torch.float32, torch.bfloat16]


class Model(nn.Module):
    """function(self, x [1, T, C], cos [1, T, P], sin) with what an attention layer of the family has."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, HEAD_DIM))
        self.o_a = nn.Parameter(torch.randn(GROUPS * 24, WIDTH // GROUPS) * 0.05)

    def forward(self, x, positions):
        angles = positions[..., None].float() / 10 ** torch.arange(PAIRS)
        return self.function(self, x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def heads(x):
    return x.view(1, -1, HEADS, HEAD_DIM)


def rotate_tail(x, cos, sin):
    """x [1, T, (H,) D], tables [1, T, P]: parts by slices."""
    if x.dim() == 4:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned = OPS.rope(x[..., -2 * PAIRS :].float(), cos, sin, style="interleaved")
    return torch.cat([x[..., : -2 * PAIRS], turned.to(x.dtype)], -1)


def rotate_split(x, cos, sin):
    """The same by a split."""
    kept, turned = x.split([x.shape[-1] - 2 * PAIRS, 2 * PAIRS], -1)
    cos, sin = cos.view(1, -1, 1, PAIRS), sin.view(1, -1, 1, PAIRS)
    turned = OPS.rope(turned.float(), cos, sin, style="interleaved")
    return torch.cat([kept, turned.to(x.dtype)], -1)


def norm(x, weight=None, tail="none"):
    return OPS.rms_norm(x, weight, eps=1e-6, tail=tail)


def grouped(x, weight):
    """DeepseekV4GroupedLinear: x [1, T, g, K] -> [1, T, g * r]."""
    weight = weight.view(GROUPS, -1, weight.shape[1]).transpose(1, 2)
    rows = x.reshape(-1, GROUPS, x.shape[-1]).transpose(0, 1)
    return torch.bmm(rows, weight).transpose(0, 1).reshape(1, -1, GROUPS, weight.shape[-1]).flatten(2)


def project(model, out, cos, sin, weight=None):
    turned = rotate_tail(out, cos, -sin)
    return grouped(turned.reshape(1, -1, GROUPS, WIDTH // GROUPS), model.o_a if weight is None else weight)


def fused(function, run_pass, dtype=torch.float32):
    torch.manual_seed(0)
    before = captured(Model(function), width=WIDTH, dtype=dtype)
    simplify(before)
    after = clone(before)
    result = run_pass(after)
    simplify(after)
    return before, after, result


def assert_same_bits(before, after, **inputs):
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens, **inputs), run(after, num_tokens, **inputs))


def assert_refused(result, reason):
    assert not result.matches and not result.changed
    assert any(reason in refusal.reason for refusal in result.refusals)
    for refusal in result.refusals:
        assert refusal.module_path.startswith("body") and ".py:" in refusal.source_line


def styled(x, cos, sin, style="chunked", cast=torch.float32):
    part = x[..., -2 * PAIRS :].to(cast)
    turned = OPS.rope(part, cos.unsqueeze(2).to(cast), sin.unsqueeze(2).to(cast), style=style)
    return torch.cat([x[..., : -2 * PAIRS], turned.to(x.dtype)], -1)
