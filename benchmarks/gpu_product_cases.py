"""What `gpu.py` measures of products over codes, of experts, and of sampling, beside what bounds them.

Bytes are those of weights, activations and results, each moved once; of experts, only of those that some token chose.
"""

from __future__ import annotations

from unittest import mock

import torch
from gpu_cases import op
from gpu_isolated import Case
from gpu_timing import Calls, bandwidth_row, num_copies

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
CHOICES = 9  # of experts


def _result(case: str, calls: Calls, num_bytes: int, flops: int, copy_gb_per_s: float, **sizes) -> dict:
    row = bandwidth_row(case, num_bytes, calls, copy_gb_per_s, **sizes)
    return {**row, "tflop_per_s": flops / row["ms"] / 1e9}


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
    for _ in range(num_copies(num_weight_bytes, most=100)):
        qweight, scales = _codes((codes, scale), format)
        if granularity:
            options = {"format": format, "dtype": torch.bfloat16}
            calls.append(lambda w=(qweight, scales), o=options: op(name)(*x, *w, **o))
        else:
            calls.append(lambda w=(qweight, scales): op(name)(x, *w, format=format))
    num_bytes = num_weight_bytes + rows * (INNER * (1 if granularity else 2) + columns * 2)
    case = f"{name} {format}" + (f", x by {granularity}" if granularity else "")
    flops = 2 * rows * columns * INNER
    return _result(case, calls, num_bytes, flops, copy_gb_per_s, rows=rows, columns=columns)


def narrow_linear(copy_gb_per_s: float, format: str, rows: int) -> dict:
    """Columns too few for the multiprocessors: with parts of k as the kernel takes them, and without."""
    given = (copy_gb_per_s, "quantized_linear", format, "", rows, NARROW_COLUMNS)
    with mock.patch.object(quantized_linear, "MAX_ROWS_OF_PARTS", 0):
        whole = linear(*given)
    return {**linear(*given), "ms_without_parts": whole["ms"]}


def experts(
    copy_gb_per_s: float, format: str, tokens: int, num_experts: int, slots: int, width: int, inner: int
) -> dict:
    """`format`: of the weights, "" for bfloat16. Each call has tokens that choose experts of their own."""
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    choices = [torch.rand(tokens, num_experts, device="cuda").argsort(1)[:, :slots] for _ in range(CHOICES)]
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
    calls = [lambda i=ids: op(name)(x, i, weights, *stacks, None, None, **options) for ids in choices]
    chosen = sum(len(ids.unique()) for ids in choices) / CHOICES
    num_bytes = round(chosen * sum(part[0].nbytes for part in stacks)) + 2 * x.nbytes
    flops = 2 * tokens * slots * 3 * width * inner
    return _result(f"{name} {format}".rstrip(), calls, num_bytes, flops, copy_gb_per_s, tokens=tokens)


def sampling(copy_gb_per_s: float, draws: int, asked: str) -> dict:
    """Bytes are those of the logits, read once; kernels read them three times or more."""
    shape = (draws, VOCAB)
    sets = [
        4 * torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for _ in range(num_copies(2 * draws * VOCAB))
    ]
    rows = torch.arange(draws, device="cuda")
    limits = {"top_k": (50, 1.0), "top_p": (1 << 40, 0.9)}.get(asked, (1 << 40, 1.0))
    table = [[1.4427, *limits, float("-inf"), 1.1 if asked == "penalty" else 1.0]] * draws
    options = torch.tensor(table, dtype=torch.float64, device="cuda")
    seen = torch.randint(0, VOCAB, (1000 * draws if asked == "penalty" else 0,), device="cuda")
    starts = torch.arange(draws + 1, device="cuda") * (1000 if asked == "penalty" else 0)
    operands = (rows, torch.stack([rows, rows], 1), options, seen, starts)
    calls = [lambda x=logits: op("sample_tokens")(x, *operands) for logits in sets]
    return bandwidth_row(f"sample_tokens, {asked}", sets[0].nbytes, calls, copy_gb_per_s, draws=draws)


def cases(copy_gb_per_s: float) -> list[Case]:
    measured = ((linear, LINEARS), (narrow_linear, NARROW), (experts, EXPERTS), (sampling, SAMPLINGS))
    return [
        (f"{measure.__name__} {sizes}", lambda m=measure, s=sizes: [m(copy_gb_per_s, *s)])
        for measure, all_sizes in measured
        for sizes in all_sizes
    ]
