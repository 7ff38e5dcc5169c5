"""Everything one engine step tells the graph: step data in one packed buffer, block tables as they lie.

buffer  | input_ids | positions | logits_rows | query_start_loc | seq_lens | slot_mapping_0 | slot_mapping_1 | ...
        ^ every field starts at a multiple of 64 bytes; its tensor is a view of the buffer

input_ids, positions  [T] int64      flat tokens, one request after the other
logits_rows           [L] int64      tokens whose logits are wanted
query_start_loc       [R + 1] int32  first token of each request; a request that computes nothing has none
seq_lens              [R] int32      context + new tokens of each request
per KV group g, as far as its layers' ops read them (`KVCacheSpec.step_inputs`):
slot_mapping_g        [T] int32      where each token's state is written: block * block size + offset
block_table_g         [S, M] int32   blocks of each request, S >= R: the KV cache's own rows, not copied on a CPU
and for the groups of cross attention, if there are any:
slot_mapping_g        [E] int32      where keys of this step's encoder tokens are written; [-1] if there are none
encoder_lens          [R] int32      encoder tokens of each request

Requests are in the order of their rows. With the same T, R and L as in the step before, the same views serve again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pagebinder.runtime.kv import KVCacheGroup
from pagebinder.runtime.kv.rows import RowArray
from pagebinder.runtime.scheduler_output import SchedulerOutput

ALIGNMENT_BYTES = 64
INITIAL_BUFFER_BYTES = 1 << 16
# A slot that nothing is written to.
NOWHERE = -1
TORCH_DTYPES = {np.int32: torch.int32, np.int64: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step, on the device. `tensors` has one entry per metadata input of the paged graph."""

    num_tokens: int
    num_reqs: int
    tensors: dict[str, torch.Tensor]


class Place(NamedTuple):
    """Where a field lies in a buffer."""

    name: str
    start: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: type


def slot_groups(groups: Sequence[KVCacheGroup]) -> tuple[int, ...]:
    """Groups whose ops are told where each token of the step is written."""
    written = (g for g, group in enumerate(groups) if "slot_mapping" in group.spec.step_inputs)
    return tuple(g for g in written if groups[g].spec.kind != "cross_attention")


def step_fields(
    slot_groups: Sequence[int], num_tokens: int, num_reqs: int, num_logits: int, widths: Sequence[int]
) -> list[tuple]:
    """(name, shape, dtype) of a step's metadata. `widths`: columns of the block tables that are copied."""
    fields = [
        ("input_ids", (num_tokens,), np.int64),
        ("positions", (num_tokens,), np.int64),
        ("logits_rows", (num_logits,), np.int64),
        ("query_start_loc", (num_reqs + 1,), np.int32),
        ("seq_lens", (num_reqs,), np.int32),
    ]
    fields += [(f"slot_mapping_{g}", (num_tokens,), np.int32) for g in slot_groups]
    return fields + [(f"block_table_{g}", (num_reqs, width), np.int32) for g, width in enumerate(widths)]


def place_fields(fields: Sequence[tuple]) -> tuple[list[Place], int]:
    """Lay out (name, shape, dtype) one after the other; returns the places and the bytes of all."""
    places, offset = [], 0
    for name, shape, dtype in fields:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        places.append(Place(name, offset, num_bytes, shape, dtype))
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places, offset


class StepPlanner:
    """Builds step plans into reused host buffers (pinned when the device is a GPU).

    `tables`: per group the KV cache's block tables by row. `max_steps_in_flight`: a plan must stay as it is until
    its step is done, so that many later plans leave it alone; with more than 1 the tables are copied too.
    `encoder_lens`: encoder tokens by row, for cross attention. `shifts_positions`: requests may have
    `position_shifts`.
    """

    def __init__(
        self, groups: Sequence[KVCacheGroup], tables: Sequence[RowArray], device: torch.device, *,
        max_steps_in_flight: int = 1, encoder_lens: RowArray | None = None, shifts_positions: bool = False,
    ) -> None:  # fmt: skip
        self.groups = tuple(groups)
        self.tables = tuple(tables)
        self.device = device
        self._whole_tables = device.type == "cpu" and max_steps_in_flight == 1
        written = [g for g, group in enumerate(self.groups) if "slot_mapping" in group.spec.step_inputs]
        # Slots of cross-attention layers belong to encoder tokens, which are no tokens of this step.
        cross = [g for g in written if self.groups[g].spec.kind == "cross_attention"]
        self._slot_groups = slot_groups(self.groups)
        self._cross_groups = tuple(cross)
        assert not cross or encoder_lens is not None, "cross attention needs encoder_lens"
        self._encoder_lens = encoder_lens
        self._shifts_positions = shifts_positions
        self._buffers = [_Buffer(device) for _ in range(max_steps_in_flight)]

    def build(self, output: SchedulerOutput, encoder_rows: Sequence[int] = ()) -> StepPlan:
        """Pack a scheduled step that has at least one token. `encoder_rows`: whose encoder runs in it, in the order
        of the encoder states."""
        num_reqs, num_tokens = len(output.counts), output.total_num_tokens
        ends = output.starts + output.counts
        widths = () if self._whole_tables else self._table_widths(ends)
        buffer = self._buffers[0]
        if len(self._buffers) > 1:
            self._buffers.append(self._buffers.pop(0))
        num_encoded = sum(int(self._encoder_lens.data[row]) for row in encoder_rows)
        buffer.wait()
        sizes = (num_tokens, num_reqs, output.num_logits, widths, max(num_encoded, 1))
        if buffer.sizes != sizes:
            buffer.place(sizes, self._fields(*sizes))
        self.fill(output, buffer.arrays)
        if self._cross_groups:
            self._fill_cross(encoder_rows, num_reqs, buffer.arrays)
        tensors = buffer.to_device()
        if self._whole_tables:
            for g, table in enumerate(self.tables):
                tensors[f"block_table_{g}"] = torch.from_numpy(table.data)
        return StepPlan(num_tokens=num_tokens, num_reqs=num_reqs, tensors=tensors)

    def _fields(
        self, num_tokens: int, num_reqs: int, num_logits: int, widths: Sequence[int], num_encoded: int
    ):
        fields = step_fields(self._slot_groups, num_tokens, num_reqs, num_logits, widths)
        if self._cross_groups:
            fields += [(f"slot_mapping_{g}", (num_encoded,), np.int32) for g in self._cross_groups]
            fields.append(("encoder_lens", (num_reqs,), np.int32))
        return fields

    def _table_widths(self, ends: np.ndarray) -> tuple[int, ...]:
        """Columns that a step can need. Tables of other things than tokens are taken whole."""
        longest = int(ends.max(initial=1))
        return tuple(
            min(table.data.shape[1], max(1, -(-longest // group.block_size)))
            if group.spec.kind != "cross_attention"
            else table.data.shape[1]
            for group, table in zip(self.groups, self.tables)
        )

    def fill(self, output: SchedulerOutput, arrays: dict[str, np.ndarray]) -> None:
        """Write a step's metadata into arrays of `step_fields`."""
        starts, counts = output.starts, output.counts
        ends = starts + counts
        arrays["query_start_loc"][0] = 0
        np.cumsum(counts, out=arrays["query_start_loc"][1:])
        arrays["seq_lens"][:] = ends
        last = arrays["query_start_loc"][1:] - 1
        arrays["logits_rows"][:] = (
            last[output.sampling] if not output.drafts else _drafted_logits(output, last)
        )
        positions, rows = arrays["positions"], None
        if output.total_num_tokens == len(counts) and counts.min() == 1:  # one token each
            positions[:] = starts
            rows = slice(None)
        else:
            rows = np.repeat(np.arange(len(counts)), counts)
            positions[:] = np.arange(len(positions)) + (ends - 1 - last)[rows]
        _fill_tokens(output, ends, last, arrays["input_ids"])
        for g in self._slot_groups:
            size, table = self.groups[g].block_size, self.tables[g].data
            blocks, offsets = np.divmod(positions, size)
            row_ids = np.arange(len(counts)) if isinstance(rows, slice) else rows
            arrays[f"slot_mapping_{g}"][:] = table[row_ids, blocks] * size + offsets
        if self._shifts_positions:
            _shift_positions(output, last, positions)
        for g, table in enumerate(self.tables):
            packed = arrays.get(f"block_table_{g}")
            if packed is not None:
                packed[:] = table.data[: packed.shape[0], : packed.shape[1]]

    def _fill_cross(self, encoder_rows: Sequence[int], num_reqs: int, arrays: dict[str, np.ndarray]) -> None:
        lens = self._encoder_lens.data
        arrays["encoder_lens"][:] = lens[:num_reqs]
        places = np.concatenate([np.arange(lens[row]) for row in encoder_rows]) if encoder_rows else None
        for g in self._cross_groups:
            slots, size, table = arrays[f"slot_mapping_{g}"], self.groups[g].block_size, self.tables[g].data
            if places is None:
                slots[:] = NOWHERE
                continue
            blocks, offsets = np.divmod(places, size)
            slots[:] = table[np.repeat(encoder_rows, lens[encoder_rows]), blocks] * size + offsets


def _fill_tokens(output: SchedulerOutput, ends: np.ndarray, last: np.ndarray, tokens: np.ndarray) -> None:
    """Newest tokens come from their array, guessed ones from the step, all others from the requests' lists. `ends`,
    `last` [R]: tokens of each request after the step, and where its last one stands among the step's."""
    counts = output.counts
    if len(output.sampling) == len(counts) == len(tokens):
        tokens[:] = output.last_token
        return
    if output.drafts:
        guessed = output.draft_counts
        for row, drafts in output.drafts.items():
            tokens[last[row] + 1 - len(drafts) : last[row] + 1] = drafts
        counts, ends, last = counts - guessed, ends - guessed, last - guessed
    tokens[last[output.sampling]] = output.last_token[output.sampling]
    samples = np.zeros(len(counts), bool)
    samples[output.sampling] = True
    for row in np.flatnonzero(counts > samples).tolist():
        end, count = int(ends[row]), int(counts[row])
        stop = int(last[row]) + 1
        tokens[stop - count : stop] = output.requests[row].all_token_ids[end - count : end]


def _shift_positions(output: SchedulerOutput, last: np.ndarray, positions: np.ndarray) -> None:
    """Places of tokens in their requests become their positions, where images count otherwise. `last` [R]: where each
    request's last token stands among the step's."""
    for row in np.flatnonzero(output.counts).tolist():
        if shifts := output.requests[row].position_shifts:
            stop = int(last[row]) + 1
            places = positions[stop - int(output.counts[row]) : stop]
            firsts, by = np.array(shifts, np.int64).T
            places += np.concatenate(([0], by))[np.searchsorted(firsts, places, side="right")]


def _drafted_logits(output: SchedulerOutput, last: np.ndarray) -> np.ndarray:
    """Tokens whose logits are wanted [L]: of every row that samples its newest token and its guessed ones."""
    guessed = output.draft_counts[output.sampling]
    within = np.arange(output.num_logits) - np.repeat(output.first_logits, guessed + 1)
    return np.repeat(last[output.sampling] - guessed, guessed + 1) + within


class _Buffer:
    """Host memory of one plan and its views, which are kept while the sizes stay the same."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes: tuple = ()
        self.arrays: dict[str, np.ndarray] = {}
        self._host = torch.zeros(0, dtype=torch.uint8, device="cpu")
        self._used_bytes = 0
        self._places: list[Place] = []
        self._views: dict[str, torch.Tensor] = {}
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Until the last copy to the device is done: then the host may write here again."""
        if self._copied is not None:
            self._copied.synchronize()

    def place(self, sizes: tuple, fields) -> None:
        """Lay out `fields` (name, shape, dtype), for a step of these sizes."""
        self.sizes = sizes
        self._places, offset = place_fields(fields)
        self._used_bytes = offset
        if offset > self._host.numel():
            pinned = self.device.type == "cuda"
            size = max(2 * offset, INITIAL_BUFFER_BYTES)
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu")
            self._host.numpy().fill(0)  # torch.zeros would wait for threads in a child of fork(): forks.py
        raw = self._host.numpy()
        self.arrays = {
            name: raw[start : start + size].view(dtype).reshape(shape)
            for name, start, size, shape, dtype in self._places
        }
        self._views = self._cut(self._host) if self.device.type == "cpu" else {}

    def to_device(self) -> dict[str, torch.Tensor]:
        """The fields' tensors, in a dict of the caller's own."""
        if self.device.type == "cpu":
            return dict(self._views)
        on_device = self._host[: self._used_bytes].to(self.device, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self.device))
        return self._cut(on_device)

    def _cut(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: buffer[start : start + size].view(TORCH_DTYPES[dtype]).view(shape)
            for name, start, size, shape, dtype in self._places
        }
