"""Attention -> cache write + paged attention: structure, values, groups, and what each layer keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagebinder.frontend.recognise import recognise_sdpa
from pagebinder.graph_tools import calls
from pagebinder.passes.layer_states import Paging, layer_states
from pagebinder.passes.page_attention import page_attention
from pagebinder.runtime.executables import EagerExecutable
from pagebinder.runtime.kv import plan_kv_cache
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.graphs import VOCAB_SIZE, assert_metadata_kept, captured, clone, count

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
WIDTH = HEADS * HEAD_DIM
MAX_MODEL_LEN = 256
ATTENTION = torch.ops.pagebinder.attention.default
PAGED = torch.ops.pagebinder.paged_attention.default
WRITE = torch.ops.pagebinder.kv_cache_write.default


class Layers(nn.Module):
    """Attention layers, one for each window (None = full), with an optional KV width per layer."""

    def __init__(self, windows, value_dim=HEAD_DIM):
        super().__init__()
        self.windows, self.value_dim = windows, value_dim
        self.projections = nn.ModuleList(nn.Linear(WIDTH, KV_HEADS * (HEAD_DIM + value_dim)) for _ in windows)
        self.outs = nn.ModuleList(nn.Linear(HEADS * value_dim, WIDTH) for _ in windows)

    def forward(self, x, positions):
        p, j = positions[0, :, None], positions[0, None, :]
        for window, project, out in zip(self.windows, self.projections, self.outs):
            k, v = (
                project(x)
                .view(1, -1, KV_HEADS, HEAD_DIM + self.value_dim)
                .transpose(1, 2)
                .split([HEAD_DIM, self.value_dim], dim=-1)
            )
            mask = (j <= p) if window is None else (j <= p) & (p - j < window)
            q = x.view(1, -1, HEADS, HEAD_DIM).transpose(1, 2)
            y = sdpa(q, k, v, attn_mask=mask, enable_gqa=True)
            x = x + out(y.transpose(1, 2).flatten(2))
        return x


def paged(body, block_size=16):
    """(graph before, graph after, what the pass said, states, plan)"""
    before = captured(body, width=WIDTH)
    recognise_sdpa(before)
    states = layer_states(before, max_model_len=MAX_MODEL_LEN)
    plan = plan_kv_cache(tuple(states), block_size=block_size, max_model_len=MAX_MODEL_LEN)
    after = clone(before)
    paging = Paging.by_plan(states, plan)
    return before, after, page_attention(after, paging=paging), states, plan


def assert_close(before, after, states, plan, num_tokens):
    ids = torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    inputs = single_sequence_inputs(plan, states, ids)
    with torch.no_grad():
        expected = before(ids, torch.arange(num_tokens))
    torch.testing.assert_close(EagerExecutable(after).run(inputs), expected, atol=2e-5, rtol=2e-5)


MODELS = {
    "one full layer": ([None], HEAD_DIM),
    "two full layers": ([None, None], HEAD_DIM),
    "full and window": ([None, 12, 12, None], HEAD_DIM),
    "two windows": ([9, 30], HEAD_DIM),
    "narrow values": ([None, None], 4),
    "a window that no request can leave": ([MAX_MODEL_LEN + 8], HEAD_DIM),
}


@pytest.mark.parametrize("name", MODELS)
def test_paged_equals_unpaged(name):
    windows, value_dim = MODELS[name]
    before, after, result, states, plan = paged(Layers(windows, value_dim))
    assert count(after, ATTENTION) == 0
    assert count(after, PAGED) == count(after, WRITE) == len(result.matches) == len(windows)
    assert result.changed and not result.refusals
    assert [s.window for s in states] == [w if w is not None and w < MAX_MODEL_LEN else None for w in windows]
    assert [s.head_dim_v for s in states] == [value_dim] * len(windows)
    assert_metadata_kept(after, PAGED)
    for num_tokens in (1, 2, 5, 40, 77):
        assert_close(before, after, states, plan, num_tokens)


def test_one_placeholder_per_resource():
    _, after, _, _, plan = paged(Layers([None, 12, 12, None]))
    names = [n.target for n in after.graph.nodes if n.op == "placeholder"]
    groups = range(len(plan.groups))
    assert sorted(names) == sorted(
        ["input_ids", "positions", "seq_lens", "query_start_loc", *(f"kv_cache_{i}" for i in range(4))]
        + [f"block_table_{g}" for g in groups]
        + [f"slot_mapping_{g}" for g in groups]
    )


def test_every_layer_writes_and_reads_its_own_cache_and_the_write_comes_first():
    _, after, _, _, _ = paged(Layers([None, 12]))
    writes, reads = list(calls(after.graph, WRITE)), list(calls(after.graph, PAGED))
    assert (
        [w.args[2].target for w in writes]
        == [r.args[1].target for r in reads]
        == ["kv_cache_0", "kv_cache_1"]
    )
    order = list(after.graph.nodes)
    assert all(order.index(w) < order.index(r) for w, r in zip(writes, reads))


def test_layers_of_a_group_share_their_table():
    _, after, _, _, plan = paged(Layers([None, 12, 12, None]))
    tables = [r.args[2].target for r in calls(after.graph, PAGED)]
    assert tables == [f"block_table_{page.group}" for page in plan.layers]


def test_caches_are_static_but_for_the_number_of_blocks():
    """Views of one arena: dense inside a page, one block stride apart."""
    _, after, _, _, plan = paged(Layers([None, None]), block_size=16)
    for name in ("kv_cache_0", "kv_cache_1"):
        cache = next(n for n in after.graph.nodes if n.target == name).meta["val"]
        assert isinstance(cache.shape[0], torch.SymInt)
        assert list(cache.shape[1:]) == [KV_HEADS, 16, 2 * HEAD_DIM]
        assert list(cache.stride()) == [plan.bytes_per_block // 4, 16 * 2 * HEAD_DIM, 2 * HEAD_DIM, 1]


def test_a_sequence_continued_in_a_second_step_equals_the_whole():
    from pagebinder.runtime.arena import KVArena

    before, after, _, states, plan = paged(Layers([None, 12]))
    ids = torch.randint(VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = before(ids, torch.arange(50))
    arena = KVArena(plan, states, 40, torch.device("cpu"))
    run = EagerExecutable(after).run
    parts = [
        run(single_sequence_inputs(plan, states, ids[a:b], start=a, arena=arena))
        for a, b in ((0, 20), (20, 21), (21, 50))
    ]
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-5, rtol=2e-5)


def test_a_graph_without_attention_is_left_alone():
    gm = captured(lambda x, p: x.exp(), width=WIDTH)
    result = page_attention(gm, paging=Paging(states=[], group_of=[], block_sizes=[], bytes_per_block=0))
    assert not result.matches and not result.changed
