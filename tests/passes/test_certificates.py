"""Rewrites cut out of their graphs and tested alone: what is certified, what is not, and what is caught."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.frontend.recognise import recognise_rms_norm, recognise_rope, recognise_sdpa
from pagebinder.graph_tools import aten, calls
from pagebinder.passes import fuse_q_norm_rope
from pagebinder.passes.certificates import UnequalRewriteError, certify
from pagebinder.passes.fuse_add_rms_norm import fuse_add_rms_norm
from pagebinder.passes.rewrite_cones import Diff, cones
from pagebinder.passes.simplify import simplify
from pagebinder.passes.trail import Trail
from tests.broken_passes import ops
from tests.graphs import WIDTH, captured
from tests.passes import v4_bodies


class Norm(nn.Module):
    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), weight))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Chain(nn.Module):
    """Three layers: a sum, its norm, a matrix."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(Norm(0.5 + i) for i in range(3))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, positions):
        for norm, mix in zip(self.norms, self.mixes):
            x = x + mix(norm(x))
        return x


class Rotated(nn.Module):
    def __init__(self, is_complex=False):
        super().__init__()
        self.register_buffer("frequencies", 10.0 ** -torch.arange(0, 1, 2 / WIDTH))
        self.is_complex = is_complex

    def forward(self, x, positions):
        angles = positions[..., None].float() * self.frequencies
        if self.is_complex:
            table = torch.polar(torch.ones_like(angles), angles)
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table).flatten(-2)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        half = torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)
        return x * cos + half * sin


class Attention(nn.Module):
    """Two layers that share a mask with a window of 4."""

    def forward(self, x, positions):
        i, j = positions[0][:, None], positions[0][None]
        mask = ((j <= i) & (j > i - 4))[None, None]
        for scale in (0.3, 0.3):
            q = k = v = x.unflatten(-1, (2, -1)).transpose(1, 2)
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            x = x + out.transpose(1, 2).flatten(2)
        return x


def certificates(body, *passes, change=None, dtype=torch.float32):
    """Certificates of the last pass; `change` breaks its graph."""
    gm, trail = captured(body, dtype=dtype), Trail("full")
    trail.add("captured", "capture", gm)
    for run in passes:
        result = run(gm)
        if run is passes[-1] and change is not None:
            change(gm)
        trail.add("semantic", result.name, gm, result)
    return certify(*trail.steps[-2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_norms_are_certified_once_and_counted(dtype):
    (found,) = certificates(Chain(), recognise_rms_norm, dtype=dtype)
    assert (found.pattern, found.count, found.reason, found.max_abs_error) == ("rms_norm", 3, "", 0.0)
    assert found.module_path == "body.norms.0"


def test_sums_along_a_residual_stream_are_cut_at_each_layer():
    found = certificates(Chain(), recognise_rms_norm, simplify, fuse_add_rms_norm)
    assert [c.count for c in found] == [2] and not found[0].reason
    gm, trail = captured(Chain()), Trail("full")
    for run in (recognise_rms_norm, fuse_add_rms_norm):
        trail.add("semantic", run.__name__, gm, run(gm))
    for cone in cones(Diff(*(step.graph.graph for step in trail.steps))):
        assert len(cone.before) <= 2 and len(cone.after) <= 2
        assert all((b is not None and a is not None) or (b or a).op == "get_attr" for b, a in cone.inputs)


@pytest.mark.parametrize("is_complex", [False, True])
def test_rotations_are_certified(is_complex):
    (found,) = certificates(Rotated(is_complex), recognise_rope)
    assert found.count == 1 and not found.reason and found.max_rel_error < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_made_of_another_input_is_no_input_of_its_own(dtype):
    """As ERNIE 4.5: the value and its turned channels are widened each by itself."""
    rotated = Rotated()

    def body(x, positions):
        angles = positions[..., None].float() * rotated.frequencies
        angles = torch.cat((angles, angles), -1)
        half = torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)
        return (x.float() * angles.cos() + half.float() * angles.sin()).to(x.dtype)

    (found,) = certificates(body, recognise_rope, dtype=dtype)
    assert found.count == 1 and not found.reason and found.max_rel_error < 1e-6


def test_attention_with_a_proven_mask_is_certified():
    """The mask's subgraph is removed with the first layer; each rewrite is tested with the whole of it."""
    found = certificates(Attention(), recognise_sdpa)
    assert sum(c.count for c in found) == 2 and not any(c.reason for c in found)
    assert all(c.max_rel_error < 1e-5 for c in found)


def test_simplified_casts_are_certified():
    found = certificates(lambda x, positions: x.sin().to(x.dtype).cos() + x.float().to(x.dtype), simplify)
    assert sum(c.count for c in found) >= 2 and all(c.max_abs_error == 0 for c in found if not c.reason)


def test_rewrites_that_share_what_an_earlier_one_made_are_certified(monkeypatch):
    """Two heads turn by one table, a third stays as it is: the second finds the rows that were made for the first."""

    def turn(x, cos, sin):
        turned = v4_bodies.OPS.rope(x[..., -2 * v4_bodies.PAIRS :], cos, sin, style="interleaved")
        return torch.cat([x[..., : -2 * v4_bodies.PAIRS], turned], -1).flatten(2)

    def body(model, x, cos, sin):
        tables = cos.unsqueeze(2), sin.unsqueeze(2)
        fused = [turn(v4_bodies.norm(v4_bodies.heads(x * i)), *tables) for i in (1, 2)]
        return sum(fused) + turn(v4_bodies.heads(3 * x), *tables)

    gm, trail = captured(v4_bodies.Model(body), width=v4_bodies.WIDTH), Trail("full")
    parts = list(fuse_q_norm_rope.rotated_parts(gm.graph))
    for some in (parts[:1], parts[1:]):
        monkeypatch.setattr(fuse_q_norm_rope, "rotated_parts", lambda graph, some=some: some)
        result = fuse_q_norm_rope.fuse_q_norm_rope(gm)
        trail.add("fused", result.name, gm, result)
    (found,) = certify(*trail.steps)
    assert found.count == 1 and not found.reason and found.max_rel_error < 1e-5


def set_option(op, index, **options):
    def change(gm):
        node = list(calls(gm.graph, op))[index]
        node.kwargs = {**node.kwargs, **options}

    return change


def swap_operands(op, i, j):
    def change(gm):
        node = next(calls(gm.graph, op))
        args = list(node.args)
        args[i], args[j] = args[j], args[i]
        node.args = tuple(args)

    return change


BROKEN = {
    "eps": (Chain, (recognise_rms_norm,), set_option(ops.rms_norm.default, 1, eps=1.1e-6), "body.norms.1"),
    "tail": (Chain, (recognise_rms_norm,), set_option(ops.rms_norm.default, 2, tail="offset"), "body.norms.2"),
    "tables": (Rotated, (recognise_rope,), swap_operands(ops.rope.default, 1, 2), "body"),
    "window": (Attention, (recognise_sdpa,), set_option(ops.attention.default, 1, window=5), "body"),
    "scale": (Attention, (recognise_sdpa,), set_option(ops.attention.default, 0, scale=0.31), "body"),
    "causal": (Attention, (recognise_sdpa,), set_option(ops.attention.default, 0, causal=False), "body"),
    "fused eps": (
        Chain, (recognise_rms_norm, fuse_add_rms_norm), set_option(ops.add_rms_norm.default, 1, eps=1e-5),
        "body.norms.2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_rewrite_is_refused_with_its_place(what, dtype):
    body, passes, change, place = BROKEN[what]
    if dtype is torch.bfloat16 and body is Rotated:
        pytest.skip("the tables are float32")
    with pytest.raises(UnequalRewriteError, match="not equal to what it replaced") as caught:
        certificates(body(), *passes, change=change, dtype=dtype)
    error = caught.value
    assert error.places == (place,) and error.pass_name == passes[-1].__name__
    assert error.cone.before and error.cone.after and error.counterexample.inputs


def test_a_value_replaced_by_another_one_is_refused():
    """simplify drops a cast, and its user then reads a value that is there, but is not the same."""

    def reroute(gm):
        cos = next(calls(gm.graph, aten.cos.default))
        cos.args = (next(calls(gm.graph, aten.embedding.default)),)

    with pytest.raises(UnequalRewriteError):
        certificates(lambda x, positions: x.sin().to(x.dtype).cos(), simplify, change=reroute)
