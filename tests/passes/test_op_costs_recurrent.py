"""What the ops over recurrent states cost, against counts by hand."""

from __future__ import annotations

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig
from pagebinder.graph_tools import calls
from pagebinder.passes.op_costs import TOKENS
from pagebinder.passes.op_costs_ours import cost_model
from tests import recurrent_models

pytestmark = pytest.mark.usefixtures("captured_once")

OPS = torch.ops.pagebinder
# model -> its recurrence, flops of a token, values of the state
COUNTS = {
    "mamba": ("selective_scan", 7 * 48 * 4, 48 * 4),
    "recurrent_gemma": ("linear_recurrence", 2 * 32, 32),
    "rwkv": ("wkv", 6 * 3 * 32, 3 * 32),
    "xlstm": ("mlstm", 5 * 4 * 5 * 9, 4 * 5 * 9),
    "bamba": ("ssd", 5 * 4 * 16 * 8, 4 * 16 * 8),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_recurrence_reads_and_writes_its_state_once(name):
    op, flops, values = COUNTS[name]
    config = CompileConfig(executable="eager", max_model_len=128)
    graphs = pagebinder.compile_model(getattr(recurrent_models, name)(), config).graphs
    for level, of_level, num_bytes in (("semantic", op, 0), ("paged", f"paged_{op}", 2 * 4 * values)):
        nodes = calls(graphs[level].graph, getattr(OPS, of_level).default)
        costs = [cost_model(graphs[level]).cost(node) for node in nodes]
        assert costs and all(cost.counted and cost.cache_bytes == num_bytes for cost in costs)
        assert all(cost.flops.subs({TOKENS: 3}) == 3 * flops for cost in costs)
