"""Batches in which requests share their first blocks, for the ops that split attention into parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from pagebinder.runtime.shared_prefixes import order_shared_tokens
from tests.custom_ops.paged_cases import Case, Inputs, cases, make_inputs

# The example to test by hand: query lengths [8, 4, 1, 1] after contexts [0, 4, 6, 4], blocks of 4 tokens.
BY_HAND = Case(((0, 8), (4, 4), (6, 1), (4, 1)), block_size=4)


@dataclass(frozen=True)
class SharedCase:
    """`groups` [R]: requests with the same number share `shared[number]` tokens; -1 shares none."""

    batch: Case
    groups: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()


def make_shared(case: SharedCase) -> tuple[Inputs, Inputs]:
    """(inputs of unified attention without `phases`, the same batch for paged attention)."""
    paged = make_inputs(case.batch)
    q, cache, table, seq_lens, starts, sinks, alibi = paged.operands
    lens, leaders = torch.zeros_like(seq_lens), torch.zeros_like(seq_lens)
    first: dict[int, int] = {}
    for r, group in enumerate(case.groups):
        if group < 0 or not case.shared[group]:
            continue
        leader = first.setdefault(group, r)
        lens[r], leaders[r] = case.shared[group], leader
        blocks = -(-case.shared[group] // cache.shape[2])
        table[r, :blocks] = table[leader, :blocks]
        # What the leader does not use of its last block is read by a sharer that is longer.
        cache[table[leader, :blocks].long()] = cache[table[leader, :blocks].long()].nan_to_num(0.5)
    tokens = torch.empty(len(q), dtype=torch.int32)
    order_shared_tokens(lens.numpy(), leaders.numpy(), starts.numpy(), tokens.numpy())
    k, v = new_rows(paged)
    operands = (q, cache, table, seq_lens, starts, lens, leaders, tokens, sinks, alibi, k, v)
    return Inputs(operands, paged.options), paged


def new_rows(paged: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the step's tokens, as they lie in the cache; zeros for padding."""
    q, cache, table, seq_lens, starts, *_ = paged.operands
    rows = cache.new_zeros(len(q), cache.shape[1], cache.shape[3])
    for r, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[r], starts[r + 1]
        j = torch.arange(seq_len - (end - begin), seq_len)
        rows[begin:end] = cache[table[r].long()[j // cache.shape[2]], :, j % cache.shape[2]]
    k, v = rows.split((q.shape[2], cache.shape[3] - q.shape[2]), dim=-1)
    return k.contiguous(), v  # v: not contiguous


@st.composite
def shared_cases(draw, **limits) -> SharedCase:
    """Random batches in up to two groups, which share any number of tokens that all their contexts have."""
    batch = draw(cases(**limits))
    options = {k: v for k, v in batch.options.items() if k not in ("chunk", "causal")}
    batch = Case(**{**vars(batch), "options": options})
    groups = tuple(
        draw(st.lists(st.integers(-1, 1), min_size=len(batch.lengths), max_size=len(batch.lengths)))
    )
    contexts = [[c for (c, _), g in zip(batch.lengths, groups) if g == n] for n in (0, 1)]
    shared = tuple(draw(st.integers(0, min(c))) if c else 0 for c in contexts)
    return SharedCase(batch, groups, shared)
