"""Default devices and dtypes of a user's own do not reach what is made here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from tests.helpers import tiny_llama

PACKAGE = Path(pagebinder.__file__).parent
MAKE_TENSORS = {
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


@pytest.mark.parametrize("room", ["runtime", "custom_ops", "passes"])
def test_every_new_tensor_says_its_device(room):
    silent = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            package, _, name = (
                ast.unparse(node.func).partition(".") if isinstance(node, ast.Call) else ("",) * 3
            )
            if (
                package == "torch"
                and name in MAKE_TENSORS
                and not {k.arg for k in node.keywords} & {"device", None}
            ):
                silent.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not silent


def generated(model, prompts):
    served = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    answers = served.engine(EngineConfig(num_kv_blocks=16)).generate(prompts, sampling)
    return [list(answer.token_ids) for answer in answers]


def test_default_devices_and_dtypes_change_nothing():
    model, prompts = tiny_llama(), [[3, 1, 4, 1, 5], [9, 2]]
    expected = generated(model, prompts)
    with torch.device("meta"):
        assert generated(model, prompts) == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert generated(model, prompts) == expected
    finally:
        torch.set_default_dtype(torch.float32)
