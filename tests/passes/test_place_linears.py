"""Linear layers of bf16 and float32 parameters -> an op of ours with providers; everything else stays with torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.custom_ops.cpu import build
from pagebinder.errors import CompilerNotFoundError
from pagebinder.graph_tools import aten
from pagebinder.passes.place_linears import place_linears
from pagebinder.passes.select_providers import select_providers
from tests.graphs import assert_metadata_kept, captured, clone, count, run
from tests.tolerances import TOLERANCES

WIDTH = 64
OURS = torch.ops.pagebinder.linear.default
pytestmark = pytest.mark.skipif(build.problem() is not None, reason="no C++ compiler")


class Chain(nn.Module):
    """Two layers, the first with two users; the second has a bias."""

    def __init__(self, middle: int = 96):
        super().__init__()
        self.up = nn.Linear(WIDTH, middle, bias=False)
        self.down = nn.Linear(middle, WIDTH)

    def forward(self, x, positions):
        up = self.up(x)
        return self.down(up.sin()) + up[..., :WIDTH]


class Computed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, positions):
        return nn.functional.linear(x, self.layer.weight * 2)


def placed(body, dtype=torch.bfloat16):
    before = captured(body, width=WIDTH, dtype=dtype)
    after = clone(before)
    return before, after, place_linears(after)


def test_structure_and_numerics():
    before, after, result = placed(Chain())
    assert count(after, OURS) == 2 and count(after, aten.linear.default) == 0
    assert len(result.matches) == 2 and not result.refusals and result.changed
    assert {m.module_path.rsplit(".", 1)[-1] for m in result.matches} == {"up", "down"}
    assert_metadata_kept(after)
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))  # the reference is torch's linear


def test_on_a_gpu_torchs_own_linear_is_no_fallback():
    """Chosen on paper: no GPU is needed."""
    _, after, _ = placed(Chain())
    (choice,) = select_providers(after, device=torch.device("cuda"), requested={}, prepare=False)
    assert (choice.op, choice.provider, choice.num_nodes) == ("linear", "reference", 2)
    assert "cuBLAS" in choice.why and "FALLBACK" not in choice.why
    assert "there is no CUDA GPU" in choice.rejected["triton"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_chosen_provider_agrees(dtype):
    before, after, _ = placed(Chain(), dtype)
    (choice,) = select_providers(after, device=torch.device("cpu"), requested={})
    assert (choice.op, choice.provider, choice.num_nodes) == ("linear", "cpu", 2)
    for num_tokens in (1, 9, 140):
        expected, actual = run(before, num_tokens), run(after, num_tokens)
        torch.testing.assert_close(
            actual.float(), expected.float(), rtol=TOLERANCES[dtype].rtol, atol=2 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize(
    ("body", "dtype", "reason"),
    [
        (Chain(middle=72), torch.bfloat16, "not multiples of 32"),
        (Chain(), torch.float64, "not all bfloat16, all float32 or all float16"),
        (Computed(), torch.bfloat16, "computed"),
    ],
    ids=["odd sizes", "float64", "computed weight"],
)
def test_near_misses_are_refused(body, dtype, reason):
    before, after, result = placed(body, dtype)
    assert count(after, OURS) == 0 and not result.matches
    assert result.refusals and all(reason in r.reason and r.module_path is not None for r in result.refusals)
    assert torch.equal(run(before, 5), run(after, 5))


def test_without_a_compiler_torch_keeps_them(monkeypatch):
    monkeypatch.setattr(build, "problem", lambda: CompilerNotFoundError("no C++ compiler found"))
    _, after, result = placed(Chain())
    assert count(after, OURS) == 0 and not result.changed
    assert all("no C++ compiler found" in r.reason for r in result.refusals) and len(result.refusals) == 2
