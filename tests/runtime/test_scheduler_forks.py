"""Forks, held requests and what happens to them without seats or blocks."""

from __future__ import annotations

import pytest

from pagebinder.errors import RequestError
from pagebinder.runtime.kv import FullAttentionSpec, KVCacheGroup, KVCacheManager
from pagebinder.runtime.request import Request, RequestStatus
from pagebinder.runtime.scheduler import Scheduler

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
FULL = KVCacheGroup(FullAttentionSpec(block_size=4, **DIMS), ("full",))


def make(num_blocks=100, max_num_seqs=8, caching=True, budget=32):
    kv = KVCacheManager(
        (FULL,), num_blocks, max_model_len=64, max_in_flight_tokens=budget, enable_caching=caching
    )
    return Scheduler(kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=64)


def add(scheduler, name, tokens, max_tokens=4):
    request = Request(name, tokens, max_tokens=max_tokens)
    scheduler.add_request(request)
    return request


def step(scheduler, tokens=None):
    output = scheduler.schedule()
    scheduler.update(output, [7] * len(output.sampling) if tokens is None else tokens)
    scheduler.check_integrity()
    return {s.request.request_id: (s.start, s.num_new_tokens) for s in output.scheduled}


def ids(scheduler, name):
    return scheduler.kv.block_ids(name)[0].tolist()


def test_a_child_shares_blocks_until_it_writes():
    scheduler = make()
    parent = add(scheduler, "a", [1] * 10)
    step(scheduler)
    before, free = ids(scheduler, "a"), scheduler.kv.num_free_blocks
    child = parent.child("b", 11, max_tokens=4)
    scheduler.fork("a", child)
    assert ids(scheduler, "b") == before and scheduler.kv.num_free_blocks == free
    assert child.status is RequestStatus.RUNNING and child.num_computed_tokens == 10
    output = scheduler.schedule()
    (copy,) = scheduler.kv.take_copies()
    assert {s.request.request_id: (s.start, s.num_new_tokens) for s in output.scheduled} == {
        "a": (10, 1), "b": (10, 1),
    }  # fmt: skip
    assert copy.src == before[-1] and copy.dst in ids(scheduler, "a") + ids(scheduler, "b")
    assert (
        ids(scheduler, "a")[:2] == ids(scheduler, "b")[:2]
        and ids(scheduler, "a")[2] != ids(scheduler, "b")[2]
    )
    scheduler.update(output, [7, 8])
    assert (parent.output_token_ids, child.output_token_ids) == ([7, 7], [7, 8])
    scheduler.check_integrity()


def test_without_a_seat_a_child_waits_and_finds_its_prefix_cached():
    scheduler = make(max_num_seqs=1)
    parent = add(scheduler, "a", [1] * 10, max_tokens=2)
    step(scheduler)
    child = parent.child("b", 10, max_tokens=2)
    child.append_output(3)
    scheduler.fork("a", child)
    assert child.status is RequestStatus.PREEMPTED and scheduler.num_waiting == 1
    assert step(scheduler) == {"a": (10, 1)}
    assert step(scheduler) == {"b": (8, 3)}
    assert child.output_token_ids == [3, 7]


def test_a_fork_in_update_comes_before_the_parent_is_freed():
    scheduler = make(caching=False)
    parent = add(scheduler, "a", [1] * 10, max_tokens=4)
    output = scheduler.schedule()
    child = parent.child("b", 10, max_tokens=4)
    child.append_output(3)
    assert scheduler.update(output, [7], {"a": "stop"}, [("a", child)]) == [parent]
    scheduler.check_integrity()
    assert step(scheduler) == {"b": (10, 1)}


def test_a_child_at_its_limit_is_finished_at_once():
    scheduler = make()
    parent = add(scheduler, "a", [1] * 10, max_tokens=1)
    output = scheduler.schedule()
    child = parent.child("b", 10, max_tokens=1)
    child.append_output(3)
    scheduler.update(output, [7], None, [("a", child)])
    assert (parent.finish_reason, child.finish_reason) == ("length", "length")
    assert not scheduler.has_unfinished and scheduler.stats.num_finished == 2
    scheduler.check_integrity()


def test_bad_forks():
    scheduler = make()
    parent = add(scheduler, "a", [1] * 10)
    with pytest.raises(RequestError, match="cannot be forked"):
        scheduler.fork("x", parent.child("b", 10, max_tokens=4))
    with pytest.raises(RequestError, match="in use"):
        scheduler.fork("a", parent.child("a", 10, max_tokens=4))


def test_a_held_request_sits_out_until_it_gets_its_token():
    scheduler = make()
    a = add(scheduler, "a", [1] * 5)
    add(scheduler, "b", [2] * 5)
    assert step(scheduler, [-1, 7]) == {"a": (0, 5), "b": (0, 5)}
    assert a.output_token_ids == []
    assert step(scheduler) == {"b": (5, 1)}
    scheduler.append_token("a", 9)
    assert step(scheduler) == {"a": (5, 1), "b": (6, 1)}
    assert a.output_token_ids == [9, 7]


def test_a_held_request_gives_its_seat_to_one_that_waits():
    scheduler = make(max_num_seqs=1)
    a, b = add(scheduler, "a", [1] * 5, max_tokens=2), add(scheduler, "b", [2] * 5, max_tokens=1)
    step(scheduler, [-1])
    assert step(scheduler) == {"b": (0, 5)} and b.finish_reason == "length"
    assert a.status is RequestStatus.PREEMPTED
    scheduler.append_token("a", 9)
    assert step(scheduler) == {"a": (4, 2)}
    assert a.output_token_ids == [9, 7]


def test_a_held_request_without_blocks_can_be_forked_and_aborted():
    scheduler = make(max_num_seqs=1)
    a = add(scheduler, "a", [1] * 5, max_tokens=3)
    add(scheduler, "b", [2] * 5, max_tokens=1)
    step(scheduler, [-1])
    step(scheduler)
    child = a.child("c", 5, max_tokens=3)
    child.append_output(4)
    scheduler.fork("a", child)
    scheduler.abort("a")
    scheduler.check_integrity()
    assert step(scheduler) == {"c": (4, 2)}
    assert child.output_token_ids == [4, 7]
