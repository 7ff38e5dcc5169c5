"""Sampling: each filter against its definition, written out on small rows; streams, statistics, bad rows."""

from __future__ import annotations

import pytest
import torch

from pagebinder import SamplingParams
from pagebinder.custom_ops.sampling import sample_tokens
from pagebinder.runtime import sampler
from pagebinder.runtime.sampler import SamplingRow, draw, greedy, logprobs

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])


@pytest.fixture(params=["served", "reference"], autouse=True)
def provider(request, monkeypatch):
    """All of it holds for whatever serves this machine, and for the reference."""
    if request.param == "reference":
        monkeypatch.setattr(sampler, "_overload", lambda op, _: getattr(torch.ops.pagebinder, op).default)


def row(params: SamplingParams, seed=0, tokens=(), num_output=0) -> SamplingRow:
    return SamplingRow(params, seed, list(tokens), num_output)


def tokens_of(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return draw(logits, range(len(rows)), rows).tolist()


def kept(**options) -> list[int]:
    """Tokens that are drawn at least once; the rarest of five has a probability of 1.2 % at temperature 1."""
    params = SamplingParams(**{"temperature": 1.0, **options})
    drawn = draw(LOGITS, [0] * 3000, [row(params, seed=1, num_output=i) for i in range(3000)])
    return sorted(set(drawn.tolist()))


def test_top_k_keeps_k_tokens():
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_with_that_mass():
    probabilities = LOGITS.softmax(-1)[0]  # .636 .234 .086 .032 .012
    assert kept(top_p=float(probabilities[0]) - 1e-3) == [0]
    assert kept(top_p=float(probabilities[0]) + 1e-3) == [0, 1]
    assert kept(top_p=1e-9) == [0]
    assert kept(top_p=1.0) == [0, 1, 2, 3, 4]


def test_top_p_is_of_what_top_k_leaves():
    probabilities = LOGITS.softmax(-1)[0]
    assert kept(top_k=2, top_p=float(probabilities[0] / probabilities[:2].sum()) - 1e-3) == [0]
    assert kept(top_k=2, top_p=float(probabilities[0] / probabilities[:2].sum()) + 1e-3) == [0, 1]


def test_min_p_is_relative_to_the_largest_probability():
    ratio = float(torch.exp(torch.tensor(-2.0)))  # of token 2 to token 0
    assert kept(min_p=ratio - 1e-3) == [0, 1, 2]
    assert kept(min_p=ratio + 1e-3) == [0, 1]
    assert kept(min_p=1.0) == [0]


def test_temperature_is_applied_before_top_p():
    assert kept(top_p=0.9, temperature=0.25) == [0]
    assert len(kept(top_p=0.9, temperature=4.0)) > len(kept(top_p=0.9, temperature=1.0))


def test_rows_of_a_batch_do_not_influence_each_other():
    params = [SamplingParams(top_k=1), SamplingParams(top_p=0.7), SamplingParams(min_p=0.1), SamplingParams()]
    rows = [row(p, seed=i, tokens=[1], num_output=j) for j in range(50) for i, p in enumerate(params)]
    assert draw(LOGITS, [0] * len(rows), rows).tolist() == [tokens_of(LOGITS, [one])[0] for one in rows]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vocab", [5, 300])
def test_the_draw_follows_the_probabilities(vocab):
    """Over positions of one request, and over one position of many: streams must not resemble each other."""
    generator = torch.Generator().manual_seed(0)
    logits = LOGITS if vocab == 5 else torch.randn(1, vocab, generator=generator)
    probabilities = (logits[0].double() / 0.8).softmax(-1)
    params, count = SamplingParams(temperature=0.8), 10_000
    for rows in (
        [row(params, seed=7, num_output=i) for i in range(count)],
        [row(params, seed=i, num_output=3) for i in range(count)],
    ):
        drawn = torch.from_numpy(draw(logits, [0] * count, rows))
        # Five standard deviations of chi-square with vocab - 1 degrees of freedom.
        limit = vocab - 1 + 5 * (2 * (vocab - 1)) ** 0.5
        assert chi_square(torch.bincount(drawn, minlength=vocab).double(), probabilities) < limit


def test_the_draw_depends_on_seed_and_position_only():
    params = SamplingParams(temperature=1.0)
    one = tokens_of(LOGITS, [row(params, 3, (1, 2), 5)])[0]
    again = tokens_of(LOGITS.expand(3, -1), [row(params, 1), row(params, 3, (9,), 5), row(params, 2)])[1]
    assert one == again


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 10**40])
def test_any_whole_number_is_a_seed(seed):
    rows = [row(SamplingParams(temperature=50.0), seed, num_output=i) for i in range(40)]
    assert len(set(tokens_of(LOGITS.expand(40, -1), rows))) > 2


def test_tokens_are_pinned():
    """What a seed gives is a promise across machines, providers and versions."""
    logits = (torch.arange(1000) % 97 / 20)[None]
    rows = [row(SamplingParams(temperature=0.9), seed=42, num_output=i) for i in range(8)]
    assert draw(logits, [0] * 8, rows).tolist() == [570, 369, 271, 288, 192, 338, 93, 831]


def test_tiny_and_huge_temperatures_are_finite():
    rows = [row(SamplingParams(temperature=1e-6), seed=s) for s in range(20)]
    assert set(tokens_of(LOGITS.expand(20, -1), rows)) == {0}
    masked = torch.tensor([[1.0, float("-inf"), 2.0]])
    rows = [row(SamplingParams(temperature=1e300), seed=s) for s in range(40)]
    assert set(tokens_of(masked.expand(40, -1), rows)) == {0, 2}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([[1.0, 0.9, -0.1, -0.2]])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert tokens_of(logits, [row(params, tokens=[0, 0])]) == [1]
    assert tokens_of(logits, [row(params, tokens=[0, 1])]) == [0]
    assert tokens_of(torch.tensor([[-0.1, -0.15]]), [row(params, tokens=[0])]) == [1]


def test_tokens_of_a_prompt_that_have_no_logit_are_not_penalised():
    """A head may be narrower than the table of embeddings: tokens of images are read, and not written."""
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert tokens_of(LOGITS, [row(params, tokens=[9, 5])]) == [0]
    assert tokens_of(torch.tensor([[1.0, 0.9]]), [row(params, tokens=[2, 0])]) == [1]


def test_logits_are_not_changed():
    before = LOGITS.clone()
    tokens_of(LOGITS, [row(SamplingParams(repetition_penalty=2.0, top_k=2), tokens=[0, 1])])
    assert torch.equal(LOGITS, before)


def test_ties_go_to_the_lowest_token():
    assert tokens_of(torch.zeros(1, 6), [row(SamplingParams(temperature=0.0))]) == [0]
    assert greedy(torch.zeros(2, 6)).tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_an_error(temperature):
    logits = torch.tensor([[1.0, float("nan")]])
    with pytest.raises(FloatingPointError, match="NaN"):
        tokens_of(logits, [row(SamplingParams(temperature=temperature, top_p=0.9))])
    with pytest.raises(FloatingPointError, match="NaN"):
        greedy(logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_fine(dtype):
    assert tokens_of(LOGITS.to(dtype), [row(SamplingParams(temperature=0.0))]) == [0]
    assert greedy(LOGITS.to(dtype)).tolist() == [0]


def test_logprobs_are_of_the_unmodified_logits_and_include_the_chosen_token():
    expected = LOGITS[0].log_softmax(-1)
    assert logprobs(LOGITS[0], 3, None) is None
    assert logprobs(LOGITS[0], 3, 1) == pytest.approx({0: float(expected[0]), 3: float(expected[3])})


def test_options_have_the_ops_columns():
    options = sampler._options(SamplingParams(temperature=0.5, top_k=3, min_p=0.25))
    assert dict(zip(sample_tokens.OPTIONS, options)) == pytest.approx(
        {"scale": 2.8853900817779268, "top_k": 3, "top_p": 1.0, "min_y": -2.0, "penalty": 1.0}
    )
