"""Compressed and latent attention, indexers and hyper-connections in ONNX: explicit caches, steps of any length."""

from __future__ import annotations

import itertools
import os

import numpy as np
import onnx
import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import ExportError
from pagebinder.export.onnx import write_onnx
from pagebinder.export.onnx_module import check_translatable
from tests.export.evaluated import EvaluatedModel
from tests.export.onnx_runs import greedy, in_steps, session
from tests.graphs import VOCAB_SIZE, captured, run
from tests.helpers import tiny_mamba2, tiny_qwen3_next
from tests.v4_models import v4_model
from tests.zoo.reference import tokens
from tests.zoo.test_fast_zoo import architecture
from tests.zoo.tiny_configs import tiny_model

ops = torch.ops.pagebinder
nightly = pytest.mark.skipif(
    os.environ.get("PAGEBINDER_NIGHTLY") != "1", reason="an export of a whole model: PAGEBINDER_NIGHTLY=1"
)
# Steps that end inside windows of 4 and 16 tokens, at their ends, and that complete several or none.
V4_ENDS = (1, 4, 9, 31, 32, 33, 45)


def equal_in_steps(graph, model, num_tokens: int, ends, rows: int = 2) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (rows, num_tokens))
    got = in_steps(model, ids, ends, capacity=num_tokens)
    for row, row_ids in zip(got, ids, strict=True):
        expected = run(graph, num_tokens, input_ids=torch.from_numpy(row_ids)).numpy()
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=2e-5)


class Sparse(torch.nn.Module):
    """Two compressors, attention to the entries of one, an indexer over those of the other, which are not normed.

    Streams around them.
    """

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(4, 16))
        self.norm = torch.nn.Parameter(torch.rand(8) + 0.5)
        self.sinks = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1]))
        self.register_buffer("no_freq", torch.empty(0))
        self.fn, self.base = torch.nn.Parameter(torch.randn(8, 16)), torch.nn.Parameter(torch.randn(8))
        self.scale = torch.nn.Parameter(torch.tensor([0.5, 1.0, 0.7]))

    def forward(self, x, positions):
        streams = q = x[0].view(-1, 2, 8)
        post, comb, collapsed = ops.hyper_connection(
            streams, self.fn, self.base, self.scale, sinkhorn_iters=3, norm_eps=1e-6, eps=1e-6
        )
        made, options = (self.bias, self.norm, self.inv_freq), {"ratio": 4, "overlap": True, "eps": 1e-6}
        entries = ops.compress(x[0], x[0].flip(1), *made, **options)
        keys = ops.compress(x[0].flip(1), x[0], self.bias, None, self.no_freq, **options)
        best = ops.index_topk(q, keys, x[0, :, :2].abs(), topk=2, ratio=4, scale=0.3)
        near = ops.compressed_attention(q, collapsed, entries, best, self.sinks, scale=0.3, window=3, ratio=4)
        mixed = ops.hyper_mix(streams, post, comb, near.mean(1))
        head = ops.hyper_head(mixed, self.fn[:2], self.base[:2], self.scale[:1], norm_eps=1e-6, eps=1e-6)
        return torch.cat([near.flatten(1), mixed.flatten(1), head], dim=-1)[None]


def test_onnx_runtime_agrees_with_sparse_attention(tmp_path):
    torch.manual_seed(0)
    graph = captured(Sparse())
    path = write_onnx(graph, tmp_path / "model.onnx", cached=True)
    equal_in_steps(graph, session(path), 23, (2, 3, 9, 10, 20, 23))
    model = onnx.load(path)
    assert sorted(f.name for f in model.functions) == [
        "Compress", "Compress_2", "CompressedAttention", "HyperConnection", "HyperHead", "HyperMix", "IndexTopK"
    ]  # fmt: skip
    assert {node.domain for f in model.functions for node in f.node} == {""}, (
        "functions of standard operators"
    )


def test_deepseek_v4_in_steps(monkeypatch):
    """Every kind of layer with its own caches; several sequences in a batch."""
    compiled = pagebinder.compile_model(v4_model(), CompileConfig(executable="eager"))
    model = EvaluatedModel(compiled.graphs["semantic"], monkeypatch)
    ids = np.array([tokens(45, seed=1), tokens(45, seed=2)])
    for row, row_ids in zip(in_steps(model, ids, V4_ENDS, capacity=45), ids, strict=True):
        expected = compiled.run_level("semantic", torch.from_numpy(row_ids)).numpy()
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-4)


class Latent(torch.nn.Module):
    """MLA: plain, in a window, and to keys, or groups of keys, that indexers list; each without and with sinks."""

    def __init__(self):
        super().__init__()
        self.w_k, self.w_v = (
            torch.nn.Parameter(torch.randn(2, 5, 6)),
            torch.nn.Parameter(torch.randn(2, 3, 6)),
        )
        self.sinks = torch.nn.Parameter(torch.tensor([1.5, float("-inf")]))

    def forward(self, x, positions):
        q, latent, k_rope = x[0].view(-1, 2, 8), x[0, :, :6], x[0, :, 6:9]
        # No score is zero: which of equal ones torch's topk takes is not said, and ONNX's TopK is not run here.
        best = ops.index_topk(q.abs(), x[0, :, 8:].abs(), x[0, :, :2].abs(), topk=3, ratio=1, scale=0.5)
        operands = (q[..., :5], q[..., 5:], latent, k_rope, self.w_k, self.w_v)
        bias = torch.zeros(3, 8)
        keys = ops.compress(
            x[0, :, 8:], x[0, :, :8], bias, None, bias[0, :0], ratio=3, overlap=False, eps=0.0
        )
        groups = ops.index_topk(q, keys, x[0, :, :2], topk=2, ratio=3, scale=0.5)
        forms = itertools.product(
            ((None, None, 1), (None, 4, 1), (best, None, 1), (groups, None, 3)), (None, self.sinks)
        )
        outs = (
            ops.mla_attention(*operands, indices, s, scale=0.4, window=w, ratio=ratio)
            for (indices, w, ratio), s in forms
        )
        return torch.cat([out.flatten(1) for out in outs], dim=-1)[None]


def test_latent_attention_in_steps(monkeypatch):
    torch.manual_seed(0)
    graph = captured(Latent())
    equal_in_steps(graph, EvaluatedModel(graph, monkeypatch), 13, (6, 7, 13))


def test_entries_that_something_else_reads_are_refused():
    def body(x, positions):
        made = (torch.ones(4, 16), torch.ones(16), torch.ones(2))
        return ops.compress(x[0], x[0], *made, ratio=4, overlap=False, eps=1e-6).relu()[None]

    graph = captured(body)
    with pytest.raises(ExportError, match="reads compressed entries"):
        check_translatable(graph)


WHOLE = {"qwen3_next": tiny_qwen3_next, "mamba2": tiny_mamba2, "deepseek_v4": v4_model}
FAMILIES = (
    "deepseek_v3",
    "deepseek_v32",
    "hy_v4",
    "kimi_linear",
    "jamba",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "glm5_next",
)


@nightly
@pytest.mark.parametrize("name", WHOLE)
def test_a_decode_loop_gives_the_engines_tokens(name, tmp_path):
    compiled = pagebinder.compile_model(WHOLE[name](), CompileConfig(executable="eager"))
    model = session(compiled.export_onnx(tmp_path)[0])
    ids = np.array([tokens(45, seed=1), tokens(45, seed=2)])
    for row, row_ids in zip(in_steps(model, ids, (45,), capacity=45), ids, strict=True):
        expected = compiled.run_level("semantic", torch.from_numpy(row_ids)).numpy()
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-4)
    prompts = [row[:n].tolist() for row, n in zip(ids, (21, 4))]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    served = compiled.engine(EngineConfig(num_kv_blocks=64)).generate(prompts, params)
    for prompt, output in zip(prompts, served, strict=True):
        assert greedy(model, prompt, 40) == list(output.token_ids)


@nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_latent_and_recurrent_families_in_onnx_runtime(name, tmp_path):
    compiled = pagebinder.compile_model(
        tiny_model(architecture("multimodal" if name == "glm5_next" else "causal", name)),
        CompileConfig(executable="eager"),
    )
    model = session(compiled.export_onnx(tmp_path)[0])
    ids = np.array([tokens(25, seed=1)])
    (row,) = in_steps(model, ids, (18, 19, 20, 25), capacity=25)
    expected = compiled.run_level("semantic", torch.from_numpy(ids[0])).numpy()
    np.testing.assert_allclose(row, expected, rtol=0, atol=1e-4)
