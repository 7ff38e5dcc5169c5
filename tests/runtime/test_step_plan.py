"""The step plan: the worked example of paged attention, one packed buffer, block tables that are only extended."""

from __future__ import annotations

import itertools

import torch

from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler_output import ScheduledRequest, SchedulerOutput
from pagebinder.runtime.step_plan import BlockTables, StepPlanner


def scheduled(name: str, context: int, new: int, samples: bool = True) -> ScheduledRequest:
    """A request whose last `new` of `context` tokens are computed in this step; token i has the id 100 + i."""
    request = Request(name, [100 + i for i in range(context)], max_tokens=4)
    return ScheduledRequest(request, context - new, new, samples)


def build(items, tables: dict[str, tuple[list[int], ...]], block_sizes=(16,)):
    planner = StepPlanner(block_sizes, torch.device("cpu"))
    output = SchedulerOutput(tuple(items), (), sum(i.num_new_tokens for i in items))
    return planner.build(output, tables.__getitem__)


ITEMS = [scheduled("a", 10, 10), scheduled("b", 25, 1), scheduled("c", 8, 8, False), scheduled("d", 30, 1)]
TABLES = {"a": ([0, 1],), "b": ([2, 3, 5],), "c": ([4],), "d": ([6, 7, 8],)}


def test_the_worked_mixed_batch():
    tensors = build(ITEMS, TABLES).tensors
    assert tensors["slot_mapping_0"].tolist() == [*range(10), 56, *range(64, 72), 125]
    assert tensors["query_start_loc"].tolist() == [0, 10, 11, 19, 20]
    assert tensors["seq_lens"].tolist() == [10, 25, 8, 30]
    assert tensors["positions"].tolist() == [*range(10), 24, *range(8), 29]
    assert tensors["input_ids"].tolist() == [*range(100, 110), 124, *range(100, 108), 129]
    assert tensors["block_table_0"].tolist() == [[0, 1, 0], [2, 3, 5], [4, 0, 0], [6, 7, 8]]


def test_only_requests_that_sample_get_logits():
    plan = build(ITEMS, TABLES)
    assert plan.sampling == ("a", "b", "d")
    assert plan.tensors["logits_rows"].tolist() == [9, 10, 19]


def test_all_fields_are_views_of_one_aligned_buffer():
    tensors = build(ITEMS, TABLES).tensors
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 1
    base = next(iter(tensors.values())).untyped_storage().data_ptr()
    offsets = sorted((t.data_ptr() - base, t.numel() * t.element_size()) for t in tensors.values())
    assert all(start % 64 == 0 for start, _ in offsets)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(offsets))


def test_groups_have_their_own_tables_slots_and_block_sizes():
    tables = {"a": ([1, 2, 3], [0, 9])}
    tensors = build([scheduled("a", 12, 4)], tables, block_sizes=(4, 8)).tensors
    assert tensors["slot_mapping_0"].tolist() == [12, 13, 14, 15]
    assert tensors["slot_mapping_1"].tolist() == [72, 73, 74, 75]
    assert tensors["block_table_1"].tolist() == [[0, 9]]


def test_fields_of_an_earlier_larger_step_do_not_shine_through():
    planner = StepPlanner((16,), torch.device("cpu"))
    big = SchedulerOutput(tuple(ITEMS), (), 20)
    planner.build(big, TABLES.__getitem__)
    small = SchedulerOutput((ITEMS[2], ITEMS[0]), (), 18)
    assert planner.build(small, TABLES.__getitem__).tensors["block_table_0"].tolist() == [[4, 0], [0, 1]]


def test_block_table_rows_are_extended_and_forgotten():
    tables = BlockTables(2)
    assert tables.row("a", 0, [3, 4]).tolist() == [3, 4]
    assert tables.row("a", 1, [7]).tolist() == [7]
    assert tables.row("a", 0, [3, 4, *range(50, 80)]).tolist() == [3, 4, *range(50, 80)]
    assert tables.row("b", 0, [1]).tolist() == [1]
    tables.drop("a")
    assert tables.row("a", 0, [8]).tolist() == [8]
    tables.drop("never seen")


def test_a_preempted_request_gets_a_new_row():
    planner = StepPlanner((16,), torch.device("cpu"))
    item = scheduled("a", 10, 10)
    planner.build(SchedulerOutput((item,), (), 10), lambda _: ([5],))
    planner.build(SchedulerOutput((scheduled("b", 4, 4),), ("a",), 4), lambda _: ([6],))
    plan = planner.build(SchedulerOutput((item,), (), 10), lambda _: ([9],))
    assert plan.tensors["block_table_0"].tolist() == [[9]]
