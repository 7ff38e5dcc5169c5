"""Linear layers with weights of 8 and 4 bits in Triton: every format, against float64."""

import pytest
import torch

from pagebinder.custom_ops.linear.weight_formats import FORMATS, STORED_FORMATS, weight_format
from pagebinder.custom_ops.linear.weight_numbers import quantize
from pagebinder.custom_ops.triton import gpu
from tests.custom_ops.test_quantized_linear import (  # noqa: F401  (run here with the provider of this folder)
    check,
    operands,
    stored_weight,
    test_layouts,
    weight_of,
)
from tests.custom_ops.triton.on_device import DEVICE
from tests.helpers import by_day
from tests.tolerances import assert_close

# Tiles of each kind, full and not: rows, columns (panels of 32), k (steps of 32).
SIZES = [(1, 64, 64), (20, 96, 448)]


@pytest.fixture(scope="module")
def linear(provider):
    return provider.overload("quantized_linear")


@pytest.mark.parametrize("name", FORMATS)
def test_against_float64(linear, name):
    for rows, columns, inner in (*SIZES, *([(130, 160, 192)] if name in ("fp8_block", "int4_g64") else [])):
        x, bias = operands(rows, columns, inner)
        check(linear, x, weight_of(columns, inner), name, bias if rows > 1 else None)


READ = [name for name in STORED_FORMATS if weight_format(name).gpu_problem is None]


@pytest.mark.parametrize("name", by_day(READ, ("int4_g128", "uint4_g64", "uint8_g32")))
def test_codes_of_checkpoints(linear, name, monkeypatch):
    monkeypatch.setattr(gpu, "MULTIPROCESSORS_OF_NO_GPU", 8)
    for rows, dtype in ((1, torch.bfloat16), (20, torch.bfloat16), (130, torch.float16), (3, torch.float32)):
        codes, scale, weight = stored_weight(name, 64, 384)
        x, bias = operands(rows, 64, 384, dtype)
        y = linear(x, codes, scale, bias, format=name)
        assert_close(y.cpu(), torch.nn.functional.linear(x.double(), weight, bias.double()))


@pytest.mark.parametrize("name", sorted(set(STORED_FORMATS) - set(READ)))
def test_what_no_kernel_reads_is_refused(linear, name):
    codes, scale, _ = stored_weight(name, 64, 384)
    with pytest.raises(ValueError, match="16 weights share a scale|codes are bytes|places in a table"):
        linear(operands(3, 64, 384)[0], codes, scale, None, format=name)


@pytest.mark.parametrize("name", by_day(FORMATS, ("fp8_block",)))
def test_parts_of_k(linear, name, monkeypatch):
    """Of few panels: parts of k that do not divide it, in both tiles of few rows."""
    monkeypatch.setattr(gpu, "MULTIPROCESSORS_OF_NO_GPU", 8)
    for rows, columns, inner in ((1, 64, 1600), (20, 96, 448)):
        x, bias = operands(rows, columns, inner)
        check(linear, x, weight_of(columns, inner), name, bias)


@pytest.mark.parametrize(
    ("rows", "programs", "tiles", "expected"),
    [
        (1, 32, 16, (4, 4)),  # 1024 columns of 4096 k
        (1, 16, 16, (8, 2)),
        (64, 40, 30, (3, 10)),
        (1, 50, 7, (2, 4)),
        (1, 4, 5, (2, 3)),  # not of less than two tiles
        (1, 133, 16, (1, 16)),
        (65, 16, 64, (1, 64)),
        (1, 4, 1, (1, 1)),
    ],
)
def test_how_many_parts(monkeypatch, rows, programs, tiles, expected):
    from pagebinder.custom_ops.triton import quantized_linear

    monkeypatch.setattr(quantized_linear, "multiprocessors", lambda device: 132)
    assert quantized_linear.parts_of(rows, programs, tiles, torch.device("cuda")) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_other_types(linear, name, dtype):
    x, bias = operands(7, 64, 192, dtype)
    check(linear, x, weight_of(64, 192), name, bias)


def test_a_code_of_each_kind(linear):
    """The identity gives back every number that a code stands for."""
    for name, largest in (("int8", 127), ("int4_g32", -8), ("fp8_tensor", 448)):
        weight = torch.linspace(-abs(largest), abs(largest), 32 * 64).view(32, 64)
        weight[:, ::32] = largest
        check(linear, torch.eye(64), weight, name)


def test_bad_operands_raise(linear):
    qweight, scale = quantize(weight_of(64, 96), "fp8")
    x, bias = operands(4, 64, 96)
    for message, args, format in (
        (r"x must be \[..., 96\]", (x[:, :64], qweight, scale), "fp8"),
        (r"bias must be \[64\]", (x, qweight, scale, bias[:32]), "fp8"),
        ("fp7", (x, qweight, scale), "fp7"),
        ("with scales", (x, qweight, scale), "fp8_block"),
        ("with scales", (x, qweight, scale), "int4_g32"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(*args, format=format)


def test_opcheck(provider):
    provider.overload("quantized_linear")
    x, bias = operands(4, 64, 96)
    given = [t.to(DEVICE) for t in (x, *quantize(weight_of(64, 96), "int8"), bias)]
    torch.library.opcheck(torch.ops.pagebinder_triton.quantized_linear, given, {"format": "int8"})
