"""What `gpu.py` measures of products over codes, of experts, and of sampling, beside what bounds them.

Bytes are those of weights, activations and results, each moved once; of experts, only of those that some token chose.
"""

from __future__ import annotations

from unittest import mock

import torch
from gpu_cases import L2_BYTES, op
from gpu_timing import median_ms

from pagebinder.custom_ops.linear.weight_formats import packed_shapes, scale_dtype
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.custom_ops.triton import quantized_linear

COLUMNS, INNER = 14336, 4096  # the gate of an 8B Llama
ROWS = (1, 64, 4096)
FORMATS = ("fp8", "fp8_block", "int8", "int4_g64")
LINEARS = tuple(("quantized_linear", format, "", rows) for format in FORMATS for rows in ROWS) + tuple(
    ("fp8_linear", format, granularity, rows)
    for format, granularity in (("fp8_tensor", "tensor"), ("fp8", "token"), ("fp8_block", "group"))
    for rows in ROWS
)  # op, format of the weight, what shares a scale of x, rows
NARROW_COLUMNS = 1024  # its keys
NARROW = tuple((format, rows) for format in FORMATS for rows in (1, 64))
EXPERTS = tuple(
    (format, tokens, 128, 8, 2048, 768)
    for format in ("", "fp8_block", "int4_g64")
    for tokens in (1, 64, 4096)
)  # format of the weights, tokens, experts, K, C, I
SAMPLINGS = tuple((draws, asked) for draws in (1, 64) for asked in ("nothing", "top_k", "top_p", "penalty"))
VOCAB = 151_936


def _result(case: str, ms: float, num_bytes: int, flops: int, copy_gb_per_s: float, **sizes) -> dict:
    rate = num_bytes / ms / 1e6
    return {
        "case": case, **sizes, "ms": ms, "gb_per_s": rate, "share_of_copy": rate / copy_gb_per_s,
        "tflop_per_s": flops / ms / 1e9,
    }  # fmt: skip


def _codes(shapes, format: str, *experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed weight, or one for each of so many experts; exponents of about 1, whatever the format."""
    codes, scale = ((*experts, *shape) for shape in shapes)
    qweight = torch.randint(0x30, 0x40, codes, dtype=torch.uint8, device="cuda")
    return qweight, torch.full(scale, 0.01, dtype=scale_dtype(format), device="cuda")


def linear(
    copy_gb_per_s: float, name: str, format: str, granularity: str, rows: int, columns: int = COLUMNS
) -> dict:
    codes, scale = packed_shapes(columns, INNER, format)
    num_weight_bytes = torch.Size(codes).numel() + torch.Size(scale).numel() * scale_dtype(format).itemsize
    x = torch.randn(rows, INNER, dtype=torch.bfloat16, device="cuda")
    if granularity:
        x = op("scaled_fp8_quant")(x, granularity=granularity)
    calls = []
    for _ in range(1 + 2 * L2_BYTES // num_weight_bytes):
        qweight, scales = _codes((codes, scale), format)
        if granularity:
            options = {"format": format, "dtype": torch.bfloat16}
            calls.append(lambda w=(qweight, scales), o=options: op(name)(*x, *w, **o))
        else:
            calls.append(lambda w=(qweight, scales): op(name)(x, *w, format=format))
    ms = median_ms(calls)
    num_bytes = num_weight_bytes + rows * (INNER * (1 if granularity else 2) + columns * 2)
    case = f"{name} {format}" + (f", x by {granularity}" if granularity else "")
    return _result(case, ms, num_bytes, 2 * rows * columns * INNER, copy_gb_per_s, rows=rows, columns=columns)


def narrow_linear(copy_gb_per_s: float, format: str, rows: int) -> dict:
    """Columns too few for the multiprocessors: with parts of k as the kernel takes them, and without."""
    given = (copy_gb_per_s, "quantized_linear", format, "", rows, NARROW_COLUMNS)
    with mock.patch.object(quantized_linear, "MAX_ROWS_OF_PARTS", 0):
        whole = linear(*given)
    return {**linear(*given), "ms_without_parts": whole["ms"]}


def experts(
    copy_gb_per_s: float, format: str, tokens: int, num_experts: int, slots: int, width: int, inner: int
) -> dict:
    """`format`: of the weights, "" for bfloat16."""
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(tokens, num_experts, device="cuda").argsort(1)[:, :slots]
    weights = torch.rand(tokens, slots, device="cuda")
    shapes = ((2 * inner, width), (width, inner))
    if format:
        stacks = [
            part for shape in shapes for part in _codes(packed_shapes(*shape, format), format, num_experts)
        ]
        name, options = "quantized_moe_experts", {"format": format}
    else:
        stacks = [
            torch.randn(num_experts, *s, dtype=torch.bfloat16, device="cuda") * s[1] ** -0.5 for s in shapes
        ]
        name, options = "moe_experts", {"transposed": False}
    options |= Gate().as_options()
    ms = median_ms([lambda: op(name)(x, ids, weights, *stacks, None, None, **options)])
    num_bytes = len(ids.unique()) * sum(part[0].nbytes for part in stacks) + 2 * x.nbytes
    flops = 2 * tokens * slots * 3 * width * inner
    return _result(f"{name} {format}".rstrip(), ms, num_bytes, flops, copy_gb_per_s, tokens=tokens)


def sampling(copy_gb_per_s: float, draws: int, asked: str) -> dict:
    """Bytes are those of the logits, read once; kernels read them three times or more."""
    logits = 4 * torch.randn(draws, VOCAB, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(draws, device="cuda")
    limits = {"top_k": (50, 1.0), "top_p": (1 << 40, 0.9)}.get(asked, (1 << 40, 1.0))
    table = [[1.4427, *limits, float("-inf"), 1.1 if asked == "penalty" else 1.0]] * draws
    options = torch.tensor(table, dtype=torch.float64, device="cuda")
    seen = torch.randint(0, VOCAB, (1000 * draws if asked == "penalty" else 0,), device="cuda")
    starts = torch.arange(draws + 1, device="cuda") * (1000 if asked == "penalty" else 0)
    operands = (logits, rows, torch.stack([rows, rows], 1), options, seen, starts)
    ms = median_ms([lambda: op("sample_tokens")(*operands)])
    return _result(f"sample_tokens, {asked}", ms, logits.nbytes, 0, copy_gb_per_s, draws=draws)


def cases(copy_gb_per_s: float) -> list:
    """Functions without arguments, one a case."""
    made = [lambda c=case: linear(copy_gb_per_s, *c) for case in LINEARS]
    made += [lambda c=case: narrow_linear(copy_gb_per_s, *c) for case in NARROW]
    made += [lambda c=case: experts(copy_gb_per_s, *c) for case in EXPERTS]
    return made + [lambda c=case: sampling(copy_gb_per_s, *c) for case in SAMPLINGS]
