"""`pagebinder_triton::paged_attention`, with LSE, over codes, and with a bias by distance: launches.

Shapes of launches follow from the shapes of operands alone, so a call can be captured in a CUDA graph, and nothing is
read back from the device. What the reference checks by reading lengths and block ids is therefore not checked here:
keys beyond a block table and blocks outside the cache are not read.

    T <= R (decode)   split_kernel, which merges few parts itself, else + merge_kernel; tile_kernel alone if the
                      requests fill the GPU without splitting
    T >  R (mixed)    tile_kernel, and split_kernel + merge_kernel for requests of a few new tokens

Tiles by the bytes of a K row and a V row, padded, in place of autotuning, which would need the GPU and minutes:

    bytes     prefill: queries x keys, warps, stages     decode: keys, warps, stages      of a head in 16 bits
    <= 256    128 x 64,  4, 3                            128, 4, 3                        64
    <= 512    128 x 32,  8, 4                            64,  4, 3                        128
    <= 1024   64  x 64,  8, 2                            32,  4, 3                        256
    <= 2048   32  x 32,  8, 2                            32,  8, 2                        512; latent rows
    beyond    16  x 32,  8, 2                            32,  8, 2                        576

    float32 (no tensor cores)
    <= 2560   16  x 32,  8, 2                            32,  8, 2                        of a head: 256; latent rows
    beyond    16  x 16,  8, 2                            16,  8, 2                        576

Prompts of heads of 32, 64 or 128 channels in 16 bits, in blocks of a multiple of 64 tokens, have a tile of their own
on Hopper (DESCRIBED), whose rows come by a descriptor of the cache.

Decodes over codes whose rows are powers of two wide have tiles of their own (PAIR_TILES) and another inner loop, see
`attention_pairs`: up to 16 heads of 32 to 128 channels of a KV head, up to 8 of 256.

Compiled for compute capability 9.0 they do not spill registers, but for DESCRIBED outside of its loop (under Triton
3.6 some over codes do, up to 208 bytes a thread); a prefill program takes at most 160 KiB of shared memory, a decode
program 75 KiB (heads of 512 channels 81, of 576 119, in float32 137). `python -m tests.custom_ops.triton.compiled_for
90 --all` tells what a version of Triton makes of them. Heads of 128 channels were tuned on an H200: two prefill
programs share a multiprocessor, one multiplies while the other takes exponentials. The other sizes are as they were
thought out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from pagebinder.custom_ops.attention.lookahead import check_lookahead
from pagebinder.custom_ops.attention.paged import check_attention, check_options
from pagebinder.custom_ops.attention.quantized_paged import check_cache, check_format
from pagebinder.custom_ops.attention.relative import check_bias, check_sinks
from pagebinder.custom_ops.triton.arrivals import arrivals_at
from pagebinder.custom_ops.triton.attention_kernels import merge_kernel, split_kernel, tile_kernel
from pagebinder.custom_ops.triton.gpu import HOPPER, capability, has_fp8, multiprocessors, round_splits
from pagebinder.custom_ops.triton.provider import MAX_HEAD_DIM

# bytes of a number -> (bytes of a K and a V row at most, prefill: queries, keys, warps, stages, decode: keys, ...)
TILES = {
    2: (
        (256, (128, 64, 4, 3), (128, 4, 3)),
        (512, (128, 32, 8, 4), (64, 4, 3)),
        (1024, (64, 64, 8, 2), (32, 4, 3)),
        (2048, (32, 32, 8, 2), (32, 8, 2)),
        (None, (16, 32, 8, 2), (32, 8, 2)),
    ),
    4: ((2560, (16, 32, 8, 2), (32, 8, 2)), (None, (16, 16, 8, 2), (16, 8, 2))),
}
# For heads of up to 128 channels in 16 bits: finding a bias for each score takes registers.
PREFILL_WITH_BIAS = (64, 64, 8, 2)
# Of rows that are values: with 16 of 16 bits Triton 3.6 makes products for Hopper that read beyond shared memory.
MIN_COLUMNS = 32
MIN_KEYS_OF_TILE = 16
MAX_HEADS_OF_TILE = 32  # more query heads of a KV head are several programs
PROGRAMS_PER_MULTIPROCESSOR = 32  # at most, by splitting
PROGRAMS_AT_ONCE = 3  # that a multiprocessor holds, of a decode
FULL = 0.95  # of a wave
SPLITS = sorted({round_splits(n) for n in range(1, 129)})
MOST_SPLITS = 64
VALUES_OF_MERGE = 32  # of parts, that a thread holds at a time
# Times that the last program of a request reads so many; what is more is merged by a launch of its own.
MOST_MERGES_AT_END = 8

MIN_KEYS_OF_SPLIT = 256  # parts smaller than this cost more in merging than they gain, ...
MIN_KEYS_OF_LONE_SPLIT = 64  # ... unless most of the GPU would be idle


@dataclass(frozen=True)
class DecodeTile:
    """Keys, warps and stages of a decode; how many programs a multiprocessor holds, of at most so many registers a
    thread (None: any); how many parts of a context are made at most."""

    keys: int
    warps: int
    stages: int
    registers: int | None = None
    at_once: int = PROGRAMS_AT_ONCE
    most_splits: int = MOST_SPLITS

    @property
    def limits(self) -> dict:
        return {"maxnreg": self.registers} if self.registers else {}


# Over codes that are read in pairs (see `attention_pairs`): (queries, channels of a row) at most -> tile. A lone warp
# waits for no other, and many of them share a multiprocessor.
PAIR_TILES = (
    ((8, 64), DecodeTile(32, 1, 3, registers=128, at_once=16, most_splits=128)),
    ((8, 128), DecodeTile(32, 1, 2, registers=168, at_once=12, most_splits=128)),
    ((8, 256), DecodeTile(32, 2, 3, registers=184, at_once=5, most_splits=128)),
    ((16, 128), DecodeTile(32, 1, 3, at_once=8, most_splits=128)),
)


# Of prefills whose K and V are fetched by a descriptor, of heads of so many channels: no registers hold addresses.
DESCRIBED, MOST_DESCRIBED = DecodeTile(64, 8, 2, registers=128), 128


@dataclass(frozen=True)
class Widths:
    """Of K rows (D) and V rows (DV), cut and padded to powers of two: see `attention_tile`."""

    D: int
    DV: int
    CUT: int
    D_A: int
    D_B: int
    BLOCK_DV: int

    @classmethod
    def of(cls, head_dim: int, head_dim_v: int, cut: int | None = None) -> Widths:
        """`cut`: where to cut K rows; None: at the largest power of two."""
        cut = min(head_dim, cut or max(16, 1 << (head_dim.bit_length() - 1)))
        second = head_dim - cut
        parts = (max(MIN_COLUMNS, padded(n)) if n else 0 for n in (cut, second, head_dim_v))
        return cls(head_dim, head_dim_v, cut, *parts)


def padded(columns: int) -> int:
    """Columns of a tile: a power of two, 16 at least for products."""
    return max(16, triton.next_power_of_2(columns))


def tiles_of(columns: int, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prefill, decode) of TILES for rows of so many columns."""
    row_bytes = columns * dtype.itemsize
    return next(tiles for most, *tiles in TILES[dtype.itemsize] if most is None or row_bytes <= most)


def paged_attention(*operands, **options):
    """See `paged_attention_reference`."""
    return _plain(*operands, **options)


def paged_attention_lse(q, *operands, **options):
    """See `paged_attention_lse_reference`."""
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return _plain(q, *operands, lse=lse, **options), lse


def paged_relative_attention(
    q,
    kv_cache,
    block_table,
    seq_lens,
    query_start_loc,
    bias,
    sinks=None,
    *,
    head_dim_v,
    num_behind,
    **options,
):
    """See `paged_relative_attention_reference`."""
    step = (block_table, seq_lens, query_start_loc)
    check_attention(q, kv_cache, *step, None, None, head_dim_v)
    check_bias(q, bias, num_behind)
    check_sinks(q, sinks)
    relative = {"bias": bias, "num_behind": num_behind}
    return attend_paged(q, kv_cache, *step, sinks, None, head_dim_v=head_dim_v, **relative, **options)


def paged_lookahead_attention(
    q, kv_cache, block_table, seq_lens, query_start_loc, lookahead, sinks=None, *, head_dim_v, **options
):
    """See `paged_lookahead_attention_reference`."""
    step = (block_table, seq_lens, query_start_loc, sinks, None)
    check_attention(q, kv_cache, *step, head_dim_v)
    check_lookahead(q, lookahead)
    lookahead = lookahead.contiguous()
    return attend_paged(q, kv_cache, *step, head_dim_v=head_dim_v, lookahead=lookahead, **options)


def _plain(
    q, kv_cache, block_table, seq_lens, query_start_loc, sinks=None, alibi_slopes=None, *, head_dim_v, lse=None,
    **options,
):  # fmt: skip
    check_attention(q, kv_cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes, head_dim_v)
    step = (block_table, seq_lens, query_start_loc, sinks, alibi_slopes)
    return attend_paged(q, kv_cache, *step, head_dim_v=head_dim_v, lse=lse, **options)


def quantized_paged_attention(
    q, kv_cache, block_table, seq_lens, query_start_loc, sinks=None, alibi_slopes=None, scales=None, *, codes,
    head_dim_v, **options,
):  # fmt: skip
    """See `quantized_paged_attention_reference`; products in q's dtype, which holds every code exactly."""
    check_format(codes, scales, kv_cache.shape[1])
    check_cache(kv_cache, q.shape[2] + head_dim_v, scales)
    step = (block_table, seq_lens, query_start_loc, sinks, alibi_slopes)
    values = q.new_empty(
        (*kv_cache.shape[:3], q.shape[2] + head_dim_v), device="meta"
    )  # what the codes stand for
    check_attention(q, values, *step, head_dim_v)
    return attend_paged(q, kv_cache, *step, head_dim_v=head_dim_v, scales=scales, codes=codes, **options)


def attend_paged(
    q, kv_cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes, *, head_dim_v, scale, window=None,
    chunk=None, soft_cap=None, causal=True, lse=None, scales=None, codes="", v_is_k=False, out=None, key_begins=None,
    context_only=False, bias=None, num_behind=0, lookahead=None, splits=None,
) -> torch.Tensor:  # fmt: skip
    """Attention [T, H, DV] over rows of values, or of codes (uint8); operands are checked by the callers.

    Args:
        scales: [2, G] fixed scales of the codes; None: behind each row. lse: [H, T] float32 to write, or None.
        v_is_k: the value row is the first DV channels of the key row (latent rows).
        out: contiguous, of any float dtype, to write; None: a new one of q's dtype.
        key_begins: [R] int32, first key of each request that counts. context_only: keys of new tokens do not count.
        sinks: [H], or [T, H]. bias: [H, N] or [T, H, N] by distance, or None; num_behind: its column of distance 0.
        lookahead: [T] int32, keys behind its own that each query sees though it is causal; None: none.
        splits: of contexts; None: to suit the GPU.
    """
    check_options(window=window, chunk=chunk, soft_cap=soft_cap)
    (num_tokens, num_heads, head_dim), num_requests = q.shape, len(seq_lens)
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    q, scale = with_positive_scale(q, scale)
    if not v_is_k and max(head_dim, head_dim_v) > MAX_HEAD_DIM:
        raise ValueError(f"heads of {head_dim} and {head_dim_v} channels: at most {MAX_HEAD_DIM} are served")
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim_v), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    widths = Widths.of(head_dim, head_dim_v, head_dim_v if v_is_k else None)
    columns = widths.D_A + widths.D_B + (0 if v_is_k else widths.BLOCK_DV)
    prefill, decode = tiles_of(columns, q.dtype)
    if bias is not None and prefill[0] > PREFILL_WITH_BIAS[0]:
        prefill = PREFILL_WITH_BIAS
    group = num_heads // num_kv_heads
    heads = min(group, MAX_HEADS_OF_TILE)
    chunks = triton.cdiv(group, heads)
    capacity = block_table.shape[1] * block_size
    is_decode = num_tokens <= num_requests
    rows = max(16, triton.next_power_of_2(heads))
    decode = DecodeTile(*decode, registers=_registers(codes, widths, q.dtype))
    in_pairs = False
    if codes and not v_is_k and q.dtype.itemsize == 2:
        rows, decode, in_pairs = _in_pairs(kv_cache, widths, heads, rows, decode, is_decode)
    programs = num_requests * num_kv_heads * chunks
    splits = splits or num_splits(programs, capacity, q.device, decode)
    few = 0 if splits == 1 else (num_tokens if is_decode else rows // heads)
    code_rows = codes != "" and scales is None
    options = {
        "GROUP": group, "HEADS": heads, "CHUNKS": chunks, **vars(widths), "BLOCK_SIZE": block_size,
        "WINDOW": window or 0, "CHUNK": chunk or 0, "CAUSAL": causal, "CODES": codes, "ROW_SCALES": code_rows,
        "ALIGNED": code_rows and _has_aligned_scales(kv_cache, head_dim + head_dim_v), "V_IS_K": v_is_k,
        "NATIVE": has_fp8(q.device), "CONTEXT_ONLY": context_only,
    }  # fmt: skip
    options |= zip(("stride_n", "stride_g", "stride_b"), kv_cache.stride())
    strides = (*q.stride()[:2], block_table.stride(0))
    distances = (num_behind, 0 if bias is None else bias.shape[-1] - 1)
    (bias, bias_stride), (sinks, sink_stride) = with_token_stride(bias, 2), with_token_stride(sinks, 1)
    if splits == 1 or not is_decode:
        queries, tile = (rows, decode) if is_decode else (max(prefill[0], rows), DecodeTile(*prefill[1:]))
        cache = None
        sees_all_before = window is None and chunk is None and key_begins is None and bias is None
        if not is_decode and sees_all_before and not (codes or v_is_k):
            cache, tile = _described(kv_cache, widths, q.dtype) or (None, tile)
        grid = (num_tokens // (queries // heads) + num_requests + 1, num_kv_heads * chunks)
        tile_kernel[grid](
            q, kv_cache, cache, block_table, seq_lens, query_start_loc, key_begins, lookahead, sinks, alibi_slopes,
            bias, scales, out, lse, *strides, bias_stride, sink_stride, num_tokens, num_requests, num_blocks,
            capacity, few, scale, soft_cap, *distances, **options, PAIRS=is_decode and in_pairs, BLOCK_M=queries,
            BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
            **(tile.limits if in_pairs or cache else {}),
        )  # fmt: skip
    if splits == 1:
        return out
    row_tokens = 0 if is_decode else few
    num_rows = num_tokens if is_decode else num_requests * few
    parts = torch.empty((num_rows, num_heads, splits, head_dim_v), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((num_rows, num_heads, splits), dtype=torch.float32, device=q.device)
    merged = triton.next_power_of_2(heads)  # at a time, at the end of a program
    arrivals = None
    if is_decode and splits * merged * widths.BLOCK_DV <= MOST_MERGES_AT_END * values_of_merge(decode.warps):
        arrivals = arrivals_at(kv_cache, num_requests * num_kv_heads * chunks)
    split_kernel[splits, num_kv_heads * chunks, num_requests](
        q, kv_cache, block_table, seq_lens, query_start_loc, key_begins, lookahead, alibi_slopes, bias, scales, parts,
        part_lse, arrivals, sinks, out, lse, *strides, bias_stride, sink_stride, num_tokens, num_blocks, capacity,
        few, row_tokens, scale, soft_cap, *distances, SPLITS=splits, **options, BLOCK_M=rows, BLOCK_N=decode.keys,
        MIN_KEYS=min_keys_of_split(programs, q.device), PAIRS=in_pairs, ROWS=merged,
        **merge_options(splits, widths.BLOCK_DV, merged, decode.warps),
        num_warps=decode.warps, num_stages=decode.stages, **decode.limits,
    )  # fmt: skip
    if arrivals is None:
        merge_kernel[num_requests + 1, num_heads](
            parts, part_lse, query_start_loc, sinks, out, lse, sink_stride, num_tokens, num_requests, few, row_tokens,
            SPLITS=splits, **merge_options(splits, widths.BLOCK_DV), DV=head_dim_v, BLOCK_DV=widths.BLOCK_DV,
            PADDING=is_decode,
        )  # fmt: skip
    return out


def _described(
    kv_cache: torch.Tensor, widths: Widths, dtype: torch.dtype
) -> tuple[TensorDescriptor, DecodeTile] | None:
    """(a descriptor of the cache, by which Hopper's copy engine fetches the rows of a block; the tile of a prefill).

    None where there is no such engine, where rows are padded or of a width whose tile is another, or where they lie
    at addresses that are no multiples of 16.
    """
    columns, sizes, strides = (widths.D_A, widths.D_B, widths.BLOCK_DV), kv_cache.shape, kv_cache.stride()
    addresses = (kv_cache.data_ptr(), *(n * dtype.itemsize for n in strides[:3]))
    if (
        capability(kv_cache.device) < HOPPER
        or kv_cache.dtype != dtype
        or dtype.itemsize != 2
        or columns != (widths.D, 0, widths.D)
        or widths.D > MOST_DESCRIBED
        or sizes[2] % DESCRIBED.keys
        or any(n % 16 for n in addresses)
    ):
        return None
    return TensorDescriptor(kv_cache, list(sizes), list(strides), [1, 1, DESCRIBED.keys, widths.D]), DESCRIBED


def merge_options(splits: int, columns: int, rows: int = 1, warps: int = 4) -> dict:
    """Of a merge of so many parts of `columns` columns, of `rows` heads: a few values of a thread at a time."""
    fit = max(1, values_of_merge(warps) // (rows * columns))
    every = triton.next_power_of_2(splits)
    return {"BLOCK_SPLITS": every, "AT_ONCE": min(1 << (fit.bit_length() - 1), every)}


def values_of_merge(warps: int) -> int:
    """Of parts, that a program holds at a time."""
    return VALUES_OF_MERGE * 32 * warps


def with_positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """The same scores with a scale above 0: kernels take the largest of them before they are scaled."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def with_token_stride(x: torch.Tensor | None, shared_dims: int) -> tuple[torch.Tensor | None, int | None]:
    """(x contiguous, its stride from token to token; None where all share it, as `shared_dims` dimensions say)."""
    if x is None:
        return None, None
    x = x.contiguous()
    return x, None if x.dim() == shared_dims else x.stride(0)


def _in_pairs(
    kv_cache: torch.Tensor, widths: Widths, heads: int, rows: int, decode: DecodeTile, is_decode: bool
) -> tuple[int, DecodeTile, bool]:
    """(rows of a tile, its keys and so on, True) where codes are read in pairs; else what was given, and False."""
    fewer = max(8, triton.next_power_of_2(heads)) if is_decode else rows
    tile = pair_tile(kv_cache, widths, fewer)
    return (rows, decode, False) if tile is None else (fewer, tile, True)


def pair_tile(kv_cache: torch.Tensor, widths: Widths, rows: int) -> DecodeTile | None:
    """How a decode reads these codes in pairs; None where it cannot, by width, rows or alignment."""
    whole = (widths.D_A, widths.D_B, widths.BLOCK_DV) == (widths.D, 0, widths.DV)
    if not whole or not _has_aligned_scales(kv_cache, widths.D + widths.DV):
        return None
    most, block_size = max(widths.D, widths.DV), kv_cache.shape[2]
    tile = next((tile for (m, channels), tile in PAIR_TILES if rows <= m and most <= channels), None)
    if tile and block_size % tile.keys and block_size % MIN_KEYS_OF_TILE == 0:
        return replace(
            tile, keys=MIN_KEYS_OF_TILE
        )  # of one block, which is found at once and asked for earlier
    return tile


def num_splits(programs: int, capacity: int, device: torch.device, tile: DecodeTile | None = None) -> int:
    """Parts of a context of up to `capacity` keys, when `programs` would run without splitting: many, as one request
    may be longer than all others, but of those that fill their waves of programs, the last one, too."""
    at_once = (tile.at_once if tile else PROGRAMS_AT_ONCE) * multiprocessors(device)
    programs = max(programs, 1)
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), programs)
    most_splits = tile.most_splits if tile else MOST_SPLITS
    of_keys = capacity // min_keys_of_split(programs, device)
    if tile and tile.warps > 1:  # short parts for each multiprocessor, but not several of them
        of_keys = min(of_keys, max(multiprocessors(device) // programs, capacity // MIN_KEYS_OF_SPLIT))
    most = max(1, min(wanted, most_splits, of_keys))
    shares = {n: programs * n / at_once / math.ceil(programs * n / at_once) for n in SPLITS if n <= most}
    return max(shares, key=lambda n: (min(shares[n], FULL), n))


def min_keys_of_split(programs: int, device: torch.device) -> int:
    return MIN_KEYS_OF_LONE_SPLIT if programs <= multiprocessors(device) else MIN_KEYS_OF_SPLIT


def _registers(codes: str, widths: Widths, dtype: torch.dtype) -> int | None:
    """With so many a thread three programs over codes share a multiprocessor, and none are spilled; otherwise two."""
    fits = dtype.itemsize == 2 and (widths.D_A, widths.D_B, widths.BLOCK_DV) == (128, 0, 128)
    return 168 if codes and fits else None


def _has_aligned_scales(kv_cache: torch.Tensor, scale_at: int) -> bool:
    """Whether the float32 behind every row can be read as such."""
    return all(n % 4 == 0 for n in (kv_cache.data_ptr(), scale_at, *kv_cache.stride()[:3]))
