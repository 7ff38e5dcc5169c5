"""`pagebinder_triton::argmax_tokens` and `sample_tokens`: launches, see `sampling_kernels`.

Nothing is read back: rows, tokens and starts are not checked on the host. A row that is not there is one of NaN, a
seen token that is not in the vocabulary is passed over.
"""

from __future__ import annotations

import torch
import triton

from pagebinder.custom_ops.sampling.sample_tokens import OPTIONS
from pagebinder.custom_ops.triton.gpu import multiprocessors
from pagebinder.custom_ops.triton.sampling_cut import bins_kernel, cut_kernel
from pagebinder.custom_ops.triton.sampling_kernels import (
    choose_kernel,
    draw_kernel,
    largest_kernel,
    penalise_kernel,
)
from pagebinder.custom_ops.triton.sampling_rows import BINS

CHUNK = 4096  # tokens that a program looks at together, ...
TOKENS_OF_RANKS = 2048  # ... or weighs
TOKENS_OF_BINS = 256  # of which each has its place in every bin
MIN_PART = 4096
MAX_PARTS = 64
PROGRAMS_PER_MULTIPROCESSOR = 4
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT = {"num_warps": 8, "enable_fp_fusion": False}


def argmax_tokens(logits):
    """See `argmax_tokens_reference`."""
    logits = _checked(logits)
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    parts, part_tokens, sizes = _parts(num_rows, vocab, logits.device)
    largest, chosen = _per_part(logits, num_rows, parts)
    largest_kernel[num_rows, parts](
        logits,
        None,
        largest,
        chosen,
        logits.stride(0),
        num_rows,
        vocab,
        part_tokens,
        CHUNK=sizes["CHUNK"],
        **EXACT,
    )
    choose_kernel[(num_rows,)](largest, chosen, out, parts, BLOCK_PARTS=sizes["BLOCK_PARTS"], num_warps=1)
    return out


def sample_tokens(logits, rows, streams, options, seen, seen_starts):
    """See `sample_tokens_reference`; what only the device knows is not checked, see above."""
    logits = _checked(logits)
    _check(rows, streams, options, seen, seen_starts)
    draws, (num_rows, vocab) = len(rows), logits.shape
    out = torch.empty(draws, dtype=torch.int64, device=logits.device)
    if draws == 0:
        return out
    parts, part_tokens, sizes = _parts(draws, vocab, logits.device)
    chunk, block = sizes["CHUNK"], {"BLOCK_PARTS": sizes["BLOCK_PARTS"]}
    grid, (x, of, stride) = (draws, parts), (logits, rows, logits.stride(0))
    if len(seen):
        x, of, stride = logits.new_empty((draws, vocab), dtype=torch.float32), None, vocab
        penalise_kernel[grid](
            logits, rows, options, seen, seen_starts, x, logits.stride(0), num_rows, len(seen), vocab, part_tokens,
            CHUNK=chunk, **EXACT,
        )  # fmt: skip
        num_rows = draws
    where = (stride, num_rows, vocab, part_tokens)
    largest, chosen = _per_part(logits, draws, parts)
    largest_kernel[grid](x, of, largest, None, *where, CHUNK=chunk, **EXACT)
    counts, masses = torch.empty((2, draws, parts, BINS.value), dtype=torch.int64, device=x.device).unbind(0)
    bins_kernel[grid](
        x, of, options, largest, counts, masses, *where, CHUNK=min(chunk, TOKENS_OF_BINS), **block, **EXACT
    )
    ranks = torch.empty((draws, 3, vocab), dtype=torch.int32, device=x.device)
    cut = torch.empty((draws, 3), dtype=torch.int32, device=x.device)
    kept = torch.empty(draws, dtype=torch.int64, device=x.device)
    for sums, by_mass in ((counts, False), (masses, True)):
        cut_kernel[(draws,)](
            x, of, options, largest, sums, ranks, cut, kept, stride, num_rows, vocab, parts, BY_MASS=by_mass,
            CHUNK=min(chunk, TOKENS_OF_RANKS), **block, **EXACT,
        )  # fmt: skip
    scores = torch.empty_like(largest)
    draw_kernel[grid](
        x, of, streams, options, largest, cut, scores, chosen, *where,
        COUNTERS=max(16, min(chunk, 1024) // 4), **block, **EXACT,
    )  # fmt: skip
    choose_kernel[(draws,)](scores, chosen, out, parts, **block, num_warps=1)
    return out


def _per_part(logits, draws: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 and a token for each part."""
    return logits.new_empty((draws, parts), dtype=torch.float32), logits.new_empty(
        (draws, parts), dtype=torch.int32
    )


def _parts(draws: int, vocab: int, device: torch.device) -> tuple[int, int, dict[str, int]]:
    """(parts of a row, tokens of a part, constants): enough programs to fill the GPU, of whole counters of noise."""
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), draws)
    parts = max(1, min(wanted, triton.cdiv(vocab, MIN_PART), MAX_PARTS))
    chunk = max(64, min(CHUNK, triton.next_power_of_2(vocab)))
    part_tokens = triton.cdiv(triton.cdiv(vocab, parts), 64) * 64
    parts = triton.cdiv(vocab, part_tokens)
    return parts, part_tokens, {"CHUNK": chunk, "BLOCK_PARTS": triton.next_power_of_2(parts)}


def _checked(logits: torch.Tensor) -> torch.Tensor:
    """Logits whose rows are contiguous."""
    if logits.dim() != 2 or logits.dtype not in FLOAT_TYPES or logits.shape[1] == 0:
        raise ValueError(f"logits are [L, V] in {', '.join(map(str, FLOAT_TYPES))}, V > 0")
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _check(rows, streams, options, seen, seen_starts) -> None:
    draws = len(rows)
    for fits, message in (
        (rows.shape == (draws,), "rows must be [R]"),
        (streams.shape == (draws, 2), f"streams must be [{draws}, 2]"),
        (options.shape == (draws, len(OPTIONS)), f"options must be [{draws}, {len(OPTIONS)}]"),
        (options.dtype == torch.float64, "options must be float64"),
        (seen.dim() == 1 and seen_starts.shape == (draws + 1,), f"seen is [S], seen_starts [{draws + 1}]"),
        (
            all(t.dtype == torch.int64 for t in (rows, streams, seen, seen_starts)),
            "rows, streams, seen and seen_starts must be int64",
        ),
        (
            all(t.is_contiguous() for t in (rows, streams, options, seen, seen_starts)),
            "rows, streams, options, seen and seen_starts must be contiguous",
        ),
    ):
        if not fits:
            raise ValueError(message)
