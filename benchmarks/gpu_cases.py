"""What `gpu.py` measures: paged decode and fused elementwise kernels against bandwidth, prefill against SDPA."""

from __future__ import annotations

import functools
from unittest import mock

import torch
from gpu_isolated import Case
from gpu_timing import attempted, bandwidth_row, median_ms, num_copies

from pagebinder.custom_ops.providers import registered_providers

H, G, D, BLOCK_SIZE = 32, 8, 128, 64  # an 8B Llama
DECODES = (
    (64, 1024),
    (64, 4096),
    (32, 16384),
    (8, 65536),
    (4, 131072),
    (1, 8192),
    (1, 131072),
)  # requests, context
NOT_IN_PAIRS = ((64, 1024), (8, 65536), (1, 8192))
PREFILLS = ((8, 1024), (2, 4096), (1, 16384))  # requests, tokens


def op(name: str):
    provider = registered_providers()["triton"]
    provider.prepare(name)
    return provider.overload(name)


def decode(
    copy_gb_per_s: float,
    requests: int,
    context: int,
    codes: str = "",
    heads: tuple[int, int, int] = (H, G, D),
) -> dict:
    """One new token a request over shuffled blocks; bytes are those of K and V, read once.

    `heads`: query heads, KV heads, their width.
    """
    num_heads, num_kv_heads, width = heads
    blocks = -(-context // BLOCK_SIZE)
    row = (2 * width + 8) if codes else 4 * width
    num_bytes = requests * context * num_kv_heads * row
    q = torch.randn(requests, num_heads, width, dtype=torch.bfloat16, device="cuda")
    lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    options = {"head_dim_v": width, "scale": width**-0.5} | ({"codes": codes} if codes else {})
    name = "quantized_paged_attention" if codes else "paged_attention"
    calls = []
    for _ in range(num_copies(num_bytes)):
        cache = _cache(requests * blocks, codes, num_kv_heads, width)
        table = torch.randperm(requests * blocks, device="cuda").int().view(requests, blocks)
        calls.append(lambda c=cache, t=table: op(name)(q, c, t, lens, starts, **options))
    case = f"decode {codes or 'bf16'}" + (f", heads of {width}" if width != D else "")
    return bandwidth_row(case, num_bytes, calls, copy_gb_per_s, requests=requests, context=context)


def decode_not_in_pairs(copy_gb_per_s: float, requests: int, context: int, codes: str) -> dict:
    """The same by the loop that rows of other widths go through, to compare the two on one GPU."""
    from pagebinder.custom_ops.triton import paged_attention

    with mock.patch.object(paged_attention, "PAIR_TILES", ()):
        row = decode(copy_gb_per_s, requests, context, codes)
    return {**row, "case": f"{row['case']}, not in pairs"}


def _cache(num_blocks: int, codes: str, num_kv_heads: int = G, width: int = D) -> torch.Tensor:
    shape = (num_blocks, num_kv_heads, BLOCK_SIZE, 2 * width + (8 if codes else 0))
    if not codes:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    rows = torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")
    rows[..., -8:] = torch.tensor([0.01, 0.01], device="cuda").view(torch.uint8)
    return rows


def prefill(requests: int, tokens: int) -> dict:
    """Causal prompts: our paged kernel, and the fastest of torch's attention backends on contiguous K and V."""
    blocks = tokens // BLOCK_SIZE
    q = torch.randn(requests * tokens, H, D, dtype=torch.bfloat16, device="cuda")
    cache = _cache(requests * blocks, "")
    table = torch.randperm(requests * blocks, device="cuda").int().view(requests, blocks)
    lens = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * tokens
    options = {"head_dim_v": D, "scale": D**-0.5}
    ms = median_ms([lambda: op("paged_attention")(q, cache, table, lens, starts, **options)])
    flops = 4 * requests * H * D * tokens * (tokens + 1) // 2
    others = {name: flops / other / 1e9 for name, other in _sdpa_ms(requests, tokens).items()}
    rate = flops / ms / 1e9
    best = max(others.values(), default=None)
    return {
        "case": "prefill bf16", "requests": requests, "tokens": tokens, "ms": ms, "tflop_per_s": rate,
        "sdpa_tflop_per_s": others, "share_of_best_sdpa": None if best is None else rate / best,
    }  # fmt: skip


def _sdpa_ms(requests: int, tokens: int) -> dict[str, float]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (
        requests,
        H,
        tokens,
        D,
    )  # K and V repeated for each query head: more than it needs, and all backends can
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    call = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    times = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                times[backend.name] = median_ms([call])
        except RuntimeError as error:
            print(f"{backend.name} is not here: {str(error).splitlines()[0]}")
    return times


def elementwise(copy_gb_per_s: float, tokens: int = 16384, width: int = 4096) -> list[dict]:
    """Fused norm, activation, and norm + RoPE + write; bytes are every operand read and every result written once."""
    x, residual = torch.randn(2, tokens, width, dtype=torch.bfloat16, device="cuda").unbind(0)
    weight = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    both = torch.randn(tokens, 2 * width, dtype=torch.bfloat16, device="cuda")
    q, k, v = (torch.randn(tokens, n, D, dtype=torch.bfloat16, device="cuda") for n in (H, G, G))
    cos, sin = torch.randn(2, tokens, D, dtype=torch.bfloat16, device="cuda").unbind(0)
    cache = torch.empty(tokens // BLOCK_SIZE, G, BLOCK_SIZE, 2 * D, dtype=torch.bfloat16, device="cuda")
    codes = torch.empty(tokens // BLOCK_SIZE, G, BLOCK_SIZE, 2 * D + 8, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(tokens, device="cuda").int()
    norm = {"eps": 1e-6, "tail": "cast_scale"}
    heads = (q, k, v, cos, sin, weight[:D], weight[:D], cache, slots)
    measured = {
        "rms_norm": (2 * x.nbytes, lambda: op("rms_norm")(x, weight, **norm)),
        "add_rms_norm": (4 * x.nbytes, lambda: op("add_rms_norm")(x, residual, weight, **norm)),
        "gated_activation": (
            both.nbytes * 3 // 2,
            lambda: op("gated_activation")(both[:, :width], both[:, width:], activation="silu"),
        ),
        "qk_norm_rope_write": (
            2 * (q.nbytes + k.nbytes + v.nbytes) + cos.nbytes + sin.nbytes,
            lambda: op("qk_norm_rope_write")(*heads, **norm, style="half"),
        ),
        "kv_cache_write": (2 * (k.nbytes + v.nbytes), lambda: op("kv_cache_write")(k, v, cache, slots)),
        "quantized_kv_cache_write": (
            k.nbytes + v.nbytes + codes.nbytes,
            lambda: op("quantized_kv_cache_write")(k, v, codes, slots, codes="fp8_e4m3"),
        ),
        "qk_norm_rope_quantized_write": (
            2 * q.nbytes + k.nbytes + v.nbytes + codes.nbytes + cos.nbytes + sin.nbytes,
            lambda: op("qk_norm_rope_quantized_write")(
                *heads[:7], codes, slots, codes="fp8_e4m3", **norm, style="half"
            ),
        ),
        "scaled_fp8_quant, dynamic, of the tensor": (
            x.nbytes * 5 // 2,  # read twice
            lambda: op("scaled_fp8_quant")(x, granularity="tensor"),
        ),
        "scaled_fp8_quant, token": (
            x.nbytes * 3 // 2,
            lambda: op("scaled_fp8_quant")(x, granularity="token"),
        ),
        "add_rms_norm_fp8_quant, group": (
            x.nbytes * 7 // 2,
            lambda: op("add_rms_norm_fp8_quant")(x, residual, weight, **norm, granularity="group"),
        ),
        "gated_activation_fp8_quant, token": (
            both.nbytes * 5 // 4,
            lambda: op("gated_activation_fp8_quant")(
                both[:, :width], both[:, width:], activation="silu", granularity="token"
            ),
        ),
    }
    return [
        attempted(name, functools.partial(bandwidth_row, name, size, [call], copy_gb_per_s, tokens=tokens))
        for name, (size, call) in measured.items()
    ]


def cases(copy_gb_per_s: float) -> list[Case]:
    made: list[Case] = [
        (f"decode {codes or 'bf16'} {shape}", lambda s=shape, c=codes: [decode(copy_gb_per_s, *s, c)])
        for codes in ("", "fp8_e4m3")
        for shape in DECODES
    ]
    made += [
        (f"decode not in pairs {shape}", lambda s=shape: [decode_not_in_pairs(copy_gb_per_s, *s, "fp8_e4m3")])
        for shape in NOT_IN_PAIRS
    ]
    made += [(f"prefill bf16 {shape}", lambda s=shape: [prefill(*s)]) for shape in PREFILLS]
    return [*made, ("elementwise", lambda: elementwise(copy_gb_per_s))]
