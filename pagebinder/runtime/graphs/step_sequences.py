"""Steps of a serving loop of the user's own: which tokens of which sequences, as the inputs of a paged graph.

StepSequence(tokens=[7, 3, 9], start=5, blocks=[[4, 1]])       positions 5, 6, 7; one block table for each KV group
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagebinder.config_checks import is_int, plain_number, short_repr
from pagebinder.errors import CaptureError, RequestError
from pagebinder.runtime.kv import KVCacheGroup
from pagebinder.runtime.step_plan import slot_groups

MOST = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class StepSequence:
    """New tokens of one sequence in a step.

    Args:
        tokens: ids to compute, one at least: a list or an array.
        start: tokens of the sequence that earlier steps have computed, and whose state is in its blocks. That is the
            loop's to know: nothing here can tell. A step that was run must not be run again where there is recurrent
            state.
        blocks: for each KV group the sequence's block ids so far, in order; entry i is of tokens i * block_size on
            (of a ring there is one entry). 0, the null block, where nothing is needed any more:
            `StepGraphs.needed_entries`.
        shift: how much larger the tokens' positions are than their places, behind images that positions count
            otherwise.
        num_logits: of how many of the tokens, the last ones, logits are wanted. 0: the prompt goes on in a later
            step.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[Sequence[int]]
    shift: int = 0
    num_logits: int = 1


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
    if isinstance(sequences, StepSequence | str) or not isinstance(sequences, Iterable):
        raise RequestError(f"pack takes a list of StepSequences, not {short_repr(sequences)}.")
    read = [_read(i, one, groups, widths) for i, one in enumerate(sequences)]
    if not read:
        raise RequestError("A step needs at least one sequence.")
    counts = np.array([len(one.tokens) for one in read], np.int64)
    starts, shifts, wanted = (
        np.array([getattr(one, name) for one in read], np.int64) for name in ("start", "shift", "num_logits")
    )
    ends = np.cumsum(counts)
    rows = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(rows)) + (starts - ends + counts)[rows]
    inputs = {
        "input_ids": np.concatenate([one.tokens for one in read]),
        "positions": places + shifts[rows],
        "logits_rows": np.arange(wanted.sum()) + np.repeat(ends - np.cumsum(wanted), wanted),
        "query_start_loc": np.concatenate([[0], ends]).astype(np.int32),
        "seq_lens": (starts + counts).astype(np.int32),
    }
    for g in range(len(groups)):  # as wide as the longest: a table for max_model_len would take milliseconds
        table = np.zeros((len(counts), max(1, *(len(one.blocks[g]) for one in read))), np.int32)
        for row, one in enumerate(read):
            table[row, : len(one.blocks[g])] = one.blocks[g]
        inputs[f"block_table_{g}"] = table
        if g in slot_groups(groups):
            inputs[f"slot_mapping_{g}"] = slots_of(table, groups[g].block_size, rows, places)
    return inputs


def slots_of(table: np.ndarray, block_size: int, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Where the tokens at `places` of the sequences `rows` are written: block * block size + offset, [T] int32."""
    blocks, offsets = np.divmod(places, block_size)
    return (table[rows, blocks].astype(np.int64) * block_size + offsets).astype(np.int32)


def _read(i: int, one: StepSequence, groups: Sequence[KVCacheGroup], widths: Sequence[int]) -> StepSequence:
    """The same with arrays. Raises RequestError."""
    if not isinstance(one, StepSequence):
        raise RequestError(f"sequence {i}: use a StepSequence, not {type(one).__name__}.")
    tokens = _whole_numbers(f"sequence {i}: tokens", one.tokens, np.iinfo(np.int64).max)
    if not len(tokens):
        raise RequestError(
            f"sequence {i}: tokens are empty; give at least one token, or leave it out of the step."
        )
    start, shift, num_logits = map(plain_number, (one.start, one.shift, one.num_logits))
    if not is_int(start) or not 0 <= start <= MOST:
        raise RequestError(f"sequence {i}: start={one.start!r}: use a whole number, at least 0.")
    if not is_int(shift) or abs(shift) > MOST:
        raise RequestError(f"sequence {i}: shift={one.shift!r}: use a whole number.")
    if not is_int(num_logits) or not 0 <= num_logits <= len(tokens):
        raise RequestError(
            f"sequence {i}: num_logits={one.num_logits!r}: use 0 to {len(tokens)}, its tokens in this step."
        )
    if isinstance(one.blocks, str) or not isinstance(one.blocks, Sequence | np.ndarray | torch.Tensor):
        raise RequestError(
            f"sequence {i}: blocks={short_repr(one.blocks)}: give a list of block ids for each KV group."
        )
    if len(one.blocks) != len(groups):
        raise RequestError(
            f"sequence {i}: {len(one.blocks)} block tables, but the model has {len(groups)} KV groups."
        )
    blocks = [_whole_numbers(f"sequence {i}: blocks[{g}]", table, MOST) for g, table in enumerate(one.blocks)]
    _check_tables(i, start + len(tokens), blocks, groups, widths)
    return StepSequence(tokens=tokens, start=start, blocks=blocks, shift=shift, num_logits=num_logits)


def _check_tables(
    i: int, end: int, blocks: Sequence[np.ndarray], groups: Sequence[KVCacheGroup], widths: Sequence[int]
) -> None:
    for g, (group, width, table) in enumerate(zip(groups, widths, blocks)):
        need = 1 if group.spec.kind == "ring" else -(-end // group.block_size)
        if need > width or len(table) > width:
            raise RequestError(
                f"sequence {i}: {max(end, len(table) * group.block_size)} tokens are more than max_model_len allows: "
                f"blocks[{g}] has {len(table)} entries, {width} of {group.block_size} tokens are the most."
            )
        if len(table) < need:
            raise RequestError(
                f"sequence {i}: {end} tokens take {need} blocks of {group.block_size} in group {g}; blocks[{g}] has "
                f"{len(table)} entries."
            )


def _whole_numbers(name: str, values: Any, most: int) -> np.ndarray:
    """[N] int64. Raises RequestError: it is anything else, or holds numbers below 0 or above `most`."""
    array = host_array(name, values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(f"{name} are {short_repr(values)}: give a list of whole numbers.")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= most:
        raise RequestError(f"{name} hold {array.min()} to {array.max()}: use numbers from 0 on that fit.")
    return array.astype(np.int64)


def host_array(name: str, values: Any) -> np.ndarray:
    """An array, or a tensor's values, on the host; of anything else one without dims, of no number. Raises
    RequestError for a tensor without values."""
    if isinstance(values, torch.Tensor) and values.device.type == "meta":
        raise RequestError(f"{name} is a tensor on the meta device, which has no numbers.")
    try:
        return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return np.asarray(None)
