"""Pointwise programs: their text, and the C++ that runs them against torch's ops one by one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from pagebinder.custom_ops.pointwise.pointwise import pointwise_reference
from pagebinder.custom_ops.pointwise.program import OPERATIONS, Program, Statement, read_program
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError

DTYPES = ("float32", "bfloat16", "float16")
UNARY = (
    "abs", "copy", "cube", "exp", "expm1", "floor", "gelu", "gelu_tanh", "log", "log1p", "log_sigmoid", "neg",
    "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sqrt", "square", "tanh", "to",
)  # fmt: skip
EXACT = {"abs", "copy", "floor", "neg", "reciprocal", "relu", "rsqrt", "square", "to"}
BINARY = ("add", "sub", "rsub", "mul", "div", "maximum", "minimum")
COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
LOGIC = ("and", "or", "not")
OTHERS = ("clamp_max", "clamp_min", "leaky_relu", "softplus", "where")
SMALLEST = 2.0**-126  # results below are taken for zeros


@pytest.fixture(scope="module")
def cpu():
    provider = registered_providers()["cpu"]
    if isinstance(provider.problem(), CompilerNotFoundError):
        pytest.skip(str(provider.problem()))
    provider.prepare("pointwise")
    return torch.ops.pagebinder_cpu.pointwise


def numbers(dtype: str) -> torch.Tensor:
    """All of 16 bits, of float32 some of every size, with what is no number."""
    if dtype != "float32":
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(4001, generator=generator) * scale for scale in (1e-6, 1e-2, 1, 8, 40, 1e4, 1e30)]
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 88.72, -87.4])
    return torch.cat([*parts, special])


def assert_near(
    ours: torch.Tensor, exact: torch.Tensor, *, share: float = 0.0, rtol: float = 0.0, atol: float = 0.0
):
    """`share`: of results that may have the next bits; NaN where torch has NaN."""
    assert ours.dtype == exact.dtype and ours.shape == exact.shape and ours.is_contiguous()
    assert torch.equal(ours.isnan(), exact.isnan())
    close = torch.isclose(ours.double(), exact.double(), rtol=rtol, atol=max(atol, SMALLEST), equal_nan=True)
    assert close.all(), (ours[~close][:4], exact[~close][:4])
    differ = (ours != exact) & ~exact.isnan() & (exact.abs() >= SMALLEST)
    assert differ.float().mean() <= share


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", UNARY)
def test_functions_against_torch(cpu, operation, dtype):
    x = numbers(dtype)
    if operation == "gelu":
        x = x[x != -float("inf")]  # torch: 0 or NaN, as its loop falls
    if operation in ("cube", "gelu", "gelu_tanh", "rsqrt", "reciprocal", "log", "log_sigmoid"):
        x = x[(x.abs() >= SMALLEST) | x.isnan()]  # where a machine flushes what is subnormal
    if operation == "cube" and dtype == "bfloat16":
        return  # torch rounds the square: written as two statements, below
    program = f"{operation}:{dtype} x0 -> v0"
    ours, exact = cpu([x], program)[0], pointwise_reference([x], program)[0]
    if operation == "gelu":  # with AVX-512 torch's is inf from half of the largest number on, and NaN of inf
        exact = torch.nn.functional.gelu(x.double()).to(x.dtype)
    if operation in EXACT:
        assert_near(ours, exact)
    elif dtype == "float32":  # units of the last place; gelu's tail is torch's to an absolute error
        assert_near(ours, exact, share=1, rtol=5e-7, atol=5e-7 if operation.startswith("gelu") else 0)
    else:
        rtol = {"bfloat16": 2**-7, "float16": 2**-10}[dtype]
        assert_near(
            ours,
            exact,
            share=0.01 if operation == "gelu" else 0.004,
            rtol=rtol,
            atol=2e-5 if operation.startswith("gelu") else 0,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", [*BINARY, *COMPARISONS])
def test_operations_of_two_have_torchs_bits(cpu, operation, dtype):
    x = numbers(dtype)
    y = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    y = torch.where(torch.arange(len(x)) % 5 == 0, x, y)
    program = f"{operation}:{dtype} x0 x1 -> v0"
    ours, exact = cpu([x, y], program)[0], pointwise_reference([x, y], program)[0]
    assert torch.equal(torch.nan_to_num(ours.float(), 7.0), torch.nan_to_num(exact.float(), 7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_operations(cpu, dtype):
    x = numbers(dtype)
    mask = torch.rand(len(x), generator=torch.Generator().manual_seed(2)) > 0.5
    for program in (
        f"clamp_min:{dtype} x0 -1.0; clamp_max:{dtype} v0 1.5 -> v1",
        f"where:{dtype} x1 x0 -0.5 -> v0",
        f"where:{dtype} x1 0.25 x0 -> v0",
        f"leaky_relu:{dtype} x0 0.0078125 -> v0",
        f"gt:{dtype} x0 0.3371; not:bool v0; or:bool v1 x1; and:bool v0 v2 -> v1 v2 v3 v0",
    ):
        for ours, exact in zip(cpu([x, mask], program), pointwise_reference([x, mask], program), strict=True):
            assert torch.equal(torch.nan_to_num(ours.float(), 7.0), torch.nan_to_num(exact.float(), 7.0)), (
                program
            )
    program = f"softplus:{dtype} x0 1.0 20.0; softplus:{dtype} x0 2.0 10.0 -> v0 v1"
    for ours, exact in zip(cpu([x], program), pointwise_reference([x], program), strict=True):
        assert_near(ours, exact, share=1, rtol={"float32": 5e-7}.get(dtype, 2**-7))


def test_every_operation_is_tested():
    assert set(OPERATIONS) == {*UNARY, *BINARY, *COMPARISONS, *LOGIC, *OTHERS}


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_as_torch_rounds_them(cpu, dtype):
    x = torch.randn(999, generator=torch.Generator().manual_seed(6)).to(getattr(torch, dtype))
    for name in ("add", "sub", "rsub", "mul", "div", "clamp_min", "clamp_max"):
        program = f"{name}:{dtype} x0 0.3371; mul:{dtype} v0 0.3371 -> v1 v0"
        for ours, exact in zip(cpu([x], program), pointwise_reference([x], program), strict=True):
            assert torch.equal(ours, exact), name


def test_a_program_in_float32():
    program = read_program(
        "gt:bfloat16 x0 0.5; add:bfloat16 x0 0.3371; where:float16 v0 v1 x0 -> v2 v0"
    ).widened()
    assert str(program) == "gt:float32 x0 0.5; add:float32 x0 0.3371; where:float32 v0 v1 x0 -> v2 v0"


def test_torchs_cube_of_bfloat16_is_two_products(cpu):
    x = numbers("bfloat16")
    ours = cpu([x], "square:bfloat16 x0; mul:bfloat16 v0 x0 -> v1")[0]
    assert torch.equal(torch.nan_to_num(ours, 7.0), torch.nan_to_num(x.pow(3), 7.0))


def layouts() -> list[list[torch.Tensor]]:
    z = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(3))
    return [
        [z[1:2, :, 3:40:2], z[0, :, :19].bfloat16()],
        [z[:, :, None, :], z.transpose(0, 1)[None, :, 2:3, :1].bfloat16()],
        [z.permute(2, 0, 1)[5:40:7], torch.tensor(2.0)],
        [z[0, 0], z],
        [z[:0], z[:1]],
        [torch.tensor(1.0), torch.tensor(2.0)],
        [z.expand(2, 3, 7, 64), z[:, :1, :1].half()],
        [torch.ones(1, 1, 1, 1, 1, 3, 1, 1), z],
    ]


@pytest.mark.parametrize("inputs", layouts(), ids=lambda inputs: str([list(x.shape) for x in inputs]))
def test_inputs_broadcast_and_lie_anyhow(cpu, inputs):
    program = "add:float32 x0 x1; mul:float32 v0 2.5; sub:float32 v1 x0; to:bfloat16 v0 -> v2 v0 v3"
    for ours, exact in zip(cpu(inputs, program), pointwise_reference(inputs, program), strict=True):
        assert ours.shape == exact.shape and torch.equal(ours, exact) and ours.is_contiguous()


def test_values_are_rounded_between_operations(cpu):
    """And results that are also read behind: a store alone would leave more bits to the next operation."""
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(5000, generator=generator).bfloat16() for _ in range(2))
    program = "mul:bfloat16 x0 x1; add:bfloat16 v0 x1; mul:bfloat16 v1 v0; sub:bfloat16 v2 x0 -> v1 v3"
    for ours, exact in zip(cpu([x, y], program), pointwise_reference([x, y], program), strict=True):
        assert torch.equal(ours, exact)


def test_threads_change_no_bit(cpu):
    x = torch.randn(300, 1000, generator=torch.Generator().manual_seed(5))
    program = "exp:float32 x0; add:float32 v0 x1; tanh:float32 v1 -> v2 v0"
    inputs = [x, x[0]]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = cpu(inputs, program)
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(cpu(inputs, program), expected, strict=True))
    finally:
        torch.set_num_threads(before)


def test_long_programs_reuse_registers(cpu):
    statements = ["add:float32 x0 x1"]
    for n in range(1, 60):
        statements.append(f"{'mul' if n % 2 else 'sub'}:float32 v{n - 1} {'x0' if n % 3 else '0.75'}")
    program = f"{'; '.join(statements)} -> v7 v59 v0"
    inputs = [torch.linspace(-1, 1, 5001), torch.linspace(0.5, 0.9, 5001)]
    for ours, exact in zip(cpu(inputs, program), pointwise_reference(inputs, program), strict=True):
        assert torch.equal(ours, exact)


def test_a_program_is_its_text():
    program = Program(
        (Statement("add", "bfloat16", ("x0", "x1")), Statement("clamp_min", "bfloat16", ("v0", -1e-7))),
        (0, 1),
    )
    assert str(program) == "add:bfloat16 x0 x1; clamp_min:bfloat16 v0 -1e-07 -> v0 v1"
    assert read_program(str(program)) == program


WRONG = (
    "add:float32 x0 x1", "add:float32 x0 x1 -> ", "add:float32 x0 x1 -> v1", "frob:float32 x0 -> v0",
    "add:int8 x0 x1 -> v0", "add:float32 -> v0", "add:float32 x0 -> v0", "abs:float32 x0 x1 -> v0",
    "add:float32 x0 one -> v0", "add:float32 v0 x0 -> v0", "exp:float32 x3 -> v0", "",
)  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_program_is_refused(cpu, text):
    with pytest.raises(RuntimeError, match="pointwise|not a number: one"):
        cpu([torch.ones(2), torch.ones(2)], text)


@pytest.mark.parametrize("text", [t for t in WRONG if " x3" not in t and "v0 x0" not in t])
def test_the_reference_refuses_it_too(text):
    """But for values that are not there, which are an IndexError."""
    with pytest.raises(ValueError, match="pointwise"):
        pointwise_reference([torch.ones(2), torch.ones(2)], text)


def test_inputs_of_other_types_and_shapes_are_named(cpu):
    with pytest.raises(RuntimeError, match="float32, bfloat16, float16 or bool"):
        cpu([torch.ones(2, dtype=torch.int64)], "neg:float32 x0 -> v0")
    with pytest.raises(RuntimeError, match="do not broadcast"):
        cpu([torch.ones(2), torch.ones(3)], "add:float32 x0 x1 -> v0")


LOCALE = """
import locale, torch
for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "de_DE", "fr_FR"):
    try:
        locale.setlocale(locale.LC_ALL, name)
        break
    except locale.Error:
        continue
else:
    raise SystemExit(77)
import pagebinder.custom_ops.cpu.provider
from pagebinder.custom_ops.cpu import build
build.load("pointwise")
(y,) = torch.ops.pagebinder_cpu.pointwise([torch.ones(3)], "mul:float32 x0 0.5; add:float32 v0 0.25 -> v1")
assert y.tolist() == [0.75] * 3, y
"""


def test_a_decimal_comma_changes_no_number(cpu, tmp_path):
    """The process's locale is what C++'s own reading of numbers goes by."""
    env = dict(os.environ)
    if shutil.which("localedef"):
        made = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
        subprocess.run(made, check=False, capture_output=True)
        env["LOCPATH"] = str(tmp_path)
    run = subprocess.run([sys.executable, "-c", LOCALE], env=env, capture_output=True, text=True, check=False)
    if run.returncode == 77:
        pytest.skip("no locale with a decimal comma is here")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("number", ["1e-310", "5e-324", "inf", "-inf"])
def test_numbers_beyond_float32(cpu, number):
    x = torch.tensor([-1.0, 0.0, 2.0])
    for program in (f"add:float32 x0 {number} -> v0", f"clamp_max:float32 x0 {number} -> v0"):
        assert torch.equal(cpu([x], program)[0], pointwise_reference([x], program)[0])
