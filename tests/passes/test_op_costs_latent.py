"""What the ops over latent rows cost, against counts by hand."""

from __future__ import annotations

import functools

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig
from pagebinder.graph_tools import calls
from pagebinder.passes.op_costs import CONTEXT, TOKENS
from pagebinder.passes.op_costs_ours import cost_model
from tests.v4_models import HEAVY_RATIO, TOPK, WINDOW, v4_model

pytestmark = pytest.mark.usefixtures("captured_once")

OPS = torch.ops.pagebinder
HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH = 4, 80, 16, 32


@functools.cache
def graphs(kv_dtype: str = "auto"):
    config = CompileConfig(executable="eager", fusions=False, kv_dtype=kv_dtype)
    return pagebinder.compile_model(v4_model(), config).graphs


def costs_of(level: str, op, kv_dtype: str = "auto", *, context: int = 400, tokens: int = 1):
    gm = graphs(kv_dtype)[level]
    model, at = cost_model(gm), {CONTEXT: context, TOKENS: tokens}
    found = [model.cost(node) for node in calls(gm.graph, op.default)]
    assert found and all(cost.counted for cost in found)
    return [
        (c.flops.subs(at), getattr(c.cache_bytes, "subs", lambda _, c=c: c.cache_bytes)(at)) for c in found
    ]


@pytest.mark.parametrize("level", ["semantic", "paged", "fused"])
def test_every_op_is_counted(level):
    gm = graphs()[level]
    model = cost_model(gm)
    ours = [n for n in gm.graph.nodes if n.op == "call_function" and "pagebinder" in str(n.target)]
    assert len(ours) > 40 and all(model.cost(node).counted for node in ours)


def test_a_decode_reads_the_window_and_what_it_chose():
    sliding, csa, hca, _ = costs_of("paged", OPS.sparse_mla_attention)
    visible = 401 / HEAVY_RATIO
    for (flops, num_bytes), rows in zip((sliding, csa, hca), (WINDOW, WINDOW + TOPK, WINDOW + visible)):
        assert flops == pytest.approx(4 * HEADS * WIDTH * rows)
        assert num_bytes == pytest.approx(rows * WIDTH * 4)


def test_8_bit_rows_are_read_as_bytes():
    (_, num_bytes), *_ = costs_of("paged", OPS.sparse_mla_attention, "fp8_ds_mla")
    assert num_bytes == WINDOW * (64 + 2 * 16 + 8)


def test_an_indexer_scores_all_that_is_visible():
    (flops, num_bytes), *_ = costs_of("paged", OPS.indexer_score_topk)
    assert flops == pytest.approx(2 * INDEX_HEADS * (INDEX_WIDTH + 1) * 401 / 4)
    assert num_bytes == pytest.approx(401 / 4 * INDEX_WIDTH * 4)
