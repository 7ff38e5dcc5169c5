"""Translations of our ops to ONNX: small graphs of all their forms, by ONNX's operators and by ours."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from pagebinder.errors import ExportError
from pagebinder.export.onnx import write_onnx
from pagebinder.export.onnx_module import check_translatable
from tests.export.evaluated import EvaluatedModel
from tests.export.onnx_runs import in_steps, session
from tests.graphs import VOCAB_SIZE, captured, run

ops = torch.ops.pagebinder
T, STEPS = 12, (7, 8, 9, 12)


class AllForms(nn.Module):
    """Norms of every tail, RoPE of every style, gates, experts, four forms of attention, every recurrence."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.up, self.up_bias = nn.Parameter(torch.randn(4, 12, 16)), nn.Parameter(torch.randn(4, 12))
        self.down, self.down_bias = nn.Parameter(torch.randn(4, 16, 6)), nn.Parameter(torch.randn(4, 16))
        self.one = nn.Parameter(torch.randn(4, 16, 5))
        self.kv = nn.Linear(16, 14)
        self.sinks = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0]))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))
        self.bias = nn.Parameter(torch.randn(4, 9))

    def forward(self, x, positions):
        of_tokens = [*self.norms(x), *self.ropes(x, positions), *self.experts(x[0], positions[0])]
        gated = [ops.gated_activation(x, x * 2, activation=name)[0] for name in ("silu", "gelu_tanh")]
        return torch.cat([*of_tokens, *gated, *self.attentions(x[0]), *self.recurrences(x[0])], dim=-1)[None]

    def norms(self, x):
        for tail in ("cast_scale", "scale_cast", "offset", "none"):
            yield ops.rms_norm(x, None if tail == "none" else self.weight, eps=1e-6, tail=tail)[0]

    def ropes(self, x, positions):
        half = positions[..., None] * torch.tensor([1.0, 0.3])
        tables = {"half": torch.cat([half, half], -1), "every_two": half.repeat_interleave(2, dim=-1)}
        heads = x.view(1, -1, 4, 4).transpose(1, 2)
        for style in ("half", "chunked", "every_two", "interleaved", "deinterleaved"):
            angle = tables.get(style, half)[:, None]
            yield ops.rope(heads, angle.cos(), angle.sin(), style=style).transpose(1, 2)[0].flatten(1)

    def experts(self, x, positions):
        ids = torch.stack([positions % 5, (positions + 2) % 5 - 1], dim=1)  # 4 and -1 choose no expert
        yield ops.moe_experts(
            x, ids, x[:, :2], self.up, self.down, self.up_bias, self.down_bias, transposed=False,
            activation="swish", alpha=1.7, gated=True, interleaved=True, limit=7.0, up_offset=1.0, in_float32=False,
        )  # fmt: skip
        yield ops.expert_linear(x, ids, self.one, None, transposed=True).flatten(1)

    def attentions(self, x):
        q, kv = x.view(-1, 4, 4), self.kv(x).view(-1, 2, 7)
        k, v = kv[..., :4], kv[..., 4:]
        yield ops.relative_attention(q, k, v, self.bias, scale=1.0, num_behind=8).flatten(1)
        options = {"scale": 1.0, "num_behind": 8, "window": 6}
        yield ops.relative_attention(q, k, v, self.bias, self.sinks, **options).flatten(1)
        of_query = self.bias * x[:, :4, None], self.sinks + x[:, 4:8]
        yield ops.relative_attention(q, k, v, *of_query, **options).flatten(1)
        yield ops.attention(q, k, v, self.sinks, None, scale=0.7, window=4, soft_cap=0.5).flatten(1)
        yield ops.attention(q, k, v, None, self.slopes, scale=0.7, chunk=5).flatten(1)
        yield ops.attention(q, k, v, self.sinks, self.slopes, scale=0.7).flatten(1)

    def recurrences(self, x):
        yield ops.short_conv(x, self.up[0, :3].t(), self.weight, activation="silu")
        B, C = self.kv(x)[:, :12].view(-1, 2, 2, 3).unbind(1)
        decay = -self.slopes.exp()
        heads, dt = x.view(-1, 4, 4), x[:, :4]
        yield ops.ssd(heads, dt, decay, B, C, self.slopes, None, dt_softplus=True).flatten(1)
        gates = -x[:, 4:8].abs(), x[:, 8:12].sigmoid()
        yield ops.gated_delta_rule(
            heads[:, :2], heads[:, 1:3], heads, *gates, scale=0.5, l2norm_eps=1e-6
        ).flatten(1)
        row_gates = -heads.abs(), gates[1]
        yield ops.gated_delta_rule(heads, heads.flip(1), heads * 0.5, *row_gates, scale=0.5).flatten(1)
        yield ops.linear_recurrence(x, x.sigmoid())
        yield ops.selective_scan(
            x, x.flip(1), x[:, :3], x[:, 3:6], -self.up.new_ones(16, 3), self.weight, None, dt_softplus=True
        )
        yield ops.wkv(x, x.flip(1), -self.weight.abs(), self.weight)
        yield ops.mlstm(heads, heads.flip(1), heads, dt, dt + 1.0, scale=0.5, eps=1e-6).flatten(1)


def test_every_form_in_steps(monkeypatch):
    torch.manual_seed(0)
    graph = captured(AllForms())
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, T))
    got = in_steps(EvaluatedModel(graph, monkeypatch), ids, STEPS, capacity=T + 3)
    for row, row_ids in zip(got, ids, strict=True):
        expected = run(graph, T, input_ids=torch.from_numpy(row_ids)).numpy()
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=2e-5)


class SomeForms(AllForms):
    """Model-local functions, written and traced, one twice in two shapes; ONNX's Scan; a mask that is added."""

    def forward(self, x, positions):
        attention = ops.attention(x.view(-1, 4, 4), *[x.view(-1, 4, 4)] * 2, self.sinks, None, scale=0.7)
        parts = [*self.experts(x[0], positions[0]), attention.flatten(1), *self.functions(x[0])]
        return torch.cat(parts, dim=-1)[None]

    def functions(self, x):
        heads = x.view(-1, 4, 4)
        yield ops.gated_delta_rule(heads, heads, heads, -x[:, :4].abs(), x[:, 4:8], scale=0.5).flatten(1)
        yield ops.short_conv(x, self.up[0, :3].t(), None, activation="silu")
        yield ops.short_conv(x[:, :12], self.up[0, :3, :12].t(), None, activation="silu")
        yield ops.short_conv(x * 2, self.up[1, :3].t(), None, activation="silu")


def test_onnx_runtime_agrees(tmp_path):
    torch.manual_seed(0)
    graph = captured(SomeForms())
    path = write_onnx(graph, tmp_path / "model.onnx", cached=True)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (1, T))
    (row,) = in_steps(session(path), ids, STEPS, capacity=T)
    expected = run(graph, T, input_ids=torch.from_numpy(ids[0])).numpy()
    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=2e-5)

    model = onnx.load(path)
    functions = {f.name: f for f in model.functions}
    assert sorted(functions) == [
        "ExpertRows", "ExpertRowsTransposed", "GatedDeltaRule", "ShortConv", "ShortConv_2"
    ]  # fmt: skip
    assert [n.op_type for n in model.graph.node if n.op_type.startswith("ShortConv")] == [
        "ShortConv", "ShortConv_2", "ShortConv"
    ]  # fmt: skip
    assert "Scan" in {node.op_type for node in functions["GatedDeltaRule"].node}
    assert {node.domain for f in model.functions for node in f.node} == {""}, (
        "functions of standard operators"
    )
    assert {o.domain for o in model.opset_import} == {"", "pagebinder"}
    assert {"body.up", "body.down", "body.one"} <= {i.name for i in model.graph.initializer}


def test_what_has_no_operator_is_named():
    def body(x, positions):
        return ops.q_norm_rope(x.view(-1, 4, 4), x[0, :, :2], x[0, :, :2], eps=1e-6).flatten(1)[None]

    with pytest.raises(ExportError, match=r"pagebinder::q_norm_rope \(1: "):
        check_translatable(captured(body))


def test_what_torch_cannot_translate_is_named(tmp_path):
    graph = captured(lambda x, positions: torch.special.bessel_j0(x))
    with pytest.raises(ExportError, match="bessel_j0"):
        write_onnx(graph, tmp_path / "model.onnx", cached=True)
    assert not list(tmp_path.iterdir())
