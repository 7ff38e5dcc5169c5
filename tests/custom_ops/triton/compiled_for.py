"""Compiles the kernels that calls would launch, for a GPU that need not be here; prints one line a kernel.

    python -m tests.custom_ops.triton.compiled_for [CAPABILITY] [--all | --recurrent]

Without TRITON_INTERPRET; 90 is Hopper. --all: more sizes and types. --recurrent: recurrences alone, in all forms.

Shared memory must fit a multiprocessor and nothing may spill: that shows in the resource report, without a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from pagebinder.custom_ops.linear.weight_formats import FORMATS, packed_shapes, scale_dtype
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.custom_ops.triton import (
    cache_write,
    fp8_quant,
    gpu,
    indexed_attention,
    latent,
    linear,
    moe,
    packed_attention,
    paged_attention,
    qk_norm_rope_write,
    quantized_linear,
    quantized_moe,
    rms_norm,
    sampling,
    unified_attention,
)
from tests.custom_ops.triton.compiled_latent import compile_latent
from tests.custom_ops.triton.compiled_recurrent import compile_recurrent

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def is_specialised(parameter, value) -> bool:
    """Is an operand an integer of which a compiled kernel knows whether it is 1, or a multiple of 16?"""
    return not parameter.is_constexpr and type(value) is int and not parameter.do_not_specialize


def compile_instead_of_running(capability: int) -> None:
    """Every launch from here on compiles its kernel for the arguments at hand, as the GPU's driver would."""

    def run(
        self, *args, grid, warmup, num_warps=4, num_stages=3, maxnreg=None, enable_fp_fusion=True, **kwargs
    ):
        values = dict(zip(self.arg_names, args)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.params):
            value = values[parameter.name]
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + NAMES[value.dtype]
            elif isinstance(value, TensorDescriptor):
                signature[parameter.name] = f"tensordesc<{NAMES[value.base.dtype]}{list(value.block_shape)}>"
            elif parameter.is_constexpr or value is None or (value == 1 and is_specialised(parameter, value)):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor) or (is_specialised(parameter, value) and value % 16 == 0):
                attributes[(i,)] = [["tt.divisibility", 16]]
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        options["enable_fp_fusion"] = enable_fp_fusion
        source = ASTSource(self, signature, constants, attributes)
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        sizes = {name: constants[name] for name in ("D", "CODES", "BLOCK_M", "BLOCK_N") if name in constants}
        types = signature[self.arg_names[0]].removeprefix("*")
        facts = {
            "kernel": self.__name__,
            "of": types,
            "described": any(isinstance(value, TensorDescriptor) for value in values.values()),
            **sizes,
            "shared_bytes": kernel.metadata.shared,
            **resources(kernel.asm["cubin"]),
        }
        print(json.dumps(facts), flush=True)

    JITFunction.run = run
    gpu.MULTIPROCESSORS_OF_NO_GPU = gpu.HOPPERS_MULTIPROCESSORS
    gpu.CAPABILITY_OF_NO_GPU = divmod(capability, 10)


def resources(cubin: bytes) -> dict:
    """Registers a thread, and bytes of local memory a thread (spills and stack)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK", "LOCAL")
    )
    return {"registers": registers, "local_bytes": stack + local}


def attend(dtype, head_dim, *, new, codes="", requests=4, heads=32, kv_heads=8) -> None:
    """Nothing is computed, so operands may hold anything: tensors of the CPU, unwritten."""
    q = torch.empty(requests * new, heads, head_dim, dtype=dtype)
    row = 2 * head_dim + (8 if codes else 0)
    cache = torch.empty(4, kv_heads, 64, row, dtype=torch.uint8 if codes else dtype)
    step = (torch.empty(requests, 64), torch.empty(requests), torch.empty(requests + 1))
    operands = (q, cache, *(x.int() for x in step))
    op = paged_attention.quantized_paged_attention if codes else paged_attention.paged_attention
    op(*operands, **({"codes": codes} if codes else {}), head_dim_v=head_dim, scale=0.1)


def attend_by_distance(dtype, *, new, requests=4, heads=16, head_dim=64) -> None:
    """T5's decoder, and its encoder."""
    q = torch.empty(requests * new, heads, head_dim, dtype=dtype)
    cache, bias = torch.empty(4, heads, 64, 2 * head_dim, dtype=dtype), torch.empty(heads, 128, dtype=dtype)
    step = (torch.empty(requests, 64), torch.empty(requests), torch.empty(requests + 1))
    options = {"scale": 1.0, "num_behind": 127}
    block_table, seq_lens, starts = (x.int() for x in step)
    operands = (q, cache, block_table, seq_lens, starts, bias)
    paged_attention.paged_relative_attention(*operands, head_dim_v=head_dim, **options)
    packed_attention.packed_relative_attention(q, q, q, starts, bias, causal=False, **options)


def attend_by_query(dtype, *, new, requests=4, heads=64, kv_heads=8, head_dim=128, extent=1024) -> None:
    """Inkling: a bias and sinks of every query's own, in a window."""
    q = torch.empty(requests * new, heads, head_dim, dtype=dtype)
    cache = torch.empty(4, kv_heads, 64, 2 * head_dim, dtype=dtype)
    bias, sinks = torch.empty(len(q), heads, extent + 1, dtype=dtype), torch.empty(len(q), heads)
    step = (torch.empty(requests, 64), torch.empty(requests), torch.empty(requests + 1))
    options = {"scale": 1.0, "num_behind": extent, "window": 512}
    operands = (q, cache, *(x.int() for x in step), bias, sinks)
    paged_attention.paged_relative_attention(*operands, head_dim_v=head_dim, **options)


def attend_to_groups(dtype, *, new, ratio, requests=4, heads=16, kv_heads=2, head_dim=256) -> None:
    """Groups of `ratio` keys that each query chooses: every query is a request of small blocks."""
    q = torch.empty(requests * new, heads, head_dim, dtype=dtype)
    cache = torch.empty(4, kv_heads, 64, 2 * head_dim, dtype=dtype)
    starts = torch.arange(requests + 1).int() * new
    step = (torch.zeros(requests, 64).int(), torch.full((requests,), new).int(), starts)
    indices = torch.zeros(len(q), 2048 // ratio).int()
    options = {"head_dim_v": head_dim, "scale": 0.1, "ratio": ratio}
    indexed_attention.paged_indexed_attention(q, cache, *step, indices, **options)


def attend_latent(dtype, heads=128, latent_dim=512, rope_dim=64, nope_dim=128, sinks=None) -> None:
    q = torch.empty(4, heads, nope_dim + rope_dim, dtype=dtype)
    w = torch.empty(heads, nope_dim, latent_dim, dtype=dtype)
    step = (torch.empty(4, 64), torch.empty(4), torch.empty(5))
    cache = torch.empty(4, 64, latent_dim + rope_dim, dtype=dtype)
    q_parts = q.split((nope_dim, rope_dim), -1)
    latent.paged_mla_attention(*q_parts, w, w, cache, *(x.int() for x in step), None, sinks, scale=0.1)


def attend_shared(dtype, head_dim, requests=32, heads=32, kv_heads=8) -> None:
    """The part that several requests share, and the merge of two parts."""
    q = torch.empty(requests, heads, head_dim, dtype=dtype)
    cache = torch.empty(4, kv_heads, 64, 2 * head_dim, dtype=dtype)
    per_request = torch.empty(requests).int()
    step = (torch.empty(requests, 64).int(), per_request, torch.empty(requests + 1).int())
    shared = (per_request, per_request, per_request)
    options = {"part": "s", "phases": "-su", "head_dim_v": head_dim, "scale": 0.1}
    out, lse = unified_attention.attention_part(q, cache, *step, *shared, **options)
    unified_attention.merge_attention_states([out, out], [lse, lse])


def write(dtype, tokens=4, heads=32, kv_heads=8, head_dim=128) -> None:
    q, k, v = (torch.empty(tokens, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    cos, weight, slots = q[:, 0].contiguous(), q[0, 0], torch.empty(tokens).int()
    cache = torch.empty(4, kv_heads, 64, 2 * head_dim, dtype=dtype)
    codes = torch.empty(4, kv_heads, 64, 2 * head_dim + 8, dtype=torch.uint8)
    options = {"eps": 1e-6, "tail": "cast_scale"}
    qk_norm_rope_write.qk_norm_rope_write(
        q, k, v, cos, cos, weight, weight, cache, slots, style="half", **options
    )
    for table in (cos, cos[:, : head_dim // 4].contiguous()):  # all channels turn, or a quarter of them
        heads = (q, k, v, table, table, weight, weight, codes, slots)
        qk_norm_rope_write.qk_norm_rope_quantized_write(*heads, codes="fp8_e4m3", style="half", **options)
    cache_write.quantized_kv_cache_write(k, v, codes, slots, codes="fp8_e4m3")
    x = torch.empty(tokens, 4096, dtype=dtype)
    rms_norm.add_rms_norm(x, x, x[0], **options)


def quantise(dtype, tokens=64, width=4096) -> None:
    """Activations in fp8: each kernel, and each thing that may share a scale."""
    x, tensor = torch.empty(tokens, width, dtype=dtype), {"granularity": "tensor"}
    fp8_quant.add_rms_norm_fp8_quant(x, x, x[0], eps=1e-6, tail="cast_scale", granularity="group")
    fp8_quant.gated_activation_fp8_quant(x, x, activation="silu", granularity="token")
    fp8_quant.scaled_fp8_quant(x, **tensor)


def multiply(dtype, rows, format, inner=4096, columns=4096, x_shares="") -> None:
    """Linear layers over packed weights; `x_shares`: x is of codes, with scales of that."""
    codes, scale = packed_shapes(columns, inner, format)
    weight = (torch.empty(codes, dtype=torch.uint8), torch.empty(scale, dtype=scale_dtype(format)))
    if not x_shares:
        quantized_linear.quantized_linear(torch.empty(rows, inner, dtype=dtype), *weight, format=format)
        return
    x = torch.empty(rows, inner, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.empty({"tensor": (1,), "token": (rows, 1), "group": (rows, inner // 128)}[x_shares])
    quantized_linear.fp8_linear(x, scales, *weight, format=format, dtype=dtype)


def project(dtype, rows, inner=4096, columns=1024) -> None:
    """Linear layers of few rows: alone, three that read one x, and a gate."""
    x, weight = torch.empty(rows, inner, dtype=dtype), torch.empty(columns, inner, dtype=dtype)
    linear.linear(x, weight)
    linear.linears(x, [weight] * 3, [])
    linear.gated_linear(x, weight, weight, activation="silu")


def choose(dtype, draws=8, vocab=128_000) -> None:
    """Sampling, with tokens that were seen."""
    logits, whole = torch.empty(draws, vocab, dtype=dtype), torch.zeros(draws + 1, dtype=torch.int64)
    options, streams = torch.empty(draws, 5, dtype=torch.float64), torch.zeros(draws, 2, dtype=torch.int64)
    sampling.sample_tokens(logits, whole[:-1], streams, options, whole, whole)


def mix(dtype, tokens, experts=128, slots=8, width=2048, inner=768) -> None:
    """Experts: both projections and the sum."""
    ids, x = torch.zeros(tokens, slots, dtype=torch.int64), torch.empty(tokens, width, dtype=dtype)
    up, down = (
        torch.empty(experts, 2 * inner, width, dtype=dtype),
        torch.empty(experts, width, inner, dtype=dtype),
    )
    gate = Gate().as_options()
    moe.moe_experts(x, ids, ids.float(), up, down, None, None, transposed=False, **gate)


def mix_codes(dtype, tokens, format, experts=128, slots=8, width=2048, inner=768, interleaved=False) -> None:
    """The same with weights of 8 or 4 bits."""
    ids, x = torch.zeros(tokens, slots, dtype=torch.int64), torch.empty(tokens, width, dtype=dtype)
    stacks = []
    for shape in ((2 * inner, width), (width, inner)):
        codes, scale = ((experts, *part) for part in packed_shapes(*shape, format))
        stacks += [torch.empty(codes, dtype=torch.uint8), torch.empty(scale, dtype=scale_dtype(format))]
    gate = Gate(interleaved=interleaved).as_options()
    quantized_moe.quantized_moe_experts(x, ids, ids.float(), *stacks, None, None, format=format, **gate)


def main() -> None:
    compile_instead_of_running(int(sys.argv[1]) if len(sys.argv) > 1 else 90)
    if "--recurrent" in sys.argv:
        compile_recurrent(everything=True)
        return
    attend(torch.bfloat16, 128, new=1)
    attend(torch.bfloat16, 128, new=64)
    attend_shared(torch.bfloat16, 128)
    if "--all" in sys.argv:
        attend_shared(torch.float32, 128)
        attend_shared(torch.bfloat16, 512)
        for head_dim in (64, 96, 192, 256, 512, 576):
            for new in (1, 64):
                attend(torch.bfloat16, head_dim, new=new)
        for new in (1, 64):
            attend(torch.float32, 128, new=new)
            attend(torch.float32, 576, new=new)
            attend(torch.bfloat16, 512, new=new, codes="fp8_e4m3")
            attend(torch.float16, 128, new=new, codes="fp8_e5m2")
            attend(torch.bfloat16, 128, new=new, codes="int8")
            attend(torch.bfloat16, 128, new=new, codes="fp8_e4m3", heads=128)
        for head_dim in (64, 256):
            attend(torch.bfloat16, head_dim, new=1, codes="fp8_e4m3")
        attend_latent(torch.bfloat16, heads=32, nope_dim=192, sinks=torch.empty(32))
        for rows in (4, 64, 256):
            for format in FORMATS:
                multiply(torch.bfloat16, rows, format)
            for x_shares in ("tensor", "token", "group"):
                multiply(torch.bfloat16, rows, "fp8_block", x_shares=x_shares)
        multiply(torch.float32, 4, "int4_g64")
        quantise(torch.float32)
        choose(torch.bfloat16)
        mix(torch.bfloat16, 4)
        mix(torch.bfloat16, 512)
        mix(torch.float32, 64)
        for tokens in (4, 512, 4096):
            for format in FORMATS:
                mix_codes(torch.bfloat16, tokens, format, interleaved=tokens == 512)
            mix_codes(torch.bfloat16, tokens, "int4_g32", interleaved=True)
        mix_codes(torch.float32, 64, "int8")
    attend(torch.bfloat16, 128, new=1, codes="fp8_e4m3")
    attend_by_distance(torch.bfloat16, new=64)
    attend_by_query(torch.bfloat16, new=1)
    attend_by_query(torch.bfloat16, new=64)
    attend_to_groups(torch.bfloat16, new=1, ratio=16)
    attend_to_groups(torch.bfloat16, new=128, ratio=4)
    attend_latent(torch.bfloat16)
    write(torch.bfloat16)
    quantise(torch.bfloat16)
    project(torch.bfloat16, rows=1)
    project(torch.bfloat16, rows=8)
    multiply(torch.bfloat16, 4, "fp8_block", x_shares="group", columns=1024)
    multiply(torch.bfloat16, 256, "int4_g64")
    choose(torch.bfloat16, vocab=1000)
    mix(torch.bfloat16, 4096)
    mix_codes(torch.bfloat16, 4, "int4_g64")
    mix_codes(torch.bfloat16, 4096, "fp8_block", interleaved=True)
    compile_latent("--all" in sys.argv)
    compile_recurrent(everything=False)


if __name__ == "__main__":
    main()
