"""Scheduling: budget, chunks, admission, preemption, priorities, prefix reuse, errors."""

import pytest

from pagebinder.errors import CacheCapacityError, ConfigError, RequestError
from pagebinder.runtime.kv import FullAttentionSpec, KVCacheGroup, KVCacheManager, SlidingWindowSpec
from pagebinder.runtime.request import Request, RequestStatus
from pagebinder.runtime.scheduler import Scheduler

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
FULL = KVCacheGroup(FullAttentionSpec(block_size=4, **DIMS), ("full",))
WINDOW = KVCacheGroup(SlidingWindowSpec(block_size=4, window=6, **DIMS), ("window",))


def make(*groups, num_blocks=100, budget=32, max_model_len=64, max_num_seqs=8, caching=True, **options):
    kv = KVCacheManager(
        groups or (FULL,), num_blocks, max_model_len=max_model_len, max_in_flight_tokens=budget,
        enable_caching=caching,
    )  # fmt: skip
    return Scheduler(
        kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len, **options
    )


def add(scheduler, name, prompt, max_tokens=4, **options):
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    request = Request(name, tokens, max_tokens=max_tokens, **options)
    scheduler.add_request(request)
    return request


def step(scheduler, finished=None):
    """One step whose every sampled token is 7. Returns (what was scheduled, what finished)."""
    output = scheduler.schedule()
    sampled = {s.request.request_id: 7 for s in output.scheduled if s.samples}
    done = scheduler.update(output, sampled, finished)
    scheduler.check_integrity()
    return summary(output), [request.request_id for request in done]


def summary(output):
    return [(s.request.request_id, s.start, s.num_new_tokens, s.samples) for s in output.scheduled]


def run_all(scheduler, limit=1000):
    for _ in range(limit):
        if not scheduler.has_unfinished:
            return
        step(scheduler)
    raise AssertionError("the scheduler does not come to an end")


def test_a_request_from_prompt_to_last_token():
    scheduler = make()
    request = add(scheduler, "a", 5, max_tokens=3)
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)
    assert step(scheduler) == ([("a", 0, 5, True)], [])
    assert request.status is RequestStatus.RUNNING
    assert step(scheduler) == ([("a", 5, 1, True)], [])
    assert step(scheduler) == ([("a", 6, 1, True)], ["a"])
    assert request.output_token_ids == [7, 7, 7] and request.finish_reason == "length"
    assert scheduler.kv.usage == 0.0 and not scheduler.has_unfinished
    assert scheduler.schedule().scheduled == ()


def test_a_request_that_cannot_be_hashed_leaves_nothing(monkeypatch):
    scheduler = make()
    with monkeypatch.context() as patch, pytest.raises(UnicodeError):
        patch.setattr(scheduler.kv, "extend_hashes", lambda request: "\ud800".encode())
        add(scheduler, "a", 5)
    assert not scheduler.has_unfinished and not scheduler.requests
    add(scheduler, "a", 5)
    run_all(scheduler)


def test_long_prompts_are_chunked_and_batches_are_mixed():
    scheduler = make(budget=10)
    add(scheduler, "a", 3)
    add(scheduler, "b", 20)
    add(scheduler, "c", [5] * 4)
    assert step(scheduler)[0] == [("a", 0, 3, True), ("b", 0, 7, False)]
    assert step(scheduler)[0] == [("a", 3, 1, True), ("b", 7, 9, False)]
    assert step(scheduler)[0] == [("a", 4, 1, True), ("b", 16, 4, True), ("c", 0, 4, True)]
    assert scheduler.stats.num_scheduled_tokens == 10 + 10 + 9


def test_long_prefill_threshold_only_with_company():
    scheduler = make(budget=32, long_prefill_token_threshold=4)
    add(scheduler, "a", 40)
    assert step(scheduler)[0] == [("a", 0, 32, False)]
    add(scheduler, "b", [5] * 30)
    add(scheduler, "c", [6] * 30)
    add(scheduler, "d", [8] * 30)
    # Four want tokens: nobody gets more than an equal share of 8.
    assert step(scheduler)[0] == [
        ("a", 32, 8, True),
        ("b", 0, 8, False),
        ("c", 0, 8, False),
        ("d", 0, 8, False),
    ]


def test_beside_decodes_a_step_takes_few_prompt_tokens():
    scheduler = make(budget=32, max_num_seqs=4, mixed_prefill_tokens=5)
    add(scheduler, "a", 40)
    add(scheduler, "b", [5] * 4)
    assert step(scheduler)[0] == [("a", 0, 32, False)]  # nobody decodes
    assert step(scheduler)[0] == [("a", 32, 8, True), ("b", 0, 4, True)]
    add(scheduler, "c", [6] * 12)
    add(scheduler, "d", [8] * 2)
    decodes = [("a", 40, 1, True), ("b", 4, 1, True)]
    assert step(scheduler)[0] == [*decodes, ("c", 0, 5, False)]
    decodes = [("a", 41, 1, True), ("b", 5, 1, True)]
    assert step(scheduler)[0] == [*decodes, ("c", 5, 5, False)]
    # What the chunk that ends a prompt leaves is for the next one.
    assert step(scheduler)[0] == [
        ("a", 42, 1, True),
        ("b", 6, 1, True),
        ("c", 10, 2, True),
        ("d", 0, 2, True),
    ]


def test_a_prompt_that_others_overtook_does_not_hold_up_their_decodes():
    scheduler = make(budget=32, policy="priority", mixed_prefill_tokens=4)
    add(scheduler, "a", [5] * 4, priority=1)
    step(scheduler)
    add(scheduler, "b", 30, priority=0)
    assert step(scheduler)[0] == [("a", 4, 1, True), ("b", 0, 4, False)]
    assert step(scheduler)[0] == [("b", 4, 4, False), ("a", 5, 1, True)]


def test_max_num_seqs_limits_the_batch():
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 4, max_tokens=2)
    assert [s[0] for s in step(scheduler)[0]] == ["a", "b"]
    assert step(scheduler)[1] == ["a", "b"]
    assert [s[0] for s in step(scheduler)[0]] == ["c"]


def test_finish_reasons_come_from_the_engine_or_from_the_limits():
    scheduler = make(max_model_len=10)
    a, b = add(scheduler, "a", 8, max_tokens=100), add(scheduler, "b", 4, max_tokens=100)
    assert step(scheduler, finished={"b": "stop"})[1] == ["b"]
    assert b.finish_reason == "stop" and b.output_token_ids == [7]
    assert step(scheduler)[1] == ["a"]
    assert a.finish_reason == "length" and a.num_tokens == 10


def test_update_refuses_bad_results_and_changes_nothing():
    scheduler = make()
    request = add(scheduler, "a", 5)
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="no sampled token for a"):
        scheduler.update(output, {})
    with pytest.raises(ValueError, match="tired"):
        scheduler.update(output, {"a": 1}, {"a": "tired"})
    with pytest.raises(ValueError, match="not a finish reason"):
        scheduler.update(output, {"a": 1}, {"a": "running"})
    assert request.num_computed_tokens == 0 and request.output_token_ids == []
    scheduler.update(output, {"a": 1})
    with pytest.raises(ValueError, match="given already"):
        scheduler.update(output, {"a": 1})


def test_a_failed_step_is_scheduled_again():
    scheduler = make(FULL, WINDOW, budget=8)
    add(scheduler, "a", 30)
    step(scheduler)
    first = summary(scheduler.schedule())
    assert summary(scheduler.schedule()) == first == [("a", 8, 8, False)]
    run_all(scheduler)


def test_abort_in_every_state():
    scheduler = make(max_num_seqs=1)
    a, b = add(scheduler, "a", 5), add(scheduler, "b", 5)
    output = scheduler.schedule()
    assert scheduler.abort("a") is a and a.finish_reason == "abort"
    assert scheduler.update(output, {"a": 1}) == [] and a.output_token_ids == []
    assert scheduler.abort("b") is b
    assert scheduler.abort("a") is None and scheduler.abort("nobody") is None
    scheduler.check_integrity()
    assert not scheduler.has_unfinished and scheduler.kv.usage == 0.0
    assert scheduler.schedule().scheduled == ()
    add(scheduler, "a", 5)  # the id may be used again
    run_all(scheduler)


def test_prefix_hits_on_admission():
    scheduler = make()
    add(scheduler, "a", 12, max_tokens=1)
    run_all(scheduler)
    again = add(scheduler, "b", 12, max_tokens=1)
    assert step(scheduler) == ([("b", 8, 4, True)], ["b"])
    assert again.num_cached_tokens == 8
    stats = scheduler.stats
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (24, 8)


def test_generated_tokens_are_reused_as_a_prefix():
    scheduler = make()
    first = add(scheduler, "a", 6, max_tokens=8)
    run_all(scheduler)
    turn = add(scheduler, "b", [*first.all_token_ids, 1, 2, 3])
    step(scheduler)
    assert turn.num_cached_tokens == 12  # 13 of 14 tokens were computed: 3 full blocks


def test_the_last_running_request_is_preempted_and_comes_back_first():
    scheduler = make(num_blocks=7, caching=False)  # 6 usable
    add(scheduler, "a", 12, max_tokens=9)
    b = add(scheduler, "b", [5] * 8, max_tokens=4)
    c = add(scheduler, "c", [6] * 4, max_tokens=2)
    # a: 3 blocks, b: 2, c: 1. The next token of each needs one more: a takes c's, b then has to go itself.
    assert [s[0] for s in step(scheduler)[0]] == ["a", "b", "c"]
    output = scheduler.schedule()
    assert output.preempted_ids == ("c", "b")
    assert [s.request.request_id for s in output.scheduled] == ["a"]
    assert b.status is RequestStatus.PREEMPTED and b.num_computed_tokens == 0 and b.output_token_ids == [7]
    assert scheduler.waiting.requests() == [b, c]
    scheduler.update(output, {"a": 7})
    run_all(scheduler)
    assert (b.num_output_tokens, c.num_output_tokens) == (4, 2)
    assert scheduler.stats.num_preemptions == b.num_preemptions + c.num_preemptions >= 2


def test_nobody_is_admitted_in_a_step_that_preempts():
    scheduler = make(num_blocks=6, caching=False, policy="priority")
    add(scheduler, "a", 12, priority=0)
    add(scheduler, "b", [5] * 8, priority=2)
    assert [s[0] for s in step(scheduler)[0]] == ["a", "b"]
    add(scheduler, "tiny", [6], priority=1)
    output = scheduler.schedule()
    assert output.preempted_ids == ("b",) and scheduler.kv.num_free_blocks == 1
    assert [s.request.request_id for s in output.scheduled] == ["a"]
    scheduler.update(output, {"a": 7})
    assert [s[0] for s in step(scheduler)[0]] == ["a", "tiny"]


def test_a_preempted_request_resumes_from_its_own_cached_blocks():
    scheduler = make(num_blocks=6)
    add(scheduler, "a", 11, max_tokens=3)
    b = add(scheduler, "b", [5] * 7, max_tokens=4)
    step(scheduler)  # a holds 3 blocks and b 2
    step(scheduler)  # 12 and 8 tokens computed
    assert scheduler.schedule().preempted_ids == ("b",)
    run_all(scheduler)
    # It was a block short: one of its two blocks went to "a", the other was found again.
    assert scheduler.stats.resumed_hit_tokens == 4
    assert b.num_cached_tokens == 0 and b.num_output_tokens == 4


def test_priority_decides_order_and_victims():
    scheduler = make(num_blocks=6, policy="priority", caching=False)
    add(scheduler, "low", 8, max_tokens=4, priority=5)
    step(scheduler)
    add(scheduler, "mid", [5] * 3, priority=1)
    add(scheduler, "high", [6] * 4, priority=0)
    assert [s[0] for s in step(scheduler)[0]] == ["low", "high", "mid"]
    # low holds 3 blocks, high and mid one each: high's next block comes from low.
    output = scheduler.schedule()
    assert output.preempted_ids == ("low",)
    assert [s.request.request_id for s in output.scheduled] == ["high", "mid"]
    scheduler.update(output, {"high": 7, "mid": 7})
    run_all(scheduler)


def test_first_come_first_served_ignores_priority():
    scheduler = make(max_num_seqs=1)
    add(scheduler, "a", 4, max_tokens=1, priority=9)
    add(scheduler, "b", 4, max_tokens=1, priority=0)
    assert step(scheduler)[1] == ["a"]


def test_a_prompt_that_does_not_fit_as_a_whole_waits():
    scheduler = make(num_blocks=8, budget=4, caching=False)
    add(scheduler, "a", 12, max_tokens=2)
    b = add(scheduler, "b", [5] * 17, max_tokens=1)
    while scheduler.num_running == 0 or scheduler.running[0].request_id == "a":
        assert b.status is RequestStatus.WAITING
        step(scheduler)
    assert scheduler.stats.num_preemptions == 0
    run_all(scheduler)


def test_a_waiting_head_is_not_searched_again_until_something_changed(monkeypatch):
    scheduler = make(num_blocks=8)
    add(scheduler, "a", 12, max_tokens=4)
    big = add(scheduler, "b", [5] * 20, max_tokens=1)
    searches = []
    find_prefix = scheduler.kv.find_prefix
    monkeypatch.setattr(
        scheduler.kv, "find_prefix", lambda r: searches.append(r.request_id) or find_prefix(r)
    )
    for _ in range(4):
        step(scheduler)
    assert searches == ["a", "b"]
    step(scheduler)
    assert searches == ["a", "b", "b"] and big.finish_reason == "length"


def test_a_waiting_head_is_tried_again_when_blocks_come_free():
    scheduler = make(num_blocks=8)
    add(scheduler, "long", [6] * 4, max_tokens=10)
    add(scheduler, "a", 12, max_tokens=3)
    add(scheduler, "b", [5] * 16, max_tokens=1)
    for _ in range(3):
        assert [s[0] for s in step(scheduler)[0]] == ["long", "a"]
    assert [s[0] for s in step(scheduler)[0]] == ["long", "b"]


def test_a_waiting_head_is_tried_again_when_its_prefix_appears():
    scheduler = make(num_blocks=8)  # 7 usable
    add(scheduler, "a", 8, max_tokens=20)
    b = add(scheduler, "b", [*range(8), *[7] * 16], max_tokens=2)
    # b needs 6 blocks beside a's 2. Once a's 2 are computed they can be shared, and 4 of 4 are enough.
    assert [s[0] for s in step(scheduler)[0]] == ["a"]
    assert step(scheduler)[0] == [("a", 8, 1, True), ("b", 8, 16, True)]
    assert b.num_cached_tokens == 8
    run_all(scheduler)


def test_a_window_model_runs_contexts_far_beyond_its_pool():
    scheduler = make(WINDOW, num_blocks=6, budget=8, max_model_len=1000)
    request = add(scheduler, "a", [i % 5 for i in range(400)], max_tokens=50)
    other = add(scheduler, "b", [i % 7 for i in range(300)], max_tokens=50)
    run_all(scheduler)
    assert request.num_output_tokens == other.num_output_tokens == 50


def test_check_fits_names_what_is_too_small():
    scheduler = make(FULL, WINDOW, num_blocks=14, budget=8, max_model_len=64)
    # 13 usable; the window group holds at most cdiv(5 + 8, 4) + 1 = 5 blocks, so the full group may have 8.
    scheduler.check_fits(prompt_len=30, max_tokens=3)
    with pytest.raises(CacheCapacityError, match=r"need up to 14 KV blocks.*has 13.*raise kv_cache_bytes"):
        scheduler.check_fits(prompt_len=30, max_tokens=4)
    with pytest.raises(RequestError, match=r"64 tokens.*max_model_len is 64"):
        scheduler.check_fits(prompt_len=64, max_tokens=1)
    with pytest.raises(CacheCapacityError):
        add(scheduler, "a", 60)
    assert not scheduler.has_unfinished
    request = add(scheduler, "b", 30, max_tokens=3)
    run_all(scheduler)
    assert request.num_output_tokens == 3 and scheduler.stats.num_preemptions == 0


def test_bad_requests_and_options():
    scheduler = make()
    add(scheduler, "a", 4)
    with pytest.raises(RequestError, match="already in use"):
        add(scheduler, "a", 4)
    with pytest.raises(RequestError, match="empty prompt"):
        add(scheduler, "b", [])
    with pytest.raises(RequestError, match="max_tokens"):
        add(scheduler, "b", 4, max_tokens=0)
    with pytest.raises(ConfigError, match="fcfs, priority"):
        make(policy="lifo")
    with pytest.raises(ConfigError, match="max_num_seqs"):
        make(max_num_seqs=0)
    with pytest.raises(ConfigError, match="steps of 32 tokens"):
        Scheduler(scheduler.kv, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
