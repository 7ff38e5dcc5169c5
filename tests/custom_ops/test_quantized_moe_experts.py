"""`quantized_moe_experts`: every provider against a float64 oracle on the values of the codes; the C++ kernel beside
the reference over formats, sizes, gates and ragged routings."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.linear.group_scales import packed_levels
from pagebinder.custom_ops.linear.weight_formats import (
    FORMATS,
    LEVEL_OFFSETS,
    LEVEL_SPAN,
    PANEL,
    formats_of_experts,
    weight_format,
)
from pagebinder.custom_ops.linear.weight_stacks import dequantize_stack, quantize_stack
from pagebinder.custom_ops.moe.router import Router
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.custom_ops.test_moe_experts import DTYPES, GATES, NUM_EXPERTS, oracle, random, routing
from tests.helpers import by_day
from tests.tolerances import assert_close

WIDTH, INNER = 128, 64
FEW_FORMATS = ("int8", "int4_g64", "fp8_block")


def ops_of(name: str):
    chosen = registered_providers()[name]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    for op in ("quantized_moe_experts", "quantized_moe_routed_experts"):
        assert not chosen.reasons_against(OpNeed(op=op, dtype="bfloat16"))
        chosen.prepare(op)
    return torch.ops.pagebinder if name == "reference" else torch.ops.pagebinder_cpu


@pytest.fixture(params=["reference", "cpu"])
def ops(request):
    return ops_of(request.param)


@pytest.fixture
def cpu():
    return ops_of("cpu")


def stacks(name, gate=GATES["silu"], *, width=WIDTH, inner=INNER, bias=False, dtype=torch.float32):
    """up, up_scale, down, down_scale, up_bias, down_bias; weights of different size from expert to expert."""
    size = torch.tensor([1.0, 0.5, 1.2, 0.8, 0.2, 1.0])[:, None, None]
    shapes = ((2 if gate.gated else 1) * inner, width), (width, inner)
    weights = [random(NUM_EXPERTS, *s, seed=i) * size * s[1] ** -0.5 for i, s in enumerate(shapes)]
    biases = [
        random(NUM_EXPERTS, s[0], seed=3 + i, dtype=dtype) if bias else None for i, s in enumerate(shapes)
    ]
    formats = formats_of_experts(name)
    return [part for w, own in zip(weights, formats) for part in quantize_stack(w, own)] + biases


def values(operands, name):
    """The same as operands of `moe_experts`."""
    up, up_scale, down, down_scale, *biases = operands
    of_up, of_down = formats_of_experts(name)
    return dequantize_stack(up, up_scale, of_up), dequantize_stack(down, down_scale, of_down), *biases


def run(ops, x, ids, chosen, operands, name, gate=GATES["silu"]):
    return ops.quantized_moe_experts(x, ids, chosen, *operands, format=name, **gate.as_options())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", by_day(FORMATS, FEW_FORMATS))
@pytest.mark.parametrize("kind", GATES)
def test_equals_one_token_and_slot_at_a_time(ops, kind, name, dtype):
    gate = GATES[kind]
    operands = stacks(name, gate, bias=True, dtype=dtype)
    for num_tokens, num_slots in ((1, 3), (2, 5), (30, 2)):
        x, (ids, chosen) = random(num_tokens, WIDTH, dtype=dtype), routing(num_tokens, num_slots)
        expected = oracle(x, ids, chosen, values(operands, name), gate, False)
        got = run(ops, x, ids, chosen, operands, name, gate)
        assert got.dtype is dtype and got.shape == x.shape and expected.abs().mean() > 0.02
        if dtype is torch.float32:
            assert_close(got, expected)
        else:  # both products and the gate between them are rounded
            torch.testing.assert_close(got.double(), expected, rtol=2**-6, atol=2**-4)


# ---- the C++ kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("width", "inner"), [(64, 64), (192, 128), (576, 320)])
@pytest.mark.parametrize("kind", ["silu", "gpt-oss", "not gated"])
def test_sizes_of_the_kernels(cpu, kind, width, inner, name, dtype):
    """The kernel in its dtype against the reference in float32 on the same values."""
    gate, reference = GATES[kind], ops_of("reference")
    operands = stacks(name, gate, width=width, inner=inner, bias=True, dtype=dtype)
    wide = [*operands[:4], *(b.float() for b in operands[4:])]
    for num_tokens, num_slots in ((1, 3), (3, 2), (40, 2), (130, 3)):
        x, (ids, chosen) = random(num_tokens, width, dtype=dtype), routing(num_tokens, num_slots)
        ids[num_tokens // 2, 0] = NUM_EXPERTS
        expected = run(reference, x.float(), ids, chosen, wide, name, gate)
        unit = torch.finfo(dtype).eps  # what the gate makes is rounded once, the result again
        got = run(cpu, x, ids, chosen, operands, name, gate)
        torch.testing.assert_close(got.float(), expected, rtol=max(2 * unit, 2e-6), atol=max(16 * unit, 5e-5))


OF_CHECKPOINTS = (
    "int4_g128",
    "uint4_g64",
    "uint4_g128",
    "int8_g64",
    "uint8_g32",
    "int8_g16",
    "uint4_g16",
    "int6_g16",
    "uint6_g32",
    "nvfp4",
    "nf4_g64",
    "iq4_g32",
)


@pytest.mark.parametrize("name", OF_CHECKPOINTS)
def test_codes_of_checkpoints(ops, name):
    """With shifts far from zero, and scales in float32."""
    for kind, dtype in (("silu", torch.bfloat16), ("gpt-oss", torch.float32), ("not gated", torch.float16)):
        gate = GATES[kind]
        operands = stacks(name, gate, width=256, inner=128, bias=True, dtype=dtype)
        for i in (1, 3):
            operands[i] = operands[i].float() * 1.0001
            if "u" in name:
                operands[i][..., 1, :] += 0.002
        wide = [*operands[:4], *(b.float() for b in operands[4:])]
        for num_tokens, num_slots in ((1, 3), (3, 2), (40, 2), (130, 3)):
            x, (ids, chosen) = random(num_tokens, 256, dtype=dtype), routing(num_tokens, num_slots)
            expected = oracle(x, ids, chosen, values(wide, name), gate, False)
            got = run(ops, x, ids, chosen, operands, name, gate)
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(
                got.double(), expected, rtol=max(2 * unit, 1e-5), atol=max(16 * unit, 1e-4)
            )


def levels(scale: torch.Tensor, name: str, inner: int) -> torch.Tensor:
    """Scales of two levels about as large as those of a stack [E, N/32, ...]."""
    fmt, (experts, panels), size = weight_format(name), scale.shape[:2], scale.float().abs().mean().item()
    rows, groups = panels * PANEL, inner // fmt.group

    def numbers(seed: int, factor: float):
        wide = random(experts * rows, inner // LEVEL_SPAN, seed=seed).sigmoid() * (size * factor / 16)
        narrow = torch.randint(1, 32, (experts * rows, groups), generator=torch.Generator().manual_seed(seed))
        return wide, narrow

    other = numbers(2, LEVEL_OFFSETS[fmt.bits]) if fmt.is_shifted else None
    return packed_levels(*numbers(1, 1.0), name, other).unflatten(0, (experts, panels))


@pytest.mark.parametrize(
    "name",
    [
        "uint4_g32",
        "uint4_g16",
        "int4_g16",
        "int6_g16",
        "int8_g16",
        "uint6_g32",
        "uint8_g32",
        "uint4_g32/int6_g16",
        "nvfp4",
        "iq4_g32",
        "nvfp4/int6_g16",
    ],
)
def test_scales_of_two_levels(ops, name):
    """As K-quants have them."""
    gate, (of_up, of_down) = GATES["silu"], formats_of_experts(name)
    for dtype in (torch.bfloat16, torch.float32):
        operands = stacks(name, gate, width=256, inner=512, dtype=dtype)
        operands[1], operands[3] = levels(operands[1], of_up, 256), levels(operands[3], of_down, 512)
        for num_tokens, num_slots in ((1, 3), (3, 2), (40, 2)):
            x, (ids, chosen) = random(num_tokens, 256, dtype=dtype), routing(num_tokens, num_slots)
            expected = oracle(x, ids, chosen, values(operands, name), gate, False)
            got = run(ops, x, ids, chosen, operands, name, gate).double()
            unit, size = torch.finfo(dtype).eps, expected.abs().max().item()
            torch.testing.assert_close(
                got, expected, rtol=max(2 * unit, 1e-5), atol=max(2 * unit, 1e-5) * size
            )


MIXED = (
    "int4_g64/int8",
    "fp8_block/int4_g32",
    "int8_g32/mxfp4",
    "nvfp4/mxfp4",
    "uint8_g16/int4_g64",
    "int6_g16/uint4_g32",
)


@pytest.mark.parametrize("name", MIXED)
def test_each_projection_in_its_format(ops, name):
    for kind, dtype in (("silu", torch.bfloat16), ("gpt-oss", torch.float32), ("not gated", torch.float16)):
        gate = GATES[kind]
        operands = stacks(name, gate, bias=True, dtype=dtype)
        wide = [*operands[:4], *(b.float() for b in operands[4:])]
        for num_tokens, num_slots in ((1, 3), (3, 2), (40, 2), (130, 3)):
            x, (ids, chosen) = random(num_tokens, WIDTH, dtype=dtype), routing(num_tokens, num_slots)
            expected = oracle(x, ids, chosen, values(wide, name), gate, False)
            got = run(ops, x, ids, chosen, operands, name, gate)
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(
                got.double(), expected, rtol=max(2 * unit, 1e-5), atol=max(16 * unit, 1e-4)
            )


@pytest.mark.parametrize("name", ["int8/", "int8/int9", "/int8", "int8/int8/int8"])
def test_formats_that_are_none(ops, name):
    operands = stacks("int8")
    with pytest.raises((RuntimeError, ValueError), match="format"):
        run(ops, random(3, WIDTH), *routing(3, 2), operands, name)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 17, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FEW_FORMATS)
def test_ragged_routings(cpu, name, dtype, num_rows):
    """All rows to one expert, one row to another, none to the rest."""
    operands, x = stacks(name), random(num_rows, WIDTH, dtype=dtype)
    ids, chosen = torch.full((num_rows, 2), 2), random(num_rows, 2, seed=7).softmax(1)
    ids[:, 1] = -1
    ids[num_rows // 2, 1] = 5
    wide = (values(operands, name), GATES["silu"], False)
    unit = torch.finfo(dtype).eps
    got = run(cpu, x, ids, chosen, operands, name).double()
    torch.testing.assert_close(
        got, oracle_of(x, ids, chosen, *wide), rtol=max(2 * unit, 2e-6), atol=max(16 * unit, 5e-5)
    )


def oracle_of(x, ids, chosen, operands, gate, transposed):
    """The oracle, with slots that chose no expert given the weight 0 of some."""
    return oracle(x, ids.clamp(min=0), chosen.where(ids >= 0, 0.0), operands, gate, transposed)


@pytest.mark.parametrize("name", FEW_FORMATS)
def test_only_chosen_experts_are_read(ops, name):
    operands, x = stacks(name), random(4, WIDTH)
    ids, chosen = routing(4, 2)
    expected = run(ops, x, ids, chosen, operands, name)
    unused = [e for e in range(NUM_EXPERTS) if e not in ids]
    for scale in operands[1], operands[3]:
        scale[unused] = float("nan")
    assert unused and torch.equal(run(ops, x, ids, chosen, operands, name), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int4_g32", "int6_g32/uint6_g32"])
def test_bits_depend_on_neither_threads_nor_other_tokens(cpu, name, dtype):
    """In bfloat16 an expert's rows, up to 2, are summed in another order than more of them."""
    operands = stacks(name, width=320, inner=96)
    x, (ids, chosen) = random(96, 320, dtype=dtype), routing(96, 3)
    whole, threads = run(cpu, x, ids, chosen, operands, name), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(run(cpu, x, ids, chosen, operands, name), whole)
    finally:
        torch.set_num_threads(threads)
    for part in (slice(0, 1), slice(5, 7), slice(0, 60)) if dtype is torch.float32 else (slice(0, 60),):
        got = run(cpu, x[part], ids[part], chosen[part], operands, name)
        assert torch.equal(got, whole[part])


@pytest.mark.parametrize("name", ["int8", "int4_g64"])
@pytest.mark.parametrize("other", [float("nan"), 1e-35], ids=str)
def test_other_tokens_never_enter_a_row(ops, name, other):
    """Be they no numbers, or so small that integers cannot hold them."""
    operands, x = stacks(name), random(8, WIDTH, dtype=torch.bfloat16)
    ids, chosen = routing(8, 2)
    expected = run(ops, x, ids, chosen, operands, name)[3]
    x[torch.arange(8) != 3] *= other
    got = run(ops, x, ids, chosen, operands, name)
    assert torch.equal(got[3], expected) if ops is not torch.ops.pagebinder else True
    torch.testing.assert_close(got[3], expected)
    assert bool(got[[0, 7]].isfinite().all()) == (other == other)


def test_more_slots_than_one_pass_takes(cpu):
    operands, (ids, chosen) = stacks("int8"), routing(3000, 4)
    x = random(3000, WIDTH)
    last = run(cpu, x[-7:], ids[-7:], chosen[-7:], operands, "int8")
    assert torch.equal(run(cpu, x, ids, chosen, operands, "int8")[-7:], last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routing_in_the_same_op_has_the_same_bits(ops, dtype):
    router = Router(top_k=3, score="softmax", weigh_rated=True, normalised="sum", weight_dtype=torch.bfloat16)
    operands, x = stacks("int4_g64", bias=True, dtype=dtype), random(9, WIDTH, dtype=dtype)
    logits = random(9, NUM_EXPERTS, seed=8)
    ids, chosen = router(logits, None)
    options = {"format": "int4_g64", **GATES["gpt-oss"].as_options()}
    got = ops.quantized_moe_routed_experts(x, logits, None, *operands, **router.as_options(), **options)
    assert torch.equal(got, run(ops, x, ids, chosen, operands, "int4_g64", GATES["gpt-oss"]))


def test_no_tokens_and_no_experts(ops):
    operands, none = stacks("int8"), torch.zeros(0, 2, dtype=torch.int64)
    assert run(ops, random(0, WIDTH), none, torch.zeros(0, 2), operands, "int8").shape == (0, WIDTH)
    ids = torch.full((3, 2), NUM_EXPERTS)
    assert not run(ops, random(3, WIDTH), ids, torch.ones(3, 2), operands, "int8").any()


def test_meta_tensors_have_the_shapes_of_real_ones(ops):
    operands = [None if w is None else w.to("meta") for w in stacks("int4_g32", bias=True)]
    ids, chosen = (r.to("meta") for r in routing(7, 2))
    x = random(7, WIDTH).to("meta")
    assert run(ops, x, ids, chosen, operands, "int4_g32").shape == (7, WIDTH)
    with pytest.raises(RuntimeError, match="differ in C"):
        run(ops, x[:, :64], ids, chosen, operands, "int4_g32")


def test_operands_that_do_not_fit_are_errors(cpu):
    operands, x, (ids, chosen) = stacks("int8"), random(4, WIDTH), routing(4, 2)
    with pytest.raises(RuntimeError, match="qweight must be"):
        run(cpu, x, ids, chosen, operands, "int4_g64")
    with pytest.raises(RuntimeError, match="scale is not that"):
        run(cpu, x, ids, chosen, [operands[0], operands[1][:2], *operands[2:]], "int8")
    with pytest.raises(RuntimeError, match="differ in C"):
        run(cpu, x[:, :64], ids, chosen, operands, "int8")
    with pytest.raises(RuntimeError, match="expert ids and weights"):
        run(cpu, x, ids[:3], chosen, operands, "int8")
    with pytest.raises(ValueError, match="expert ids and weights"):
        run(ops_of("reference"), x, ids[:3], chosen, operands, "int8")


def test_opcheck(cpu):
    operands, x = stacks("int8", bias=True), random(4, WIDTH)
    options = {"format": "int8", **GATES["gpt-oss"].as_options()}
    torch.library.opcheck(cpu.quantized_moe_experts.default, (x, *routing(4, 2), *operands), options)
