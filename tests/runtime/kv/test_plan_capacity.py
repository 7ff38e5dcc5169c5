"""Formulas against counted blocks, capacity against a pool that is filled, and pages inside a block."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.layer_state import DTYPE_BYTES
from pagebinder.errors import ConfigError
from pagebinder.runtime.kv import NO_GROUP, BlockPool, KVCacheSpec, RingSpec, Workload, plan_kv_cache
from pagebinder.runtime.kv.counts import blocks_held, blocks_now, blocks_retained, bytes_now, bytes_used
from pagebinder.runtime.kv.spec_builders import spec_from_state
from pagebinder.runtime.kv.specs import BLOCK_SIZE, ENCODER_TOKENS, TOKENS, FullAttentionSpec
from tests.helpers import NIGHTLY
from tests.runtime.kv import plan_cases as cases

MODEL_LEN = 4000
LENGTHS = [1, 2, 15, 16, 17, 47, 48, 49, 95, 96, 97, 100, 101, 130, 131, 192, 193, 1000, 3999, 4000]


@pytest.mark.parametrize("state", cases.ONE_OF_EACH_KIND, ids=lambda state: state.kind)
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_integers_are_the_formulas_and_bound_every_step(state, block_size):
    spec = spec_from_state(state, block_size, MODEL_LEN)
    for tokens in LENGTHS:
        values = {TOKENS: tokens, ENCODER_TOKENS: 77, BLOCK_SIZE: spec.block_size}
        assert blocks_held(spec, tokens, 77) == spec.blocks_formula.subs(values)
        assert bytes_used(spec, tokens, 77) == spec.used_formula.subs(values) == state.formula.subs(values)
        assert blocks_now(spec, tokens, 77) <= blocks_held(spec, tokens, 77)
        assert bytes_now(spec, tokens, 77) <= bytes_used(spec, tokens, 77)
        assert bytes_now(spec, tokens, 77) <= blocks_now(spec, tokens, 77) * spec.page_size_bytes
    # The most is reached, not only bounded (but by chunks that straddle blocks in one alignment of several).
    tail = range(3000, 3000 + 2 * 96 * 48)
    most = max(blocks_held(spec, t, 77) for t in tail)
    assert most - getattr(spec, "straddle", 0) <= max(blocks_now(spec, t, 77) for t in tail) <= most


def test_a_spec_that_is_not_known_is_counted_by_its_formulas():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class EveryOther(KVCacheSpec):
        blocks_formula = FullAttentionSpec.blocks_formula
        used_formula = FullAttentionSpec.used_formula

    spec = EveryOther(block_size=16, entry_bytes=6, dtype="float16", tokens_per_entry=2)
    assert blocks_held(spec, 33) == 3
    assert bytes_used(spec, 33) == 99


def test_compressed_entries_count_in_part():
    spec = FullAttentionSpec(
        block_size=64, entry_bytes=10, dtype="uint8", tokens_per_entry=4, num_kv_heads=1, head_dim=10,
        head_dim_v=0,
    )  # fmt: skip
    assert bytes_used(spec, 8) == 20
    assert bytes_used(spec, 9) == 22.5 == float(spec.used_formula.subs(TOKENS, 9))


@pytest.mark.parametrize(
    ("state", "prefix", "blocks"),
    [
        (cases.attention(0), 64, 4),
        (cases.attention(0), 72, 5),  # the block in which a hit ends is kept too
        (cases.attention(0, window=33), 160, 2),  # ceil((W - 1) / B)
        (cases.attention(0, window=34), 160, 3),
        (cases.attention(0, window=1), 160, 0),
        (cases.attention(0, chunk=64), 160, 2),
        (cases.attention(0, chunk=64), 128, 0),
        (cases.recurrent(0), 160, 1),
        (cases.ring(0), 160, 0),
        (cases.cross(0), 160, 0),
        (cases.recurrent(0), 0, 0),
    ],
)
def test_what_a_cached_prefix_keeps(state, prefix, blocks):
    assert blocks_retained(spec_from_state(state, 16, MODEL_LEN), prefix) == blocks


def test_retained_bytes_are_of_the_prefix_that_can_be_resumed():
    states = [cases.attention(0), cases.attention(1, window=33), cases.recurrent(2)]
    plan = plan_kv_cache(states, block_size=16, max_model_len=MODEL_LEN)
    interval = next(g.block_size for g in plan.groups if g.spec.kind == "recurrent")
    assert plan.granularity == interval
    blocks = plan.retained_bytes(3 * interval + 1)
    assert [n // plan.bytes_per_block for n in blocks] == [3 * interval // 16, 2, 1]


@pytest.mark.parametrize("prefix", [0, 70, 400])
@pytest.mark.parametrize("tokens", [50, 401, 1000])
def test_capacity_is_what_a_pool_takes(tokens, prefix):
    states = [s for s in cases.ONE_OF_EACH_KIND if s.kind != "ring"]
    plan = plan_kv_cache(states, block_size=16, max_model_len=MODEL_LEN)
    num_bytes = 1000 * plan.bytes_per_block + 5
    pool = BlockPool(plan.num_blocks_for(num_bytes), enable_caching=False)
    hit = min(prefix, tokens - 1) // plan.granularity * plan.granularity
    shared = sum(hit // g.block_size for g in plan.groups if g.spec.grows)
    pool.get_new_blocks(shared)
    fitting = 0
    while True:
        need = sum(blocks_held(g.spec, tokens, 60) for g in plan.groups) - shared
        if need > pool.num_free_blocks:
            break
        pool.get_new_blocks(need)
        fitting += 1
    assert plan.capacity(num_bytes, tokens, encoder_tokens=60, prefix_tokens=prefix) == fitting > 0


def test_memory_that_is_too_small_holds_nothing():
    plan = plan_kv_cache([cases.attention(0)], max_model_len=1000)
    assert plan.capacity(1, 10) == plan.capacity(plan.bytes_per_block, 10) == 0
    assert plan.capacity(2 * plan.bytes_per_block, 10) == 1
    with pytest.raises(ConfigError, match="at least 1 token"):
        plan.capacity(10**6, 0)


@settings(max_examples=60 if NIGHTLY else 20, deadline=None)
@given(st.integers(0, 400), st.integers(1, 300))
def test_the_longest_request_is_the_longest(num_blocks, in_flight):
    plan = plan_kv_cache(cases.ONE_OF_EACH_KIND, block_size=16, max_model_len=MODEL_LEN)
    longest = plan.max_model_len_for(num_blocks * plan.bytes_per_block, in_flight, 60)
    fits = [n for n in range(1, MODEL_LEN + 1) if plan.min_blocks(n, in_flight, 60) <= num_blocks]
    assert longest == max(fits, default=0)
    if longest:
        assert plan.min_bytes(longest, in_flight, 60) <= num_blocks * plan.bytes_per_block


states_of_any_kind = st.lists(st.integers(0, 999), min_size=1, max_size=14).map(
    lambda seeds: [
        [
            lambda i, n: cases.attention(i, heads=1 + n % 3, dim=1 + n % 7, dtype=("int8", "float32")[n % 2]),
            lambda i, n: cases.attention(i, window=20 + n % 3 * 50),
            lambda i, n: cases.attention(i, chunk=48, dim=5),
            lambda i, n: cases.latent(i, width=65 + n % 5),
            lambda i, n: cases.cross(i, dtype=("float16", "float32")[n % 2]),
            lambda i, n: cases.recurrent(i, shape=(1 + n % 5, 3)),
            lambda i, n: cases.short_conv(i, shape=(1 + n % 9, 3)),
            lambda i, n: cases.ring(i, resume_multiple=(4, None)[n % 2]),
            lambda i, n: cases.encoder_only(i),
        ][n % 9](i, n // 9)
        for i, n in enumerate(seeds)
    ]
)


@settings(max_examples=80, deadline=None)
@given(states_of_any_kind, st.sampled_from([None, 16, 40]), st.integers(30, 3000))
def test_pages_never_overlap_and_all_is_aligned(states, block_size, max_model_len):
    if all(state.kind == "encoder_only" for state in states):
        with pytest.raises(ConfigError, match="no layer keeps"):
            plan_kv_cache(states, max_model_len=max_model_len)
        return
    plan = plan_kv_cache(states, block_size=block_size, max_model_len=max_model_len)
    assert [page.layer for page in plan.layers] == [state.layer for state in states]
    assert plan.bytes_per_block % 64 == 0
    ends = [0] * len(plan.groups)
    for state, page in sorted(zip(states, plan.layers, strict=True), key=lambda pair: pair[1].offset_bytes):
        if state.kind == "encoder_only":
            assert (page.group, page.page_bytes) == (NO_GROUP, 0)
            continue
        group = plan.groups[page.group]
        assert group.layers[page.slot] == page.layer
        assert page.offset_bytes >= ends[page.group]
        ends[page.group] = page.offset_bytes + page.page_bytes
        assert page.offset_bytes % 64 == 0 and plan.bytes_per_block % DTYPE_BYTES[state.dtype] == 0
        tensors = state.tensors(group.block_size)
        assert sum(t.num_bytes for t in tensors) == group.layer_specs[page.slot].page_size_bytes
        assert sum(t.num_bytes for t in tensors) <= page.page_bytes
        if block_size and not isinstance(group.spec, RingSpec) and "head_dim" in dir(state):
            assert group.block_size == block_size
    assert max(ends) == plan.bytes_per_block
    assert sum(len(g.layers) for g in plan.groups) == sum(s.kind != "encoder_only" for s in states)
    for split, unused in zip(plan.splits, plan.padding_bytes_per_block, strict=True):
        assert split.alignment + split.empty_slots + split.padding == unused >= 0
    assert min(split.padding for split in plan.splits) == 0
    waste = plan.waste(encoder_tokens=70)
    assert 0 <= waste.percent < 100
    assert waste.held_bytes == plan.request_bytes_formula.subs({TOKENS: max_model_len, ENCODER_TOKENS: 70})
    used = plan.used_formula.subs({TOKENS: max_model_len, ENCODER_TOKENS: 70})
    assert waste.held_bytes - waste.padding_bytes - waste.rounding_bytes == used
    lines = plan.describe(memory_bytes=[1 << 20])
    assert len(lines) > 8 and all(isinstance(line, str) for line in lines)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"contexts": []}, "contexts is a list"),
        ({"contexts": [[0, 1.0]]}, "not a number of tokens"),
        ({"contexts": [[10, -1.0]]}, "not a weight"),
        ({"contexts": [[10, 0]]}, "at least one weight"),
        ({"contexts": 5}, "contexts is a list"),
        ({"context": [[10, 1.0]]}, "no field 'context'; did you mean 'contexts'"),
        ({"prefix_share": 2}, "prefix_share=2"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"sparse_retention": 1}, "sparse_retention=1"),
        ({"contexts": [[5000, 1.0]]}, "longer than max_model_len"),
        ("short", "use a Workload"),
    ],
)
def test_bad_workloads_are_refused_with_the_remedy(fields, message):
    with pytest.raises(ConfigError, match=message):
        plan_kv_cache([cases.attention(0)], max_model_len=1000, workload=fields)


def test_workloads():
    load = Workload.of({"contexts": [[100, 3], [200, 1]]}, 1000)
    assert load.contexts == ((100, 0.75), (200, 0.25))
    assert load.mean_tokens == 125
    grown = Workload.grown([(1000, 1.0)])
    assert len(grown.contexts) == 16
    assert all(750 < tokens <= 1000 for tokens, _ in grown.contexts)
    assert max(tokens for tokens, _ in Workload.default(50).contexts) <= 50
    with pytest.raises(ConfigError, match="give encoders"):
        plan_kv_cache([cases.cross(0)], max_model_len=300, workload=Workload(contexts=((100, 1.0),)))
