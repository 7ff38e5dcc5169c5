"""Compressors with random weights, their oracle in float64 from the definition, and paged batches of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.latent.layouts import load_rows, row_layout


@dataclass(frozen=True)
class Compressor:
    """ratio tokens per entry of `width` channels, normed or not, the trailing 2 * `pairs` of them rotated."""

    ratio: int
    overlap: bool
    width: int = 24
    pairs: int = 4
    dtype: torch.dtype = torch.float32
    bias_dtype: torch.dtype = torch.float32
    rope_scale: float = 1.0
    spread: float = 1.0  # of gates
    normed: bool = True

    eps = 1e-6

    @property
    def slots(self) -> int:
        return 2 if self.overlap else 1

    def tokens(self, num_tokens: int, generator) -> tuple[torch.Tensor, torch.Tensor]:
        """kv and gate [T, c * d]: columns of one wider matrix, as a fused projection makes them."""
        channels = self.slots * self.width
        both = torch.randn(num_tokens, 2 * channels + 3, generator=generator)
        both[:, channels:] *= self.spread
        both = both.to(self.dtype)
        return both[:, :channels], both[:, channels : 2 * channels]

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        bias = torch.randn(self.ratio, self.slots * self.width, generator=generator).to(self.bias_dtype)
        norm = (torch.rand(self.width, generator=generator) + 0.5).to(self.dtype) if self.normed else None
        return bias, norm, 100.0 ** (-torch.arange(self.pairs) / max(self.pairs, 1))

    @property
    def options(self) -> dict:
        return {"ratio": self.ratio, "overlap": self.overlap, "eps": self.eps, "rope_scale": self.rope_scale}

    def scores(self, gate: torch.Tensor) -> torch.Tensor:
        bias = self.weights[0].double()
        return gate.double() + bias[torch.arange(len(gate)) % self.ratio]

    def gathered(self, kv, gate, w: int, end: int, ends_window: bool = False):
        """(z, kv) float64 [tokens, d] of what entry w weighs of the tokens before `end`."""
        z, kv, d = self.scores(gate), kv.double(), self.width
        own = slice(w * self.ratio, min((w + 1) * self.ratio, end))
        before = slice(max(w - 1, 0) * self.ratio, w * self.ratio)
        if not self.overlap:
            return z[own], kv[own]
        if ends_window:  # what the entry after w has of window w
            return z[own, :d], kv[own, :d]
        return tuple(torch.cat([x[before, :d], x[own, d:]]) for x in (z, kv))

    def entries(self, kv, gate) -> torch.Tensor:
        """[T // ratio, d] float64."""
        _, norm, inv_freq = self.weights
        rows = []
        for w in range(len(kv) // self.ratio):
            z, values = self.gathered(kv, gate, w, len(kv))
            x = (torch.softmax(z, 0) * values).sum(0)
            if norm is not None:
                x = x * torch.rsqrt(x.square().mean() + self.eps) * norm.double()
            pairs = torch.view_as_complex(x[self.width - 2 * self.pairs :].view(-1, 2).clone())
            angle = (torch.tensor(float(w * self.ratio)) * inv_freq).double()
            rotated = torch.view_as_real(pairs * torch.polar(torch.full_like(angle, self.rope_scale), angle))
            rows.append(torch.cat([x[: self.width - 2 * self.pairs], rotated.flatten()]))
        return torch.stack(rows) if rows else torch.zeros(0, self.width, dtype=torch.float64)

    def state(self, kv, gate, end: int) -> torch.Tensor:
        """[c, 3, d] float64 after `end` tokens, from its definition."""
        w = end // self.ratio
        slots = []
        for s in range(self.slots):
            z, values = self.gathered(kv, gate, w, end, ends_window=s == 1)
            if len(z) == 0:
                slots.append(torch.zeros(3, self.width, dtype=torch.float64))
                continue
            most = z.amax(0)
            weights = torch.exp(z - most)
            slots.append(torch.stack([most, weights.sum(0), (weights * values).sum(0)]))
        return torch.stack(slots)


class Paged:
    """Requests with tokens, and tables over state and entry blocks dealt at random in wider arenas of NaN.

    `op` is the provider's `compress_norm_rope_store`. State blocks in `unwanted` and entry blocks in
    `unwanted_entries` (of request r, number i) are null. `rows`: entries per entry block.
    """

    def __init__(
        self, op, compressor, lengths, block_size, *, rows=4, seed=0, layout="plain", rope_dim=0,
        cache_dtype=torch.float32, unwanted=lambda r, i: False, unwanted_entries=lambda r, i: False,
    ):  # fmt: skip
        self.op, self.compressor, self.lengths, self.block_size, self.rows = (
            op,
            compressor,
            lengths,
            block_size,
            rows,
        )
        self.layout, self.rope_dim = layout, rope_dim
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [compressor.tokens(n, generator) for n in lengths]
        self.state_table, num_states = deal([-(-n // block_size) for n in lengths], seed, unwanted)
        pages = [-(-(n // compressor.ratio) // rows) for n in lengths]
        self.entry_table, num_pages = deal(pages, seed + 1, unwanted_entries)
        shape = (compressor.slots, 3, compressor.width)
        size = torch.Size(shape).numel()
        arena = torch.full((num_states, size + 7), float("nan"))
        self.states = arena[:, 3 : 3 + size].unflatten(1, shape)
        self.entry_arena, self.entries = self._entry_cache(num_pages, cache_dtype)
        self.done = [0] * len(lengths)
        self._oracles = {}

    def expected_entries(self, r: int) -> torch.Tensor:
        """All entries of request r, float64; computed when first asked for."""
        if r not in self._oracles:
            self._oracles[r] = self.compressor.entries(*self.tokens[r])
        return self._oracles[r]

    def expected_state(self, r: int, end: int) -> torch.Tensor:
        if (r, end) not in self._oracles:
            self._oracles[r, end] = self.compressor.state(*self.tokens[r], end)
        return self._oracles[r, end]

    def _entry_cache(self, num_pages: int, dtype: torch.dtype):
        width = self.compressor.width
        if self.layout == "plain":
            size = self.rows * width
            arena = torch.full((num_pages, size + 5), float("nan"), dtype=dtype)
            return arena, arena[:, 2 : 2 + size].unflatten(1, (self.rows, width))
        size = row_layout(self.layout, width, self.rope_dim).page_bytes(self.rows, padded=True)
        arena = torch.full((num_pages, size + 5), 0xFF, dtype=torch.uint8)  # NaN in every format
        return arena, arena[:, 2 : 2 + size]

    def step(self, new_tokens, padding: int = 0) -> None:
        """Compute `new_tokens[r]` more tokens of each request; padding tokens are NaN."""
        ends = [d + n for d, n in zip(self.done, new_tokens)]
        parts = zip(*([x[s:e] for x in t] for t, s, e in zip(self.tokens, self.done, ends)))
        pad = (0, 0, 0, padding)
        kv, gate = (torch.nn.functional.pad(torch.cat(part), pad, value=float("nan")) for part in parts)
        lens = torch.tensor(ends, dtype=torch.int32)
        starts = torch.tensor([0, *new_tokens], dtype=torch.int32).cumsum(0).to(torch.int32)
        self.op(
            kv, gate, *self.compressor.weights, self.states, self.state_table, self.entries, self.entry_table, lens,
            starts, block_size=self.block_size, layout=self.layout, rope_dim=self.rope_dim, **self.compressor.options,
        )  # fmt: skip
        self.done = ends

    def run_in_chunks(self, chunk: int) -> None:
        while self.done != self.lengths:
            self.step([min(chunk, n - d) for n, d in zip(self.lengths, self.done)])

    def stored(self, r: int, entries: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of some entries of request r (all by default), float32."""
        w = torch.arange(self.lengths[r] // self.compressor.ratio) if entries is None else entries
        slots = self.entry_table[r, w // self.rows] * self.rows + w % self.rows
        return load_rows(self.entries, slots, self.layout, self.compressor.width, self.rope_dim)


def deal(counts: list[int], seed: int, unwanted) -> tuple[torch.Tensor, int]:
    """A table whose blocks (from 1 on) are dealt at random, with rows and columns to spare; the number of blocks."""
    ids = list(range(1, 1 + sum(counts)))
    random.Random(seed).shuffle(ids)
    table = torch.full((len(counts) + 3, max(counts) + 2), -7, dtype=torch.int32)
    for r, count in enumerate(counts):
        for i in range(count):
            block = ids.pop()
            table[r, i] = 0 if unwanted(r, i) else block
    return table, 1 + sum(counts)
