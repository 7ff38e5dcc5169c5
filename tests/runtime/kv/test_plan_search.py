"""The optimiser against brute force, and what it counts against sums that are made step by step."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv import KernelConstraints, KVCacheManager, Workload, plan_kv_cache, plan_specs
from pagebinder.runtime.kv.kinds import kind_variants
from pagebinder.runtime.kv.optimise import Search
from pagebinder.runtime.kv.spec_builders import spec_from_state
from pagebinder.runtime.kv.waste import split_blocks, workload_waste
from tests.helpers import NIGHTLY
from tests.runtime.kv import plan_cases as cases

MODEL_LEN = 600
CONSTRAINTS = KernelConstraints(
    attention_blocks=(16, 32, 48), recurrent_intervals=(32, 80), min_run_bytes=0, max_groups=5
)
MAKERS = [
    lambda i: cases.attention(i),
    lambda i: cases.attention(i, heads=3),
    lambda i: cases.attention(i, window=100),
    lambda i: cases.attention(i, heads=5, window=100),
    lambda i: cases.attention(i, window=40, dtype="float32"),
    lambda i: cases.attention(i, chunk=96),
    lambda i: cases.latent(i, width=96),
    lambda i: cases.recurrent(i),
    lambda i: cases.short_conv(i),
    lambda i: cases.ring(i),
    lambda i: cases.cross(i),
]
mixes = st.lists(st.sampled_from(range(len(MAKERS))), min_size=1, max_size=6).map(
    lambda numbers: [MAKERS[n](i) for i, n in enumerate(numbers)]
)
workloads = st.builds(
    Workload,
    contexts=st.lists(st.tuples(st.integers(1, MODEL_LEN), st.floats(0.1, 1)), min_size=1, max_size=4),
    encoders=st.just(((50, 0.5), (90, 0.5))),
    concurrency=st.integers(1, 9),
    prefix_share=st.sampled_from([0.0, 0.3, 0.9]),
    tokens_in_flight=st.sampled_from([0, 8, 64]),
    chunk_tokens=st.just(64),
    sparse_retention=st.booleans(),
)


def variants_of(states, constraints=CONSTRAINTS):
    specs = {state.layer: spec_from_state(state, 16, MODEL_LEN) for state in states}
    return kind_variants(specs, constraints, None)


def cost_of(kinds, choices, load, search):
    """A layout's cost the long way: from its groups, by cause."""
    groups = [g for kind, (b, n) in zip(kinds, choices, strict=True) for g in kind.groups(b, n)]
    taken = [sum(CONSTRAINTS.align(s.page_size_bytes) for s in g.layer_specs) for g in groups]
    waste = workload_waste(
        groups, split_blocks(groups, taken, max(taken)), load, search.layout(choices).granularity
    )
    return sum(w.bytes for w in waste) + len(groups) * search.costs.toll


@settings(max_examples=400 if NIGHTLY else 120, deadline=None)
@given(mixes, workloads)
def test_no_layout_is_cheaper_than_the_chosen_one(states, load):
    for kinds in variants_of(states):
        most = max(CONSTRAINTS.max_groups, len(kinds))
        search = Search(kinds, load, CONSTRAINTS, most)
        found = search.best_two()
        options = [
            [(b, n) for b in kind.block_sizes for n in range(1, len(kind.layers) + 1)] for kind in kinds
        ]
        every = [c for c in itertools.product(*options) if sum(n for _, n in c) <= most]
        costs = [search.layout(choices).cost for choices in every]
        assert found[0].cost == pytest.approx(min(costs), abs=1e-4)
        for choices in {found[0].choices, *every[::13]}:
            assert search.layout(choices).cost == pytest.approx(
                cost_of(kinds, choices, load, search), abs=1e-4
            )
        if len(found) == 2:
            assert found[1].cost >= found[0].cost - 1e-4


@settings(max_examples=40, deadline=None)
@given(mixes, workloads)
def test_the_next_best_is_the_second_of_all_that_are_not_split_more_than_they_need_be(states, load):
    for kinds in variants_of(states):
        most = max(CONSTRAINTS.max_groups, len(kinds))
        search = Search(kinds, load, CONSTRAINTS, most)
        found = search.best_two()
        options = [
            [(b, n) for b in kind.block_sizes for n in range(1, len(kind.layers) + 1)] for kind in kinds
        ]
        costs = []
        for choices in itertools.product(*options):
            if sum(n for _, n in choices) > most:
                continue
            size = search.layout(choices).bytes_per_block
            fewest = all(
                n == 1 or search.needs[k][b][n - 2] > size for k, (b, n) in enumerate(choices)
            )  # one group fewer would not fit
            if fewest:
                costs.append(search.layout(choices).cost)
        assert [layout.cost for layout in found] == pytest.approx(sorted(costs)[:2], abs=1e-4)


@settings(max_examples=400 if NIGHTLY else 120, deadline=None)
@given(mixes, workloads)
def test_the_plan_is_the_cheapest_variant_and_its_waste_adds_up(states, load):
    if all(state.kind != "cross_attention" for state in states):
        load = dataclasses.replace(load, encoders=())
    plan = plan_kv_cache(states, max_model_len=MODEL_LEN, workload=load, constraints=CONSTRAINTS)
    variants = variants_of(states)
    most = max(CONSTRAINTS.max_groups, min(map(len, variants)))
    searches = [Search(kinds, load, CONSTRAINTS, most) for kinds in variants if len(kinds) <= most]
    best, toll = min(search.best_two()[0].cost for search in searches), searches[0].costs.toll
    assert plan.wasted_bytes + len(plan.groups) * toll == pytest.approx(best, abs=1e-4)
    assert plan.wasted_bytes == pytest.approx(
        sum(size for waste in plan.group_waste for size in waste.by_cause.values())
    )
    assert all(size >= 0 for waste in plan.group_waste for size in waste.by_cause.values())
    assert 0 <= plan.wasted_percent < 100
    # The manager that will serve this plan resumes prefixes where the plan says so.
    manager = KVCacheManager(
        plan.groups, 100, max_model_len=MODEL_LEN, max_in_flight_tokens=64, max_encoder_tokens=90
    )
    assert plan.granularity is None or manager.alignment == plan.granularity


def test_held_bytes_are_what_is_used_and_what_is_wasted():
    """Without prefixes: mean bytes held, counted block by block, are used + wasted."""
    states = [s for s in cases.ONE_OF_EACH_KIND if s.kind not in ("cross_attention",)]
    load = Workload(contexts=((37, 1), (333, 2), (590, 1)), prefix_share=0.0, tokens_in_flight=0)
    plan = plan_kv_cache(states, max_model_len=MODEL_LEN, workload=load)
    held = 0
    for tokens, weight in load.contexts:
        held += weight * plan.bytes_per_block * sum(held_by_replay(g.spec, tokens) for g in plan.groups)
    taken = plan.wasted_bytes + sum(w.used_bytes for w in plan.group_waste)
    assert taken == pytest.approx(held)


def held_by_replay(spec, num_tokens):
    """Blocks held in the step that computes the last token: one block at a time, freed when nobody can see it."""
    if spec.kind == "ring":
        return 1
    first_visible = {
        "sliding_window": lambda p: max(0, p - spec.window + 1),
        "sliding_window_mla": lambda p: max(0, p - spec.window + 1),
        "chunked_local": lambda p: p // spec.chunk * spec.chunk,
        "recurrent": lambda p: max(0, p - 1),
        "short_conv": lambda p: max(0, p - 1),
    }.get(spec.kind, lambda p: 0)
    blocks: set[int] = set()
    for position in range(num_tokens):
        blocks.add(position // spec.block_size)
        blocks = {b for b in blocks if (b + 1) * spec.block_size > first_visible(position)}
    return len(blocks)


def test_the_limit_on_groups_holds_unless_there_are_more_kinds():
    states = [cases.attention(i, heads=i + 1, window=40 + 20 * i) for i in range(4)]
    tight = KernelConstraints(max_groups=2)
    assert len(plan_kv_cache(states, max_model_len=500, constraints=tight).groups) == 4
    same = [cases.attention(i) for i in range(9)]
    mixed = [*same, *(cases.attention(20 + i, window=100) for i in range(4))]
    for limit in (2, 3, 5):
        plan = plan_kv_cache(mixed, max_model_len=500, constraints=KernelConstraints(max_groups=limit))
        assert len(plan.groups) <= limit


def test_a_kind_alone_is_one_group_and_has_no_padding():
    for states in ([cases.attention(i) for i in range(80)], [cases.recurrent(i) for i in range(7)]):
        plan = plan_kv_cache(states, max_model_len=4096)
        assert len(plan.groups) == 1
        assert plan.padding_bytes_per_block == (0,)


def test_blocks_hold_whole_entries():
    plan = plan_specs(cases.v4_flash_like(), max_model_len=1 << 20)
    for group in plan.groups:
        assert all(group.block_size % spec.tokens_per_entry == 0 for spec in group.layer_specs)
    with pytest.raises(ConfigError, match=r"'3\.main' stores one entry per 128 tokens.*block_size=64"):
        plan_specs(cases.v4_flash_like(), max_model_len=1 << 20, block_size=64)
