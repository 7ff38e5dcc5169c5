"""The hash model's cached computation against its oracle, and that it notices what it is there to notice."""

import random

import numpy as np
import pytest
import torch

from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.kv.specs import cdiv
from tests.runtime.hash_model import group, hash_model
from tests.runtime.hash_oracle import (
    VOCAB_SIZE,
    Oracle,
    chunk,
    full,
    latent,
    recurrent,
    ring,
    short_conv,
    window,
)

MAX_MODEL_LEN = 40
LAYERS = {
    "full": full(),
    "window": window(5),
    "window of one": window(1),
    "chunk": chunk(8),
    "straddling chunk": chunk(6),
    "latent": latent(),
    "window latent": latent(3),
    "recurrent": recurrent(),
    "short conv": short_conv(4),
    "ring": ring(5),
    "resumable ring": ring(8, 8),
}


class Tables:
    """Every request has all the blocks it can need, in random places."""

    def __init__(self, groups, num_reqs, seed):
        self.model = hash_model(groups, MAX_MODEL_LEN)
        self.sizes = [g.block_size for g in self.model.kv_plan.groups]
        widths = [cdiv(MAX_MODEL_LEN, size) for size in self.sizes]
        num_blocks = 1 + num_reqs * sum(widths)
        self.arena = KVArena(self.model.kv_plan, self.model.states, num_blocks, torch.device("cpu"))
        self.arena.memory.random_(0, 256)
        ids = iter(np.random.default_rng(seed).permutation(np.arange(1, num_blocks)).astype(np.int32))
        self.tables = [np.array([[next(ids) for _ in range(w)] for _ in range(num_reqs)]) for w in widths]

    def run(self, tokens, starts, ends):
        """Logits of all tokens [start, end) of each request."""
        positions = np.concatenate([np.arange(s, e) for s, e in zip(starts, ends)])
        rows = np.repeat(np.arange(len(starts)), np.subtract(ends, starts))
        inputs = {
            "input_ids": np.array([tokens[r][p] for r, p in zip(rows, positions)]),
            "positions": positions,
            "logits_rows": np.arange(len(positions)),
            "query_start_loc": np.concatenate([[0], np.cumsum(np.subtract(ends, starts))]).astype(np.int32),
            "seq_lens": np.array(ends, np.int32),
        }
        for g, (size, table) in enumerate(zip(self.sizes, self.tables)):
            inputs[f"slot_mapping_{g}"] = table[rows, positions // size] * size + positions % size
            inputs[f"block_table_{g}"] = table
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        return self.model.executable.run({**tensors, **self.arena.caches})


def oracle_logits(states, tokens):
    oracle, rows = Oracle(states), []
    for token in tokens:
        oracle.feed(token)
        rows.append(oracle.logits)
    return torch.stack(rows)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_chunks_of_a_batch_agree_with_the_oracle(layer, block_size):
    rng = random.Random(block_size)
    tables = Tables([group(block_size, LAYERS[layer]), group(2, full(), LAYERS["full"])], 4, block_size)
    tokens = [[rng.randrange(VOCAB_SIZE) for _ in range(MAX_MODEL_LEN)] for _ in range(4)]
    expected = [oracle_logits(tables.model.states, t) for t in tokens]
    starts = [0] * 4
    while min(starts) < MAX_MODEL_LEN:
        ends = [min(s + rng.choice([0, 1, 1, 2, 5, 13]), MAX_MODEL_LEN) for s in starts]
        if ends == starts:
            continue
        want = torch.cat([expected[r][s:e] for r, (s, e) in enumerate(zip(starts, ends))])
        assert torch.equal(tables.run(tokens, starts, ends), want)
        starts = ends


@pytest.mark.parametrize("layer", LAYERS)
def test_a_row_that_is_overwritten_changes_what_follows(layer):
    tokens = [[1 + i % 7 for i in range(MAX_MODEL_LEN)]]
    tables = Tables([group(4, LAYERS[layer])], 1, 0)
    before = tables.run(tokens, [0], [10])
    tables.arena.memory.fill_(0xA5)
    after = tables.run(tokens, [10], [12])
    expected = oracle_logits(tables.model.states, tokens[0][:12])
    assert torch.equal(before, expected[:10])
    assert torch.equal(after, expected[10:]) == (layer == "window of one")


def test_a_null_block_that_is_needed_is_noticed():
    tables = Tables([group(4, full())], 1, 0)
    tables.run([[1] * 8], [0], [8])
    tables.tables[0][0, 0] = 0
    with pytest.raises(AssertionError, match="null block"):
        tables.run([[1] * 9], [8], [9])


def test_a_copied_oracle_goes_its_own_way():
    states = hash_model(
        [group(4, full()), group(4, recurrent(), short_conv(3)), group(4, ring(4))], MAX_MODEL_LEN
    ).states
    first = Oracle(states, [1, 2, 3])
    second = first.copy()
    first.feed(4)
    second.feed(5)
    assert first.hash != second.hash
    assert second.hash == Oracle(states, [1, 2, 3, 5]).hash
