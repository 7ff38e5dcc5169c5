"""Quantised linear layers: formats against what they promise, every provider against float64."""

from __future__ import annotations

import pytest
import torch

from pagebinder.config import QUANTIZATIONS
from pagebinder.custom_ops.activation.gated_activation import gated_activation_reference
from pagebinder.custom_ops.cpu.provider import has_matrix_tiles
from pagebinder.custom_ops.latent.small_floats import E2M1_VALUES
from pagebinder.custom_ops.linear import weight_numbers
from pagebinder.custom_ops.linear.group_scales import packed_groups, packed_levels
from pagebinder.custom_ops.linear.weight_formats import (
    FORMATS,
    STORED_FORMATS,
    in_8_bits,
    levels_shape,
    packed_shapes,
    scale_dtype,
    weight_format,
)
from pagebinder.custom_ops.linear.weight_numbers import (
    codes_of_8_bits,
    dequantize,
    error_bound,
    pack_codes,
    quantize,
)
from pagebinder.custom_ops.linear.weight_stacks import dequantize_stack
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.tolerances import assert_close

# Of normally distributed weights, relative to them (root mean square), and a tenth.
ERRORS = {
    "fp8": 0.029,
    "fp8_tensor": 0.029,
    "fp8_block": 0.029,
    "int8": 0.009,
    "int4_g64": 0.1,
    "int4_g32": 0.09,
    "mxfp4": 0.125,
}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def linear(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    assert chosen.reasons_against(OpNeed(op="quantized_linear", dtype="bfloat16")) == []
    chosen.prepare("quantized_linear")
    return chosen.overload("quantized_linear")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request):
    """The ops of one layer, of several, and of a gate."""
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    names = ("quantized_linear", "quantized_linears", "quantized_gated_linear")
    for name in names:
        chosen.prepare(name)
    return tuple(map(chosen.overload, names))


def test_weights_that_were_stored_in_mxfp4_are_packed_without_loss():
    """Any codes and exponents, also groups whose largest number is small, or zero."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([*E2M1_VALUES, *(-x for x in E2M1_VALUES)])
    codes = torch.randint(0, 16, (96, 256), generator=generator)
    codes[::3] = codes[::3] % 3 + 8 * (codes[::3] > 7)  # 0, 0.5 and 1
    codes[5] = 0
    exponents = torch.randint(-100, 100, (96, 8), generator=generator)
    weight = torch.ldexp(values[codes], exponents.repeat_interleave(32, dim=1))
    for stored in (weight, weight.bfloat16()):
        assert torch.equal(dequantize(*quantize(stored, "mxfp4"), "mxfp4"), weight)


def test_mxfp4_rounds_to_nearest():
    """Ties to even codes; what is beyond the largest number becomes that one, or the exponent rises."""
    group = torch.zeros(32, 32)
    group[0, :10] = torch.tensor([0.24, 0.25, 0.26, 0.75, 1.25, 2.5, 3.5, 5.0, -5.1, 6.0])
    got = dequantize(*quantize(group, "mxfp4"), "mxfp4")[0, :10]
    assert got.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 4.0, 4.0, -6.0, 6.0]


def weight_of(columns: int, inner: int, seed: int = 0) -> torch.Tensor:
    """Scaled so that outputs are about 1; row 3 is zero, row 5 much larger than its neighbours."""
    weight = torch.randn(columns, inner, generator=torch.Generator().manual_seed(seed)) * inner**-0.5
    weight[3] = 0
    weight[5] *= 4
    return weight.bfloat16()


def operands(rows: int, columns: int, inner: int, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows, inner, generator=generator), torch.randn(columns, generator=generator)
    return x.to(dtype), bias.to(dtype)


def check(linear, x, weight, name, bias=None):
    qweight, scale = quantize(weight, name)
    out = linear(x, qweight, scale, bias, format=name)
    exact = torch.nn.functional.linear(
        x.double(), dequantize(qweight, scale, name).double(), None if bias is None else bias.double()
    )
    assert out.dtype == x.dtype and out.shape == exact.shape and out.is_contiguous()
    assert_close(out, exact)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_come_back(name):
    weight = weight_of(160, 448)
    qweight, scale = quantize(weight, name)
    assert (tuple(qweight.shape), tuple(scale.shape)) == packed_shapes(160, 448, name)
    assert qweight.dtype == torch.uint8 and scale.dtype == scale_dtype(name)
    values, exact = dequantize(qweight, scale, name), weight.float()
    assert ((values - exact).abs() <= error_bound(weight, name)).all()
    assert (values[3] == 0).all()
    assert (values - exact).norm() < ERRORS[name] * exact.norm()
    assert torch.equal(quantize(values, name)[0], qweight) or name.startswith(
        "int4"
    )  # values are their own codes


def test_weights_are_remembered_only_within(monkeypatch):
    weights = [torch.randn(32, 128), torch.randn(32, 128)]
    codes = [quantize(weight, "int4_g64") for weight in weights]
    expected = [dequantize(*each, "int4_g64") for each in codes]
    with weight_numbers.remembering_weights():
        found = [dequantize(*each, "int4_g64") for each in codes]
        assert all(torch.equal(*pair) for pair in zip(found, expected))
        assert dequantize(*codes[0], "int4_g64") is found[0]
        assert dequantize_stack(*codes[0], "int4_g64") is not found[0]  # somebody may write into it
        assert dequantize(*(each.to("meta") for each in codes[0]), "int4_g64").is_meta
        monkeypatch.setattr(weight_numbers, "REMEMBERED_BYTES", 0)
        other = quantize(torch.randn(32, 128), "int4_g64")
        assert dequantize(*other, "int4_g64") is not dequantize(*other, "int4_g64")
    assert dequantize(*codes[0], "int4_g64") is not dequantize(*codes[0], "int4_g64")


def test_the_option_names_the_formats():
    assert tuple(FORMATS) == QUANTIZATIONS and not set(FORMATS) & set(STORED_FORMATS)


def stored_weight(name: str, columns: int, inner: int, dtype=torch.float16):
    """(codes, scale tensor, the weight in float64), with zero points of any size, as checkpoints have them."""
    fmt, generator = weight_format(name), torch.Generator().manual_seed(columns)
    groups, half = inner // fmt.group, 1 << (fmt.bits - 1)
    codes = torch.randint(0, 2 * half, (columns, inner), generator=generator)
    if fmt.is_float:
        numbers = torch.tensor(fmt.table or [*E2M1_VALUES, *(-x for x in E2M1_VALUES)], dtype=torch.float32)
        scale = ((torch.rand(columns, groups, generator=generator) + 0.5) * inner**-0.5 / numbers.max()).to(
            dtype
        )
        weight = numbers[codes] * scale.float().repeat_interleave(fmt.group, dim=1)
        return pack_codes(codes.to(torch.uint8), name), packed_groups(scale), weight.double()
    scale = ((torch.rand(columns, groups, generator=generator) + 0.5) * inner**-0.5 / half).to(dtype)
    zeros = torch.full((columns, groups), half)
    if fmt.is_shifted:
        zeros = torch.randint(0, 2 * half, (columns, groups), generator=generator)
    shift = (half - zeros) * scale.float() if fmt.is_shifted else None
    each = [part.double().repeat_interleave(fmt.group, dim=1) for part in (zeros, scale)]
    stored = codes.to(torch.uint8) if fmt.bits == 4 else (codes - half).to(torch.int8)
    return pack_codes(stored, name), packed_groups(scale, shift), (codes.double() - each[0]) * each[1]


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STORED_FORMATS)
def test_codes_of_checkpoints(ops, name, scales):
    """Scales stay in 16 bits, but for shifts, which need float32; no number is lost, whatever the zero points."""
    linear, linears, gated = ops
    codes, scale, weight = stored_weight(name, 160, 640, scales)
    assert (tuple(codes.shape), tuple(scale.shape)) == packed_shapes(160, 640, name)
    if weight_format(name).is_shifted:
        assert scale.dtype in (torch.float16, torch.float32)
    else:
        assert scale.dtype == scales
    assert torch.equal(dequantize(codes, scale, name).double(), weight)
    for rows in (1, 2, 3, 8, 17, 70):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            x, bias = operands(rows, 160, 640, dtype)
            x[:, :40] += 3  # sums of x that are far from zero
            y = linear(x, codes, scale, bias, format=name)
            assert_close(y, torch.nn.functional.linear(x.double(), weight, bias.double()))
            both = linears(x, [codes, codes], [scale, scale], [bias, -bias], format=name)
            assert torch.equal(both[0], y)
            assert torch.equal(linear(x, codes, scale, -bias, format=name), both[1])
        x, _ = operands(rows, 160, 640)
        plain = linear(x, codes, scale, format=name)
        expected = gated_activation_reference(plain, plain, activation="relu2")
        assert torch.equal(gated(x, codes, scale, codes, scale, format=name, activation="relu2"), expected)


@pytest.mark.parametrize("name", [name for name in STORED_FORMATS if in_8_bits(name)])
def test_integers_of_fewer_bits_in_8(name):
    """As a GPU reads them: the same numbers."""
    codes, scale, weight = stored_weight(name, 64, 256)
    wide = in_8_bits(name)
    assert weight_format(wide).bits == 8 and weight_format(wide).group == weight_format(name).group
    assert torch.equal(dequantize(codes_of_8_bits(codes, name), scale, wide).double(), weight)


def test_scales_of_nvfp4_in_two_levels(ops):
    """All that e4m3 has: subnormal ones, zero; and numbers that differ by columns, as layers are merged."""
    linear, linears, _ = ops
    generator, columns, inner = torch.Generator().manual_seed(0), 96, 512
    codes = torch.randint(0, 16, (columns, inner), generator=generator).to(torch.uint8)
    lower = torch.randint(0, 0x7F, (columns, inner // 16), generator=generator).to(torch.uint8)
    lower = lower.view(torch.float8_e4m3fn)
    lower.view(torch.uint8)[:, ::5] %= 9
    upper = (torch.rand(columns, 1, generator=generator) * inner**-0.5 / 900).expand(columns, inner // 256)
    scale = packed_levels(upper, lower, "nvfp4")
    assert tuple(scale.shape) == levels_shape(columns, inner, "nvfp4") and scale.dtype is torch.uint8
    packed = pack_codes(codes, "nvfp4")
    numbers = torch.tensor([*E2M1_VALUES, *(-x for x in E2M1_VALUES)])
    weight = (numbers[codes.int()] * (upper[:, :1] * lower.float()).repeat_interleave(16, dim=1)).double()
    assert torch.equal(dequantize(packed, scale, "nvfp4").double(), weight)
    for rows in (1, 2, 3, 9, 40):
        for dtype in (torch.bfloat16, torch.float32):
            x, bias = operands(rows, columns, inner, dtype)
            y = linear(x, packed, scale, bias, format="nvfp4")
            assert_close(y, torch.nn.functional.linear(x.double(), weight, bias.double()))
            assert torch.equal(linears(x, [packed] * 2, [scale] * 2, [bias] * 2, format="nvfp4")[1], y)


@pytest.mark.parametrize("name", ["int4_g32", "uint4_g32", "int6_g16", "int8_g32", "uint8_g32"])
def test_scales_of_two_levels_as_k_quants_have_them(linear, name, request):
    """Rows alone, in twos and in strips meet codes in other ways, and get the same bits."""
    fmt, columns, inner = weight_format(name), 96, 768
    generator = torch.Generator().manual_seed(0)
    codes, _ = quantize(weight_of(columns, inner), name)
    numbers = (torch.rand(columns, inner // 256, generator=generator) * 0.03 / 2**fmt.bits).half()
    bytes_ = torch.randint(-60, 60, (columns, inner // fmt.group), generator=generator, dtype=torch.int8)
    scale = packed_levels(numbers, bytes_, name, (numbers / 2, bytes_.abs()) if fmt.is_shifted else None)
    weight = dequantize(codes, scale, name).double()
    x, bias = operands(40, columns, inner)
    together = linear(x, codes, scale, bias, format=name)
    assert_close(together, torch.nn.functional.linear(x.double(), weight, bias.double()))
    if request.node.callspec.params["linear"] == "reference" or has_matrix_tiles():
        return
    for rows in (1, 2, 3, 4, 5, 9, 17):
        assert torch.equal(linear(x[:rows], codes, scale, bias, format=name), together[:rows])


@pytest.mark.parametrize("name", STORED_FORMATS)
def test_the_same_bits_of_shifted_weights_in_any_batch(name):
    chosen = registered_providers()["cpu"]
    if chosen.problem() is not None:
        pytest.skip(str(chosen.problem()))
    chosen.prepare("quantized_linear")
    linear, most = chosen.overload("quantized_linear"), 2 if has_matrix_tiles() else 0
    codes, scale, _ = stored_weight(name, 320, 1152)
    x, _ = operands(100, 320, 1152)
    together, few = linear(x, codes, scale, format=name), linear(x[:2], codes, scale, format=name)
    wide = linear(x.float(), codes, scale, format=name)
    for rows in (1, 2, 3, 5, 8, 9, 31, 40):
        whole = few if rows <= most else together
        assert torch.equal(linear(x[:rows], codes, scale, format=name), whole[:rows])
        assert torch.equal(linear(x[:rows].float(), codes, scale, format=name), wide[:rows])


@pytest.mark.parametrize("other", [float("nan"), float("inf"), 1e-33], ids=str)
@pytest.mark.parametrize(
    "name", ["int8", "int4_g64", "int6_g16", "uint4_g32", "uint8_g128", "nvfp4", "nf4_g64", "iq4_g32"]
)
def test_other_rows_never_enter_a_row(linear, name, other):
    """Be they no numbers, or too small for integers to hold. Dots of bf16 take products below 2^-126 for zeros, of
    which there are few here."""
    codes, scale = quantize(weight_of(96, 640), name)
    x, _ = operands(9, 96, 640)
    expected = linear(x, codes, scale, format=name)
    for row in (0, 4, 8):
        changed = x.clone()
        changed[row] *= other
        got = linear(changed, codes, scale, format=name)
        kept = torch.arange(9) != row
        assert torch.equal(got[kept], expected[kept])
        exact = torch.nn.functional.linear(changed[row].double(), dequantize(codes, scale, name).double())
        assert bool(got[row].isfinite().all()) == (other == 1e-33)
        if other == 1e-33:
            assert_close((got[row].double() / other).bfloat16(), exact / other)


@pytest.mark.parametrize("name", ["int8", "int4_g32", "int4_g128", "uint4_g64", "int6_g16", "nf4_g64"])
def test_one_x_far_beyond_the_others(linear, name):
    """As massive activations are, of which no weight takes any: the others of its row keep their bits."""
    weight = weight_of(96, 640)
    weight[:, 200] = 0
    codes, scale = quantize(weight, name)
    exact = dequantize(codes, scale, name).double()
    some = exact.any(dim=1)  # of zeros codes and shifts cancel to what float32 holds of 1e4
    for rows in (1, 2, 5, 9, 40):
        x, _ = operands(rows, 96, 640)
        plain = linear(x, codes, scale, format=name)
        x[rows // 2, 200] = 1e4
        y = linear(x, codes, scale, format=name)
        kept = torch.arange(rows) != rows // 2
        assert torch.equal(y[kept], plain[kept])
        assert_close(y[rows // 2, some], torch.nn.functional.linear(x[rows // 2].double(), exact[some]))


@pytest.mark.parametrize("name", [name for name in STORED_FORMATS if weight_format(name).is_shifted])
def test_codes_and_shifts_that_cancel(linear, name):
    """A row of zeros whose scale is 1: roundings of x must cancel, too, however large codes and shifts are."""
    codes, scale = quantize(weight_of(96, 640), name)
    for rows in (1, 3, 9, 40):
        x, _ = operands(rows, 96, 640)
        assert linear(x, codes, scale, format=name)[:, 3].abs().max() < 2e-3


@pytest.mark.parametrize("name", STORED_FORMATS)
def test_shifted_weights_may_be_made_of_plain_ones(name):
    weight = weight_of(160, 640)
    values = dequantize(*quantize(weight, name), name)
    assert ((values - weight.float()).abs() <= error_bound(weight, name)).all()
    most = {4: 0.115, 6: 0.025, 8: 0.01}[weight_format(name).bits]
    assert (values - weight.float()).norm() < most * weight.float().norm()


def test_int8_codes_of_checkpoints(linear):
    """With -128, which the formats that we choose ourselves do without."""
    codes = torch.randint(-128, 128, (64, 96), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    codes[:, :3], scale = -128, torch.rand(64, generator=torch.Generator().manual_seed(1)) / 1000
    packed = pack_codes(codes, "int8")
    assert torch.equal(dequantize(packed, torch.ones(64), "int8"), codes.float())
    for rows in (1, 4, 20):
        x, _ = operands(rows, 64, 96)
        exact = torch.nn.functional.linear(x.double(), codes.double() * scale.double()[:, None])
        assert_close(linear(x, packed, scale, format="int8"), exact)


def test_codes_are_zero_or_normal():
    weight = torch.zeros(32, 32)
    weight[:, 0] = 448
    weight[:, 1:5] = torch.tensor([2.0**-6, 1.1 * 2.0**-7, 0.9 * 2.0**-7, -1.1 * 2.0**-7])
    values = dequantize(*quantize(weight, "fp8"), "fp8")
    assert values[0, :6].tolist() == [448, 2.0**-6, 2.0**-6, 0, -(2.0**-6), 0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("rows", "columns", "inner"), [(1, 64, 64), (5, 32, 192), (16, 160, 1088), (40, 96, 640)]
)
def test_against_float64(linear, name, rows, columns, inner):
    weight = weight_of(columns, inner)
    x, bias = operands(rows, columns, inner)
    check(linear, x, weight, name)
    check(linear, x, weight, name, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_other_types(linear, name, dtype):
    x, bias = operands(7, 96, 320, dtype)
    check(linear, x, weight_of(96, 320), name, bias)


def test_layouts(linear):
    weight = weight_of(64, 96)
    x, bias = operands(12, 64, 96)
    for rows in (x.view(3, 4, 96), x[0], x[::2], x.view(3, 4, 96).transpose(0, 1), x.T.contiguous().T, x[:0]):
        check(linear, rows, weight, "int8", bias)


def test_bad_operands_raise(linear):
    qweight, scale = quantize(weight_of(64, 96), "fp8")
    x, bias = operands(4, 64, 96)
    with pytest.raises(RuntimeError):
        linear(x[:, :64], qweight, scale, format="fp8")
    with pytest.raises(RuntimeError):
        linear(x, qweight, scale, bias[:32], format="fp8")
    with pytest.raises((RuntimeError, ValueError), match="fp7"):
        linear(x, qweight, scale, format="fp7")


@pytest.mark.parametrize("sizes", [(48, 64), (64, 48), (0, 64)])
def test_sizes_that_do_not_fit_are_told(sizes):
    with pytest.raises(ValueError, match="multiples of 32"):
        quantize(torch.ones(sizes), "int8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4_g32"])
def test_same_bits_with_any_number_of_rows_and_threads(name, dtype):
    """Up to the rows that meet codes in registers, and beyond: two kernels, two orders of sums."""
    chosen = registered_providers()["cpu"]
    if chosen.problem() is not None:
        pytest.skip(str(chosen.problem()))
    chosen.prepare("quantized_linear")
    linear = chosen.overload("quantized_linear")
    qweight, scale = quantize(weight_of(320, 1088), name)
    x, _ = operands(100, 320, 1088, dtype)
    threads = torch.get_num_threads()
    together = linear(x, qweight, scale, format=name)
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x, qweight, scale, format=name), together)
    finally:
        torch.set_num_threads(threads)
    chosen.prepare("linear")
    most = 2 if dtype == torch.bfloat16 and (has_matrix_tiles() or name == "fp8") else 0
    few = linear(x[:most], qweight, scale, format=name)
    for rows in (1, 2, 3, 5, 8, 9, 31, 40):
        whole = few if rows <= most else together
        assert torch.equal(linear(x[:rows], qweight, scale, format=name), whole[:rows])


@pytest.mark.parametrize("name", ["fp8", "int4_g32", "uint4_g64"])
def test_rows_that_come_in_blocks(ops, name, request):
    if request.node.callspec.params["ops"] == "reference":
        pytest.skip("promised of the kernels")
    linear, linears, _ = ops
    qweight, scale = quantize(weight_of(64, 2112), name)
    x, bias = operands(301, 64, 2112)
    together = linear(x, qweight, scale, bias, format=name)
    pieces = [linear(rows, qweight, scale, bias, format=name) for rows in x.split(43)]
    assert torch.equal(together, torch.cat(pieces))
    both = linears(x, [qweight, qweight], [scale, scale], [], format=name)
    pieces = [linears(rows, [qweight, qweight], [scale, scale], [], format=name)[1] for rows in x.split(43)]
    assert torch.equal(both[1], torch.cat(pieces))


@pytest.mark.parametrize("factor", [1e-37, 1e-30, 1e30, 1e36])
def test_rows_of_any_size(linear, factor):
    """Kernels that lift rows by powers of two, and sums of theirs, lose nothing."""
    weight = weight_of(96, 256)
    for rows in (1, 2, 5, 40):
        x, _ = operands(rows, 96, 256)
        x[0] *= factor
        check(linear, x, weight, "fp8")
        y = linear(x[:1], *quantize(weight, "fp8"), format="fp8")
        plain = linear(x[:1] / factor, *quantize(weight, "fp8"), format="fp8")
        torch.testing.assert_close(y.double() / factor, plain.double(), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("name", ["int8", "int4_g64", "fp8"])
def test_values_that_digits_cannot_hold(linear, name):
    """Groups of zeros, with numbers far apart, tiny ones, and such that are no numbers."""
    x, bias = operands(4, 96, 256)
    x[0, :64], x[1, 64:128] = 0, x[1, 64:128] * 1e-4
    x[1, 70], x[2] = 3e4, x[2] * 1e-36
    check(linear, x, weight_of(96, 256), name, bias)
    for bad in (float("inf"), float("nan")):
        y = linear(
            torch.where(torch.arange(256) == 200, bad, x), *quantize(weight_of(96, 256), name), format=name
        )
        assert not y[:, 16:].isfinite().any()


ROWS = (1, 2, 3, 8, 17, 40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_several_layers_have_the_bits_of_each(ops, name, dtype):
    linear, linears, _ = ops
    parts = [quantize(weight_of(columns, 320, columns), name) for columns in (160, 32, 64)]
    codes, scales = map(list, zip(*parts))
    for rows in ROWS:
        x, _ = operands(rows, 160, 320, dtype)
        biases = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (160, 32, 64)]
        for given in ([], biases):
            out = linears(x, codes, scales, given, format=name)
            for y, part, bias in zip(out, parts, given or [None] * 3, strict=True):
                assert torch.equal(y, linear(x, *part, bias, format=name)) and y.is_contiguous()


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("name", FORMATS)
def test_gated_layers_have_the_bits_of_their_parts(ops, name, activation):
    linear, _, gated = ops
    gate, up = (quantize(weight_of(96, 320, seed), name) for seed in (1, 2))
    for rows in ROWS:
        x, bias = operands(rows, 96, 320)
        for biases in ((None, None), (bias, None), (bias, -bias)):
            y = gated(x, *gate, *up, *biases, format=name, activation=activation)
            parts = (linear(x, *w, b, format=name) for w, b in zip((gate, up), biases))
            expected = gated_activation_reference(*parts, activation=activation)
            near = torch.nextafter(expected, expected + y - expected)  # the exponential's last bit may differ
            assert ((y == expected) | (y == near)).all() and (y == expected).float().mean() > 0.99


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["fp8", "int4_g64"])
def test_gated_layers_in_float32(ops, name, activation):
    linear, _, gated = ops
    gate, up = (quantize(weight_of(96, 320, seed), name) for seed in (1, 2))
    for rows in ROWS:
        x, _ = operands(rows, 96, 320, torch.float32)
        y = gated(x, *gate, *up, format=name, activation=activation)
        parts = (linear(x, *w, format=name).double() for w in (gate, up))
        assert_close(y, gated_activation_reference(*parts, activation=activation))


def test_what_layers_of_one_call_must_have_in_common(ops):
    _, linears, gated = ops
    x, bias = operands(4, 64, 96)
    small, large = (quantize(weight_of(n, 96), "int8") for n in (32, 64))
    errors = (RuntimeError, ValueError)
    with pytest.raises(errors, match="a scale"):
        linears(x, [small[0], large[0]], [small[1]], [], format="int8")
    with pytest.raises(errors, match="bias"):
        linears(x, [small[0], large[0]], [small[1], large[1]], [bias], format="int8")
    with pytest.raises(errors, match="a scale"):
        linears(x, [], [], [], format="int8")
    with pytest.raises(errors, match="alike"):
        gated(x, *small, *large, format="int8", activation="silu")
    with pytest.raises(errors, match="swish2"):
        gated(x, *large, *large, format="int8", activation="swish2")


def test_opcheck_of_several_layers(ops):
    _, linears, gated = ops
    x, _ = operands(4, 64, 96)
    parts = [quantize(weight_of(n, 96), "int8") for n in (32, 64)]
    codes, scales = map(list, zip(*parts))
    torch.library.opcheck(linears, (x, codes, scales, []), {"format": "int8"})
    torch.library.opcheck(gated, (x, *parts[1], *parts[1]), {"format": "int8", "activation": "silu"})


def test_opcheck(linear):
    x, bias = operands(4, 64, 96)
    torch.library.opcheck(linear, (x, *quantize(weight_of(64, 96), "int8"), bias), {"format": "int8"})
