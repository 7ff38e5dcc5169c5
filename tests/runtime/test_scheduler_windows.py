"""What a prefill chunk looked back on goes back as soon as the chunk is done, not when the next block is needed."""

import numpy as np
import pytest

from pagebinder.runtime.kv import KVCacheManager, PrefixRetention
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler
from tests.helpers import by_day
from tests.runtime.kv.cache_driver import chunked, full, latent_window, recurrent, window

BLOCK, WINDOW, PROMPT, BUDGET = 8, 20, 205, 64


def make(*groups, steps_in_flight=1, **options):
    in_flight = BUDGET * steps_in_flight
    kv = KVCacheManager(groups, 400, max_model_len=512, max_in_flight_tokens=in_flight, **options)
    return Scheduler(
        kv, max_num_seqs=4, max_num_batched_tokens=BUDGET, max_model_len=512,
        max_steps_in_flight=steps_in_flight,
    )  # fmt: skip


def held(scheduler, group, request_id="a"):
    table = scheduler.kv.managers[group].tables[request_id]
    return sum(not block.is_null for block in table.blocks)


def update(scheduler, output):
    return scheduler.update(output, np.full(len(output.sampling), 7))


def prefill(scheduler, length=PROMPT):
    scheduler.add_request(Request("a", list(range(1, length + 1)), max_tokens=60))
    while not scheduler.requests["a"].num_output_tokens:
        update(scheduler, scheduler.schedule())


def decoding_bound(spec, num_tokens):
    symbols = {"T": num_tokens, "B": spec.block_size}
    return int(spec.blocks_formula.subs({s: symbols[s.name] for s in spec.blocks_formula.free_symbols}))


KINDS = [
    window(WINDOW, BLOCK),
    latent_window(WINDOW, BLOCK),
    chunked(24, BLOCK),
    chunked(20, BLOCK),
    recurrent(BLOCK),
]
OPTIONS = [{}, {"enable_caching": False}, {"retention": PrefixRetention.sparse()}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("group", KINDS, ids=lambda g: g.spec.kind)
@pytest.mark.parametrize("length", by_day(range(PROMPT, PROMPT + BLOCK), [PROMPT, PROMPT + 1]))
def test_after_a_long_prefill_a_request_holds_what_a_decoding_one_holds(group, length, options):
    """Whether or not its first decode step needs a block."""
    scheduler = make(full(BLOCK), group, **options)
    prefill(scheduler, length)
    output = scheduler.schedule()
    assert output.counts.tolist() == [1]
    assert held(scheduler, 1) <= decoding_bound(group.spec, length + 1)
    scheduler.check_integrity()
    for _ in range(2 * BLOCK):
        update(scheduler, output)
        output = scheduler.schedule()
        assert held(scheduler, 1) <= decoding_bound(group.spec, scheduler.requests["a"].num_tokens)


def test_another_chunk_in_flight_keeps_what_it_reads():
    scheduler = make(full(BLOCK), window(WINDOW, BLOCK), steps_in_flight=2)
    scheduler.add_request(Request("a", list(range(1, PROMPT + 1)), max_tokens=8))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.counts.tolist(), second.starts.tolist()) == ([BUDGET], [BUDGET])
    reads = scheduler.kv.block_ids("a")[1][(BUDGET - WINDOW + 1) // BLOCK : 2 * BUDGET // BLOCK].tolist()
    update(scheduler, first)
    third = scheduler.schedule()
    assert third.starts.tolist() == [2 * BUDGET]
    kept = scheduler.kv.block_ids("a")[1].tolist()
    assert kept[(BUDGET - WINDOW + 1) // BLOCK : 2 * BUDGET // BLOCK] == reads
    assert not any(kept[: (BUDGET - WINDOW + 1) // BLOCK])
    assert scheduler.kv.num_deferred_blocks > 0
    update(scheduler, second)
    assert scheduler.kv.num_deferred_blocks == 0


def test_a_request_that_went_away_meanwhile_is_no_trouble():
    scheduler = make(full(BLOCK), window(WINDOW, BLOCK))
    prefill(scheduler)
    scheduler.abort("a")
    assert scheduler.schedule().step is None
    assert scheduler.kv.usage == 0.0
