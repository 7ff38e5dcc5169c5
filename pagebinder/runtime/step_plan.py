"""Everything one engine step tells the graph, in one packed buffer that goes to the device in one copy.

buffer  | input_ids | positions | logits_rows | query_start_loc | seq_lens | slot_mapping_0 | block_table_0 | ...
        ^ every field starts at a multiple of 64 bytes; its tensor is a view of the buffer

input_ids, positions  [T] int64      flat tokens, one request after the other
logits_rows           [L] int64      tokens whose logits are wanted
query_start_loc       [R + 1] int32  first token of each request
seq_lens              [R] int32      context + new tokens of each request
per KV group g:
slot_mapping_g        [T] int32      where each token's state is written: block * block size + offset
block_table_g         [R, M] int32   blocks of each request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagebinder.runtime.scheduler_output import SchedulerOutput

ALIGNMENT_BYTES = 64
INITIAL_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step, on the device. `tensors` has one entry per metadata input of the paged graph.

    `sampling` lists the request ids whose next token is sampled, in the order of the rows of the logits.
    """

    num_tokens: int
    num_reqs: int
    tensors: dict[str, torch.Tensor]
    sampling: tuple[str, ...]


class BlockTables:
    """Block tables as int32 rows that are extended, never rebuilt, while a request runs.

    Blocks that left a window stay in the row: no query can see them, so no kernel reads the entry.
    """

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._rows: dict[str, list[tuple[np.ndarray, int]]] = {}

    def row(self, request_id: str, group: int, block_ids: Sequence[int]) -> np.ndarray:
        """The row of one request in one group, as long as its block table."""
        rows = self._rows.setdefault(request_id, [(np.zeros(16, np.int32), 0)] * self.num_groups)
        array, known = rows[group]
        count = len(block_ids)
        if count > known:
            if count > len(array):
                array = np.concatenate([array, np.zeros(max(count, len(array)), np.int32)])
            elif known == 0:
                array = array.copy()
            array[known:count] = block_ids[known:]
            rows[group] = (array, count)
        return array[:count]

    def drop(self, request_id: str) -> None:
        """Forget a request that finished or was preempted."""
        self._rows.pop(request_id, None)


class StepPlanner:
    """Builds step plans into a reused host buffer (pinned when the device is a GPU)."""

    def __init__(self, block_sizes: Sequence[int], device: torch.device) -> None:
        self.block_sizes = tuple(block_sizes)
        self.device = device
        self.tables = BlockTables(len(self.block_sizes))
        self._host = torch.zeros(0, dtype=torch.uint8)

    def build(self, output: SchedulerOutput, block_ids_of) -> StepPlan:
        """Pack a scheduled step. `block_ids_of(request_id)` gives the live block table of each group."""
        for request_id in output.preempted_ids:
            self.tables.drop(request_id)
        items = output.scheduled
        rows = [
            [self.tables.row(item.request.request_id, g, ids) for item, ids in zip(items, column)]
            for g, column in enumerate(zip(*(block_ids_of(i.request.request_id) for i in items)))
        ]
        widths = [max((len(r) for r in group_rows), default=1) for group_rows in rows]
        sampling = [i for i in items if i.samples]
        fields = self._fields(output.total_num_tokens, len(items), len(sampling), widths)
        tensors, arrays = self._allocate(fields)
        self._fill_tokens(items, arrays)
        for g, group_rows in enumerate(rows):
            self._fill_group(g, items, group_rows, arrays)
        return StepPlan(
            num_tokens=output.total_num_tokens,
            num_reqs=len(items),
            tensors=self._to_device(tensors),
            sampling=tuple(i.request.request_id for i in sampling),
        )

    @staticmethod
    def _fields(num_tokens: int, num_reqs: int, num_logits: int, widths: Sequence[int]):
        fields = [
            ("input_ids", (num_tokens,), np.int64),
            ("positions", (num_tokens,), np.int64),
            ("logits_rows", (num_logits,), np.int64),
            ("query_start_loc", (num_reqs + 1,), np.int32),
            ("seq_lens", (num_reqs,), np.int32),
        ]
        for g, width in enumerate(widths):
            fields.append((f"slot_mapping_{g}", (num_tokens,), np.int32))
            fields.append((f"block_table_{g}", (num_reqs, width), np.int32))
        return fields

    def _allocate(self, fields):
        """Place the fields in the host buffer; returns (name, offset, shape, dtype) and numpy views."""
        places, offset = [], 0
        for name, shape, dtype in fields:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            places.append((name, offset, size, shape, dtype))
            offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if offset > self._host.numel():
            pinned = self.device.type == "cuda"
            self._host = torch.zeros(
                max(2 * offset, INITIAL_BUFFER_BYTES), dtype=torch.uint8, pin_memory=pinned
            )
        self._used_bytes = offset
        raw = self._host.numpy()
        arrays = {
            name: raw[start : start + size].view(dtype).reshape(shape)
            for name, start, size, shape, dtype in places
        }
        return places, arrays

    @staticmethod
    def _fill_tokens(items, arrays) -> None:
        start, row = 0, 0
        arrays["query_start_loc"][0] = 0
        for i, item in enumerate(items):
            end, first, last = start + item.num_new_tokens, item.start, item.start + item.num_new_tokens
            arrays["input_ids"][start:end] = item.request.all_token_ids[first:last]
            arrays["positions"][start:end] = np.arange(first, last)
            arrays["query_start_loc"][i + 1] = end
            arrays["seq_lens"][i] = last
            if item.samples:
                arrays["logits_rows"][row] = end - 1
                row += 1
            start = end

    def _fill_group(self, g: int, items, rows: list[np.ndarray], arrays) -> None:
        block_size = self.block_sizes[g]
        slots, table = arrays[f"slot_mapping_{g}"], arrays[f"block_table_{g}"]
        table.fill(0)
        start = 0
        for i, (item, row) in enumerate(zip(items, rows)):
            table[i, : len(row)] = row
            positions = np.arange(item.start, item.start + item.num_new_tokens)
            end = start + item.num_new_tokens
            slots[start:end] = row[positions // block_size] * block_size + positions % block_size
            start = end

    def _to_device(self, places) -> dict[str, torch.Tensor]:
        buffer = self._host[: self._used_bytes]
        if self.device.type != "cpu":
            buffer = buffer.to(self.device, non_blocking=True)
        return {
            name: buffer[start : start + size].view(torch.from_numpy(np.empty(0, dtype)).dtype).view(shape)
            for name, start, size, shape, dtype in places
        }
