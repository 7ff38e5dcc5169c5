"""The event log: counts agree with the pool at every step, and what is saved is what is loaded."""

import dataclasses
import itertools
import json
import random
from collections import Counter, deque

import pytest

from pagebinder.errors import EventLogError
from pagebinder.runtime.kv import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheManager,
    RecurrentSpec,
    SlidingWindowSpec,
)
from pagebinder.runtime.kv.event_log import CACHED, FREE, KVEventLog
from pagebinder.runtime.kv.event_recorder import KVEventRecorder
from pagebinder.runtime.kv.host_blocks import HostBlocks
from pagebinder.runtime.kv.retention import PrefixRetention
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler
from pagebinder.runtime.swap_policy import SwapPolicy
from tests.helpers import by_day

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
MAX_MODEL_LEN = 64
LONGEST = 56  # tokens of the longest request below


def full(block_size):
    return KVCacheGroup(FullAttentionSpec(block_size=block_size, **DIMS), ("full",))


def window(tokens, block_size):
    return KVCacheGroup(SlidingWindowSpec(block_size=block_size, window=tokens, **DIMS), ("window",))


def chunked(tokens, block_size):
    return KVCacheGroup(ChunkedLocalSpec(block_size=block_size, chunk=tokens, **DIMS), ("chunked",))


def recurrent(block_size):
    spec = RecurrentSpec(block_size=block_size, shape=(4,), dtype="float32", entry_bytes=16)
    return KVCacheGroup(spec, ("state",))


LAYOUTS = {
    "full": [full(4)],
    "full and windows": [full(4), window(6, 4), window(9, 2)],
    "full and chunked": [full(4), chunked(8, 4)],
    "full and recurrent": [full(4), recurrent(4), window(6, 4)],
}


def test_a_log_cannot_be_saved_into_a_folder_that_is_missing(tmp_path):
    log = KVEventLog(4, ())
    with pytest.raises(EventLogError, match="the folder .*nowhere does not exist"):
        log.save(tmp_path / "nowhere" / "run.jsonl")
    with pytest.raises(EventLogError, match="cannot write"):
        log.save(tmp_path)


def make(layout, num_blocks=24, budget=16, in_flight=1, max_num_seqs=4, swap=False, **options):
    kv = KVCacheManager(
        layout, num_blocks, max_model_len=MAX_MODEL_LEN, max_in_flight_tokens=budget * in_flight,
        host_blocks=HostBlocks(100) if swap else None, **options,
    )  # fmt: skip
    return Scheduler(
        kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN,
        max_steps_in_flight=in_flight, swap_policy=SwapPolicy("always", 128) if swap else None,
    )  # fmt: skip


def schedule(scheduler, recorder):
    output = scheduler.schedule()
    recorder.record_step(output)
    scheduler.kv.take_swaps()
    scheduler.kv.take_copies()
    return output


def update(scheduler, output, rng=None):
    """A step's results: tokens are drawn from a few, so that prefixes meet again; some requests stop."""
    if output.step is None:
        return
    ids = output.sampling_ids
    ends = {i: "stop" for i in ids if rng is not None and i in scheduler.requests and rng.random() < 0.05}
    scheduler.update(output, [1 + int(output.starts[row]) % 3 for row in output.sampling.tolist()], ends)


def step(scheduler, recorder):
    update(scheduler, schedule(scheduler, recorder))


def counted(scheduler, output):
    """Per group (in use, cached, empty slots), and owners, from the pool and the tables alone. O(blocks)."""
    kv = scheduler.kv
    stored = {r.request_id: s + n for r, s, n in zip(output.requests, output.starts, output.counts)}
    in_use, cached, gaps = {}, {}, {}
    for group_id, manager in enumerate(kv.managers):
        has_rows = not isinstance(manager.spec, RecurrentSpec)
        for request_id, table in manager.tables.items():
            for index, block in enumerate(table.blocks):
                if not block.is_null:
                    in_use.setdefault(block.block_id, group_id)
                    gap = has_rows * max((index + 1) * manager.block_size - int(stored[request_id]), 0)
                    gap = min(gap, manager.block_size)
                    gaps[block.block_id] = min(gap, gaps.get(block.block_id, gap))
    for block in kv.pool.blocks:
        if block.block_hash is not None and block.block_id not in in_use:
            cached[block.block_id] = block.group_id
    uses, hits = Counter(in_use.values()), Counter(cached.values())
    empty = Counter()
    for block_id, gap in gaps.items():
        empty[in_use[block_id]] += gap
    groups = range(len(kv.groups))
    return [(uses[g], hits[g], empty[g]) for g in groups], in_use, cached


def check(scheduler, recorder, output, owners):
    """Compare the newest record with the pool; `owners` is kept up to date from the records."""
    record, log = recorder.log.steps[-1], recorder.log
    expected, in_use, cached = counted(scheduler, output)
    empty = [slots - tokens for slots, tokens in zip(record.slots, record.tokens)]
    assert list(zip(record.in_use, record.cached, empty)) == expected
    assert list(record.slots) == [n * g.slots_per_block for n, g in zip(record.in_use, log.groups)]
    kv = scheduler.kv
    assert sum(record.in_use) == kv.num_usable_blocks - kv.num_free_blocks - record.deferred
    assert (record.running, record.waiting) == (scheduler.num_running, scheduler.num_waiting)
    owners.update(record.owners)
    assert {b for b, owner in owners.items() if owner == CACHED} == cached.keys()
    holders = {b: owner for b, owner in owners.items() if owner not in (CACHED, FREE)}
    assert holders.keys() == in_use.keys()
    for block_id, owner in holders.items():
        table = kv.managers[in_use[block_id]].tables[owner]
        assert block_id in [block.block_id for block in table.blocks]


CACHING = {
    "off": {"enable_caching": False},
    "dense": {"retention": PrefixRetention.dense()},
    "sparse": {"retention": PrefixRetention.sparse()},
    "swap": {"swap": True},
}


@pytest.mark.parametrize("caching", CACHING)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_flight", by_day([1, 2], [2]))
def test_counts_agree_with_the_pool_at_every_step_of_random_traffic(layout, caching, in_flight):
    """Requests come, end, are aborted under ids that come again, are forked, preempted and recomputed."""
    rng = random.Random(f"{layout} {caching} {in_flight}")
    # Little more than the longest request needs: somebody is preempted now and then.
    sizes = make(LAYOUTS[layout], in_flight=in_flight, **CACHING[caching]).kv
    num_blocks = sizes.max_blocks_for(LONGEST) + 3
    scheduler = make(LAYOUTS[layout], num_blocks, in_flight=in_flight, **CACHING[caching])
    recorder = KVEventRecorder(scheduler)
    text = [1 + i * i % 3 for i in range(40)]
    names = map("r{}".format, itertools.count())
    pending, owners = deque(), {}
    for _ in range(400):
        for _ in range(rng.choice([0, 0, 1, 2])):
            if scheduler.num_waiting < 4:
                prompt = text[: rng.randint(0, 30)] + [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]
                scheduler.add_request(Request(next(names), prompt, max_tokens=rng.randint(1, 20)))
        if scheduler.requests and rng.random() < 0.05:
            name = rng.choice(sorted(scheduler.requests))
            tokens = scheduler.abort(name).prompt_token_ids
            scheduler.add_request(Request(name, tokens, max_tokens=4))
        if scheduler.running and rng.random() < 0.1:
            parent = rng.choice(scheduler.running)
            if parent.num_output_tokens:
                child = parent.child(next(names), parent.num_tokens, max_tokens=parent.max_tokens)
                scheduler.fork(parent.request_id, child)
        output = schedule(scheduler, recorder)
        check(scheduler, recorder, output, owners)
        scheduler.check_integrity()
        if output.step is not None:
            pending.append(output)
        if len(pending) == in_flight or output.step is None:
            while pending:
                update(scheduler, pending.popleft(), rng)
                if rng.random() < 0.5:
                    break
        if not scheduler.requests and rng.random() < 0.5:
            scheduler.kv.reset_prefix_cache()
    log, stats = recorder.detach(), scheduler.stats
    *_, (_, at_end) = log.owners_over_time()
    assert at_end == {b: owner for b, owner in owners.items() if owner is not FREE}
    assert stats.num_preemptions > 0
    assert stats.num_forks > 0
    assert log.total("preemptions") == stats.num_preemptions
    assert log.total("swaps_out") == stats.num_swaps_out
    assert log.total("swaps_in") == stats.num_swaps_in
    assert (stats.num_swaps_in > 0) == (caching == "swap")
    assert log.total("queried_tokens") == stats.prefix_queried_tokens
    assert log.total("hit_tokens") == stats.prefix_hit_tokens
    assert (log.total("hit_tokens") > 0) == (log.total("evictions") > 0) == (caching != "off")
    assert log.total("scheduled_tokens") == stats.num_scheduled_tokens
    assert 0 < log.mean_waste < 1


def recorded(num_steps=30, layout="full and windows", caching="dense"):
    scheduler = make(LAYOUTS[layout], num_blocks=48, **CACHING[caching])
    recorder = KVEventRecorder(scheduler, bytes_per_block=128)
    for i in range(num_steps):
        if i % 5 == 0:
            scheduler.add_request(Request(f"r{i}", [1, 2, 3] * 4 + [i], max_tokens=6))
        step(scheduler, recorder)
    return recorder.detach()


def test_a_recorder_attached_in_mid_run_knows_what_was_there():
    scheduler = make(LAYOUTS["full and windows"], num_blocks=48)
    early = KVEventRecorder(scheduler)
    for i in range(3):
        scheduler.add_request(Request(f"r{i}", [1, 2, 3] * 4 + [i], max_tokens=4 * i + 1))
    for _ in range(4):
        step(scheduler, early)
    late, owners = KVEventRecorder(scheduler), {}
    for _ in range(4):
        output = schedule(scheduler, late)
        check(scheduler, late, output, owners)
        update(scheduler, output)
    assert late.log.steps[0].allocations == 0


def test_evictions_and_allocations_are_counted_once():
    scheduler = make([full(4)], num_blocks=5)
    recorder = KVEventRecorder(scheduler)
    for i in range(3):
        scheduler.add_request(Request(f"r{i}", [i] * 12, max_tokens=1))
        step(scheduler, recorder)
    # 3 blocks each; 1 of 4 is unused by the first, so the second evicts 2 and the third 3.
    assert [s.allocations for s in recorder.log.steps] == [3, 3, 3]
    assert [s.evictions for s in recorder.log.steps] == [0, 2, 3]


def test_waste_is_the_share_of_memory_that_no_token_fills():
    scheduler = make([full(4)])
    recorder = KVEventRecorder(scheduler)
    scheduler.add_request(Request("a", [1] * 5, max_tokens=2))
    step(scheduler, recorder)
    (record,) = recorder.log.steps
    assert (record.in_use, record.slots, record.tokens) == ((2,), (8,), (5,))
    assert record.waste == recorder.log.mean_waste == pytest.approx(3 / 8)


def test_large_pools_are_not_followed_block_by_block():
    scheduler = make([full(4)], num_blocks=300)
    assert not KVEventRecorder(scheduler).log.has_owners
    assert KVEventRecorder(scheduler, follow_blocks=True).log.has_owners


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_log_that_is_saved_and_loaded_is_the_same(tmp_path, layout):
    log = recorded(layout=layout)
    log.save(tmp_path / "run.jsonl")
    again = KVEventLog.load(tmp_path / "run.jsonl")
    assert [dataclasses.replace(s, time=round(s.time, 6)) for s in log.steps] == again.steps
    assert dataclasses.replace(log, steps=[]) == dataclasses.replace(again, steps=[])


def test_owners_end_as_cached_or_free():
    for caching, wanted in {"dense": {CACHED}, "off": {FREE}}.items():
        last = dict(change for record in recorded(caching=caching).steps for change in record.owners)
        assert {owner for owner in last.values() if not owner} == wanted
        assert {owner for owner in last.values() if owner} <= {f"r{i}" for i in range(30)}


def damaged(change):
    """A way to damage the record in line 5 of a log."""

    def apply(lines):
        record = json.loads(lines[4])
        change(record)
        lines[4] = json.dumps(record)

    return apply


DAMAGE = {
    "half a line": (lambda lines: lines.append(lines.pop()[:30]), "not JSON"),
    "no object": (lambda lines: lines.append("[1, 2]"), "not a JSON object"),
    "other file": (lambda lines: lines.__setitem__(0, '{"a": 1}'), "no KV event log"),
    "later version": (lambda lines: lines.__setitem__(0, lines[0].replace('"version": 1', '"version": 9')),
                      "version 9"),
    "header": (lambda lines: lines.__setitem__(0, lines[0].replace("num_blocks", "blocks")), "line 1"),
    "header size": (lambda lines: lines.__setitem__(0, lines[0].replace('"num_blocks": 48', '"num_blocks": "x"')),
                    "line 1"),
    "missing": (damaged(lambda r: r.pop("free")), "line 5: free missing"),
    "unknown": (damaged(lambda r: r.update(extra=1)), "line 5: unknown: extra"),
    "group count": (damaged(lambda r: r["in_use"].append(0)), "line 5: in_use must be 3 counts"),
    "negative": (damaged(lambda r: r.update(waiting=-1)), "line 5: not a count: waiting"),
    "time": (damaged(lambda r: r.update(time="now")), "line 5: time"),
    "owner": (damaged(lambda r: r.update(owners=[[1, 2, 3]])), "line 5: owners"),
    "order": (damaged(lambda r: r.update(step=1)), "line 5: step 1 follows step 2"),
    "sum": (damaged(lambda r: r.update(free=r["free"] + 1)), "line 5: 48 blocks are accounted for"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_log_is_refused_with_file_and_line(tmp_path, name):
    path = tmp_path / "run.jsonl"
    recorded().save(path)
    damage, message = DAMAGE[name]
    lines = path.read_text().splitlines()
    damage(lines)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(EventLogError, match=message) as caught:
        KVEventLog.load(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_logs_at_all(tmp_path):
    with pytest.raises(EventLogError, match="cannot read"):
        KVEventLog.load(tmp_path / "missing.jsonl")
    (tmp_path / "empty").write_text("")
    with pytest.raises(EventLogError, match="no KV event log"):
        KVEventLog.load(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(EventLogError, match="not a text file"):
        KVEventLog.load(tmp_path / "binary")
