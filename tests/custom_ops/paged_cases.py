"""Random problems for the paged ops, and a dense oracle that shares no code with the references."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

SLOT_EXAMPLE = {  # the worked mixed batch: block size 16
    "block_size": 16,
    "seq_and_query_lens": [(10, 10), (25, 1), (8, 8), (30, 1)],
    "tables": [[0, 1], [2, 3, 5], [4], [6, 7, 8]],
    "slots": [*range(10), 56, *range(64, 72), 125],
}


@dataclass(frozen=True)
class Case:
    """A batch: (context, new tokens) of each request, sizes, and the op's options."""

    lengths: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32
    head_dim: int = 32
    head_dim_v: int = 32
    num_kv_heads: int = 2
    group: int = 2
    block_size: int = 16
    padding: int = 0
    strided: bool = False
    sinks: str = "none"  # "none", "finite" or "some -inf"
    alibi: bool = False
    options: dict = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Operands of `paged_attention` in order, and its keyword arguments."""

    operands: tuple
    options: dict

    def run(self, op):
        return op(*self.operands, **self.options)

    def float32(self) -> Inputs:
        q, kv_cache, *rest = self.operands
        return Inputs((q.float(), kv_cache.float(), *rest), self.options)


def make_inputs(case: Case) -> Inputs:
    """Random operands. Blocks are shuffled, unused table entries are -1 and unused cache rows are NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    num_tokens = sum(new for _, new in case.lengths) + case.padding
    num_heads = case.num_kv_heads * case.group
    width = case.head_dim + case.head_dim_v
    q = _randn((num_tokens, num_heads, case.head_dim), case.strided, generator).to(case.dtype)
    seq_lens = [context + new for context, new in case.lengths]
    block_table, num_blocks = _shuffled_tables(seq_lens, case.block_size, generator)
    cache = _nan_cache(num_blocks, case, width)
    for row, seq_len in zip(block_table.long(), seq_lens):
        j = torch.arange(seq_len)
        values = torch.randn((seq_len, case.num_kv_heads, width), generator=generator)
        cache[row[j // case.block_size], :, j % case.block_size] = values.to(case.dtype)
    starts = [0]
    for _, new in case.lengths:
        starts.append(starts[-1] + new)
    sinks = None if case.sinks == "none" else torch.randn(num_heads, generator=generator) * 2
    if case.sinks == "some -inf":
        sinks[::2] = float("-inf")
    alibi = torch.rand(num_heads, generator=generator) if case.alibi else None
    operands = (q, cache, block_table, _int32(seq_lens), _int32(starts), sinks, alibi)
    options = {"head_dim_v": case.head_dim_v, "scale": case.head_dim**-0.5, **case.options}
    return Inputs(operands, options)


def _int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _randn(shape, strided: bool, generator) -> torch.Tensor:
    if not strided:
        return torch.randn(shape, generator=generator)
    wide = torch.randn((shape[0], shape[1] + 1, shape[2] + 5), generator=generator)
    return wide[:, 1:, 3:-2]


def _shuffled_tables(seq_lens: list[int], block_size: int, generator) -> tuple[torch.Tensor, int]:
    needed = [math.ceil(length / block_size) for length in seq_lens]
    num_blocks = sum(needed) + 2
    order = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.full((len(seq_lens), max([*needed, 1])), -1, dtype=torch.int32)
    for row, count in zip(table, needed):
        for i in range(count):
            row[i] = order.pop()
    return table, num_blocks


def _nan_cache(num_blocks: int, case: Case, width: int) -> torch.Tensor:
    """[N, G, B, width] full of NaN; strided: one layer of an arena that stores tokens before heads."""
    if not case.strided:
        shape = (num_blocks, case.num_kv_heads, case.block_size, width)
        return torch.full(shape, float("nan"), dtype=case.dtype)
    arena = torch.full((num_blocks, 3, case.block_size, case.num_kv_heads, width + 3), float("nan"))
    return arena.to(case.dtype)[:, 1, :, :, 2:-1].transpose(1, 2)


def sees(p: int, j: int, *, window=None, chunk=None, causal=True) -> bool:
    """The mask, spelled out."""
    if causal and j > p:
        return False
    if window is not None and (j <= p - window or (not causal and j >= p + window)):
        return False
    return chunk is None or math.floor(j / chunk) == math.floor(p / chunk)


def dense_attention(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """float64: keys gathered one by one, an explicit mask, the sink as one more column of the softmax."""
    q, cache, table, seq_lens, starts, sinks, alibi = inputs.operands
    o = dict(inputs.options)
    head_dim_v, scale, soft_cap = o.pop("head_dim_v"), o.pop("scale"), o.pop("soft_cap", None)
    num_tokens, num_heads, head_dim = q.shape
    block_size, group = cache.shape[2], num_heads // cache.shape[1]
    out = torch.zeros(num_tokens, num_heads, head_dim_v, dtype=torch.float64)
    lse = torch.full((num_heads, num_tokens), float("-inf"), dtype=torch.float64)
    for r, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[r].item(), starts[r + 1].item()
        for t in range(start, end):
            p = seq_len - (end - t)
            keys = [j for j in range(seq_len) if sees(p, j, **o)]
            if not keys:
                continue
            rows = torch.stack([cache[table[r, j // block_size], :, j % block_size] for j in keys]).double()
            for h in range(num_heads):
                score = rows[:, h // group, :head_dim] @ q[t, h].double() * scale
                if soft_cap is not None:
                    score = soft_cap * torch.tanh(score / soft_cap)
                if alibi is not None:
                    score = score + alibi[h].double() * (torch.tensor(keys) - p)
                lse[h, t] = torch.logsumexp(score, 0)
                if sinks is not None:
                    score = torch.cat([score, sinks[h].double()[None]])
                weights = torch.softmax(score, 0)[: len(keys)]
                out[t, h] = weights @ rows[:, h // group, head_dim:]
    return out, lse


WIDTHS = st.one_of(st.sampled_from([16, 24, 40, 64, 80, 96, 128, 256, 576]), st.integers(16, 200))
BLOCK_SIZES = st.one_of(st.sampled_from([1, 16, 32, 256]), st.integers(1, 256))


@st.composite
def cases(draw, max_context: int = 400, max_new: int = 70, max_requests: int = 4) -> Case:
    """Mixed batches with lengths at and around block borders, and any combination of features."""
    block_size = draw(BLOCK_SIZES)
    borders = st.sampled_from([0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 63, 64, 65])
    context = st.one_of(borders, st.integers(0, max_context))
    new = st.one_of(
        st.sampled_from([0, 1, 1, 2]), st.integers(0, max_new), borders.map(lambda n: min(n, max_new))
    )
    head_dim = draw(WIDTHS)
    options = {}
    if draw(st.integers(0, 2)) == 0:
        options["window"] = draw(st.one_of(st.integers(1, 80), st.just(10_000)))
    if draw(st.integers(0, 3)) == 0:
        options["chunk"] = draw(st.integers(1, 100))
    if draw(st.integers(0, 2)) == 0:
        options["soft_cap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.integers(0, 3)) == 0:
        options["causal"] = False
    return Case(
        lengths=tuple(draw(st.lists(st.tuples(context, new), min_size=1, max_size=max_requests))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        head_dim=head_dim,
        head_dim_v=draw(st.one_of(st.just(head_dim), WIDTHS)),
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 16)),
        block_size=block_size,
        padding=draw(st.integers(0, 3)),
        strided=draw(st.booleans()),
        sinks=draw(st.sampled_from(["none", "finite", "some -inf"])),
        alibi=draw(st.integers(0, 2)) == 0,
        options=options,
        seed=draw(st.integers(0, 2**31)),
    )
