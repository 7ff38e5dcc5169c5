"""Is a step's metadata what a paged graph may be run with? Asked before anything runs, as a step that fails in the
middle has changed recurrent states already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagebinder.config_checks import short_repr
from pagebinder.custom_ops.prompt_rows import FIRST_ROW_ID
from pagebinder.errors import RequestError
from pagebinder.runtime.graphs.block_rules import check_blocks
from pagebinder.runtime.graphs.step_sequences import host_array, slots_of
from pagebinder.runtime.step_plan import slot_groups

if TYPE_CHECKING:
    from pagebinder.runtime.graphs.step_graphs import StepGraphs

WIDE = ("input_ids", "positions", "logits_rows")  # int64


def check_inputs(
    graphs: StepGraphs, inputs: Mapping[str, np.ndarray | torch.Tensor]
) -> tuple[dict[str, np.ndarray], bool]:
    """A step's metadata as arrays, and whether every sequence has one token. Raises RequestError."""
    arrays = _named_arrays(graphs, inputs)
    _check_lengths(graphs, arrays)
    loc, lens = arrays["query_start_loc"], arrays["seq_lens"]
    counts = np.diff(loc)
    rows = np.repeat(np.arange(len(counts)), counts)
    _check_ids(graphs, arrays["input_ids"], loc, rows)
    places = np.arange(len(rows)) + np.repeat(lens - loc[1:], counts)
    _check_positions(graphs, arrays["positions"], places, rows)
    _check_range("logits_rows", arrays["logits_rows"], 0, len(rows))
    _check_tables(graphs, arrays, counts, rows, places)
    _check_shift(graphs, arrays["positions"], places, rows)
    return as_arrays(arrays)


def as_arrays(inputs: Mapping[str, np.ndarray | torch.Tensor]) -> tuple[dict[str, np.ndarray], bool]:
    """Metadata in their dtypes on the host, and whether every sequence has one token. Checks nothing."""
    arrays = {}
    for name, value in inputs.items():
        array = value.cpu().numpy() if isinstance(value, torch.Tensor) else value
        arrays[name] = np.ascontiguousarray(array, np.int64 if name in WIDE else np.int32)
    return arrays, bool((np.diff(arrays["query_start_loc"]) == 1).all())


def _named_arrays(graphs: StepGraphs, inputs: Mapping) -> dict[str, np.ndarray]:
    """All inputs, of whatever whole numbers they are: int32 may be too small."""
    if not isinstance(inputs, Mapping):
        raise RequestError(f"A step is metadata by name, as `pack` makes them, not {short_repr(inputs)}.")
    groups = graphs.plan.groups
    names = ["input_ids", "positions", "logits_rows", "query_start_loc", "seq_lens"]
    names += [f"slot_mapping_{g}" for g in slot_groups(groups)]
    names += [f"block_table_{g}" for g in range(len(groups))]
    missing, unknown = [n for n in names if n not in inputs], sorted(str(n) for n in set(inputs) - set(names))
    if missing or unknown:
        raise RequestError(f"A step takes {', '.join(names)}; missing: {missing}, unknown: {unknown}.")
    return {name: _array(name, inputs[name]) for name in names}


def _array(name: str, value: np.ndarray | torch.Tensor) -> np.ndarray:
    dims = 2 if name.startswith("block_table") else 1
    array = host_array(name, value)
    if array.ndim != dims or array.dtype.kind not in "iu":
        raise RequestError(f"{name} must be {dims}-D and of whole numbers, not {array.dtype} {array.shape}.")
    if array.dtype == np.uint64:
        _check_range(name, array, 0, np.iinfo(np.int64).max)
    return array if dims == 2 and array.dtype != np.uint64 else array.astype(np.int64)


def _check_lengths(graphs: StepGraphs, arrays: Mapping[str, np.ndarray]) -> None:
    sizes = {name: len(arrays[name]) for name in ("input_ids", "positions", "seq_lens", "query_start_loc")}
    sizes |= {name: len(array) for name, array in arrays.items() if name.startswith("slot_mapping")}
    of_tokens = {name: size for name, size in sizes.items() if name not in ("seq_lens", "query_start_loc")}
    if len(set(of_tokens.values())) > 1:
        raise RequestError(f"These have one entry for each token, and differ: {of_tokens}.")
    if sizes["query_start_loc"] != sizes["seq_lens"] + 1:
        raise RequestError(
            f"query_start_loc has {sizes['query_start_loc']} entries and seq_lens {sizes['seq_lens']}: one more than "
            "there are sequences, and one each."
        )
    loc, lens = arrays["query_start_loc"], arrays["seq_lens"]
    counts = np.diff(loc)
    if not sizes["input_ids"] or loc[0] != 0 or loc[-1] != sizes["input_ids"] or (counts < 0).any():
        raise RequestError("query_start_loc must rise from 0 to the number of input_ids, at least 1.")
    if (lens < counts).any():
        raise RequestError("a length in seq_lens is less than the tokens that its sequence has in this step.")
    for g, group in enumerate(graphs.plan.groups):
        table, width = arrays[f"block_table_{g}"], graphs.widths[g]
        if len(table) < len(lens) or table.shape[1] > width:
            raise RequestError(
                f"block_table_{g} is {table.shape}: give {len(lens)} rows of up to {width} blocks."
            )
        if group.spec.kind != "ring" and (lens > table.shape[1] * group.block_size).any():
            raise RequestError(f"a length in seq_lens is more than the blocks of block_table_{g} hold.")


def _check_ids(graphs: StepGraphs, ids: np.ndarray, loc: np.ndarray, rows: np.ndarray) -> None:
    tables = graphs.prompt_tables
    is_row = (ids >= FIRST_ROW_ID) & (ids < FIRST_ROW_ID + (0 if tables is None else len(tables.rows)))
    if tables is not None and tables.lookahead is not None and is_row.any():
        own = torch.from_numpy(ids[is_row] - FIRST_ROW_ID)
        seen = np.flatnonzero(is_row) + tables.lookahead[own.to(tables.lookahead.device)].cpu().numpy()
        if (seen >= loc[1:][rows][is_row]).any():
            raise RequestError(
                "embeddings that see each other (parts of an image) are computed in one step, all of them."
            )
    most = graphs.vocab_size or np.iinfo(np.int64).max
    _check_range("input_ids", np.where(is_row, 0, ids), 0, most, rows)


def _check_positions(graphs: StepGraphs, positions: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    """Places of tokens in their sequences; behind images that positions count otherwise, shifted."""
    shift = positions - places
    if (
        graphs.prompt_tables is None
        and (jump := np.flatnonzero((np.diff(shift) != 0) & (np.diff(rows) == 0))).size
    ):
        at = int(jump[0])
        raise RequestError(
            f"sequence {rows[at]}: positions go from {positions[at]} to {positions[at + 1]}: tokens of a sequence "
            f"stand at rising places, {places[at]} and {places[at] + 1} by seq_lens."
        )
    _check_range("positions", positions, 0, graphs.max_position, rows)


def _check_shift(graphs: StepGraphs, positions: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    if graphs.prompt_tables is None and (shifted := np.flatnonzero(positions != places)).size:
        at = int(shifted[0])
        raise RequestError(
            f"sequence {rows[at]}: position {positions[at]} at place {places[at]}: positions are shifted behind "
            "images alone, and this model was compiled without prompt_embeds."
        )


def _check_tables(
    graphs: StepGraphs,
    arrays: Mapping[str, np.ndarray],
    counts: np.ndarray,
    rows: np.ndarray,
    places: np.ndarray,
) -> None:
    groups, num_reqs, num_blocks = graphs.plan.groups, len(counts), graphs.num_kv_blocks
    longest = int(arrays["seq_lens"].max())
    tables = []
    for g, group in enumerate(groups):  # columns behind the longest sequence are not read
        table = arrays[f"block_table_{g}"][:num_reqs, : max(1, -(-longest // group.block_size))]
        _check_range(f"block_table_{g}", table, 0, num_blocks, np.repeat(np.arange(num_reqs), table.shape[1]))
        tables.append(table.astype(np.int64))
    runs = np.flatnonzero(counts)
    ends = arrays["seq_lens"][runs]
    check_blocks(groups, [table[runs] for table in tables], ends - counts[runs], ends, num_blocks, runs)
    for g in slot_groups(groups):
        slots, expected = arrays[f"slot_mapping_{g}"], slots_of(tables[g], groups[g].block_size, rows, places)
        if (wrong := np.flatnonzero(slots != expected)).size:
            at = int(wrong[0])
            raise RequestError(
                f"sequence {rows[at]}: slot_mapping_{g} writes its token {places[at]} to slot {slots[at]}; by "
                f"block_table_{g} it is {expected[at]}."
            )


def _check_range(name: str, values: np.ndarray, low: int, high: int, rows: np.ndarray | None = None) -> None:
    """rows: the sequence of each value, flat."""
    if not values.size or low <= values.min() <= values.max() < high:
        return
    flat = values.reshape(-1)
    at = int(np.flatnonzero((flat < low) | (flat >= high))[0])
    whose = "" if rows is None else f"sequence {rows[at]}: "
    raise RequestError(f"{whose}{name} holds {flat[at]}: use {low} to {high - 1}.")
