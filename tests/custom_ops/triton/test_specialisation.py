"""No kernel is compiled again because a step has one token, or a multiple of 16; none needs a Triton beyond 3.6."""

from __future__ import annotations

import ast
from pathlib import Path

import pagebinder.custom_ops.triton as kernels
from pagebinder.custom_ops.triton.gpu import round_splits
from pagebinder.custom_ops.triton.values import SIZES

# Numbers that a model, or the memory of an engine, fixes.
FIXED = {
    "block_size", "scale", "soft_cap", "eps", "norm_eps", "rope_scale", "C", "W", "num_experts", "slots_per_row",
    "scales_of_expert", "width", "num_columns", "num_panels", "num_steps", "N", "K",
    "N_0", "N_1", "N_2",  # columns of linear layers
    "limit", "alpha", "up_offset", "vocab",
    "dt_min", "dt_max", "behind", "farthest",
    "cache",  # a descriptor
    "part_tokens", "part_steps",  # multiples of 64 and of a tile's step: pointers stay aligned
}  # fmt: skip
STRIDES = ("stride", "window_stride_", "entry_stride_", "x_", "cos_", "sin_")


def parsed():
    return [ast.parse(path.read_text()) for path in Path(kernels.__file__).parent.glob("*.py")]


def launched_kernels():
    trees = parsed()
    calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    launched = {f.value.id for f in calls if isinstance(f, ast.Subscript) and isinstance(f.value, ast.Name)}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in launched and node.decorator_list:
                yield node


def test_sizes_of_a_step_are_not_specialised():
    found = 0
    for kernel in launched_kernels():
        operands = {a.arg for a in kernel.args.args if a.annotation is None}  # others are constexpr
        operands = {name for name in operands if not name.endswith("_ptr")}
        operands = {name for name in operands if name in SIZES or not name.startswith(STRIDES)}
        unknown = operands - FIXED - set(SIZES)
        assert not unknown, f"{kernel.name}: do {unknown} change from step to step (SIZES), or not (FIXED)?"
        if operands & set(SIZES):
            found += 1
            assert ast.unparse(kernel.decorator_list[0]) == "triton.jit(do_not_specialize=SIZES)", kernel.name
    assert found > 35


def test_contexts_that_grow_need_few_kernels():
    counts = {round_splits(splits) for splits in range(1, 65)}
    assert counts == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}
    assert all(2 * splits < 3 * round_splits(splits) + 2 for splits in range(1, 65))


def test_device_functions_return_no_none():
    """As an operand that may be missing would be: Triton 3.6 refuses that, Triton 3.7 and interpreters do not."""
    functions = [f for tree in parsed() for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    device = [f for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)]
    returns = [
        (f.name, r.value) for f in device for r in ast.walk(f) if isinstance(r, ast.Return) and r.value
    ]
    choices = [(name, ast.unparse(value)) for name, value in returns if " is None" in ast.unparse(value)]
    assert not choices and len(returns) > 60
