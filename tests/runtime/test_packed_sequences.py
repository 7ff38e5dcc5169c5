"""Several sequences in one call: every position gets a slot of its own, and tables say where."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.layer_state import AttentionState, CrossAttentionState, RecurrentState
from pagebinder.runtime.kv import plan_kv_cache
from pagebinder.runtime.packed_sequences import PackedSequences

STATES = (
    AttentionState(layer="a", index=0, dtype="float32", num_kv_heads=1, head_dim=8, head_dim_v=8),
    AttentionState(layer="b", index=1, dtype="float32", num_kv_heads=1, head_dim=8, head_dim_v=8, window=4),
    RecurrentState(layer="c", index=2, dtype="float32", shape=(2, 8)),
)
LENGTHS = (9, 1, 4)


def packed(states=STATES, **options):
    plan = plan_kv_cache(states, block_size=4, max_model_len=64, max_encoder_tokens=32)
    return plan, PackedSequences(plan, states, [torch.arange(n) + 10 * n for n in LENGTHS], **options)


def test_inputs_of_two_calls():
    plan, sequences = packed()
    first = sequences.inputs([(0, 5), (0, 0), (0, 2)])
    second = sequences.inputs([(5, 9), (0, 1), (2, 4)])
    assert first["query_start_loc"].tolist() == [0, 5, 5, 7] and first["seq_lens"].tolist() == [5, 0, 2]
    assert second["positions"].tolist() == [5, 6, 7, 8, 0, 2, 3]
    assert second["input_ids"].tolist() == [95, 96, 97, 98, 10, 42, 43]
    assert second["seq_lens"].tolist() == [9, 1, 4] and second["query_start_loc"].dtype is torch.int32
    for g, group in enumerate(plan.groups):
        if "slot_mapping" in group.spec.step_inputs:
            slots = torch.cat([first[f"slot_mapping_{g}"], second[f"slot_mapping_{g}"]]).tolist()
            assert len(set(slots)) == sum(LENGTHS) and min(slots) >= group.block_size  # never in block 0
            table = second[f"block_table_{g}"]
            assert slots[7] == int(table[0, 1]) * 4 + 1  # sequence 0, position 5
    assert all(first[name] is second[name] for name in sequences.caches)


def test_no_block_belongs_to_two():
    plan, sequences = packed()
    used = torch.cat([t[t > 0] for t in sequences.tables]).tolist()
    assert (
        len(used)
        == len(set(used))
        == sum(-(-n // group.block_size) for group in plan.groups for n in LENGTHS)
    )
    rows = torch.arange(7)
    assert [len(x) for x in sequences.split(rows, [(0, 5), (0, 0), (0, 2)])] == [5, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_encoder_states_are_written_with_the_first_tokens(dtype):
    cross = CrossAttentionState(layer="x", index=0, dtype="float32", num_kv_heads=1, head_dim=8, head_dim_v=8)
    states = [torch.full((n, 8), float(n)) for n in (3, 6, 2)]
    _, sequences = packed((cross,), encoder_states=states, convert=lambda cache: cache.to(dtype))
    first = sequences.inputs([(0, 5), (0, 0), (0, 2)])
    assert first["encoder_states"][:, 0].tolist() == [3, 3, 3, 2, 2] and len(first["slot_mapping_0"]) == 5
    assert first["encoder_lens"].tolist() == [3, 6, 2] and first["kv_cache_0"].dtype is dtype
    last = sequences.inputs([(5, 9), (1, 1), (2, 4)])
    assert last["slot_mapping_0"].tolist() == [-1] and last["encoder_states"].shape == (1, 8)
