"""Random traffic over random mixes of state kinds; every read is judged by a simulated memory."""

import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pagebinder.runtime.kv import PrefixRetention
from tests.runtime.kv.cache_driver import (
    MAX_ENCODER_TOKENS,
    MAX_MODEL_LEN,
    CacheDriver,
    chunked,
    cross,
    full,
    latent,
    latent_window,
    recurrent,
    ring,
    short_conv,
    window,
)

NIGHTLY = os.environ.get("PAGEBINDER_NIGHTLY") == "1"
# By day each layout once, half of them with one step in flight and half with two.
SEEDS, OPERATIONS = (range(240), 600) if NIGHTLY else ((0, 9, 2, 11, 4, 13, 6, 15), 400)
RETENTIONS = [PrefixRetention.dense(), PrefixRetention.sparse(), PrefixRetention.sparse(8)]

SIZES = st.sampled_from([2, 4, 8])
GROUPS = st.one_of(
    SIZES.map(full),
    SIZES.map(latent),
    st.builds(window, st.sampled_from([1, 2, 3, 5, 6, 9, 14]), SIZES),
    st.builds(latent_window, st.sampled_from([3, 6]), SIZES),
    st.builds(chunked, st.sampled_from([3, 4, 6, 8, 13]), SIZES),
    st.sampled_from([4, 6, 8]).map(recurrent),
    st.just(short_conv(4)),
    st.builds(ring, st.sampled_from([4, 8]), st.sampled_from([2, 4, None])),
    SIZES.map(cross),
)
# Mixes as real models have them, so that every kind's hits are exercised however small the sample is.
LAYOUTS = [
    [full(4)],
    [full(8), window(6, 4), window(6, 4)],
    [full(4), chunked(6, 4)],
    [full(8), recurrent(8), short_conv(8)],
    [full(4), cross(2)],
    [latent(8), latent_window(5, 2), ring(4, 2)],
    [window(5, 2), chunked(8, 8)],
    [full(2), window(3, 8), chunked(5, 4), recurrent(4), ring(8, 4), cross(4)],
]


def make_driver(layout, spare_blocks, **options):
    depth = options.get("depth", 1)
    one = sum(g.spec.max_blocks_per_request(MAX_MODEL_LEN, 12 * depth, MAX_ENCODER_TOKENS) for g in layout)
    return CacheDriver(layout, 1 + one + spare_blocks, **options)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.lists(GROUPS, min_size=1, max_size=4) | st.sampled_from(LAYOUTS),
        spare_blocks=st.integers(0, 40),
        caching=st.sampled_from([True, True, True, False]),
        retention=st.sampled_from(RETENTIONS),
        match_unit=st.sampled_from([None, 1, 2]),
        host_slots=st.sampled_from([0, 8, 40]),
        depth=st.integers(1, 3),
    )
    def start(self, layout, spare_blocks, caching, retention, match_unit, host_slots, depth):
        self.driver = make_driver(
            layout, spare_blocks, enable_caching=caching, retention=retention, prefix_match_unit=match_unit,
            host_slots=host_slots, depth=depth,
        )  # fmt: skip

    @rule(
        seed=st.integers(0, 2**32),
        names=st.lists(
            st.sampled_from((*CacheDriver.OPERATIONS, "add", "step", "step")), min_size=1, max_size=5
        ),
    )
    def operate(self, seed, names):
        rng = random.Random(seed)
        for name in names:
            self.driver.run(name, rng)

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=1000 if NIGHTLY else 30, stateful_step_count=30, deadline=None
)  # fmt: skip

# What nightly runs have found: (names, seed) of each `operate`. A step failed with copies pending, a request that
# awaited one was preempted with steps in flight, and its block came back as another's, still with the copy.
RECORDED = [
    (["step"], 507846), (["step"], 857), (["add"], 133), (["step"], 264541),
    (["add", "step", "step", "add", "abort_swapped"], 317), (["preempt", "add", "add", "step"], 710),
    (["preempt"], 1678503), (["fork", "step", "finish", "step"], 52855), (["step", "step", "add", "fork"], 9801),
    (["preempt", "fork"], 355), (["fork", "finish", "add", "step", "preempt"], 6265),
    (["abort_swapped", "step", "add", "step"], 144976), (["finish_step", "fork", "add", "step"], 17373212),
    (["fork", "step", "add", "fork", "step"], 0), (["add", "finish", "add", "step", "step"], 5944396),
    (["finish", "add"], 473), (["fork", "add", "step", "fork"], 87466), (["step", "step"], 333),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "spare_blocks", "options", "operations"),
    [
        pytest.param(
            LAYOUTS[5], 26, {"retention": RETENTIONS[0], "host_slots": 40, "depth": 3}, RECORDED,
            id="a copy into a block that was freed in flight",
        ),
    ],
)  # fmt: skip
def test_recorded_runs(layout, spare_blocks, options, operations):
    driver = make_driver(layout, spare_blocks, **options)
    for names, seed in operations:
        rng = random.Random(seed)
        for name in names:
            driver.run(name, rng)
    driver.drain()


def books(kv):
    """Everything a cache knows that later decisions depend on."""
    return (
        [
            {r: (t.ids.tolist(), t.first_live, t.num_hashed, t.covered_tokens) for r, t in m.tables.items()}
            for m in kv.managers
        ],
        [(b.ref_cnt, b.block_hash, b.group_id, b.inner_hashes) for b in kv.pool.blocks],
        [b.block_id for b in kv.pool.free_queue.get_all_free_blocks()],
        {(g, h, b.block_id) for g, h, b in kv.pool._entries()},
        (dict(kv.context.fence.pins), dict(kv.rows.row_of), len(kv.context.copies)),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_batched_growth_leaves_the_same_books_as_one_request_after_the_other(seed):
    layout, rng = LAYOUTS[seed % len(LAYOUTS)], random.Random(seed)
    options = {"enable_caching": seed % 5 > 0, "retention": RETENTIONS[seed % 3], "depth": 1 + seed // 8 % 2}
    spare = rng.randint(0, 30)
    batched, single = make_driver(layout, spare, **options), make_driver(layout, spare, **options)
    taken = []
    original = batched.kv.batched.try_grow
    batched.kv.batched.try_grow = lambda *args: taken.append(original(*args)) or taken[-1]
    single.kv.batched.try_grow = lambda *args: None
    for i, name in enumerate(rng.choices(CacheDriver.OPERATIONS, CacheDriver.WEIGHTS, k=OPERATIONS // 2)):
        for driver in (batched, single):
            driver.run(name, random.Random(f"{seed} {i}"))
        assert books(batched.kv) == books(single.kv)
    assert sum(covered is not None for covered in taken) > len(taken) // 10 > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_long_runs(seed):
    """Long enough that the pool is full of old prefixes and every mechanism meets every other."""
    rng = random.Random(seed)
    layout = LAYOUTS[seed % len(LAYOUTS)]
    driver = make_driver(
        layout, rng.randint(0, 30), retention=RETENTIONS[seed % 3], prefix_match_unit=rng.choice([None, 1, 2]),
        host_slots=rng.choice([0, 60]), depth=1 + seed // len(LAYOUTS) % 2,
    )  # fmt: skip
    for name in rng.choices(CacheDriver.OPERATIONS, CacheDriver.WEIGHTS, k=OPERATIONS):
        driver.run(name, rng)
    driver.drain()
    assert driver.counts["uncalled"] > 0 and driver.counts["batched"] > 0 and driver.counts["hit tokens"] > 0
    assert driver.memory.counts["copies"] > 0
    if driver.kv.swapper is not None:
        assert driver.memory.counts["swaps"] > 0
