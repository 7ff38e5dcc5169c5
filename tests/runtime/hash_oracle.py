"""What the hash model must answer, from the tokens alone: no cache, no batch, plain integers.

Also its layers as data, and the numbers that both computations use. All arithmetic is modulo 2^64. Layer at position
p with input x_p:
    attention, ring    y = mix(x_p + SCALE * sum(mix(row_j + j * PLACE) for visible j)),  row_j = mix(x_j)
    recurrent          s_p = DECAY * s_{p-1} + mix(x_p);   y = mix(x_p + SCALE * s_p)
    short convolution  y = mix(x_p + SCALE * sum(DECAY^i * x_{p-i} for i < kernel))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebinder.custom_ops.layer_state import (
    AttentionState,
    LatentState,
    LayerState,
    RecurrentState,
    RingState,
    ShortConvState,
)

VOCAB_SIZE = 50
EOS = 0
ROW_BYTES = 8

MASK = (1 << 64) - 1
MIX, PLACE, SCALE, DECAY, TOKEN = (
    0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xA0761D6478BD642F,
)  # fmt: skip
# Logits are looked up by hash: random rows, so that drawn tokens depend on the seed and greedy ones do not.
LOGITS = torch.randn(1021, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 2


# Layers


def _rows(kind: type, **options) -> LayerState:
    return kind(layer="", index=0, dtype="uint8", num_kv_heads=1, head_dim=ROW_BYTES, head_dim_v=0, **options)


def full() -> LayerState:
    return _rows(AttentionState)


def window(tokens: int) -> LayerState:
    return _rows(AttentionState, window=tokens)


def chunk(tokens: int) -> LayerState:
    return _rows(AttentionState, chunk=tokens)


def latent(window: int | None = None) -> LayerState:
    return _rows(LatentState, latent_dim=ROW_BYTES, window=window)


def recurrent() -> LayerState:
    return RecurrentState(layer="", index=0, dtype="uint8", shape=(ROW_BYTES,))


def short_conv(kernel: int) -> LayerState:
    return ShortConvState(layer="", index=0, dtype="uint8", shape=(ROW_BYTES, kernel - 1))


def ring(rows: int, resume_multiple: int | None = None) -> LayerState:
    """Sees the last `rows` tokens; with a resume multiple only those since the last multiple of it."""
    return RingState(
        layer="", index=0, dtype="uint8", rows=rows, width=ROW_BYTES, resume_multiple=resume_multiple
    )


def first_visible(state: LayerState, position):
    """First position that a query at `position` (int or array) sees in an attention or ring layer."""
    if isinstance(state, RingState):
        first = position - state.rows + 1
        if state.resume_multiple is None:
            return first
        start = position // state.resume_multiple * state.resume_multiple
        return first + (start - first) * (start > first)
    if getattr(state, "chunk", None) is not None:
        return position // state.chunk * state.chunk
    limit = getattr(state, "window", None)
    return position * 0 if limit is None else position - limit + 1


def mix_int(z: int) -> int:
    z = ((z ^ (z >> 32)) * MIX) & MASK
    return z ^ (z >> 29)


class Oracle:
    """The hash of a growing list of tokens, from the tokens alone. `logits` is the row for the next token."""

    def __init__(self, states: Sequence[LayerState], tokens: Sequence[int] = ()) -> None:
        self.states = states
        self.num_tokens = 0
        self.hash = 0
        # Per layer: attention and ring keep prefix sums, recurrent layers their state, convolutions their inputs.
        self.memory: list[list[int]] = [[0] for _ in states]
        for token in tokens:
            self.feed(token)

    def copy(self) -> Oracle:
        twin = Oracle(self.states)
        twin.num_tokens, twin.hash = self.num_tokens, self.hash
        twin.memory = [list(values) for values in self.memory]
        return twin

    def feed(self, token: int) -> None:
        p = self.num_tokens
        x = mix_int((token * TOKEN + p * PLACE) & MASK)
        for state, memory in zip(self.states, self.memory):
            x = mix_int((x + SCALE * self._seen(state, memory, p, x)) & MASK)
        self.num_tokens, self.hash = p + 1, x

    @property
    def logits(self) -> torch.Tensor:
        return LOGITS[self.hash % len(LOGITS)]

    @staticmethod
    def _seen(state: LayerState, memory: list[int], p: int, x: int) -> int:
        if isinstance(state, ShortConvState):
            memory.append(x)
            taps = range(min(state.shape[1] + 1, p + 1))
            return sum(pow(DECAY, i, 1 << 64) * memory[-1 - i] for i in taps)
        if isinstance(state, RecurrentState):
            memory[0] = (DECAY * memory[0] + mix_int(x)) & MASK
            return memory[0]
        memory.append((memory[-1] + mix_int((mix_int(x) + p * PLACE) & MASK)) & MASK)
        return memory[-1] - memory[max(0, first_visible(state, p))]
