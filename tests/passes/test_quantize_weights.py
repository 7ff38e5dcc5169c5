"""Weights of linear layers -> codes and scales in the graph, then one op: what is quantised, and what is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.custom_ops.linear.weight_formats import FORMATS
from pagebinder.custom_ops.linear.weight_numbers import dequantize, quantize
from pagebinder.errors import VerificationError
from pagebinder.graph_tools import aten, attribute, calls
from pagebinder.passes.fuse_quantized_linear import fuse_quantized_linear
from pagebinder.passes.place_linears import place_linears
from pagebinder.passes.quantize_weights import certify_weights, quantize_weights
from tests.graphs import VOCAB_SIZE, assert_metadata_kept, captured, captured_model, clone, count, run
from tests.tolerances import assert_close

WIDTH = 64
ours = torch.ops.pagebinder
DEQUANTIZE, QUANTIZED = ours.dequantize_weight.default, ours.quantized_linear.default


class Mlp(nn.Module):
    """Two layers, the first with two users; the second has a bias. Their weights may be shared."""

    def __init__(self, middle: int = 128, shared: bool = False):
        super().__init__()
        self.up = nn.Linear(WIDTH, middle, bias=False)
        self.down = nn.Linear(middle, WIDTH)
        if shared:
            self.down.weight = self.up.weight

    def forward(self, x, positions):
        up = self.up(x)
        return self.down(up.sin()) + up[..., :WIDTH]


class Decoder(nn.Module):
    """Embedding -> Mlp -> LM head that shares the embedding's table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mlp = nn.Embedding(VOCAB_SIZE, WIDTH), Mlp()
        self.lm_head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, input_ids, position_ids):
        return self.lm_head(self.mlp(self.embed(input_ids), position_ids))


def quantised(before, name):
    after = clone(before)
    return after, quantize_weights(after, format=name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("place", [False, True], ids=["aten", "placed"])
def test_structure_and_values(name, place):
    before = captured(Mlp(), width=WIDTH)
    if place:
        for node in calls(before.graph, aten.linear.default):
            node.target = ours.linear.default
        before.recompile()
    after, result = quantised(before, name)
    assert count(after, DEQUANTIZE) == 2 and len(result.matches) == 2 and not result.refusals
    assert result.changes_numbers and {m.detail for m in result.matches} == {name}
    fused = clone(after)
    result = fuse_quantized_linear(fused)
    assert count(fused, QUANTIZED) == 2 == len(result.matches) and count(fused, DEQUANTIZE) == 0
    assert not result.changes_numbers and not list(
        calls(fused.graph, aten.linear.default, ours.linear.default)
    )
    assert_metadata_kept(fused, QUANTIZED)
    for num_tokens in (1, 9):
        assert_close(run(fused, num_tokens), run(after, num_tokens))


def test_values_are_those_of_the_codes():
    model = Decoder()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    after, result = quantised(captured_model(model), "int4_g64")
    fuse_quantized_linear(after)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())  # the source is as it was
    with torch.no_grad():
        for layer in (model.mlp.up, model.mlp.down):
            layer.weight.copy_(dequantize(*quantize(layer.weight, "int4_g64"), "int4_g64"))
        head = dequantize(*quantize(model.embed.weight, "int4_g32"), "int4_g32")
        ids = torch.randint(VOCAB_SIZE, (9,), generator=torch.Generator().manual_seed(9))
        expected = nn.functional.linear(model.mlp(model.embed(ids), None), head)
    assert {m.detail for m in result.matches if m.module_path == "lm_head"} == {"int4_g32"}
    assert_close(run(after, 9), expected)


def test_a_shared_weight_is_quantised_once():
    after, result = quantised(captured(Mlp(middle=WIDTH, shared=True), width=WIDTH), "fp8")
    codes = [n for n in after.graph.nodes if n.op == "get_attr" and str(n.target).endswith("_codes")]
    assert len(result.matches) == 2 and len(codes) == 1


class Computed(Mlp):
    def forward(self, x, positions):
        return nn.functional.linear(x, self.up.weight * 2)


class Transposed(Mlp):
    def forward(self, x, positions):
        return torch.addmm(self.down.bias, x.view(-1, WIDTH), self.up.weight)[None]


class Router(Mlp):
    def forward(self, x, positions):
        return self.up(x).softmax(-1).topk(2).values


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        (Mlp(middle=72), "int8", "multiples of 32"),
        (Mlp(middle=96), "int4_g64", "multiples of 32 rows and 64 columns"),
        (Computed(), "int8", "computed"),
        (Transposed(middle=WIDTH), "int8", "the weight is [K, N]"),
        (Router(), "int8", "it chooses experts"),
    ],
    ids=["odd sizes", "odd groups", "computed weight", "transposed", "router"],
)
def test_near_misses_are_refused(body, name, reason):
    before = captured(body, width=WIDTH)
    after, result = quantised(before, name)
    assert result.refusals and all(reason in r.reason for r in result.refusals)
    if not result.matches:
        assert torch.equal(run(before, 5), run(after, 5))


def test_what_is_refused_is_left_to_torch():
    after, _ = quantised(captured(Mlp(middle=72), width=WIDTH, dtype=torch.bfloat16), "int8")
    assert not fuse_quantized_linear(after).matches and len(place_linears(after).refusals) == 2


def test_on_the_meta_device():
    model = Decoder().to("meta")
    after, _ = quantised(captured_model(model), "int4_g64")
    fuse_quantized_linear(after)
    parts = [attribute(after, n.target) for n in after.graph.nodes if "codes" in str(n.target)]
    assert all(p.is_meta and p.dtype == torch.uint8 for p in parts)
    assert sum(p.numel() for p in parts) == 2 * 128 * WIDTH // 2 + VOCAB_SIZE * WIDTH // 2


def test_wrong_codes_are_no_certificate():
    before = captured(Mlp(), width=WIDTH)
    after, result = quantised(before, "int4_g32")
    (certificate,) = certify_weights(before, after, result)
    assert certificate.count == 2 and 0 < certificate.max_rel_error < 0.1
    name = next(n.target for n in after.graph.nodes if str(n.target).endswith("_scale"))
    attribute(after, name)[0, 1] *= 1.5
    with pytest.raises(VerificationError, match=r"int4_g32 of body\.up\.weight"):
        certify_weights(before, after, result)
