"""Products with a parameter [K, N] become linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.graph_tools import aten, calls, recipe_of
from pagebinder.passes.turn_weights import turn_weights, turned
from tests.graphs import captured, clone, count, run

WIDTH = 32
PRODUCTS = (aten.addmm.default, aten.mm.default, aten.matmul.default)


class Body(nn.Module):
    def __init__(self, function, sizes=(WIDTH, 2 * WIDTH)):
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(sizes, generator=generator) / 8)
        self.bias = nn.Parameter(torch.randn(sizes[1], generator=generator))

    def forward(self, x, positions):
        return self.function(x, self.weight, self.bias)


def rewritten(function, dtype=torch.float32, **options):
    before = captured(Body(function, **options), width=WIDTH, dtype=dtype)
    after = clone(before)
    result = turn_weights(after)
    for num_tokens in (1, 9):
        expected, got = run(before, num_tokens), run(after, num_tokens)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got, expected, **tolerance)
    return after, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_with_and_without_a_bias(dtype):
    def function(x, weight, bias):
        rows = x.view(-1, WIDTH)
        return torch.addmm(bias, rows, weight) + torch.mm(rows, weight) + torch.matmul(x, weight)

    gm, result = rewritten(function, dtype)
    assert count(gm, aten.linear.default) == 3 and count(gm, *PRODUCTS) == 0 and len(result.matches) == 3
    weights = {n.args[1].target for n in calls(gm.graph, aten.linear.default)}
    assert len(weights) == 1  # made once
    made = getattr(gm, weights.pop())
    assert made.is_contiguous() and recipe_of(made).function is turned


@pytest.mark.parametrize(
    ("function", "sizes", "reason"),
    [
        (lambda x, w, b: torch.addmm(b, x.view(-1, WIDTH), w, alpha=2), (WIDTH, WIDTH), "has a factor"),
        (lambda x, w, b: torch.addmm(b, x.view(-1, WIDTH), w), (WIDTH, 40), "not multiples of 32"),
        (lambda x, w, b: torch.addmm(b[:1], x.view(-1, WIDTH), w), (WIDTH, WIDTH), None),  # no parameter
        (lambda x, w, b: torch.mm(w, w) + x.sum(), (WIDTH, WIDTH), None),
    ],
)
def test_others_stay(function, sizes, reason):
    _, result = rewritten(function, sizes=sizes)
    if reason is None:
        assert not result.refusals
    else:
        assert len(result.refusals) == 1 and reason in result.refusals[0].reason and not result.changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpt2_is_verified_saved_and_holds_no_third_copy(dtype, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=128)
    model = transformers.GPT2LMHeadModel(config).to(dtype).eval()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="native", verify="full"))
    assert sum(len(p.matches) for p in compiled.report.passes if p.name == "turn_weights") == 8
    fused = compiled.graphs["fused"]
    read = {n.target for n in fused.graph.nodes if n.op == "get_attr"}
    kept = [name for name, _ in fused.named_buffers() if "_turned" in name]
    assert set(kept) <= read  # a packed one stands for the plain one

    def tokens(served):
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        results = served.engine(EngineConfig(max_num_seqs=2)).generate([[3, 1, 4, 1, 5], [9, 2, 6]], params)
        return [r.token_ids for r in results]

    compiled.save(tmp_path / "saved")
    assert tokens(pagebinder.load(tmp_path / "saved")) == tokens(compiled)
    if dtype is torch.float32:
        prompt = torch.tensor([[3, 1, 4, 1, 5]])
        expected = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert tokens(compiled)[0] == expected[0, 5:].tolist()
