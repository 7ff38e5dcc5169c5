"""Sampling: each filter against its definition, written out on small rows."""

from __future__ import annotations

import pytest
import torch

from pagebinder import SamplingParams
from pagebinder.runtime.sampler import SamplingRow, _filter, sample

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])


def kept(**options) -> list[int]:
    params = SamplingParams(**{"temperature": 1.0, **options})
    return _filter(LOGITS, [params])[0].nonzero()[:, 0].tolist()


def row(params: SamplingParams, seed=0, tokens=(), num_output=0) -> SamplingRow:
    return SamplingRow(params, seed, list(tokens), num_output)


def test_top_k_keeps_k_tokens():
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_with_that_mass():
    probabilities = LOGITS.softmax(-1)[0]  # .636 .234 .086 .032 .012
    assert kept(top_p=float(probabilities[0]) - 1e-3) == [0]
    assert kept(top_p=float(probabilities[0]) + 1e-3) == [0, 1]
    assert kept(top_p=1e-9) == [0]
    assert kept(top_p=1.0) == [0, 1, 2, 3, 4]


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
    batch = _filter(LOGITS.expand(4, -1).clone(), params)
    for i, p in enumerate(params):
        assert torch.equal(batch[i : i + 1], _filter(LOGITS, [p]))


def test_the_draw_follows_the_probabilities():
    params = SamplingParams(temperature=1.0)
    rows = [row(params, seed=7, num_output=i) for i in range(4000)]
    tokens = torch.tensor([t.token_id for t in sample(LOGITS.expand(4000, -1), rows)])
    frequency = torch.bincount(tokens, minlength=5) / 4000
    # Four standard deviations of a binomial frequency.
    bound = 4 * (LOGITS.softmax(-1)[0] * (1 - LOGITS.softmax(-1)[0]) / 4000).sqrt()
    assert bool(((frequency - LOGITS.softmax(-1)[0]).abs() < bound).all())


def test_the_draw_depends_on_seed_and_position_only():
    params = SamplingParams(temperature=1.0)
    one = sample(LOGITS, [row(params, 3, (1, 2), 5)])[0]
    again = sample(LOGITS.expand(3, -1), [row(params, 1), row(params, 3, (9,), 5), row(params, 2)])[1]
    assert one == again


def test_tiny_temperatures_are_greedy_and_finite():
    rows = [row(SamplingParams(temperature=1e-6), seed=s) for s in range(20)]
    assert {t.token_id for t in sample(LOGITS.expand(20, -1), rows)} == {0}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([[1.0, 0.9, -0.1, -0.2]])
    greedy = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert sample(logits, [row(greedy, tokens=[0])])[0].token_id == 1
    assert sample(logits, [row(greedy, tokens=[0, 1])])[0].token_id == 0
    negative = torch.tensor([[-0.1, -0.15]])
    assert sample(negative, [row(greedy, tokens=[0])])[0].token_id == 1


def test_logits_are_not_changed():
    before = LOGITS.clone()
    sample(LOGITS, [row(SamplingParams(repetition_penalty=2.0, top_k=2), tokens=[0, 1])])
    assert torch.equal(LOGITS, before)


def test_ties_go_to_the_lowest_token():
    assert sample(torch.zeros(1, 6), [row(SamplingParams(temperature=0.0))])[0].token_id == 0


def test_nan_is_an_error():
    with pytest.raises(FloatingPointError, match="NaN"):
        sample(torch.tensor([[float("nan"), 1.0]]), [row(SamplingParams())])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_fine(dtype):
    assert sample(LOGITS.to(dtype), [row(SamplingParams(temperature=0.0))])[0].token_id == 0
