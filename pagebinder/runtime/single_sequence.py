"""Inputs to run a paged graph on one whole sequence: a scratch cache, one request, logits of every token.

This is how a graph with caches is compared with a graph without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.kv import KVPlan
from pagebinder.runtime.shared_prefixes import nothing_shared


def single_sequence_inputs(
    plan: KVPlan,
    states: Sequence,
    input_ids: torch.Tensor,
    *,
    start: int = 0,
    arena: KVArena | None = None,
    encoder_states: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """All inputs of a paged graph for tokens [start, start + T) of one sequence.

    Args:
        input_ids: [T] int64. start: tokens that an earlier call with the same `arena` has written.
        arena: None makes a fresh one just large enough.
        encoder_states: [E, C], what the encoder of an encoder-decoder returned for this sequence; every call
            writes its keys and values (again).
    """
    device, end = input_ids.device, start + len(input_ids)
    sizes = [group.block_size for group in plan.groups]
    written = [
        torch.arange(len(encoder_states), device=device)
        if group.spec.kind == "cross_attention"
        else torch.arange(start, end, device=device)
        for group in plan.groups
    ]
    counts = [-(-(int(p[-1]) + 1) // size) for p, size in zip(written, sizes)]
    arena = arena or KVArena(plan, states, 1 + len(counts) * max(counts), device)
    positions = torch.arange(start, end, device=device)
    inputs = {
        "input_ids": input_ids,
        "positions": positions,
        "logits_rows": torch.arange(len(input_ids), device=device),
        "query_start_loc": torch.tensor([0, len(input_ids)], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([end], dtype=torch.int32, device=device),
        **nothing_shared(len(plan.groups), 1, len(input_ids), device),
        **arena.caches,
    }
    if encoder_states is not None:
        inputs["encoder_states"] = encoder_states
        inputs["encoder_lens"] = torch.tensor([len(encoder_states)], dtype=torch.int32, device=device)
    first = 1
    # Each group gets its share of the arena, so that a continued sequence finds its blocks again.
    share = (arena.num_blocks - 1) // len(sizes)
    for g, (size, count) in enumerate(zip(sizes, counts)):
        table = torch.arange(first, first + count, device=device)
        inputs[f"block_table_{g}"] = table.to(torch.int32)[None]
        if "slot_mapping" in plan.groups[g].spec.step_inputs:
            slots = table[written[g] // size] * size + written[g] % size
            inputs[f"slot_mapping_{g}"] = slots.to(torch.int32)
        first += share
    return inputs
