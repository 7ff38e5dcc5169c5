"""What `gpu.py` measures of latent rows and streams, in the sizes of one DeepSeek-V4 layer, against bandwidth.

Bytes are those that must move: every row that is attended to, every key that is scored, every operand and result of
what is elementwise, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from gpu_cases import op
from gpu_isolated import Case
from gpu_timing import attempted, bandwidth_row, num_copies

from pagebinder.custom_ops.latent.layouts import row_bytes, row_layout

HEADS, WIDTH, ROPE, WINDOW, TOPK, RATIO = 64, 512, 64, 128, 512, 4
INDEX_WIDTH, HIDDEN, STREAMS, GROUPS, GROUP_ROWS = 128, 4096, 4, 8, 1024
ENTRIES = 64  # of a block
DECODES = ((1, 65536), (16, 65536), (64, 16384), (256, 16384))  # requests, context
PROMPT = 8192
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def int32(x: torch.Tensor) -> torch.Tensor:
    return x.to(device="cuda", dtype=torch.int32)


def paged(requests: int, rows: int, layout: str, width: int, rope_dim: int):
    """(cache, table) of random rows in shuffled blocks: codes and scales of bytes are all finite."""
    blocks = -(-rows // ENTRIES)
    table = int32(torch.randperm(requests * blocks)).view(requests, blocks)
    if layout == "plain":
        return torch.randn(len(table) * blocks, ENTRIES, width, **BF16), table
    size = row_layout(layout, width, rope_dim).page_bytes(ENTRIES)
    cache = torch.randint(0x30, 0x40, (requests * blocks, size), dtype=torch.uint8, device="cuda")
    return cache, table


def batch(requests: int, context: int, new: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(seq_lens, query_start_loc)."""
    return int32(torch.full((requests,), context)), int32(torch.arange(requests + 1) * new)


def attention(copy: float, requests: int, context: int, layout: str, new: int = 1) -> dict:
    """A window and lists of entries; each token reads rows of its own but for those of the window."""
    tokens = requests * new
    rope_dim = 0 if layout == "plain" else ROPE
    q, sinks = torch.randn(tokens, HEADS, WIDTH, **BF16), torch.randn(HEADS, device="cuda")
    entry = 2 * WIDTH if layout == "plain" else row_bytes(layout, width=WIDTH, rope_dim=ROPE)
    rows = min(tokens * TOPK, requests * context // RATIO)  # of many tokens, which share most of theirs
    num_bytes = (rows + requests * (WINDOW + new - 1)) * entry + 2 * q.nbytes
    options = {"scale": WIDTH**-0.5, "window": WINDOW, "ratio": RATIO, "head_dim_v": WIDTH}
    options |= {"layout": layout, "rope_dim": rope_dim}
    calls = []
    for _ in range(num_copies(num_bytes)):
        window = paged(requests, context, layout, WIDTH, rope_dim)
        entries = paged(requests, context // RATIO, layout, WIDTH, rope_dim)
        scores = torch.rand(tokens, (context - new) // RATIO, device="cuda")
        lists = int32(scores.topk(TOPK).indices.sort().values)
        operands = (q, *window, *entries, lists, *batch(requests, context, new), sinks)
        calls.append(lambda o=operands: op("sparse_mla_attention")(*o, **options))
    flops = 4 * tokens * HEADS * WIDTH * (TOPK + WINDOW)
    sizes = {"requests": requests, "context": context, "new": new}
    row = bandwidth_row(f"sparse attention {layout}", num_bytes, calls, copy, **sizes)
    return {**row, "tflop_per_s": flops / row["ms"] / 1e9}


def indexer(copy: float, requests: int, context: int, layout: str, new: int = 1) -> dict:
    """Keys of all entries, and their scores written and read once."""
    tokens, entries = requests * new, context // RATIO
    q, weights = torch.randn(tokens, HEADS, INDEX_WIDTH, **BF16), torch.randn(tokens, HEADS, device="cuda")
    key = 2 * INDEX_WIDTH if layout == "plain" else row_bytes(layout, width=INDEX_WIDTH)
    num_bytes = requests * entries * key + 8 * tokens * entries + q.nbytes
    options = {"topk": TOPK, "ratio": RATIO, "scale": INDEX_WIDTH**-0.5, "layout": layout}
    calls = []
    for _ in range(num_copies(num_bytes)):
        operands = (
            q,
            weights,
            *paged(requests, entries, layout, INDEX_WIDTH, 0),
            *batch(requests, context, new),
        )
        calls.append(lambda o=operands: op("indexer_score_topk")(*o, **options))
    flops = 2 * tokens * entries * HEADS * INDEX_WIDTH
    sizes = {"requests": requests, "context": context, "new": new}
    row = bandwidth_row(f"indexer {layout}", num_bytes, calls, copy, **sizes)
    return {**row, "tflop_per_s": flops / row["ms"] / 1e9}


def compressor(copy: float, ratio: int, tokens: int = PROMPT) -> dict:
    """One prompt into entries of the quantised layout, with its states."""
    slots = 2 if ratio == RATIO else 1
    kv, gate = torch.randn(2, tokens, slots * WIDTH, **BF16).unbind(0)
    weights = (
        torch.randn(ratio, slots * WIDTH, device="cuda"), torch.ones(WIDTH, **BF16), torch.ones(32, device="cuda")
    )  # fmt: skip
    states, table = torch.zeros(3, slots, 3, WIDTH, device="cuda"), int32(torch.zeros(1, tokens // 256))
    table[0, -1] = 1
    entries, _ = paged(1, tokens // ratio + ENTRIES, "fp8_v4", WIDTH, ROPE)
    pages = int32(torch.arange(1, len(entries)).view(1, -1))
    operands = (kv, gate, *weights, states, table, entries, pages, *batch(1, tokens, tokens))
    options = {"ratio": ratio, "overlap": slots == 2, "eps": 1e-6, "rope_scale": 1.0, "block_size": 256}
    options |= {"layout": "fp8_v4", "rope_dim": ROPE}
    call = lambda: op("compress_norm_rope_store")(*operands, **options)  # noqa: E731
    num_bytes = 2 * kv.nbytes + tokens // ratio * row_bytes("fp8_v4", width=WIDTH, rope_dim=ROPE)
    case = f"compress_norm_rope_store, {ratio} tokens"
    return bandwidth_row(case, num_bytes, [call], copy, tokens=tokens)


def layer_calls(tokens: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Bytes and call of each op of a layer that is elementwise, or a product of few columns."""
    q, kv = torch.randn(tokens, HEADS, WIDTH, **BF16), torch.randn(tokens, WIDTH, **BF16)
    cos, sin = torch.randn(2, tokens, ROPE // 2, device="cuda").unbind(0)
    cache, _ = paged(1, tokens, "fp8_v4", WIDTH, ROPE)
    slots = int32(torch.randperm(tokens))
    weight = torch.randn(GROUPS * GROUP_ROWS, HEADS * WIDTH // GROUPS, **BF16)
    streams, update = torch.randn(tokens, STREAMS, HIDDEN, **BF16), torch.randn(tokens, HIDDEN, **BF16)
    rows = (2 + STREAMS) * STREAMS
    mixing = [torch.randn(*shape, device="cuda") for shape in ((rows, STREAMS * HIDDEN), (rows,), (3,))]
    post, comb = (
        torch.rand(tokens, STREAMS, device="cuda"),
        torch.rand(tokens, STREAMS, STREAMS, device="cuda"),
    )
    store = {"layout": "fp8_v4", "rope_dim": ROPE}
    weights = {"sinkhorn_iters": 20, "norm_eps": 1e-6, "eps": 1e-6}
    return {
        "q_norm_rope": (2 * q.nbytes, lambda: op("q_norm_rope")(q, cos, sin, eps=1e-6)),
        "kv_rope_quant_store": (
            kv.nbytes + 2 * cos.nbytes + tokens * row_bytes("fp8_v4", width=WIDTH, rope_dim=ROPE),
            lambda: op("kv_rope_quant_store")(kv, cos, sin, cache, slots, **store),
        ),
        "latent_cache_write": (
            kv.nbytes + tokens * row_bytes("fp8_v4", width=WIDTH, rope_dim=ROPE),
            lambda: op("latent_cache_write")(kv, cache, slots, **store),
        ),
        "inverse_rope_grouped_linear": (
            q.nbytes + weight.nbytes + 2 * tokens * GROUPS * GROUP_ROWS,
            lambda: op("inverse_rope_grouped_linear")(q, cos, sin, weight, groups=GROUPS),
        ),
        "hyper_connection": (
            streams.nbytes + mixing[0].nbytes + update.nbytes,
            lambda: op("hyper_connection")(streams, *mixing, **weights),
        ),
        "hyper_mix": (
            2 * streams.nbytes + update.nbytes,
            lambda: op("hyper_mix")(streams, post, comb, update),
        ),
    }


def elementwise(copy: float, tokens: int) -> list[dict]:
    """Several layers where one would stay in the cache."""
    layers = [layer_calls(tokens) for _ in range(9 if tokens < 1024 else 1)]
    rows = []
    for name, (num_bytes, _) in layers[0].items():
        calls = [layer[name][1] for layer in layers]
        rows.append(
            attempted(name, functools.partial(bandwidth_row, name, num_bytes, calls, copy, tokens=tokens))
        )
    return rows


def cases(copy: float) -> list[Case]:
    made: list[Case] = []
    for layout in ("plain", "fp8_v4"):
        made += [(f"sparse {layout} {s}", lambda s=s, l=layout: [attention(copy, *s, l)]) for s in DECODES]
        prompt = lambda l=layout: [attention(copy, 1, PROMPT, l, new=2048)]  # noqa: E731
        made.append((f"sparse {layout}, a prompt", prompt))
    for layout in ("fp8_index", "fp4_index"):
        made += [(f"indexer {layout} {s}", lambda s=s, l=layout: [indexer(copy, *s, l)]) for s in DECODES]
    made.append(("indexer, a prompt", lambda: [indexer(copy, 1, 65536, "fp8_index", new=2048)]))
    made += [(f"compressor {r}", lambda r=r: [compressor(copy, r)]) for r in (RATIO, 128)]
    return made + [(f"latent elementwise {t}", lambda t=t: elementwise(copy, t)) for t in (64, 16384)]
