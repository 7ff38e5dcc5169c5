"""Plans of published models against the groupings of kv_cache facts, and what a printed plan says."""

import pytest

from pagebinder.runtime.kv import (
    KernelConstraints,
    KVCacheGroup,
    RingSpec,
    Workload,
    plan_kv_cache,
    plan_specs,
    spec_from_state,
)
from pagebinder.runtime.kv.kinds import at, granularity
from pagebinder.runtime.kv.specs import TOKENS
from pagebinder.runtime.kv.waste import split_blocks, workload_waste
from tests.runtime.kv import plan_cases as cases


def cost_of_design(groups, load, constraints):
    """(bytes per block, waste per request) of groups that somebody else chose."""
    taken = [sum(constraints.align(s.page_size_bytes) for s in g.layer_specs) for g in groups]
    splits = split_blocks(groups, taken, max(taken))
    waste = workload_waste(groups, splits, load, granularity(g.spec for g in groups))
    return max(taken), sum(w.bytes for w in waste)


@pytest.mark.parametrize(
    ("num_full", "num_window", "known"),
    [
        (2, 4, [(0, 1), (2, 4), (3, 5)]),
        (3, 7, [(0, 1, 2), (3, 6, 9), (4, 7), (5, 8)]),
        (6, 5, [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10)]),
    ],
)
def test_known_groupings_of_uniform_pages_cost_no_less(num_full, num_window, known):
    states = [cases.attention(i) for i in range(num_full)]
    states += [cases.attention(num_full + i, window=64) for i in range(num_window)]
    specs = [spec_from_state(s, 16, 4096) for s in states]
    groups = [KVCacheGroup(specs[g[0]], tuple(states[i].layer for i in g)) for g in known]
    for contexts in (((300, 1.0),), ((4000, 1.0),), ((100, 0.5), (2000, 0.5))):
        load = Workload(contexts=contexts)
        _, known_waste = cost_of_design(groups, load, KernelConstraints())
        plan = plan_kv_cache(states, block_size=16, max_model_len=4096, workload=load)
        toll = 0.002 * sum(w.used_bytes for w in plan.group_waste)
        assert plan.wasted_bytes + toll * len(plan.groups) <= known_waste + toll * len(groups) + 1e-3


def v4_known_design():
    """Five groups: all compressed rows (256), windows (64) in two, C4 states (4), C128 states (8)."""
    specs = cases.v4_flash_like()

    def group(block_size, *endings, every=slice(None)):
        names = [n for n in specs if n.split(".")[1] in endings][every]
        members = tuple(at(specs[n], block_size) for n in names)
        return KVCacheGroup(members[0], tuple(names), members)

    return [
        group(256, "main", "indexer"),
        group(64, "swa", every=slice(0, None, 2)),
        group(64, "swa", every=slice(1, None, 2)),
        group(4, "c4_state", "c4_indexer_state"),
        group(8, "c128_state"),
    ]


FINE_BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512)


@pytest.mark.parametrize("alignment", [64, 576])
@pytest.mark.parametrize("max_groups", [5, 8])
def test_deepseek_v4_flash_costs_no_more_than_its_known_design(alignment, max_groups):
    load = Workload.default(1 << 20)
    known_constraints = KernelConstraints(page_alignment_bytes=576)
    known_bytes, known_waste = cost_of_design(v4_known_design(), load, known_constraints)
    assert known_bytes == 1_002_240
    constraints = KernelConstraints(
        page_alignment_bytes=alignment, attention_blocks=FINE_BLOCKS, max_groups=max_groups
    )
    plan = plan_specs(cases.v4_flash_like(), max_model_len=1 << 20, workload=load, constraints=constraints)
    assert len(plan.groups) <= max_groups
    assert plan.bytes_per_block <= known_bytes
    assert plan.wasted_bytes < known_waste
    assert plan.fixed_bytes_per_request <= 26 * known_bytes


def test_deepseek_v4_flash_as_it_is_planned_by_default():
    """Blocks of 16 tokens and more: smaller in all three figures than 1,002,240 B, 26 blocks, 3,915 B a token."""
    plan = plan_specs(cases.v4_flash_like(), max_model_len=1 << 20)
    assert plan.bytes_per_block == 986_624
    assert plan.fixed_bytes_per_request == 26 * 986_624
    assert plan.bytes_per_token == 3_854
    assert len(plan.groups) <= 8


def test_compressor_states_as_rings_take_less_while_a_prompt_is_computed():
    specs = cases.v4_flash_like()
    windows = plan_specs(specs, max_model_len=1 << 20)
    rows = {"c4_state": (8, 8192), "c4_indexer_state": (8, 2048), "c128_state": (128, 4096)}
    for name in specs:
        if (ending := name.split(".")[1]) in rows:
            n, width = rows[ending]
            specs[name] = RingSpec(
                block_size=1 << 20, entry_bytes=n * width, dtype="float32", rows=n, resume_multiple=128
            )
    rings = plan_specs(specs, max_model_len=1 << 20)
    assert rings.granularity == 128
    assert rings.min_bytes(65_536, 8192) < 0.3 * windows.min_bytes(65_536, 8192)


def test_gemma_3_27b_like():
    plan = plan_kv_cache(cases.gemma_3_27b_like(), max_model_len=131_072)
    assert plan.wasted_percent < 11
    assert [g.block_size for g in plan.groups] == [64] * len(plan.groups)
    by_min_count = [10] + [9] * 4 + [8] * 2  # one group of 10 and six groups for 52 windows
    specs = [spec_from_state(s, 64, 131_072) for s in cases.gemma_3_27b_like()]
    full, window = ([s for s in specs if s.kind == kind] for kind in ("full_attention", "sliding_window"))
    left = iter(window)
    groups = [KVCacheGroup(full[0], tuple(map(str, range(10))))]
    groups += [
        KVCacheGroup(window[0], tuple(str(i) for i, _ in zip(range(n), left, strict=False)))
        for n in by_min_count[1:]
    ]
    assert sum(len(g.layers) for g in groups) == 62
    _, known_waste = cost_of_design(groups, plan.workload, KernelConstraints())
    assert plan.wasted_bytes < known_waste * 1.01 and len(plan.groups) < len(groups)


def test_qwen3_next_like_blocks_of_both_kinds_are_equal_without_padding():
    plan = plan_kv_cache(cases.qwen3_next_like(), max_model_len=262_144)
    assert plan.padding_bytes_per_block == (0,) * 7
    assert plan.bytes_per_block == 6 * 32 * 128 * 128 * 4 == 12 * 512 * 2 * 2 * 256 * 2
    assert plan.bytes_per_token == 12 * 2 * 2 * 256 * 2


def test_llama_4_like_has_no_padding():
    plan = plan_kv_cache(cases.llama_4_like(), max_model_len=1 << 20)
    assert plan.padding_bytes_per_block == (0,) * 4
    assert plan.wasted_percent < 2
    assert plan.capacity(80 << 30, 32_768) == 30


def test_windows_hold_far_less_at_long_contexts():
    """32k context, window 4k: at least 7.5 times less than full attention."""

    def held(window):
        plan = plan_kv_cache([cases.attention(0, 8, 128, window=window)], max_model_len=32_768)
        return plan.request_bytes_formula.subs(TOKENS, 32_768)

    assert held(None) / held(4096) >= 7.5


def test_a_plan_says_whose_block_is_padded_and_for_whom():
    states = [cases.attention(i, heads=3, window=None) for i in range(3)] + [cases.recurrent(9, (64, 64, 4))]
    plan = plan_kv_cache(states, block_size=16, max_model_len=2000)
    text = "\n".join(plan.describe(contexts=[100, 2000], memory_bytes=[1 << 30]))
    padded = next(i for i, unused in enumerate(plan.padding_bytes_per_block) if unused)
    assert f"group {padded}: {plan.padding_bytes_per_block[padded]:,} bytes of each block stay empty" in text
    assert "because group" in text and f"needs {plan.bytes_per_block:,}" in text
    assert str(plan.request_bytes_formula) in text and str(plan.used_formula) in text
    assert "next best under the constraints costs" in text
    assert f"{plan.next_best.bytes_per_block:,} bytes per block" in text
    assert "in 1 GiB" in text and "at 100" in text
    assert f"{plan.capacity(1 << 30, 100):,}" in text
    assert f"{plan.min_bytes(None, 2048):,} bytes" in text


def test_layers_that_keep_nothing_are_listed():
    states = [cases.encoder_only(0), cases.encoder_only(1), cases.cross(2), cases.attention(3)]
    plan = plan_kv_cache(states, max_model_len=448)
    text = "\n".join(plan.describe(stateless=["more"]))
    assert "keeps nothing between steps (encoder only): more and 2 more" in text
    assert "KV cache: 2 layers" in text and "per encoder token" in text and "ceiling(E/" in text


def test_waste_by_cause_names_what_a_kind_can_waste():
    plan = plan_kv_cache(cases.ONE_OF_EACH_KIND, max_model_len=4000)
    causes = {
        "full_attention": "rounding",
        "mla_latent": "rounding",
        "cross_attention": "rounding",
        "sliding_window": "windows",
        "sliding_window_mla": "windows",
        "chunked_local": "windows",
        "recurrent": "checkpoints",
    }
    for group, waste in zip(plan.groups, plan.group_waste, strict=True):
        whole_blocks = {c for c in ("rounding", "windows", "checkpoints") if waste.by_cause[c] > 0}
        assert whole_blocks <= {causes.get(group.spec.kind, "rounding")}
