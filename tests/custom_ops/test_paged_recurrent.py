"""The paged recurrences: chunked and batched in any way, they equal one sequence; checkpoints and null entries."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.custom_ops import recurrent_cases
from tests.custom_ops.defined_recurrence_cases import DEFINED
from tests.custom_ops.recurrent_cases import bad_operands, int32, strided_cache, zero_state
from tests.helpers import NIGHTLY
from tests.tolerances import assert_close

RECURRENCES = recurrent_cases.RECURRENCES | DEFINED
NAMES = tuple(RECURRENCES)


class Batch:
    """Requests with their tokens, oracles, block tables and a cache; `step` computes some tokens of each.

    Each logical block has a cache row of its own, in shuffled order; those in `unwanted` are null.
    """

    def __init__(self, recurrence, lengths, block_size, seed=0, unwanted=lambda r, i: False):
        self.recurrence, self.block_size, self.lengths = recurrence, block_size, lengths
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [recurrence.tokens(n, generator) for n in lengths]
        oracles = [recurrence.oracle(zero_state(recurrence), t, recurrence.weights) for t in self.tokens]
        self.expected, self.states = [o for o, _ in oracles], [s for _, s in oracles]
        counts = [-(-n // block_size) for n in lengths]
        ids = list(range(1, 1 + sum(counts)))
        random.Random(seed).shuffle(ids)
        self.table = torch.full((len(lengths) + 3, max(counts) + 2), -7, dtype=torch.int32)
        for r, count in enumerate(counts):
            row = [ids.pop() for _ in range(count)]
            row = [0 if unwanted(r, i) else block for i, block in enumerate(row)]
            self.table[r, :count] = torch.tensor(row, dtype=torch.int32)
        self.cache = strided_cache(recurrence, 1 + sum(counts))
        self.done = [0] * len(lengths)

    def step(self, new_tokens, padding=0):
        """Compute `new_tokens[r]` more tokens of each request and compare their outputs."""
        start, ends = list(self.done), [d + n for d, n in zip(self.done, new_tokens)]
        parts = zip(*([x[s:e] for x in t] for t, s, e in zip(self.tokens, start, ends)))
        tokens = [torch.cat([*part, part[0].new_full((padding, *part[0].shape[1:]), 3.0)]) for part in parts]
        lens = torch.tensor(ends, dtype=torch.int32)
        starts = torch.tensor([0, *new_tokens], dtype=torch.int32).cumsum(0).to(torch.int32)
        out = self.recurrence.run_paged(tokens, self.cache, self.table, lens, starts, self.block_size)
        expected = torch.cat([o[s:e] for o, s, e in zip(self.expected, start, ends)])
        assert out.is_contiguous() and len(out) == len(expected) + padding
        assert_close(out[: len(expected)], expected)
        assert not out[len(expected) :].any()
        self.done = ends
        return out

    def check_states(self):
        """Every block that was reached holds the state after its last computed token; the others are untouched."""
        for r, done in enumerate(self.done):
            for i in range(-(-self.lengths[r] // self.block_size)):
                row = self.cache[int(self.table[r, i])]
                if int(self.table[r, i]) == 0 or i * self.block_size >= done:
                    assert row.isnan().all(), "a block was written that was not reached or not wanted"
                else:
                    last = min((i + 1) * self.block_size, done) - 1
                    assert_close(row, self.states[r][last])
        assert self.cache[0].isnan().all(), "the null block was written"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 40, 77, 200])
def test_one_prompt_equals_the_semantic_op(name, num_tokens):
    recurrence = RECURRENCES[name]()
    batch = Batch(recurrence, [num_tokens], block_size=16)
    out = batch.step([num_tokens], padding=3)
    assert_close(out[:num_tokens], recurrence.run(batch.tokens[0]))
    batch.check_states()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25 if NIGHTLY else 6, deadline=None)
@given(data=st.data())
def test_any_chunking_of_any_batch(name, data):
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    block_size = data.draw(st.sampled_from([1, 4, 16, 64, 100]))
    batch = Batch(RECURRENCES[name](), lengths, block_size, seed=data.draw(st.integers(0, 99)))
    while batch.done != lengths:
        left = [n - d for n, d in zip(lengths, batch.done)]
        batch.step([data.draw(st.one_of(st.just(min(1, n)), st.integers(0, n))) for n in left])
        batch.check_states()


@pytest.mark.parametrize("name", NAMES)
def test_decodes_in_one_batch_with_prefills(name):
    batch = Batch(RECURRENCES[name](), [40, 33, 50, 20, 1], block_size=16)
    batch.step([32, 32, 0, 7, 0])
    batch.step([1, 1, 30, 1, 1])  # the first two begin a block
    batch.step([1, 0, 1, 9, 0], padding=2)
    batch.check_states()


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_that_nobody_wants_are_not_written(name):
    """Only every third block and the last of a step are kept; steps end inside kept blocks."""
    batch = Batch(
        RECURRENCES[name](), [100, 90], block_size=8, unwanted=lambda r, i: i not in (2, 5, 8, 11, 12)
    )
    batch.step([24, 20])
    batch.check_states()
    batch.step([71, 70])
    batch.check_states()


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_resumes_another_request_and_stays_as_it_is(name):
    """Prefix caching: a second request begins behind a finished block of the first."""
    recurrence = RECURRENCES[name]()
    batch = Batch(recurrence, [60, 60], block_size=16)
    batch.tokens[1] = tuple(torch.cat([a[:32], b[32:]]) for a, b in zip(*batch.tokens))
    out, states = recurrence.oracle(zero_state(recurrence), batch.tokens[1], recurrence.weights)
    batch.expected[1], batch.states[1] = out, states
    batch.table[1, :2] = batch.table[0, :2]
    batch.step([60, 0])
    shared = batch.cache[batch.table[0, :2].long()].clone()
    batch.done[1] = 32
    batch.step([0, 1])
    batch.step([0, 27])
    assert torch.equal(batch.cache[batch.table[0, :2].long()], shared)
    batch.check_states()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_nothing(name):
    batch = Batch(RECURRENCES[name](), [20, 30], block_size=16)
    batch.step([0, 0], padding=4)
    batch.check_states()


def test_short_conv_is_bitwise_the_same_however_it_is_cut():
    recurrence = RECURRENCES["short_conv"](activation=None)
    batch = Batch(recurrence, [77], block_size=16)
    whole = recurrence.run(batch.tokens[0])
    parts = [batch.step([n]) for n in (1, 30, 1, 2, 43)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name):
    recurrence = RECURRENCES[name](dtype=torch.bfloat16)
    batch = Batch(recurrence, [70, 20], block_size=16)
    batch.step([33, 5])
    batch.step([1, 1])
    batch.step([36, 14])
    assert batch.cache.dtype is (torch.bfloat16 if name == "short_conv" else torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_bad_metadata(name):
    recurrence = RECURRENCES[name]()
    tokens = recurrence.tokens(4, torch.Generator().manual_seed(0))
    cache, table = strided_cache(recurrence, 3), int32(1, 2)[None]

    def run(cache=cache, table=table, lens=None, starts=None, block_size=8):
        lens, starts = int32(4) if lens is None else lens, int32(0, 4) if starts is None else starts
        return recurrence.run_paged(tokens, cache, table, lens, starts, block_size)

    run()
    for message, options in bad_operands(cache).items():
        with pytest.raises(ValueError, match=message):
            run(**options)
