"""Random problems for the sparse ops over paged rows, and a dense oracle that shares no code with the references.

Blocks are shuffled; what no query sees is unreadable: blocks behind the window are gone from the table (-1), and rows
that were never written decode to NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from pagebinder.custom_ops.latent.layouts import load_rows, row_layout, rows_per_block, store_rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: (context, new tokens) of each request, sizes, and the op's options.

    topk None: no list, all entries. window 0: no rows of tokens. entries False: no entries.
    """

    lengths: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32
    layout: str = "plain"
    rope_dim: int = 0
    heads: int = 4
    width: int = 48
    head_dim_v: int | None = None
    window: int = 16
    ratio: int = 4
    entries: bool = True
    topk: int | None = None
    sinks: str = "none"  # "none", "finite" or "some -inf"
    rows_per_block: tuple[int, int] = (16, 8)  # of tokens, of entries
    padding: int = 0
    strided: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Operands of an op in order, and its keyword arguments."""

    operands: tuple
    options: dict = field(default_factory=dict)

    def run(self, op):
        return op(*self.operands, **self.options)

    def replace(self, index: int, value) -> Inputs:
        return Inputs((*self.operands[:index], value, *self.operands[index + 1 :]), self.options)

    def with_options(self, **options) -> Inputs:
        return Inputs(self.operands, self.options | options)


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention_inputs(case: Case) -> Inputs:
    """Operands of `sparse_mla_attention`."""
    generator = torch.Generator().manual_seed(case.seed)
    q, seq_lens, starts = _queries(case, generator)
    lowest = [max(0, context - case.window + 1) for context, _ in case.lengths]
    window = _paged(case, seq_lens, lowest, case.rows_per_block[0], generator) if case.window else (None,) * 2
    num_entries = [length // case.ratio for length in seq_lens]
    paged = _paged(case, num_entries, [0] * len(seq_lens), case.rows_per_block[1], generator)
    entries = paged if case.entries else (None, None)
    indices = _lists(case, generator) if case.topk is not None and case.entries else None
    sinks = None if case.sinks == "none" else torch.randn(case.heads, generator=generator) * 2
    if case.sinks == "some -inf":
        sinks[::2] = float("-inf")
    options = dict(
        scale=case.width**-0.5,
        window=case.window,
        ratio=case.ratio,
        head_dim_v=case.head_dim_v or case.width,
        layout=case.layout,
        rope_dim=case.rope_dim,
    )
    return Inputs((q, *window, *entries, indices, int32(seq_lens), int32(starts), sinks), options)


def indexer_inputs(case: Case, *, whole: bool = False) -> Inputs:
    """Operands of `indexer_score_topk`; `whole`: small whole numbers, so that every sum is exact and scores tie."""
    generator = torch.Generator().manual_seed(case.seed)
    q, seq_lens, starts = _queries(case, generator)
    weights = torch.randn(q.shape[:2], generator=generator)
    num_entries = [length // case.ratio for length in seq_lens]
    draw = _whole if whole else None
    cache, table = _paged(
        case, num_entries, [0] * len(seq_lens), case.rows_per_block[1], generator, draw=draw
    )
    scale = case.width**-0.5
    if whole:
        q = torch.randint(-2, 3, q.shape, generator=generator).to(case.dtype)
        weights, scale = torch.randint(-2, 4, weights.shape, generator=generator).float(), 0.5
    options = dict(topk=case.topk, ratio=case.ratio, scale=scale, layout=case.layout)
    return Inputs((q, weights, cache, table, int32(seq_lens), int32(starts)), options)


def _whole(shape, generator):
    return torch.randint(-2, 3, shape, generator=generator).float()


def _queries(case: Case, generator):
    num_tokens = sum(new for _, new in case.lengths) + case.padding
    shape = (num_tokens, case.heads, case.width)
    if case.strided:
        wide = torch.randn((shape[0], shape[1] + 1, shape[2] + 5), generator=generator)
        q = wide.to(case.dtype)[:, 1:, 3:-2]
    else:
        q = torch.randn(shape, generator=generator).to(case.dtype)
    starts = [0]
    for _, new in case.lengths:
        starts.append(starts[-1] + new)
    return q, [context + new for context, new in case.lengths], starts


def _paged(case: Case, counts, lowest, n: int, generator, draw=None):
    """(cache, table) of `counts[r]` random rows a request, of which those before `lowest[r]` are gone."""
    needed = [math.ceil(count / n) for count in counts]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    cache = empty_cache(case, len(order), n)
    table = torch.full((len(counts), max([*needed, 1]) + 1), -1, dtype=torch.int32)
    for row, count, first in zip(table, counts, lowest):
        for i in range(first // n, math.ceil(count / n)):
            row[i] = order.pop()
        w = torch.arange(first, count)
        shape = (len(w), case.width)
        rows = torch.randn(shape, generator=generator) if draw is None else draw(shape, generator)
        store_rows(rows, cache, row.long()[w // n] * n + w % n, case.layout, case.rope_dim)
    return cache, table


def empty_cache(case: Case, num_blocks: int, n: int) -> torch.Tensor:
    """Rows that decode to NaN. strided: a layer's share of a larger arena."""
    if case.layout == "plain":
        if not case.strided:
            return torch.full((num_blocks, n, case.width), float("nan"), dtype=case.dtype)
        arena = torch.full((num_blocks, 3, n, case.width + 3), float("nan"), dtype=case.dtype)
        return arena[:, 1, :, 2:-1]
    size = row_layout(case.layout, case.width, case.rope_dim).page_bytes(
        n, padded=case.layout == "fp8_v4" and n % 2 == 0
    )
    arena = torch.full((num_blocks, size + 64 * case.strided), 255, dtype=torch.uint8)
    return arena[:, :size]


def _lists(case: Case, generator) -> torch.Tensor:
    """Visible entries in any order, -1 between them, sometimes one that is not visible; every fifth list is empty."""
    num_tokens = sum(new for _, new in case.lengths) + case.padding
    lists = torch.full((num_tokens, case.topk), -1, dtype=torch.int32)
    t = 0
    for context, new in case.lengths:
        for p in range(context, context + new):
            visible = (p + 1) // case.ratio
            chosen = torch.randperm(visible + 1, generator=generator)[: case.topk].int()
            chosen[torch.rand(len(chosen), generator=generator) < 0.2] = -1
            if t % 5 != 4:
                lists[t, : len(chosen)] = chosen
            t += 1
    return lists


def dense_attention(inputs: Inputs) -> torch.Tensor:
    """float64: rows fetched one by one, the sink as one more column of the softmax."""
    q, window_cache, window_table, entry_cache, entry_table, indices, seq_lens, starts, sinks = (
        inputs.operands
    )
    o = inputs.options
    out = torch.zeros(*q.shape[:2], o["head_dim_v"], dtype=torch.float64)

    def fetch(cache, row, i):
        layout, rope_dim, width = o["layout"], o["rope_dim"], q.shape[2]
        n = rows_per_block(cache, layout, width, rope_dim)
        slot = torch.tensor([int(row[i // n]) * n + i % n])
        row = load_rows(cache, slot, layout, width, rope_dim)[0]
        return (row if layout == "plain" else row.bfloat16()).double()

    for r, seq_len in enumerate(seq_lens.tolist()):
        for t in range(int(starts[r]), int(starts[r + 1])):
            p = seq_len - (int(starts[r + 1]) - t)
            rows = [fetch(window_cache, window_table[r], j) for j in range(max(0, p - o["window"] + 1), p + 1)
                    if o["window"]]  # fmt: skip
            if entry_cache is not None:
                seen = range((p + 1) // o["ratio"])
                listed = seen if indices is None else {int(w) for w in indices[t]}
                rows += [fetch(entry_cache, entry_table[r], w) for w in seen if w in listed]
            for h in range(q.shape[1] if rows else 0):
                scores = torch.stack(rows) @ q[t, h].double() * o["scale"]
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h].double()[None]])
                weights = torch.softmax(scores, 0)[: len(rows)]
                out[t, h] = weights @ torch.stack(rows)[:, : o["head_dim_v"]]
    return out


LAYOUTS = {  # layout -> (width, rope_dim) of small rows
    "plain": (48, 0),
    "fp8_v4": (80, 16),
    "fp8_v32": (144, 16),
}
INDEX_LAYOUTS = {"plain": 32, "fp8_index": 32, "fp4_index": 32}


@st.composite
def cases(draw, max_context: int = 600, max_new: int = 40, max_heads: int = 70) -> Case:
    """Mixed batches with lengths around the borders of windows, entries and blocks."""
    ratio, window = draw(st.sampled_from([1, 4, 8, 128])), draw(st.sampled_from([0, 1, 5, 16, 128, 10_000]))
    borders = st.sampled_from([0, 1, ratio - 1, ratio, ratio + 1, 127, 128, 129, 255, 256, 257])
    context = st.one_of(borders, st.integers(0, max_context))
    new = st.one_of(st.sampled_from([0, 1, 1, 2]), st.integers(0, max_new))
    layout = draw(st.sampled_from(list(LAYOUTS)))
    width, rope_dim = LAYOUTS[layout]
    if layout == "plain":
        width = draw(st.one_of(st.just(64), st.integers(1, 160)))
    return Case(
        lengths=tuple(draw(st.lists(st.tuples(context, new), min_size=1, max_size=4))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        layout=layout,
        rope_dim=rope_dim,
        width=width,
        head_dim_v=draw(st.one_of(st.none(), st.integers(1, width))),
        heads=draw(st.one_of(st.sampled_from([1, 16, 64]), st.integers(1, max_heads))),
        window=window,
        ratio=ratio,
        entries=window == 0 or draw(st.integers(0, 3)) > 0,
        topk=draw(st.one_of(st.none(), st.sampled_from([1, 7, 300]))),
        sinks=draw(st.sampled_from(["none", "finite", "some -inf"])),
        rows_per_block=(draw(st.sampled_from([1, 16, 64])), draw(st.sampled_from([1, 2, 15, 64]))),
        padding=draw(st.integers(0, 3)),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )
