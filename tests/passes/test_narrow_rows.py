"""Rows of logits are selected as early as tokens no longer meet: the same values, and no other row is computed."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.graph_tools import aten, calls, val
from pagebinder.models import tiny_path, tiny_v4_path
from pagebinder.passes.gather_logits import gather_logits
from pagebinder.passes.narrow_rows import narrow_rows
from pagebinder.passes.simplify import simplify
from pagebinder.runtime.executables import EagerExecutable
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.graphs import WIDTH, assert_metadata_kept, captured, clone, count, run
from tests.helpers import by_day, tiny_gpt_oss, tiny_llama, tiny_mamba2

pytestmark = pytest.mark.usefixtures("captured_once")

ROWS = [
    torch.tensor([6]),
    torch.tensor([0, 6, 3]),
    torch.arange(7),
    torch.tensor([2, 2]),
    torch.empty(0).long(),
]
SELECT = aten.index_select.default


class Body(nn.Module):
    """x -> mixed over tokens -> behind -> LM head."""

    def __init__(self, behind):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24)
        self.behind = behind

    def forward(self, x, positions):
        return self.head(self.behind(self, x.cumsum(1), x))


def narrowed(behind):
    before = captured(Body(behind))
    simplify(before)
    gather_logits(before)
    after = clone(before)
    return before, after, narrow_rows(after)


MOVES = {  # what follows the last op that mixes tokens, and how many tensors rows are selected of
    "a layer": (lambda m, mixed, x: m.norm(x + m.down(m.up(mixed).relu())), 2),
    "one operand twice": (lambda m, mixed, x: mixed + m.down(m.up(m.norm(mixed))), 1),
    "flat tokens": (lambda m, mixed, x: m.down(m.up(mixed.view(-1, WIDTH))).view(1, -1, WIDTH) + x, 2),
    "a factor for all": (lambda m, mixed, x: m.down(m.up(mixed) * 0.5).to(torch.float32), 1),
    "a scale of the whole tensor": (lambda m, mixed, x: m.down(m.up(mixed)) * x.abs().mean(), 1),
    "mixed again before the last layer": (lambda m, mixed, x: m.down(m.up(m.down(m.up(x)).cumsum(1))), 1),
}
STAYS = {
    "no layer": lambda m, mixed, x: m.norm(mixed + x),
    "mixed right before the head": lambda m, mixed, x: m.down(m.up(x)).cumsum(1),
    "along the tokens": lambda m, mixed, x: m.down(m.up(x)).softmax(1),
    "tokens in another place": lambda m, mixed, x: (
        m.down(m.up(x)).transpose(0, 1).flip(1).transpose(0, 1) * 1.0
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_rows_move_up(name):
    behind, selections = MOVES[name]
    before, after, result = narrowed(behind)
    assert len(result.matches) == 1 and not result.refusals and result.changed
    assert count(after, SELECT) == selections
    rows = next(n for n in after.graph.nodes if n.target == "logits_rows").meta["val"].shape[0].node.expr
    for layer in list(calls(after.graph, aten.linear.default))[-3:]:
        assert rows in [size.node.expr for size in val(layer).shape if isinstance(size, torch.SymInt)]
    assert_metadata_kept(after, SELECT)
    for chosen in ROWS:
        torch.testing.assert_close(run(after, 7, logits_rows=chosen), run(before, 7, logits_rows=chosen))


@pytest.mark.parametrize("name", STAYS)
def test_rows_stay_where_tokens_meet_behind_all_layers(name):
    before, after, result = narrowed(STAYS[name])
    (refusal,) = result.refusals
    assert "no linear layer" in refusal.reason and not result.matches and not result.changed
    assert [n.target for n in after.graph.nodes] == [n.target for n in before.graph.nodes]


def test_a_value_that_is_read_elsewhere_is_computed_for_all():
    def behind(m, mixed, x):
        hidden = m.up(mixed)
        return m.down(hidden) + m.down(hidden).cumsum(1)

    before, after, result = narrowed(behind)
    assert len(result.matches) == 1
    first, *others = calls(after.graph, aten.linear.default)
    assert val(first).shape[1].node.expr != val(others[0]).shape[1].node.expr
    for chosen in ROWS:
        torch.testing.assert_close(run(after, 7, logits_rows=chosen), run(before, 7, logits_rows=chosen))


MODELS = {  # and the layers or experts of theirs that compute the rows of logits alone, the head apart
    "shipped": (tiny_path, 3),
    "llama": (tiny_llama, 3),
    "v4": (tiny_v4_path, None),
    "gpt_oss": (tiny_gpt_oss, None),
    "mamba2": (tiny_mamba2, 1),
}


@pytest.mark.parametrize("name", by_day(MODELS, ["shipped", "v4"]))
def test_the_last_layer_of_a_model(name):
    """Its logits of some rows are those of all rows."""
    make, layers = MODELS[name]
    compiled = pagebinder.compile_model(make(), CompileConfig(executable="eager", max_model_len=256))
    (result,) = (p for p in compiled.report.passes if p.name == "narrow_rows")
    assert len(result.matches) == 1, result
    if layers is not None:
        assert result.matches[0].detail.startswith(f"{layers} op(s) with large weights")
    inputs = single_sequence_inputs(compiled.kv_spec, compiled.states, torch.arange(4, 23))
    caches = {name: value.clone() for name, value in inputs.items() if name.startswith("kv_cache")}
    graph = EagerExecutable(compiled.graphs["fused"])

    def logits(rows: torch.Tensor) -> torch.Tensor:
        for cache, value in caches.items():
            inputs[cache].copy_(value)
        return graph.run(inputs | {"logits_rows": rows})

    every = logits(torch.arange(19))
    most = float(every.abs().max())
    for rows in (torch.tensor([18]), torch.tensor([3, 3, 0]), torch.empty(0).long()):
        tolerance = most * (
            1e-5 if every.dtype == torch.float32 else 2e-2
        )  # few rows have kernels of their own
        torch.testing.assert_close(logits(rows), every[rows], atol=tolerance, rtol=0)


def test_a_pair_is_selected_result_by_result():
    """Of an op with two results, one of which is read elsewhere, too, rows are selected behind it."""
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager", block_size=16))
    graph = compiled.graphs["fused"].graph
    for select in calls(graph, SELECT):
        assert select.args[0].target is operator.getitem or isinstance(val(select.args[0]), torch.Tensor)
    engine = compiled.engine(EngineConfig(max_num_seqs=4, max_num_batched_tokens=16))
    params = SamplingParams(max_tokens=5, temperature=0.0)
    prompts = [list(range(4, 44)), [5, 6, 7], list(range(60, 80))]
    together = [o.token_ids for o in engine.generate(prompts, params)]
    alone = [compiled.engine().generate([p], params)[0].token_ids for p in prompts]
    assert together == alone
