"""What the KV room refuses, and what a plan says of the layouts it did not choose."""

import dataclasses

import pytest

from pagebinder.config import CompileConfig
from pagebinder.custom_ops.layer_state import DTYPE_BYTES
from pagebinder.errors import CacheCapacityError, ConfigError
from pagebinder.runtime.kv import (
    BLOCK_SIZE,
    ENCODER_TOKENS,
    TOKENS,
    BlockPool,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KernelConstraints,
    KVCacheGroup,
    KVCacheManager,
    LatentSpec,
    NextBest,
    Request,
    SlidingWindowLatentSpec,
    SlidingWindowSpec,
    Workload,
    plan_kv_cache,
    plan_specs,
)
from pagebinder.runtime.kv.specs import DTYPES
from tests.runtime.kv import plan_cases as cases

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
NO_NUMBERS = [0, -16, 1.5, "8", None, True]


def text_of(plan):
    return "\n".join(plan.describe())


# Layouts that were not chosen


def test_what_the_kernel_constraint_costs_is_what_the_other_plan_saves():
    states = [cases.attention(i, heads=8, dim=64) for i in range(4)]
    plan = plan_kv_cache(states, max_model_len=2048)
    free = plan_kv_cache(states, max_model_len=2048, constraints=KernelConstraints(min_run_bytes=0))
    cost = plan.constraint_cost
    assert (plan.groups[0].block_size, free.groups[0].block_size) == (64, 16)
    assert cost.blocks == ("full_attention blocks of 16",) and cost.block_size == 16
    assert cost.saved_bytes == plan.wasted_bytes - free.wasted_bytes > 0
    assert cost.wasted_percent == free.wasted_percent
    chosen = plan_kv_cache(states, max_model_len=2048, block_size=cost.block_size)
    assert chosen.groups == free.groups
    text = text_of(plan)
    assert "at least 32,768 bytes" in text and "block_size=16 does without it" in text
    assert f"waste {free.wasted_percent:.1f} %, {cost.saved_bytes:,.0f} bytes per request less" in text
    assert "next best under the constraints" in text


def test_no_single_option_is_promised_for_different_block_sizes():
    states = [cases.attention(0, heads=8, dim=64), cases.attention(1, heads=8, dim=32, window=1024)]
    plan = plan_kv_cache(states, max_model_len=20_000)
    free = plan_kv_cache(states, max_model_len=20_000, constraints=KernelConstraints(min_run_bytes=0))
    assert [g.block_size for g in free.groups] == [16, 32]
    assert plan.constraint_cost.block_size is None
    assert plan.constraint_cost.blocks == ("full_attention blocks of 16", "sliding_window 1,024 blocks of 32")
    assert "KernelConstraints(min_run_bytes=0) does without it" in text_of(plan)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 64}, {"constraints": KernelConstraints(min_run_bytes=0)}, {"max_model_len": 16}],
)
def test_a_constraint_that_changes_nothing_is_not_mentioned(options):
    plan = plan_kv_cache([cases.attention(0, dim=64)], **{"max_model_len": 2048} | options)
    assert plan.constraint_cost is None
    assert "kernel constraint" not in text_of(plan)


def test_an_equal_plan_costs_the_same_and_never_less_than_nothing():
    plan = plan_kv_cache([cases.attention(i) for i in range(4)], max_model_len=500)
    same = NextBest(kinds=("full_attention",), bytes_per_block=64, extra_bytes=0.0, extra_percent=0.0)
    text = text_of(dataclasses.replace(plan, next_best=same))
    assert "next best under the constraints costs the same, 64 bytes per block" in text
    for length in range(1, 200, 7):
        every = plan_kv_cache(cases.ONE_OF_EACH_KIND, max_model_len=length)
        assert every.next_best is None or every.next_best.extra_bytes >= 0
        assert "-0" not in text_of(every)


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 16), (10, 16), (16, 16), (17, 32), (40, 64), (64, 64), (4096, 64)]
)
def test_blocks_are_no_larger_than_requests(length, expected):
    plan = plan_kv_cache([cases.attention(0, dim=64)], max_model_len=length)
    assert plan.groups[0].block_size == expected


def test_blocks_of_cross_attention_follow_the_encoder():
    plan = plan_kv_cache(
        [cases.attention(0, dim=64), cases.cross(1, dim=64)], max_model_len=10, max_encoder_tokens=2000
    )
    assert {g.spec.kind: g.block_size for g in plan.groups} == {"full_attention": 16, "cross_attention": 64}


def test_what_fits_says_for_which_encoder():
    workload = {"encoders": [[300, 1.0], [70, 1.0]]}
    plan = plan_kv_cache([cases.attention(0), cases.cross(1)], max_model_len=500, workload=workload)
    text = text_of(plan)
    assert "requests that fit, of an encoder of 300" in text and "and an encoder of 300: " in text
    assert "encoder" not in text_of(plan_kv_cache([cases.attention(0)], max_model_len=500))


def test_encoders_of_a_model_without_one_are_refused():
    states = [cases.attention(0)]
    for workload in ({"encoders": [[300, 1.0]]}, Workload(contexts=((9, 1.0),), encoders=((300, 1.0),))):
        with pytest.raises(ConfigError, match="no encoder"):
            plan_kv_cache(states, max_model_len=500, workload=workload)
    for workload in (Workload.default(500), Workload.of({"concurrency": 2}, 500), {"encoders": []}):
        assert plan_kv_cache(states, max_model_len=500, workload=workload).groups


def test_a_limit_that_no_request_outgrows_is_none_in_specs_by_hand_too():
    specs = {
        "full": FullAttentionSpec(block_size=16, **DIMS),
        "window": SlidingWindowSpec(block_size=16, window=500, **DIMS),
        "chunk": ChunkedLocalSpec(block_size=16, chunk=600, **DIMS),
        "narrow": SlidingWindowSpec(block_size=16, window=499, **DIMS),
        "latent": SlidingWindowLatentSpec(block_size=16, window=500, **DIMS),
    }
    plan = plan_specs(specs, max_model_len=500, block_size=16)
    types = {n: type(s) for g in plan.groups for n, s in zip(g.layers, g.layer_specs, strict=True)}
    assert types == {
        "full": FullAttentionSpec, "window": FullAttentionSpec, "chunk": FullAttentionSpec,
        "latent": LatentSpec, "narrow": SlidingWindowSpec,
    }  # fmt: skip
    kinds = [{spec.table_key for spec in g.layer_specs} for g in plan.groups]
    assert all(len(keys) == 1 for keys in kinds)
    assert {"full", "window", "chunk", "latent"} == {n for g in plan.groups if g.spec.grows for n in g.layers}


def test_formulas_are_evaluated_with_the_exported_symbols():
    plan = plan_kv_cache([cases.attention(0), cases.cross(1)], block_size=16, max_model_len=500)
    values = {TOKENS: 33, ENCODER_TOKENS: 16}
    assert plan.request_bytes_formula.subs(values) == plan.waste(33, 16).held_bytes
    spec = plan.groups[0].spec
    assert spec.request_bytes_formula.subs({TOKENS: 33, BLOCK_SIZE: 16}) == 3 * spec.page_size_bytes


# Arguments


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_plans_refuse_what_is_no_number(value):
    plan = plan_kv_cache([cases.attention(0)], max_model_len=500)
    calls = [
        lambda: plan.capacity(value, 10),
        lambda: plan.capacity(1 << 20, value),
        lambda: plan.num_blocks_for(value),
        lambda: plan.max_concurrency(value),
        lambda: plan.min_bytes(10, value),
    ]
    if value is not None:
        calls += [lambda: plan.min_bytes(value), lambda: plan.min_blocks(value), lambda: plan.waste(value)]
    if value != 0 or value is False:
        calls += [
            lambda: plan.capacity(1 << 20, 10, prefix_tokens=value),
            lambda: plan.capacity(1 << 20, 10, encoder_tokens=value),
            lambda: plan.waste(10, value),
            lambda: plan.retained_bytes(value),
            lambda: plan.max_model_len_for(value),
        ]
    for call in calls:
        with pytest.raises(ConfigError, match="use a whole number, at least") as error:
            call()
        assert "common prefix" not in str(error.value)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_specs_refuse_what_is_no_number(value):
    with pytest.raises(ConfigError, match="block_size="):
        FullAttentionSpec(block_size=value, **DIMS)
    with pytest.raises(ConfigError, match="window="):
        SlidingWindowSpec(block_size=16, window=value, **DIMS)
    with pytest.raises(ConfigError, match="chunk="):
        ChunkedLocalSpec(block_size=16, chunk=value, **DIMS)


def test_specs_know_the_dtypes_of_layer_states():
    assert set(DTYPE_BYTES) == DTYPES
    with pytest.raises(ConfigError, match="dtype='float12'.*bfloat16"):
        FullAttentionSpec(block_size=16, **DIMS | {"dtype": "float12"})


@pytest.mark.parametrize("block_size", [0, -1, 65_537, 10**9, 1.5, True])
def test_block_sizes_out_of_range_are_refused(block_size):
    with pytest.raises(ConfigError, match="at most 65,536"):
        plan_kv_cache([cases.attention(0)], max_model_len=500, block_size=block_size)
    with pytest.raises(ConfigError, match="at most 65,536"):
        CompileConfig(block_size=block_size)


def test_a_workload_is_checked_where_it_is_given():
    for workload, words in [
        ({"concurency": 4}, "did you mean 'concurrency'"),
        ({"contexts": [[0, 1.0]]}, "number of tokens"),
        ("short", "use a Workload"),
    ]:
        with pytest.raises(ConfigError, match=words):
            CompileConfig(workload=workload)
    with pytest.raises(ConfigError, match="longer than max_model_len"):
        CompileConfig(workload={"contexts": [[500, 1.0]]}, max_model_len=100)
    assert CompileConfig(workload={"contexts": [[500, 1.0]]}).workload == {"contexts": [[500, 1.0]]}


def test_pools_refuse_what_they_cannot_do():
    for num_blocks in (2.0, "9", None, True):
        with pytest.raises(ConfigError, match="num_blocks="):
            BlockPool(num_blocks)
    with pytest.raises(CacheCapacityError):
        BlockPool(-3)
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="-1 blocks wanted"):
        pool.get_new_blocks(-1)
    assert pool.get_new_blocks(0) == [] and pool.num_free_blocks == 3
    for ids in ([4], [1, -1], ["x"]):
        with pytest.raises(ValueError, match="ids are 0 to 3"):
            pool.evict_blocks(ids)
    pool.evict_blocks(iter([0, 3]))
    pool.check_integrity()


def test_managers_hash_for_themselves_and_name_unknown_requests():
    group = KVCacheGroup(FullAttentionSpec(block_size=4, **DIMS), ("full",))
    kv = KVCacheManager([group], 20, max_model_len=64, max_in_flight_tokens=64)
    first, second = (Request(name, list(range(12)), max_tokens=4) for name in "ab")
    assert kv.find_prefix(first).num_tokens == 0  # no extend_hashes before
    assert kv.allocate_slots(first, 12)
    first.num_computed_tokens = 12
    kv.cache_blocks(first)
    assert kv.find_prefix(second).num_tokens == 8
    with pytest.raises(KeyError, match="'b' holds no blocks"):
        kv.block_ids("b")
    kv.free(first)
    with pytest.raises(KeyError, match="'a' holds no blocks"):
        kv.block_ids("a")
