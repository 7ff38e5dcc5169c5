"""Running a recurrence over a step's requests, with its states in blocks of a paged cache.

    tokens of a request   0 . . . B . . . . 2B . . . . 3B         B = block size
    logical blocks        [ block 0 ][ block 1 ][ block 2 ...
                                   ^          ^      ^
    cache row of block i  state after the last computed token of [i * B, (i + 1) * B)

    a step that computes [s, e):  reads   table[(s - 1) // B]     (zeros if s == 0)
                                  writes  table[(p - 1) // B]     p = e, and every multiple of B with s < p <= e

A finished block is thus a checkpoint of a whole prefix. Reading one never changes it: the next token belongs to the
next logical block. An entry of 0, the null block, says that nobody wants that checkpoint; it is never written.

R requests, L tokens of a chunk, T tokens of the step, N blocks, M blocks of a request at most, B block size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from pagebinder.custom_ops.query_starts import query_starts

# Tokens that a scan takes at once: the work inside a chunk grows with its square, the number of chunks shrinks.
CHUNK_TOKENS = 64

# Requests of one token are batched while their states are no more than this: what is touched again stays near.
BATCH_BYTES = 4 << 20

# scan(state [R, *state shape], *operands [R, L, ...]) -> (out [R, L, ...], state after the L tokens)
# It may overwrite the state that it is given: states are large, and it is always a copy.
Scan = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def scan_sequence(
    scan: Scan, state: torch.Tensor, operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan whole sequences [R, L, ...] in chunks; any number of tokens in one scan gives the same, up to rounding."""
    outs = []
    for chunk in zip(*(x.split(CHUNK_TOKENS, dim=1) for x in operands)):
        out, state = scan(state, *chunk)
        outs.append(out)
    return torch.cat(outs, dim=1), state


def scan_requests(
    scan: Scan,
    operands: Sequence[torch.Tensor],
    out: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Advance every request of a step and keep its checkpoints, in place.

    Args:
        scan: see `Scan`; states are of the cache's dtype or wider.
        operands: [T, ...] flat tokens, one request after the other.
        out: [T, ...] zeros; rows of requests are filled, padding behind query_start_loc[R] stays zero.
        cache: [N, *state shape], any strides. block_table: [R or more, M] int32; R = len(seq_lens).
        seq_lens: [R] int32, tokens including the new ones. query_start_loc: [R + 1] int32. A request without
            new tokens reads and writes nothing.
    Raises:
        ValueError: metadata do not fit, a length exceeds the block table, a block id is not valid, or the block
            that holds a request's start state is null.
    """
    check_metadata(len(out), block_table, seq_lens, query_start_loc, block_size)
    starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
    state_bytes = cache[0].numel() * cache.element_size()
    for rows in (ends - starts == 1).nonzero().flatten().split(max(1, BATCH_BYTES // state_bytes)):
        if len(rows):
            tokens, context = starts[rows], seq_lens[rows].long() - 1
            parts = [x[tokens][:, None] for x in operands]
            out_R1 = _scan_single_tokens(scan, parts, cache, block_table[rows], context, block_size)
            out[tokens] = out_R1[:, 0].to(out.dtype)
    for r in (ends - starts > 1).nonzero().flatten().tolist():
        tokens = slice(int(starts[r]), int(ends[r]))
        context = int(seq_lens[r]) - (tokens.stop - tokens.start)
        parts = [x[tokens][None] for x in operands]
        out[tokens] = _scan_request(scan, parts, cache, block_table[r], context, block_size).to(out.dtype)
    return out


def _scan_single_tokens(
    scan: Scan, operands, cache, blocks_RM, context_R: torch.Tensor, block_size: int
) -> torch.Tensor:
    """One token of each of several requests at once: decodes, and prompts of one token."""
    state = _read(cache, _entries(blocks_RM, (context_R - 1).clamp(min=0) // block_size), context_R)
    out, state = scan(state, *operands)
    _write(cache, _entries(blocks_RM, context_R // block_size), state)
    return out


def _scan_request(scan: Scan, operands, cache, table_M, context: int, block_size: int) -> torch.Tensor:
    """The tokens of one request from `context` on, cut at each checkpoint that is wanted."""
    end = context + operands[0].shape[1]
    first = max(context - 1, 0) // block_size
    blocks = table_M[first : (end - 1) // block_size + 1]
    ids = blocks.tolist()
    known = torch.tensor([context], device=table_M.device)
    state = _read(cache, blocks[:1], known)
    outs, done = [], context
    for p in itertools.chain(range((context // block_size + 1) * block_size, end, block_size), (end,)):
        if ids[(p - 1) // block_size - first] == 0 and p != end:
            continue
        part, state = scan_sequence(scan, state, [x[:, done - context : p - context] for x in operands])
        index = (p - 1) // block_size - first
        _write(cache, blocks[index : index + 1], state)
        outs.append(part)
        done = p
    return torch.cat(outs, dim=1)[0]


def _entries(blocks_RM: torch.Tensor, columns_R: torch.Tensor) -> torch.Tensor:
    return blocks_RM.gather(1, columns_R[:, None])[:, 0]


def _read(cache: torch.Tensor, blocks_R: torch.Tensor, context_R: torch.Tensor) -> torch.Tensor:
    """The states that requests of `context_R` computed tokens start from."""
    begins = context_R == 0
    _require(bool(((blocks_R > 0) | begins).all()), "the block of a request's start state is null")
    _require(bool((begins | (blocks_R < len(cache))).all()), "a block id in block_table is not valid")
    state = cache[blocks_R.long().masked_fill(begins, 0)]
    state[begins] = 0
    return state


def _write(cache: torch.Tensor, blocks_R: torch.Tensor, state: torch.Tensor) -> None:
    _require(
        bool(((blocks_R >= 0) & (blocks_R < len(cache))).all()), "a block id in block_table is not valid"
    )
    wanted = blocks_R > 0
    if not bool(wanted.all()):
        blocks_R, state = blocks_R[wanted], state[wanted]
    cache[blocks_R.long()] = state.to(cache.dtype)


def check_metadata_shapes(block_table, seq_lens, query_start_loc, block_size: int) -> None:
    """Raise ValueError for metadata of a step that do not fit each other, whatever they hold."""
    for name, tensor in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        _require(tensor.dtype == torch.int32, f"{name} must be int32")
    _require(block_size > 0, "block_size must be positive")
    _require(block_table.dim() == 2, "block_table is [R, M]")
    _require(
        seq_lens.dim() == 1 and len(seq_lens) <= block_table.shape[0],
        "seq_lens must have one entry a request, and block_table at least as many rows",
    )
    _require(
        query_start_loc.shape == (len(seq_lens) + 1,),
        "query_start_loc must have one entry more than seq_lens",
    )


def check_metadata(num_tokens: int, block_table, seq_lens, query_start_loc, block_size: int) -> None:
    """Raise ValueError where the metadata of a step contradict each other."""
    check_metadata_shapes(block_table, seq_lens, query_start_loc, block_size)
    query_starts(query_start_loc, num_tokens)  # raises
    lengths = query_start_loc.diff()
    computes = lengths > 0
    _require(bool((seq_lens >= lengths)[computes].all()), "a seq_len is smaller than its new tokens")
    _require(
        bool((seq_lens <= block_table.shape[1] * block_size)[computes].all()),
        "a seq_len exceeds its block table",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
