"""Recurrences -> their paged forms: structure, values, states, groups, metadata."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from pagebinder.graph_tools import calls
from pagebinder.passes.layer_states import Paging, layer_states
from pagebinder.passes.page_recurrent import PAGED, page_recurrent
from pagebinder.runtime.executables import EagerExecutable
from pagebinder.runtime.kv import KVCacheGroup, plan_kv_cache
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.graphs import VOCAB_SIZE, assert_metadata_kept, captured, clone, count, run_in_steps

OPS = torch.ops.pagebinder
WIDTH, HEADS, KEY_WIDTH, VALUE_WIDTH, TAPS = 16, 2, 4, 8, 4
MAX_MODEL_LEN = 256


class Mixer(nn.Module):
    """A short convolution and a recurrence behind it, added to the stream."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.conv = nn.Parameter(torch.randn(WIDTH, TAPS) / 2)
        self.bias = nn.Parameter(torch.randn(WIDTH)) if kind != "gated_delta_rule" else None
        self.keys = nn.Linear(WIDTH, 2 * HEADS * KEY_WIDTH)
        self.steps = nn.Linear(WIDTH, 2 * HEADS)
        self.A = nn.Parameter(-torch.rand(HEADS) / 4)

    def forward(self, x):
        y = OPS.short_conv(x[0], self.conv, self.bias, activation="silu")
        first, second = self.keys(y).view(-1, 2, HEADS, KEY_WIDTH).unbind(1)
        v, (a, b) = y.view(-1, HEADS, VALUE_WIDTH), self.steps(y).view(-1, 2, HEADS).unbind(1)
        if self.kind == "gated_delta_rule":
            decay = -torch.nn.functional.softplus(a) / 8
            out = OPS.gated_delta_rule(first, second, v, decay, b.sigmoid(), scale=0.5, l2norm_eps=1e-6)
        elif self.kind == "ssd":
            out = OPS.ssd(v, a, self.A, first, second, None, None, dt_softplus=True)
        else:
            out = v
        return x + out.reshape(1, -1, WIDTH)


class Layers(nn.Module):
    def __init__(self, *kinds):
        super().__init__()
        self.mixers = nn.ModuleList(map(Mixer, kinds))

    def forward(self, x, positions):
        for mixer in self.mixers:
            x = mixer(x)
        return x


def with_block_size(plan, block_size):
    """The plan with checkpoints every `block_size` tokens; a page's size does not depend on that."""
    groups = []
    for group in plan.groups:
        specs = tuple(dataclasses.replace(spec, block_size=block_size) for spec in group.layer_specs)
        groups.append(KVCacheGroup(specs[0], group.layers, specs))
    return dataclasses.replace(plan, groups=tuple(groups))


def paged(body, block_size=16, dtype=torch.float32):
    """(graph before, graph after, what the pass said, states, plan)"""
    before = captured(body, width=WIDTH, dtype=dtype)
    states = layer_states(before, max_model_len=MAX_MODEL_LEN)
    plan = with_block_size(plan_kv_cache(tuple(states), max_model_len=MAX_MODEL_LEN), block_size)
    after = clone(before)
    paging = Paging.by_plan(states, plan)
    return before, after, page_recurrent(after, paging=paging), states, plan


MODELS = {
    "convolution": ("short_conv",),
    "delta rule": ("gated_delta_rule",),
    "state space": ("ssd",),
    "a chain": ("ssd", "gated_delta_rule", "short_conv", "ssd"),
}


@pytest.mark.parametrize("kinds", MODELS.values(), ids=MODELS)
def test_structure_and_values(kinds):
    before, after, result, states, plan = paged(Layers(*kinds))
    expected = [op for kind in kinds for op in ("short_conv", kind)[: 1 if kind == "short_conv" else 2]]
    assert [m.pattern for m in result.matches] == [f"paged_{name}" for name in expected]
    assert count(after, *PAGED) == 0 and count(after, *PAGED.values()) == len(expected)
    assert {p.target for p in after.graph.nodes if p.op == "placeholder"} == {
        "input_ids", "positions", "block_table_0", "seq_lens", "query_start_loc",
        *(f"kv_cache_{i}" for i in range(len(expected))),
    }  # fmt: skip
    assert_metadata_kept(after, *PAGED.values())
    for num_tokens in (1, 2, 40, 77):
        ids = torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
        with torch.no_grad():
            want = before(ids, torch.arange(num_tokens))
        got = EagerExecutable(after).run(single_sequence_inputs(plan, states, ids))
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_a_continued_sequence():
    """Prefill, then single tokens, over one arena."""
    before, after, _, states, plan = paged(Layers("ssd", "gated_delta_rule"))
    ids = torch.randint(VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = before(ids, torch.arange(50))
    got = run_in_steps(after, plan, states, ids, (20, 31, 32, 33, 50), num_blocks=6)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_states():
    _, _, _, states, plan = paged(Layers("gated_delta_rule", "ssd"), dtype=torch.bfloat16)
    assert [(s.kind, s.shape, s.dtype) for s in states] == [
        ("short_conv", (WIDTH, TAPS - 1), "bfloat16"),
        ("recurrent", (HEADS, KEY_WIDTH, VALUE_WIDTH), "float32"),
        ("short_conv", (WIDTH, TAPS - 1), "bfloat16"),
        ("recurrent", (HEADS, VALUE_WIDTH, KEY_WIDTH), "float32"),
    ]
    assert [s.layer for s in states] == ["body.mixers.0"] * 2 + ["body.mixers.1"] * 2
    assert len(plan.groups) == 1, "all layers that keep one state a block share a block table"


def test_several_users_of_the_result():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = Mixer("ssd")

        def forward(self, x, positions):
            y = self.mixer(x)
            return y * torch.sigmoid(y) + y

    _, after, result, _, _ = paged(Twice())
    (node,) = calls(after.graph, OPS.paged_ssd.default)
    assert len(result.matches) == 2 and node.kwargs["block_size"] == 16


def test_a_graph_without_recurrences_is_left_alone():
    gm = captured(lambda x, positions: torch.sigmoid(x))
    result = page_recurrent(gm, paging=Paging(states=(), group_of=(), block_sizes=(), bytes_per_block=0))
    assert not result.matches and not result.changed
