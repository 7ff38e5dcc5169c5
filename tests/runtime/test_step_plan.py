"""The step plan: the worked example of paged attention, one packed buffer, block tables that are not copied."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from pagebinder.runtime.kv import FullAttentionSpec, KVCacheGroup, RecurrentSpec
from pagebinder.runtime.kv.rows import RequestRows
from pagebinder.runtime.kv.specs import CrossAttentionSpec
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler_output import SchedulerOutput
from pagebinder.runtime.step_plan import StepPlanner

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}


def full(block_size: int) -> KVCacheGroup:
    return KVCacheGroup(FullAttentionSpec(block_size=block_size, **DIMS), ("full",))


def output(*items: tuple[str, int, int, bool]) -> SchedulerOutput:
    """(name, known tokens, new tokens, samples) per row; token i has the id 100 + i. Without `samples` the new
    tokens end before the last known one."""
    requests, starts = [], []
    for name, context, new, samples in items:
        known = context if samples else context + 5
        requests.append(Request(name, [100 + i for i in range(known)], max_tokens=4))
        starts.append(context - new)
    counts = np.array([new for *_, new, _ in items], np.int64)
    return SchedulerOutput(
        requests, np.array(starts, np.int64), counts,
        np.array([row for row, item in enumerate(items) if item[3]], np.int64),
        np.array([r.all_token_ids[-1] for r in requests], np.int64), np.zeros(len(items), np.int64),
        total_num_tokens=int(counts.sum()), step=1,
    )  # fmt: skip


def tables(*groups: list[list[int]], width: int = 4, spare: int = 1):
    rows = RequestRows(len(groups[0]) + spare)
    arrays = [rows.add_array("int32", width) for _ in groups]
    for array, group in zip(arrays, groups):
        for r, ids in enumerate(group):
            array.data[r, : len(ids)] = ids
    return arrays


def planner(groups, arrays, **options) -> StepPlanner:
    return StepPlanner(groups, arrays, torch.device("cpu"), **options)


ITEMS = [("a", 10, 10, True), ("b", 25, 1, True), ("c", 8, 8, False), ("d", 30, 1, True)]
TABLES = [[0, 1], [2, 3, 5], [4], [6, 7, 8]]


def worked() -> dict[str, torch.Tensor]:
    return planner([full(16)], tables(TABLES)).build(output(*ITEMS)).tensors


def test_the_worked_mixed_batch():
    tensors = worked()
    assert tensors["slot_mapping_0"].tolist() == [*range(10), 56, *range(64, 72), 125]
    assert tensors["query_start_loc"].tolist() == [0, 10, 11, 19, 20]
    assert tensors["seq_lens"].tolist() == [10, 25, 8, 30]
    assert tensors["positions"].tolist() == [*range(10), 24, *range(8), 29]
    assert tensors["input_ids"].tolist() == [*range(100, 110), 124, *range(100, 108), 129]
    assert tensors["block_table_0"][:4, :3].tolist() == [[0, 1, 0], [2, 3, 5], [4, 0, 0], [6, 7, 8]]


def test_only_requests_that_sample_get_logits():
    assert worked()["logits_rows"].tolist() == [9, 10, 19]


def test_dtypes():
    found = {name: tensor.dtype for name, tensor in worked().items()}
    wide = {"input_ids", "positions", "logits_rows"}
    assert found == {name: torch.int64 if name in wide else torch.int32 for name in found}


def test_a_request_that_computes_nothing_has_no_tokens_and_keeps_its_context():
    step = output(("a", 10, 1, True), ("b", 25, 0, False), ("c", 8, 2, True))
    tensors = planner([full(16)], tables(TABLES)).build(step).tensors
    assert tensors["query_start_loc"].tolist() == [0, 1, 1, 3]
    assert tensors["seq_lens"].tolist() == [10, 25, 8]
    assert tensors["positions"].tolist() == [9, 6, 7]
    assert tensors["slot_mapping_0"].tolist() == [9, 70, 71]
    assert tensors["logits_rows"].tolist() == [0, 2]


def test_a_decode_step_is_one_token_each():
    step = output(("a", 10, 1, True), ("b", 25, 1, True), ("c", 8, 1, True))
    tensors = planner([full(16)], tables(TABLES)).build(step).tensors
    assert tensors["input_ids"].tolist() == [109, 124, 107]
    assert tensors["positions"].tolist() == [9, 24, 7]
    assert tensors["slot_mapping_0"].tolist() == [9, 56, 71]
    assert tensors["logits_rows"].tolist() == [0, 1, 2]


def test_block_tables_are_the_caches_own_rows():
    arrays = tables(TABLES)
    tensors = planner([full(16)], arrays).build(output(*ITEMS)).tensors
    assert tensors["block_table_0"].shape == (5, 4)
    assert tensors["block_table_0"].data_ptr() == arrays[0].data.ctypes.data


def test_all_other_fields_are_views_of_one_aligned_buffer():
    tensors = {name: t for name, t in worked().items() if not name.startswith("block_table")}
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 1
    base = next(iter(tensors.values())).untyped_storage().data_ptr()
    offsets = sorted((t.data_ptr() - base, t.numel() * t.element_size()) for t in tensors.values())
    assert all(start % 64 == 0 for start, _ in offsets)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(offsets))


def test_groups_have_their_own_tables_slots_and_block_sizes():
    groups, arrays = [full(4), full(8)], tables([[1, 2, 3]], [[0, 9]])
    tensors = planner(groups, arrays).build(output(("a", 12, 4, True))).tensors
    assert tensors["slot_mapping_0"].tolist() == [12, 13, 14, 15]
    assert tensors["slot_mapping_1"].tolist() == [72, 73, 74, 75]
    assert tensors["block_table_1"][0].tolist() == [0, 9, 0, 0]


def test_a_group_without_slots_gets_its_table_only():
    spec = RecurrentSpec(block_size=4, shape=(2, 2), dtype="float32", entry_bytes=16)
    groups = [full(4), KVCacheGroup(spec, ("recurrent",))]
    tensors = planner(groups, tables([[1, 2, 3]], [[0, 9]])).build(output(("a", 12, 4, True))).tensors
    assert {name for name in tensors if name.endswith("_1")} == {"block_table_1"}


def test_steps_of_other_sizes_do_not_shine_through():
    plans = planner([full(16)], tables(TABLES))
    plans.build(output(*ITEMS))
    small = plans.build(output(("c", 8, 8, False), ("a", 10, 10, True))).tensors
    assert small["input_ids"].tolist() == [*range(100, 108), *range(100, 110)]
    assert small["seq_lens"].tolist() == [8, 10] and small["logits_rows"].tolist() == [17]


def test_plans_in_flight_are_left_alone():
    arrays = tables(TABLES)
    plans = planner([full(16)], arrays, max_steps_in_flight=2)
    first = plans.build(output(*ITEMS)).tensors
    before = {name: tensor.clone() for name, tensor in first.items()}
    arrays[0].data[:] = 99
    plans.build(output(*reversed(ITEMS)))
    assert all(torch.equal(first[name], before[name]) for name in first)
    assert first["block_table_0"].tolist() == [[0, 1], [2, 3], [4, 0], [6, 7]]


def test_slots_of_cross_attention_are_those_of_the_encoder_tokens_of_the_step():
    """Rows 0 and 2 are new: their 3 and 17 encoder tokens are written; row 1 only reads its 20."""
    groups = [full(16), KVCacheGroup(CrossAttentionSpec(block_size=16, **DIMS), ("cross",))]
    rows = RequestRows(3)
    arrays = [rows.add_array("int32", 4) for _ in groups]
    lens = rows.add_array(np.int32)
    lens.data[:] = [3, 20, 17]
    arrays[1].data[:, :2] = [[5, 0], [6, 7], [8, 2]]
    step = output(("a", 4, 4, True), ("b", 9, 1, True), ("c", 1, 1, True))
    build = planner(groups, arrays, encoder_lens=lens).build
    tensors = build(step, encoder_rows=[0, 2]).tensors
    assert tensors["slot_mapping_1"].tolist() == [80, 81, 82, *range(128, 144), 32]
    assert tensors["encoder_lens"].tolist() == [3, 20, 17]
    assert tensors["slot_mapping_0"].shape == (6,)
    assert {tensors[name].dtype for name in ("slot_mapping_1", "encoder_lens")} == {torch.int32}
    none = build(step).tensors
    assert none["slot_mapping_1"].tolist() == [-1] and none["encoder_lens"].tolist() == [3, 20, 17]
