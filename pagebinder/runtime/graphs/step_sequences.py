"""Steps of a serving loop of the user's own: which tokens of which sequences, as the inputs of a paged graph.

StepSequence(tokens=[7, 3, 9], start=5, blocks=[[4, 1]])       positions 5, 6, 7; one block table for each KV group
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagebinder.config_checks import is_int, plain_number
from pagebinder.custom_ops.prompt_rows import FIRST_ROW_ID
from pagebinder.errors import CaptureError, RequestError
from pagebinder.runtime.kv import KVCacheGroup
from pagebinder.runtime.step_plan import slot_groups

if TYPE_CHECKING:
    from pagebinder.runtime.graphs.step_graphs import StepGraphs


@dataclass(frozen=True, kw_only=True)
class StepSequence:
    """New tokens of one sequence in a step.

    tokens: ids to compute. start: tokens of the sequence that earlier steps have computed. blocks: for each KV group
    the sequence's block ids so far, in order; 0 where a block was given back, or is not wanted. shift: how much
    larger the tokens' positions are than their places, behind images that positions count otherwise.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[Sequence[int]]
    shift: int = 0


def table_widths(groups: Sequence[KVCacheGroup], max_model_len: int) -> tuple[int, ...]:
    """Columns of each group's block table for contexts of up to so many tokens.

    Raises CaptureError for cross attention: encoder prompts have no fixed size.
    """
    if any(group.spec.kind == "cross_attention" for group in groups):
        raise CaptureError(
            "Steps of an encoder-decoder are not captured: encoder prompts have no fixed size."
        )
    return tuple(1 if g.spec.kind == "ring" else max(1, -(-max_model_len // g.block_size)) for g in groups)


def pack_sequences(
    groups: Sequence[KVCacheGroup], widths: Sequence[int], sequences: Sequence[StepSequence]
) -> dict[str, np.ndarray]:
    """See `StepGraphs.pack`. Raises RequestError for a sequence that does not fit."""
    for i, one in enumerate(sequences):
        _check_sequence(i, one, groups, widths)
    counts = np.array([len(one.tokens) for one in sequences], np.int64)
    if not len(counts):
        raise RequestError("A step needs at least one sequence.")
    starts = np.array([one.start for one in sequences], np.int64)
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(rows)) + (starts - ends + counts)[rows]
    inputs = {
        "input_ids": np.concatenate([np.asarray(one.tokens, np.int64) for one in sequences]),
        "positions": positions + np.array([one.shift for one in sequences], np.int64)[rows],
        "logits_rows": ends - 1,
        "query_start_loc": np.concatenate([[0], ends]).astype(np.int32),
        "seq_lens": (starts + counts).astype(np.int32),
    }
    for g, width in enumerate(widths):
        table = np.zeros((len(counts), width), np.int32)
        for row, one in enumerate(sequences):
            table[row, : len(one.blocks[g])] = one.blocks[g]
        inputs[f"block_table_{g}"] = table
        if g in slot_groups(groups):
            blocks, offsets = np.divmod(positions, groups[g].block_size)
            inputs[f"slot_mapping_{g}"] = (table[rows, blocks] * groups[g].block_size + offsets).astype(
                np.int32
            )
    return inputs


def _check_sequence(i: int, one: StepSequence, groups: Sequence[KVCacheGroup], widths: Sequence[int]) -> None:
    if not isinstance(one, StepSequence):
        raise RequestError(f"sequence {i}: use a StepSequence, not {type(one).__name__}.")
    start = plain_number(one.start)
    if not len(one.tokens) or not is_int(start) or start < 0:
        raise RequestError(
            f"sequence {i}: give at least one token, and a whole number as start, at least 0 (it is {one.start!r})."
        )
    for name, numbers in (("tokens", one.tokens), *((f"blocks[{g}]", b) for g, b in enumerate(one.blocks))):
        if len(numbers) and np.asarray(numbers).dtype.kind not in "iu":
            raise RequestError(f"sequence {i}: {name} are no whole numbers.")
    if len(one.blocks) != len(groups):
        raise RequestError(
            f"sequence {i}: {len(one.blocks)} block tables, but the model has {len(groups)} KV groups."
        )
    end = one.start + len(one.tokens)
    for g, (group, width) in enumerate(zip(groups, widths)):
        if group.spec.kind == "ring":
            continue
        need = -(-end // group.block_size)
        if not need <= len(one.blocks[g]) <= width:
            raise RequestError(
                f"sequence {i}: {end} tokens take {need} blocks of {group.block_size} in group {g}; its table has "
                f"{len(one.blocks[g])} entries, of {width} at most."
            )


def check_inputs(
    graphs: StepGraphs, inputs: Mapping[str, np.ndarray | torch.Tensor]
) -> tuple[dict[str, np.ndarray], bool]:
    """A step's metadata as arrays, and whether every sequence has one token. Raises RequestError."""
    groups, written = graphs.plan.groups, slot_groups(graphs.plan.groups)
    names = ["input_ids", "positions", "logits_rows", "query_start_loc", "seq_lens"]
    names += [f"slot_mapping_{g}" for g in written] + [f"block_table_{g}" for g in range(len(groups))]
    missing, unknown = [n for n in names if n not in inputs], sorted(set(inputs) - set(names))
    if missing or unknown:
        raise RequestError(f"A step takes {', '.join(names)}; missing: {missing}, unknown: {unknown}.")
    arrays = {name: _array(name, inputs[name]) for name in names}
    num_tokens, num_reqs = len(arrays["input_ids"]), len(arrays["seq_lens"])
    shapes = {"positions": (num_tokens,), "query_start_loc": (num_reqs + 1,)}
    shapes |= {f"slot_mapping_{g}": (num_tokens,) for g in written}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise RequestError(f"{name} has the shape {arrays[name].shape}, not {shape}.")
    loc, lens = arrays["query_start_loc"], arrays["seq_lens"]
    counts = np.diff(loc)
    if not num_tokens or loc[0] != 0 or loc[-1] != num_tokens or (counts < 0).any():
        raise RequestError("query_start_loc must rise from 0 to the number of input_ids, at least 1.")
    if (lens < counts).any():
        raise RequestError("a length in seq_lens is less than the tokens that its sequence has in this step.")
    ids = arrays["input_ids"]
    tables = graphs.prompt_tables
    is_row = (ids >= FIRST_ROW_ID) & (ids < FIRST_ROW_ID + (0 if tables is None else len(tables.rows)))
    if tables is not None and tables.lookahead is not None and is_row.any():
        rows = torch.from_numpy(ids[is_row] - FIRST_ROW_ID)
        seen = np.flatnonzero(is_row) + tables.lookahead[rows.to(tables.lookahead.device)].cpu().numpy()
        if (seen >= np.repeat(loc[1:], counts)[is_row]).any():
            raise RequestError(
                "embeddings that see each other (parts of an image) are computed in one step, all of them."
            )
    _check_range("input_ids", ids[~is_row], 0, graphs.vocab_size or np.iinfo(np.int64).max)
    _check_range("logits_rows", arrays["logits_rows"], 0, num_tokens)
    num_blocks = min((len(cache) for cache in graphs.caches.values()), default=1)
    for g, group in enumerate(groups):
        table, width = arrays[f"block_table_{g}"], graphs.widths[g]
        if len(table) < num_reqs or table.shape[1] > width:
            raise RequestError(
                f"block_table_{g} is {table.shape}: give {num_reqs} rows of up to {width} blocks."
            )
        _check_range(f"block_table_{g}", table[:num_reqs], 0, num_blocks)
        if group.spec.kind != "ring" and (lens > table.shape[1] * group.block_size).any():
            raise RequestError(f"a length in seq_lens is more than the blocks of block_table_{g} hold.")
        if g in written:
            _check_range(f"slot_mapping_{g}", arrays[f"slot_mapping_{g}"], -1, num_blocks * group.block_size)
    return arrays, bool((counts == 1).all())


def _array(name: str, value) -> np.ndarray:
    array = value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    dims = 2 if name.startswith("block_table") else 1
    if array.ndim != dims or array.dtype.kind != "i":
        raise RequestError(f"{name} must be {dims}-D and of whole numbers, not {array.dtype} {array.shape}.")
    wide = name in ("input_ids", "positions", "logits_rows")
    return np.ascontiguousarray(array, np.int64 if wide else np.int32)


def _check_range(name: str, values: np.ndarray, low: int, high: int) -> None:
    if values.size and not low <= values.min() <= values.max() < high:
        raise RequestError(f"{name} holds {values.min()} to {values.max()}: use {low} to {high - 1}.")
