"""What a shared prefix costs read once for each request, and read once for all of them: seconds of one layer's call.

    apart       sum over requests of  S * (read, or tile * tiles + row * rows for more rows than a decode's)
    together    S * (tile * tiles + row * rows + what it costs to bring the keys near)
                + a fixed cost for the call and for each token that is merged

S is the number of shared tokens, rows are queries x heads that share a KV head. `read` is what a key of a few queries
costs, which is mostly its bytes: less for a prefix that stays in a processor's caches from request to request than
for one that does not, and in between in between. `tile` is what it costs to bring a key to matrix tiles, `row` what
each row adds. They are measured on synthetic requests of the layer's shape when an engine starts (a few hundred
milliseconds at most), or given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pagebinder.custom_ops.providers import OpNeed, select_provider
from pagebinder.runtime.shared_prefixes import order_shared_tokens

# Rows that the kernels multiply at once, and up to which they read keys row by row.
TILE_ROWS, FEW_ROWS = 64, 8
CALL_SECONDS, TOKEN_SECONDS = 2e-5, 5e-7
# A gain below this share of what the prefix costs apart is left: rates are as noisy as the machine.
MARGIN = 0.2
NEAR_BYTES, FAR_BYTES = 2 << 20, 16 << 20  # of a prefix that stays in caches, and of one that does not
MEASURED_REQUESTS = (8, 32)
MEASURED_BLOCK = 64
MOST_MEASURED_BLOCKS = 64  # small layers need no long prefix to tell
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class CascadeRates:
    """Seconds per key of all KV heads together: read by one request of few rows, from a prefix of NEAR_BYTES or
    FAR_BYTES; `tile` and `row` as above."""

    read_near: float
    read_far: float
    tile: float
    row: float


@dataclass(frozen=True, kw_only=True)
class CascadeShape:
    """A layer of attention, as far as its cost goes; `dtype` is a name such as "bfloat16"."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def key_bytes(self) -> int:
        """K and V of a token."""
        return self.num_kv_heads * (self.head_dim + self.head_dim_v) * getattr(torch, self.dtype).itemsize


class CascadeCosts:
    """Decides by `rates`. `new_tokens` everywhere: queries of each request, [R] or one number for all."""

    def __init__(self, shape: CascadeShape, rates: CascadeRates) -> None:
        self.shape, self.rates = shape, rates

    def read(self, num_keys: int) -> float:
        """Seconds of a key of a prefix of so many."""
        size = math.log(max(1, num_keys * self.shape.key_bytes))
        near, far = math.log(NEAR_BYTES), math.log(FAR_BYTES)
        far_share = min(max((size - near) / (far - near), 0.0), 1.0)
        return self.rates.read_near + far_share * (self.rates.read_far - self.rates.read_near)

    def apart(self, new_tokens: np.ndarray, num_keys: int) -> float:
        """Each request reads the keys by itself. Requests without new tokens read nothing."""
        rows = np.asarray(new_tokens) * self.shape.group
        on_tiles = self.rates.tile * -(-rows // TILE_ROWS) + self.rates.row * rows
        return num_keys * float(
            (np.where(rows <= FEW_ROWS, self.read(num_keys), on_tiles) * (rows > 0)).sum()
        )

    def together(self, new_tokens: np.ndarray, num_keys: int) -> float:
        tokens = int(np.sum(new_tokens))
        rows = tokens * self.shape.group
        per_key = self.rates.tile * math.ceil(rows / TILE_ROWS) + self.rates.row * rows
        if rows <= FEW_ROWS:
            per_key = self.rates.read_near
        per_key += max(0.0, self.read(num_keys) - self.rates.read_near)
        return num_keys * per_key + CALL_SECONDS + TOKEN_SECONDS * tokens

    def gain(self, new_tokens: np.ndarray, num_keys: int) -> float:
        """Seconds that reading together saves, if it is worth the risk; else 0."""
        apart = self.apart(new_tokens, num_keys)
        gain = apart - self.together(new_tokens, num_keys)
        return gain if gain > MARGIN * apart else 0.0

    def predicted_ratio(self, new_tokens: np.ndarray, num_keys: int, unique_keys: int) -> float:
        """Time of a call apart over that of one together; each request reads `unique_keys` more either way."""
        unique = self.apart(new_tokens, unique_keys)
        return (self.apart(new_tokens, num_keys) + unique) / (self.together(new_tokens, num_keys) + unique)


def measure_rates(shape: CascadeShape, device: torch.device) -> CascadeRates:
    """Rates of the kernels that serve `shape` on `device`, at the present number of threads."""
    few, many = MEASURED_REQUESTS
    block_bytes = shape.key_bytes * MEASURED_BLOCK
    near, far = (min(max(1, n // block_bytes), MOST_MEASURED_BLOCKS) for n in (NEAR_BYTES, FAR_BYTES))
    size = (far, shape.num_kv_heads, MEASURED_BLOCK, shape.head_dim + shape.head_dim_v)
    # Not zeros: pages of zeros that nobody wrote are one page.
    cache = torch.ones(size, dtype=getattr(torch, shape.dtype), device=device)
    read_near, read_far = (_seconds_per_key(shape, cache, few, n, together=False) / few for n in (near, far))
    seconds = {n: _seconds_per_key(shape, cache, n, near, together=True) for n in (few, many)}
    rows = {n: n * shape.group for n in seconds}
    tiles = {n: math.ceil(rows[n] / TILE_ROWS) for n in seconds}
    determinant = tiles[few] * rows[many] - tiles[many] * rows[few]
    tile = (seconds[few] * rows[many] - seconds[many] * rows[few]) / determinant if determinant else 0.0
    tile = min(max(tile, 0.0), seconds[few] / tiles[few])
    row = max(0.0, (seconds[many] - tile * tiles[many]) / rows[many])
    return CascadeRates(read_near=read_near, read_far=read_far, tile=tile, row=row)


def _seconds_per_key(
    shape: CascadeShape, cache: torch.Tensor, requests: int, num_blocks: int, *, together: bool
) -> float:
    """Of the fastest of some calls over a prefix of `num_blocks`, which is all that the requests see."""
    device, num_keys = cache.device, num_blocks * MEASURED_BLOCK
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).repeat(requests, 1)
    lens = torch.full((requests,), num_keys, dtype=torch.int32, device="cpu")
    shared = lens - 1 if together else torch.zeros_like(lens)  # the last key is the new token's
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cpu")
    leaders = torch.zeros(requests, dtype=torch.int32, device="cpu")
    tokens = torch.empty(requests, dtype=torch.int32, device="cpu")
    order_shared_tokens(shared.numpy(), leaders.numpy(), starts.numpy(), tokens.numpy())
    q = torch.zeros(requests, shape.num_heads, shape.head_dim, dtype=cache.dtype, device=device)
    need = OpNeed(op="unified_attention", device=device.type, dtype=shape.dtype)
    attention = select_provider(need).overload
    operands = (q, cache, table, *(x.to(device) for x in (lens, starts, shared, leaders, tokens)))
    options = {"phases": "-su", "head_dim_v": shape.head_dim_v, "scale": 1.0}
    return _fastest(lambda: attention(*operands, **options), device) / num_keys


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    best = math.inf
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
