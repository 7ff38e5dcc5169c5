"""The indexer: selection against a sort in plain Python, every provider against the reference, faults that show."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.latent.layouts import load_rows, rows_per_block
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.custom_ops.sparse.indexer import indexer_score_topk_reference, requantised
from pagebinder.custom_ops.sparse.semantic import index_scores, index_topk_reference, select_topk
from pagebinder.errors import CompilerNotFoundError
from tests.custom_ops.sparse_cases import INDEX_LAYOUTS, Case, Inputs, indexer_inputs, int32
from tests.helpers import NIGHTLY

PROVIDERS = ["reference", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = ((137, 1), (0, 21), (300, 5), (12, 0), (911, 1))
relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", params=PROVIDERS)
def indexer(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    assert chosen.reasons_against(OpNeed(op="indexer_score_topk", dtype="bfloat16")) == []
    chosen.prepare()
    return chosen.overload("indexer_score_topk")


def of_layout(layout: str, **options) -> Case:
    return Case(
        **{"lengths": MIXED, "topk": 16, "heads": 6} | options, layout=layout, width=INDEX_LAYOUTS[layout]
    )


def check_exact(indexer, case: Case) -> torch.Tensor:
    """Operands for which all sums are exact: the same entries, ties included."""
    inputs = indexer_inputs(case, whole=True)
    chosen = inputs.run(indexer)
    assert chosen.dtype == torch.int32 and chosen.is_contiguous()
    assert torch.equal(chosen, inputs.run(indexer_score_topk_reference))
    return chosen


def assert_best(inputs: Inputs, chosen: torch.Tensor) -> None:
    """Ascending, as many as there should be, and no entry left out scores more than one chosen, up to rounding."""
    q, weights, cache, table, seq_lens, starts = inputs.operands
    o = inputs.options
    n = indexer_rows(inputs)
    for r, seq_len in enumerate(seq_lens.tolist()):
        for t in range(int(starts[r]), int(starts[r + 1])):
            p = seq_len - (int(starts[r + 1]) - t)
            visible = (p + 1) // o["ratio"]
            best = chosen[t][: min(visible, o["topk"])].long()
            assert (chosen[t][len(best) :] == -1).all()
            assert (best.diff() > 0).all() and ((best >= 0) & (best < visible)).all()
            if visible <= o["topk"]:
                continue
            w = torch.arange(visible)
            k = load_rows(cache, table[r].long()[w // n] * n + w % n, o["layout"], q.shape[2])
            scores = index_scores(requantised(q[t : t + 1], o["layout"]), k, weights[t : t + 1], o["scale"])[
                0
            ]
            left = scores[~torch.isin(w, best)].max()
            assert left <= scores[best].min() + 1e-5 * scores.abs().max()


def indexer_rows(inputs: Inputs) -> int:
    q, _, cache, *_ = inputs.operands
    return rows_per_block(cache, inputs.options["layout"], q.shape[2])


@given(st.integers(0, 20), st.integers(1, 12), st.integers(0, 1000))
def test_selection_against_sorting(num_entries, topk, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (1, 20), generator=generator).float()
    scores[0, 3] = float("nan")
    scores[0, 5] = float("-inf")
    values = [float("-inf") if math.isnan(x) else x for x in scores[0].tolist()]
    ranked = sorted(range(num_entries), key=lambda w: (-values[w], w))
    best = sorted(ranked[:topk])
    assert select_topk(scores, torch.tensor([num_entries]), topk)[0].tolist() == best + [-1] * (
        topk - len(best)
    )


@pytest.mark.parametrize("layout", ["plain", "fp8_index"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [1, 4, 8, 128])
@pytest.mark.parametrize("heads", [1, 6, 20, 64, 70])
def test_exact_scores(indexer, layout, dtype, ratio, heads):
    check_exact(indexer, of_layout(layout, dtype=dtype, ratio=ratio, heads=heads, padding=2))


@settings(relaxed, max_examples=80 if NIGHTLY else 30)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 12)), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    width=st.integers(1, 140),
    heads=st.integers(1, 70),
    topk=st.integers(1, 300),
    rows=st.sampled_from([1, 2, 15, 64]),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_sizes(indexer, lengths, dtype, width, heads, topk, rows, strided, seed):
    case = Case(
        lengths=tuple(lengths), dtype=dtype, width=width, heads=heads, topk=topk, ratio=1,
        rows_per_block=(1, rows), strided=strided, seed=seed,
    )  # fmt: skip
    check_exact(indexer, case)


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_random_scores(indexer, layout, dtype, strided):
    inputs = indexer_inputs(of_layout(layout, dtype=dtype, ratio=2, heads=20, strided=strided))
    assert_best(inputs, inputs.run(indexer))


@pytest.mark.parametrize("layout", ["plain", "fp8_index"])
def test_sizes_of_deepseek(indexer, layout):
    """64 heads of 128, top-512, keys in several parts."""
    case = Case(
        lengths=((20_000, 1), (9000, 6)), dtype=torch.bfloat16, layout=layout, width=128, heads=64, topk=512,
        rows_per_block=(1, 64), ratio=4,
    )  # fmt: skip
    check_exact(indexer, case)
    inputs = indexer_inputs(case)
    assert_best(inputs, inputs.run(indexer))


def test_few_entries_are_all_listed(indexer):
    """Without scores: rows of NaN do not matter."""
    inputs = indexer_inputs(Case(lengths=((61, 4), (0, 2)), topk=16, ratio=4))
    cache = torch.full_like(inputs.operands[2], float("nan"))
    chosen = inputs.replace(2, cache).run(indexer)
    for t, p in enumerate((61, 62, 63, 64, 0, 1)):
        assert chosen[t].tolist() == [w if w < (p + 1) // 4 else -1 for w in range(16)]


def test_padding_and_empty_requests(indexer):
    chosen = check_exact(indexer, Case(lengths=((0, 0), (50, 2), (5, 0)), topk=4, padding=3))
    assert (chosen[2:] == -1).all() and (chosen[:2] >= 0).all()
    assert len(check_exact(indexer, Case(lengths=(), topk=4))) == 0


def test_equal_scores_go_to_the_lowest_index(indexer):
    inputs = indexer_inputs(Case(lengths=((3000, 1),), topk=100, ratio=1))
    chosen = inputs.replace(1, torch.zeros_like(inputs.operands[1])).run(indexer)
    assert chosen[0].tolist() == list(range(100))


def test_nan_counts_as_least(indexer):
    inputs = indexer_inputs(Case(lengths=((99, 1),), topk=90, ratio=1, rows_per_block=(1, 100)), whole=True)
    cache, table = inputs.operands[2:4]
    block = int(table[0, 0])
    cache[block, 10:40] = float("nan")
    expected = inputs.run(indexer_score_topk_reference)
    assert torch.equal(inputs.run(indexer), expected)
    assert [w for w in range(100) if w not in expected[0]] == list(range(30, 40))
    cache[block] = float("nan")
    assert inputs.run(indexer)[0].tolist() == list(range(90))


@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_paged_equals_semantic(indexer, ratio):
    """One sequence of 90 tokens: at once, and the last 13 over a cache."""
    inputs = indexer_inputs(Case(lengths=((0, 90),), ratio=ratio, topk=5, rows_per_block=(1, 8)), whole=True)
    q, weights, cache, table, seq_lens, _ = inputs.operands
    k = torch.full((90, q.shape[2]), float("nan"))
    w = torch.arange(90 // ratio)
    k[ratio - 1 :: ratio] = cache[table[0].long()[w // 8], w % 8]
    options = {name: inputs.options[name] for name in ("topk", "ratio", "scale")}
    whole = index_topk_reference(q, k, weights, **options)
    assert torch.equal(inputs.run(indexer), whole)
    part = indexer(q[77:], weights[77:], cache, table, seq_lens, int32([0, 13]), **options)
    assert torch.equal(part, whole[77:])


# ---- a fault must show ---------------------------------------------------------------------------------------------

FAULTS = {
    "topk one less": lambda i: i.with_options(topk=15),
    "a token later": lambda i: i.replace(4, i.operands[4] + 1),
    "a token earlier": lambda i: i.replace(4, i.operands[4] - 1),
    "weights of other heads": lambda i: i.replace(1, i.operands[1].flip(1)),
    "ratio": lambda i: i.with_options(ratio=5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(indexer, fault):
    """Entries grow in score, so the newest are chosen, and the last query completes one."""
    inputs = indexer_inputs(
        Case(lengths=((88, 4),), topk=16, ratio=4, heads=2, rows_per_block=(1, 30)), whole=True
    )
    q, cache, table = (inputs.operands[i] for i in (0, 2, 3))
    cache[table[0, 0]] = torch.arange(30.0)[:, None]
    signs = torch.tensor([1.0, -1.0])  # the second head adds nothing: relu(-k)
    inputs = inputs.replace(0, signs[None, :, None].expand_as(q).contiguous()).replace(1, signs.expand(4, 2))
    expected = inputs.run(indexer_score_topk_reference)
    assert expected[3].tolist() == list(range(7, 23)) and expected[2].tolist() == list(range(6, 22))
    changed = FAULTS[fault](inputs).run(indexer)
    assert changed.shape != expected.shape or not torch.equal(changed, expected)


# ---- promises of the cpu provider, bad operands --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_choice_in_any_batch_and_with_any_number_of_threads(dtype):
    chosen = registered_providers()["cpu"]
    if chosen.problem() is not None:
        pytest.skip(str(chosen.problem()))
    chosen.prepare()
    indexer = chosen.overload("indexer_score_topk")
    inputs = indexer_inputs(
        Case(lengths=((5000, 1), (700, 30), (2100, 1)), dtype=dtype, topk=100, ratio=1, heads=8)
    )
    together = inputs.run(indexer)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(inputs.run(indexer), together)
    finally:
        torch.set_num_threads(threads)
    q, weights, cache, table, seq_lens, starts = inputs.operands
    for r in range(3):
        mine, row = slice(starts[r], starts[r + 1]), slice(r, r + 1)
        own = (
            q[mine],
            weights[mine],
            cache,
            table[row],
            seq_lens[row],
            int32([0, starts[r + 1] - starts[r]]),
        )
        assert torch.equal(Inputs(own, inputs.options).run(indexer), together[mine])


BAD_OPERANDS = {
    "q (is|must be)": (0, lambda q: q[0]),
    "weights must be": (1, lambda weights: weights[:, :1]),
    "weights must be float32": (1, lambda weights: weights.double()),
    "same dtype": (2, lambda cache: cache.half()),
    "k_cache must be|a cache row is": (2, lambda cache: cache[..., 1:]),
    "k_table must be int32": (3, lambda table: table.long()),
    "is not valid": (3, lambda table: table + 1000),
    "exceeds its block table": (4, lambda lens: lens + 1000),
    "query_start_loc": (5, lambda starts: starts + 50),
}


@pytest.mark.parametrize("message", BAD_OPERANDS)
def test_bad_operands_raise(indexer, message):
    index, change = BAD_OPERANDS[message]
    inputs = indexer_inputs(Case(lengths=((80, 5), (3, 1)), topk=4))
    with pytest.raises((ValueError, RuntimeError), match=message):
        inputs.replace(index, change(inputs.operands[index])).run(indexer)


@pytest.mark.parametrize("options", [{"topk": 0}, {"ratio": 0}, {"layout": "fp3"}])
def test_bad_options_raise(indexer, options):
    inputs = indexer_inputs(Case(lengths=((20, 5),), topk=4))
    with pytest.raises((ValueError, RuntimeError), match=next(iter(options))):
        inputs.with_options(**options).run(indexer)


def test_opcheck(indexer):
    inputs = indexer_inputs(Case(lengths=((40, 4), (3, 1)), topk=4, ratio=2), whole=True)
    q, weights, cache, *rest = inputs.operands
    torch.library.opcheck(indexer, (q, weights, cache.nan_to_num(), *rest), inputs.options)
