"""A model of hashes: real caches, real step metadata, no neural network.

    token, position --> x --> [ layer 0 ] --> x --> [ layer 1 ] --> ... --> x = hash of all that the token may see
                                 |   ^                                       |
                           write v   | read                                  +--> row of logits
                              KV arena, through slots and block tables

Every layer writes 8-byte rows into the arena and folds exactly the rows that its kind may see into its output. One
stale, foreign, lost or overwritten row changes the hash, and with it this token and all that follow.
`hash_oracle` says what the layers compute; here it is done through the cache, for a ragged batch of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagebinder.custom_ops.layer_state import LayerState, RecurrentState, RingState, ShortConvState
from pagebinder.runtime.engine import EngineModel
from pagebinder.runtime.kv import KVCacheGroup, KVPlan, LayerPage, Workload, spec_from_state
from tests.runtime.hash_oracle import DECAY, EOS, LOGITS, MIX, PLACE, SCALE, TOKEN, VOCAB_SIZE, first_visible

MAX_STEP_TOKENS = 1024
POWERS = np.array([pow(DECAY, i, 1 << 64) for i in range(MAX_STEP_TOKENS + 1)], np.uint64)
INVERSE_POWERS = np.array([pow(DECAY, -i, 1 << 64) for i in range(MAX_STEP_TOKENS + 1)], np.uint64)


@dataclass(frozen=True)
class HashGroup:
    """Layers that share a block table with blocks of `block_size` tokens."""

    block_size: int
    layers: tuple[LayerState, ...]


def group(block_size: int, *layers: LayerState) -> HashGroup:
    return HashGroup(block_size, layers)


def hash_plan(groups: Sequence[HashGroup], max_model_len: int) -> tuple[KVPlan, tuple[LayerState, ...]]:
    """A plan with exactly these groups and block sizes, and the states numbered in order."""
    states, kv_groups, pages = [], [], []
    for g, wanted in enumerate(groups):
        specs, offset = [], 0
        for slot, state in enumerate(wanted.layers):
            name = f"layer{len(states)}"
            states.append(_numbered(state, name, len(states)))
            spec = spec_from_state(states[-1], wanted.block_size, max_model_len)
            pages.append(
                LayerPage(
                    layer=name, group=g, slot=slot, offset_bytes=offset, page_bytes=spec.page_size_bytes
                )
            )
            offset += spec.page_size_bytes
            specs.append(spec)
        names = tuple(page.layer for page in pages if page.group == g)
        kv_groups.append(KVCacheGroup(specs[0], names, tuple(specs)))
    plan = KVPlan(
        groups=tuple(kv_groups),
        layers=tuple(pages),
        bytes_per_block=max(g.page_bytes for g in kv_groups),
        max_model_len=max_model_len,
        workload=Workload.default(max_model_len),
        granularity=None,
    )
    return plan, tuple(states)


def _numbered(state: LayerState, name: str, index: int) -> LayerState:
    fields = {f: getattr(state, f) for f in state.__dataclass_fields__}
    return type(state)(**fields | {"layer": name, "index": index})


def hash_model(groups: Sequence[HashGroup], max_model_len: int) -> EngineModel:
    """What an engine needs of a compiled model, with the hash executable in it."""
    plan, states = hash_plan(groups, max_model_len)
    return EngineModel(
        executable=HashExecutable(plan, states),
        kv_plan=plan,
        states=states,
        device=torch.device("cpu"),
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        tokenizer=None,
    )


# The cached computation


def mix(z: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that spreads every bit."""
    z = (z ^ (z >> np.uint64(32))) * np.uint64(MIX)
    return z ^ (z >> np.uint64(29))


class Batch:
    """A step's requests as ragged arrays: row, position and place in the step of every token."""

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        self.ends = inputs["seq_lens"].numpy().astype(np.int64)
        offsets = inputs["query_start_loc"].numpy().astype(np.int64)
        self.counts = np.diff(offsets)
        self.starts = self.ends - self.counts
        self.first = offsets[:-1]
        self.positions = inputs["positions"].numpy()
        self.rows = np.repeat(np.arange(len(self.ends)), self.counts)
        assert (self.counts >= 0).all() and (self.starts >= 0).all()
        assert (self.positions == ragged_ranges(self.starts, self.ends)[0]).all(), (
            "positions and lengths differ"
        )

    def blocks(self, table: np.ndarray, rows: np.ndarray, logical: np.ndarray) -> np.ndarray:
        """Block ids of logical blocks that must be there."""
        ids = table[rows, logical]
        assert (ids > 0).all(), "a needed block is the null block"
        return ids


def ragged_ranges(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All ranges one after the other, and where each begins."""
    counts = ends - starts
    offsets = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - offsets, counts), offsets


class HashExecutable:
    """Runs the layers over the arena's caches. Reads what the metadata says and nothing else."""

    name = "hash"

    def __init__(self, plan: KVPlan, states: Sequence[LayerState]) -> None:
        self.layers = [(state, page.group, plan.groups[page.group].block_size)
                       for state, page in zip(states, plan.layers, strict=True)]  # fmt: skip
        self._views: dict[tuple, np.ndarray] = {}

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Step metadata and caches by name -> logits [L, V]."""
        batch = Batch(inputs)
        x = inputs["input_ids"].numpy().astype(np.uint64) * np.uint64(TOKEN)
        x = mix(x + batch.positions.astype(np.uint64) * np.uint64(PLACE))
        for state, g, block_size in self.layers:
            cache = self._cache(inputs[f"kv_cache_{state.index}"])
            table = inputs[f"block_table_{g}"].numpy()
            assert len(table) >= len(batch.ends) and table.dtype == np.int32
            if isinstance(state, ShortConvState):
                x = _short_conv(cache, table, batch, x, block_size)
            elif isinstance(state, RecurrentState):
                x = _recurrent(cache, table, batch, x, block_size)
            elif isinstance(state, RingState):
                x = _ring(state, cache, table, batch, x)
            else:
                slots = inputs[f"slot_mapping_{g}"].numpy()
                x = _attention(state, cache, table, slots, batch, x, block_size)
        return LOGITS[torch.from_numpy((x % np.uint64(len(LOGITS))).astype(np.int64))[inputs["logits_rows"]]]

    def _cache(self, cache: torch.Tensor) -> np.ndarray:
        """The cache [N, ...] as rows of one hash each, [N, rows] uint64, in place."""
        # Layers of different groups begin at the same byte of a block.
        key = (cache.data_ptr(), cache.shape)
        view = self._views.get(key)
        if view is None:
            raw = cache.numpy()
            view = raw.reshape(len(raw), -1).view(np.uint64)
            assert np.shares_memory(view, raw)
            self._views[key] = view
        return view


def _fold(state: LayerState, batch: Batch, x: np.ndarray, keys: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """Layer output from the ragged rows `keys` of the positions [lows, ends) of each request."""
    positions, offsets = ragged_ranges(lows, batch.ends)
    total = np.zeros(len(keys) + 1, np.uint64)
    np.cumsum(mix(keys + positions.astype(np.uint64) * np.uint64(PLACE)), out=total[1:])
    shift = (offsets - lows)[batch.rows]
    first = np.maximum(first_visible(state, batch.positions), 0)
    seen = total[batch.positions + 1 + shift] - total[first + shift]
    return mix(x + np.uint64(SCALE) * seen)


def _lows(state: LayerState, batch: Batch) -> np.ndarray:
    """First position that any of a request's queries sees; its end if it has no query."""
    lows = np.maximum(first_visible(state, batch.starts), 0)
    return np.where(batch.counts > 0, lows, batch.ends)


def _attention(state, cache, table, slots, batch: Batch, x, block_size: int) -> np.ndarray:
    assert (slots // block_size > 0).all(), "a token is written to the null block"
    cache[slots // block_size, slots % block_size] = mix(x)
    lows = _lows(state, batch)
    positions, _ = ragged_ranges(lows, batch.ends)
    rows = np.repeat(np.arange(len(lows)), batch.ends - lows)
    keys = cache[batch.blocks(table, rows, positions // block_size), positions % block_size]
    return _fold(state, batch, x, keys, lows)


def _ring(state: RingState, cache, table, batch: Batch, x) -> np.ndarray:
    """Old rows are read before new ones overwrite them; of a long chunk only the last tokens stay."""
    lows = _lows(state, batch)
    positions, _ = ragged_ranges(lows, batch.ends)
    rows = np.repeat(np.arange(len(lows)), batch.ends - lows)
    keys = np.empty(len(positions), np.uint64)
    old = positions < batch.starts[rows]
    keys[old] = cache[batch.blocks(table, rows[old], 0), positions[old] % state.rows]
    keys[~old] = mix(x)
    kept = batch.positions >= batch.ends[batch.rows] - state.rows
    rows, positions = batch.rows[kept], batch.positions[kept]
    cache[batch.blocks(table, rows, 0), positions % state.rows] = mix(x)[kept]
    return _fold(state, batch, x, keys, lows)


def _recurrent(cache, table, batch: Batch, x, block_size: int) -> np.ndarray:
    start = _start_states(cache, table, batch, block_size)[batch.rows, 0]
    power = batch.positions - batch.starts[batch.rows] + 1
    total = np.zeros(len(x) + 1, np.uint64)
    np.cumsum(INVERSE_POWERS[power] * mix(x), out=total[1:])
    states = POWERS[power] * (start + total[1:] - total[batch.first[batch.rows]])
    _write_checkpoints(cache, table, batch, states[:, None], block_size)
    return mix(x + np.uint64(SCALE) * states)


def _short_conv(cache, table, batch: Batch, x, block_size: int) -> np.ndarray:
    depth = cache.shape[1]  # kernel - 1 inputs before the present one
    before = _start_states(cache, table, batch, block_size)
    # Per request: the inputs of its start state, then those of the step.
    at = np.arange(len(x)) + (batch.rows + 1) * depth
    inputs = np.empty(len(x) + len(before) * depth, np.uint64)
    inputs[(batch.first[:, None] + np.arange(len(before))[:, None] * depth) + np.arange(depth)] = before
    inputs[at] = x
    seen = sum(POWERS[i] * inputs[at - i] for i in range(depth + 1))
    states = inputs[at[:, None] - np.arange(depth)[::-1]]
    _write_checkpoints(cache, table, batch, states, block_size)
    return mix(x + np.uint64(SCALE) * seen)


def _start_states(cache, table, batch: Batch, block_size: int) -> np.ndarray:
    """State before each request's first token of the step, [R, width]; zeros at the start of a context."""
    states = np.zeros((len(batch.starts), cache.shape[1]), np.uint64)
    rows = np.flatnonzero((batch.starts > 0) & (batch.counts > 0))
    states[rows] = cache[batch.blocks(table, rows, (batch.starts[rows] - 1) // block_size)]
    return states


def _write_checkpoints(cache, table, batch: Batch, states: np.ndarray, block_size: int) -> None:
    """Store the state after every block's last token and after the step's last, where a block wants it."""
    after = batch.positions + 1
    wanted = (after % block_size == 0) | (after == batch.ends[batch.rows])
    ids = table[batch.rows[wanted], (after[wanted] - 1) // block_size]
    cache[ids[ids > 0]] = states[wanted][ids > 0]
