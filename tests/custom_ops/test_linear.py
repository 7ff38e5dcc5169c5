"""Linear layers alone, together and gated: every provider against float64, on both sides of the kernels' limits."""

import pytest
import torch

from pagebinder.custom_ops.cpu import pack
from pagebinder.custom_ops.linear import packed_weights
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.tolerances import TOLERANCES, assert_close

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def provider(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    for op in ("linear", "linears", "gated_linear"):
        assert chosen.reasons_against(OpNeed(op=op, dtype="bfloat16")) == []
        chosen.prepare(op)
    return chosen


@pytest.fixture(scope="module")
def linear(provider):
    return provider.overload("linear")


def operands(rows: int, columns: int, inner: int, dtype=torch.bfloat16, seed: int = 0):
    """x [rows, inner], weight scaled so that outputs are about 1, bias."""
    generator = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(rows, inner, generator=generator), torch.randn(columns, generator=generator)
    weight = torch.randn(columns, inner, generator=generator) * inner**-0.5
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def check(linear, x, weight, bias=None):
    out = linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert out.dtype == x.dtype and out.shape == exact.shape and out.is_contiguous()
    assert_close(out, exact)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 100, 128, 129, 300])
@pytest.mark.parametrize(("columns", "inner"), [(32, 32), (96, 64), (160, 352), (64, 1024), (40, 72)])
def test_against_float64(linear, rows, columns, inner):
    x, weight, bias = operands(rows, columns, inner)
    check(linear, x, weight)
    check(linear, x, weight, bias)


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 9, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(linear, rows, dtype):
    check(linear, *operands(rows, 64, 96, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 6, 40, 140])
def test_siblings_have_the_bits_of_each_layer_alone(provider, rows, dtype):
    linear, linears = provider.overload("linear"), provider.overload("linears")
    x, weight, bias = operands(rows, 288, 96, dtype)
    weights, biases = list(weight.split([96, 32, 160])), list(bias.split([96, 32, 160]))
    for given in (biases, []):
        together = linears(x.view(1, rows, 96), weights, given)
        for y, w, b in zip(together, weights, given or [None] * 3, strict=True):
            assert y.is_contiguous() and torch.equal(y[0], linear(x, w, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 6, 40, 140])
def test_gated_layers_equal_two_layers_and_a_gate(provider, rows, dtype):
    """On the same products the gate rounds as its ops do: in bf16 and f16 nearly all results have the same bits."""
    linear, gated = provider.overload("linear"), provider.overload("gated_linear")
    x, weight, bias = operands(rows, 128, 96, dtype)
    (gate, up), half = weight.split(64), bias[:64]
    for activation in ACTIVATIONS:
        out = gated(x, gate, up, half, None, activation=activation)
        parts = linear(x, gate, half), linear(x, up, None)
        expected = torch.ops.pagebinder.gated_activation(*parts, activation=activation)
        tolerance = TOLERANCES[
            dtype
        ]  # twice, as the activation may be rounded to the neighbour before the product
        torch.testing.assert_close(out, expected, rtol=2 * tolerance.rtol, atol=2 * tolerance.atol)
        assert (out != expected).float().mean() < (1.0 if dtype is torch.float32 else 0.02)
    with pytest.raises((RuntimeError, ValueError), match="activation"):
        gated(x, gate, up, None, None, activation="tanh")
    with pytest.raises((RuntimeError, ValueError), match="alike"):
        gated(x, gate, up[:32], None, None, activation="silu")


def test_a_bias_for_some_of_the_siblings_is_refused(provider):
    x, weight, bias = operands(3, 64, 96)
    with pytest.raises((RuntimeError, ValueError), match="bias"):
        provider.overload("linears")(x, [weight, weight], [bias])


def test_layouts(linear):
    x, weight, bias = operands(12, 64, 96)
    check(linear, x.view(3, 4, 96), weight, bias)
    check(linear, x.view(1, 12, 96), weight)
    check(linear, x[0], weight, bias)
    check(linear, x[::2], weight)
    check(linear, x.view(3, 4, 96).transpose(0, 1), weight)
    check(linear, x.T.contiguous().T, weight)
    check(linear, x, weight.T.contiguous().T, bias)
    check(linear, x[:, :64], weight[:, 32:])
    check(linear, x[:0], weight)


def test_nan_stays_in_its_row(linear):
    x, weight, _ = operands(20, 64, 96)
    x[3, 5] = float("nan")
    out = linear(x, weight)
    assert out[3].isnan().all() and not out[:3].isnan().any() and not out[4:].isnan().any()


def test_bad_sizes_raise(linear):
    x, weight, bias = operands(4, 64, 96)
    with pytest.raises(RuntimeError):
        linear(x[:, :64], weight)
    with pytest.raises(RuntimeError):
        linear(x, weight, bias[:32])


def test_same_bits_with_any_number_of_rows_and_threads():
    """Promised up to 4 rows, which are summed on vectors, and from 5 to 128, on matrix tiles or dots."""
    chosen = registered_providers()["cpu"]
    if chosen.problem() is not None:
        pytest.skip(str(chosen.problem()))
    chosen.prepare("linear")
    if not torch.ops.pagebinder_cpu.reads_packed_weights():
        pytest.skip("torch serves this machine, which promises nothing")
    linear = chosen.overload("linear")
    x, weight, bias = operands(128, 320, 1056)
    threads = torch.get_num_threads()
    together = linear(x, weight, bias)
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x, weight, bias), together)
    finally:
        torch.set_num_threads(threads)
    few = linear(x[:4], weight, bias)
    for rows, whole in ((1, few), (2, few), (3, few), (5, together), (31, together), (40, together)):
        assert torch.equal(linear(x[:rows], weight, bias), whole[:rows])


def test_opcheck(provider):
    x, weight, bias = operands(4, 64, 96)
    torch.library.opcheck(provider.overload("linear"), (x, weight, bias))
    torch.library.opcheck(provider.overload("linears"), (x, [weight, weight], [bias, bias]))
    torch.library.opcheck(
        provider.overload("gated_linear"), (x, weight, weight, bias), {"activation": "silu"}
    )


# ---- packed weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "inner"), [(32, 32), (96, 64), (160, 352), (608, 1056)])
def test_packing_keeps_every_number(provider, columns, inner):
    _, weight, _ = operands(1, columns, inner)
    packed = packed_weights.pack(weight)
    assert packed_weights.plain_shape(packed) == (columns, inner)
    assert torch.equal(packed_weights.unpack(packed), weight)
    if provider.name == "cpu":
        wide = torch.nn.functional.pad(weight, (0, 7))[:, :inner]  # rows further apart
        ours, back = torch.empty_like(packed), torch.empty_like(weight)
        torch.ops.pagebinder_cpu.pack_linear_weight(wide, ours)
        torch.ops.pagebinder_cpu.unpack_linear_weight(ours, back)
        assert torch.equal(ours, packed) and torch.equal(back, weight)


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17, 31, 32, 33, 48, 100, 257, 600])
@pytest.mark.parametrize(("columns", "inner"), [(32, 32), (96, 64), (288, 1056), (64, 2080), (96, 5184)])
def test_packed_weights_against_float64(linear, rows, columns, inner):
    x, weight, bias = operands(rows, columns, inner)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert_close(linear(x, packed_weights.pack(weight), bias), exact)


@pytest.mark.parametrize("rows", [3, 16, 40, 300])
def test_packed_siblings_and_gates(provider, rows):
    x, weight, bias = operands(rows, 288, 1056)
    linear, linears = provider.overload("linear"), provider.overload("linears")
    weights, biases = (
        [packed_weights.pack(w) for w in weight.split([96, 32, 160])],
        list(bias.split([96, 32, 160])),
    )
    for given in (biases, []):
        together = linears(x, weights, given)
        for y, w, b in zip(together, weights, given or [None] * 3, strict=True):
            assert y.is_contiguous() and torch.equal(y, linear(x, w, b))
    gate, up = (packed_weights.pack(w) for w in (weight[:96], weight[96:192]))
    parts = linear(x, gate, biases[0]), linear(x, up, None)
    for activation in ACTIVATIONS:
        out = provider.overload("gated_linear")(x, gate, up, biases[0], None, activation=activation)
        expected = torch.ops.pagebinder.gated_activation(*parts, activation=activation)
        torch.testing.assert_close(
            out, expected, rtol=2 * TOLERANCES[x.dtype].rtol, atol=2 * TOLERANCES[x.dtype].atol
        )
        assert (out != expected).float().mean() < 0.02
    with pytest.raises((RuntimeError, ValueError), match="alike"):
        provider.overload("gated_linear")(x, gate, weights[1], None, None, activation="silu")


@pytest.mark.parametrize(("columns", "inner"), [(320, 1056), (1312, 4640)])
def test_packed_weights_give_the_same_bits_with_any_number_of_rows_and_threads(provider, columns, inner):
    if provider.name != "cpu" or not torch.ops.pagebinder_cpu.reads_packed_weights():
        pytest.skip("promised of the kernels on matrix tiles and dots")
    linear = provider.overload("linear")
    x, weight, bias = operands(600, columns, inner)
    packed, threads = packed_weights.pack(weight), torch.get_num_threads()
    together = linear(x, packed, bias)
    try:
        torch.set_num_threads(3)
        for rows in (1, 4, 5, 14, 15, 16, 31, 40, 300, 600):
            assert torch.equal(linear(x[:rows], packed, bias), together[:rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("columns", "inner"), [(32, 32), (288, 96), (64, 1056)])
def test_on_dots_a_weight_of_either_form_gives_the_same_bits(provider, columns, inner):
    """Without matrix tiles one kernel serves both; rows of a plain weight may lie further apart."""
    kernels = torch.ops.pagebinder_cpu
    if provider.name != "cpu" or kernels.has_matrix_tiles() or not kernels.reads_packed_weights():
        pytest.skip("promised of the kernel on dots")
    x, weight, bias = operands(300, columns, inner)
    packed, apart = packed_weights.pack(weight), torch.nn.functional.pad(weight, (0, 7))[:, :inner]
    for rows in (5, 14, 15, 300):
        expected = kernels.linear(x[:rows], packed, bias)
        assert torch.equal(kernels.linear(x[:rows], weight, bias), expected)
        assert torch.equal(kernels.linear(x[:rows], apart, bias), expected)
    gates = [[f(w) for w in (weight, weight.flip(0))] for f in (packed_weights.pack, torch.clone)]
    gated = [kernels.gated_linear(x[:40], *pair, bias, None, activation="silu") for pair in gates]
    assert torch.equal(*gated)


def test_layouts_of_x_with_packed_weights(linear):
    x, weight, bias = operands(60, 64, 96)
    packed = packed_weights.pack(weight)

    def check_packed(x):
        assert_close(
            linear(x, packed, bias), torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        )

    for view in (
        x.view(3, 20, 96),
        x[0],
        x[::2],
        x.view(3, 20, 96).transpose(0, 1),
        x.T.contiguous().T,
        x[:0],
    ):
        check_packed(view)
    with pytest.raises(RuntimeError):
        linear(x[:, :64], packed)
    with pytest.raises(RuntimeError):
        linear(x, packed, bias[:32])
    with pytest.raises((RuntimeError, ValueError)):
        linear(x.float(), packed)


def test_what_cannot_be_packed():
    for weight in (torch.zeros(40, 64), torch.zeros(64, 64), torch.zeros(64, 40, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="multiples of 32"):
            packed_weights.pack(weight)


# ---- coded weights ---------------------------------------------------------------------------------------------


def odd_weight() -> torch.Tensor:
    """[128, 512] with what codes have to stand: zeros of both signs, no numbers, denormals, rare exponents."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(128, 512, generator=generator) * 0.03
    weight[3], weight[4, 5], weight[4, 6], weight[5, 7] = 0, -0.0, float("inf"), float("nan")
    weight[9, :20] = 1e-39
    weight[10] *= torch.logspace(-20, 20, 512)
    return weight.bfloat16()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def coding(provider):
    if provider.name != "cpu":
        pytest.skip("weights are coded by the C++ kernels")
    return torch.ops.pagebinder_cpu


def test_codes_keep_every_bit(provider):
    kernels, weight = coding(provider), odd_weight()
    coded, packed = pack.code(weight), packed_weights.pack(weight)
    assert packed_weights.is_coded(coded) and packed_weights.plain_shape(coded) == (128, 512)
    assert torch.equal(bits(kernels.decode_linear_weight(coded)), bits(packed))
    assert torch.equal(bits(packed_weights.decode(coded)), bits(packed))
    assert torch.equal(bits(pack.unpack(coded)), bits(weight))


def test_ordinary_weights_take_about_12_bits(provider):
    coding(provider)
    weight = operands(1, 256, 2_048)[1]
    assert pack.code(weight).numel() < 0.77 * 2 * weight.numel()


@pytest.mark.parametrize("rows", [1, 4, 16, 17, 32, 33, 300, 600])
@pytest.mark.parametrize("inner", [256, 1_536, 5_376])
def test_coded_weights_give_the_bits_of_packed_ones(provider, rows, inner):
    kernels = coding(provider)
    x, weight, bias = operands(rows, 192, inner)
    form = [weight, packed_weights.pack(weight), pack.code(weight)]
    y = [kernels.linear(x, w, bias) for w in form]
    together = [kernels.linears(x, [w, w], [])[1] for w in form]
    halves = [[f(half) for half in weight.split(96)] for f in (packed_weights.pack, pack.code)]
    gated = [kernels.gated_linear(x, *pair, bias[:96], None, activation="silu") for pair in halves]
    assert (
        torch.equal(y[2], y[1]) and torch.equal(together[2], together[1]) and torch.equal(gated[1], gated[0])
    )
    torch.testing.assert_close(y[2], y[0], rtol=2e-2, atol=2e-2)
    reference = torch.ops.pagebinder.linear(x, form[2], bias)
    torch.testing.assert_close(y[2], reference, rtol=2e-2, atol=2e-2)


def test_a_gate_and_its_values_may_have_codes_of_different_sizes(provider):
    kernels = coding(provider)
    x, up, _ = operands(7, 128, 512)
    gate = up.clone()
    gate[0] *= torch.logspace(-20, 0, 512)  # more exponents than codes stand for
    coded = [pack.code(gate), pack.code(up)]
    assert coded[0].shape[2] != coded[1].shape[2]
    plainly = kernels.gated_linear(
        x, packed_weights.pack(gate), packed_weights.pack(up), None, None, activation="silu"
    )
    assert torch.equal(kernels.gated_linear(x, *coded, None, None, activation="silu"), plainly)
    compared = torch.ops.pagebinder.gated_linear(x, *coded, None, None, activation="silu")
    torch.testing.assert_close(compared, plainly, rtol=2e-2, atol=2e-2)
    on_meta = torch.ops.pagebinder.gated_linear(
        x.to("meta"), *(c.to("meta") for c in coded), activation="silu"
    )
    assert on_meta.shape == plainly.shape
