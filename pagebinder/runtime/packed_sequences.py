"""Inputs to run a paged graph on several sequences at once, in as many calls as wanted, over one arena.

    sequences a, b, c of 5, 3 and 1 tokens          call 1: a0 a1 | b0          call 2: a2 a3 a4 | b1 b2 | c0
    blocks are dealt in random order, block 0 is null, unused columns of a table are null

This is how packing, chunked prefill and block tables are compared with sequences that were run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.kv import KVPlan
from pagebinder.runtime.shared_prefixes import nothing_shared


class PackedSequences:
    """Sequences with blocks for all their tokens.

    Args:
        ids: token ids [T_i] int64 of each sequence.
        encoder_states: [E_i, C] of each, for an encoder-decoder.
        convert: applied to each cache before the first call, for example to another dtype.
    """

    def __init__(
        self,
        plan: KVPlan,
        states: Sequence,
        ids: Sequence[torch.Tensor],
        *,
        encoder_states: Sequence[torch.Tensor] | None = None,
        convert: Callable[[torch.Tensor], torch.Tensor] = lambda cache: cache,
    ) -> None:
        self.plan, self.ids, self.encoder_states = plan, ids, encoder_states
        self.device = ids[0].device
        # Per group and sequence: how many blocks, then which.
        counts = [[-(-self._entries(g, i) // g.block_size) for i in range(len(ids))] for g in plan.groups]
        num_blocks = 1 + sum(map(sum, counts))
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0), device="cpu") + 1
        pieces = iter(order.split([count for group in counts for count in group]))
        self.tables = [self._table([next(pieces) for _ in group]) for group in counts]
        arena = KVArena(plan, states, num_blocks, self.device)
        self.caches = {name: convert(cache) for name, cache in arena.caches.items()}

    def _entries(self, group, sequence: int) -> int:
        """Tokens whose state a sequence keeps in a group."""
        if group.spec.kind == "cross_attention":
            return len(self.encoder_states[sequence])
        return len(self.ids[sequence])

    def _table(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        table = torch.zeros(len(blocks), max(map(len, blocks)), dtype=torch.int32, device="cpu")
        for row, ids in enumerate(blocks):
            table[row, : len(ids)] = ids
        return table.to(self.device)

    def inputs(self, spans: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        """All inputs of one call that computes tokens [start, end) of every sequence; start == end: none of it.

        Calls must come in order, as each reads what the earlier ones wrote. Encoder states are written by the call
        that computes a sequence's first tokens.
        """
        counts = torch.tensor([end - start for start, end in spans], device="cpu")
        starts = torch.tensor([start for start, _ in spans], device="cpu")
        rows = torch.arange(len(spans), device="cpu").repeat_interleave(counts)
        positions = torch.cat([torch.arange(start, end, device="cpu") for start, end in spans])
        inputs = {
            "input_ids": torch.cat([x[start:end] for x, (start, end) in zip(self.ids, spans)]),
            "positions": positions,
            "logits_rows": torch.arange(len(positions), device="cpu"),
            "query_start_loc": torch.cat([torch.zeros(1, device="cpu"), counts.cumsum(0)]).to(torch.int32),
            "seq_lens": (starts + counts).to(torch.int32),
            **nothing_shared(len(self.plan.groups), len(spans), len(positions), self.device),
        }
        encoded = [i for i, (start, end) in enumerate(spans) if start == 0 < end]
        if self.encoder_states is not None:
            inputs |= self._encoder_inputs(encoded)
        for g, group in enumerate(self.plan.groups):
            inputs[f"block_table_{g}"] = self.tables[g]
            if "slot_mapping" in group.spec.step_inputs:
                of = (rows, positions)
                of = self._encoder_rows(encoded) if group.spec.kind == "cross_attention" else of
                inputs[f"slot_mapping_{g}"] = self._slots(g, *of)
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        return inputs | self.caches

    def _slots(self, g: int, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Slot of place p of a sequence: its block of p // B, row p % B. No places: one slot that is not written."""
        if not len(places):
            return torch.tensor([-1], dtype=torch.int32, device="cpu")
        size = self.plan.groups[g].block_size
        blocks = self.tables[g].cpu()[rows, places // size]
        return (blocks * size + places % size).to(torch.int32)

    def _encoder_rows(self, encoded: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        lens = torch.tensor([len(self.encoder_states[i]) for i in encoded], dtype=torch.int64, device="cpu")
        rows = torch.tensor(encoded, dtype=torch.int64, device="cpu").repeat_interleave(lens)
        return rows, torch.cat(
            [torch.arange(0, device="cpu"), *(torch.arange(int(n), device="cpu") for n in lens)]
        )

    def _encoder_inputs(self, encoded: Sequence[int]) -> dict[str, torch.Tensor]:
        """States of the sequences that begin, one after the other; one row of zeros if none does."""
        first = self.encoder_states[0]
        states = [self.encoder_states[i] for i in encoded] or [torch.zeros_like(first[:1])]
        lens = torch.tensor([len(x) for x in self.encoder_states], dtype=torch.int32, device="cpu")
        return {"encoder_states": torch.cat(states), "encoder_lens": lens}

    def split(self, rows: torch.Tensor, spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Rows [T, ...] that a call returned, by sequence."""
        return list(rows.split([end - start for start, end in spans]))
