"""Stacked weights of experts -> codes and scales in the graph, then one op of the mixture: structure and values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CompileConfig, SamplingParams, VerificationError
from pagebinder.compile import explain_model
from pagebinder.config import QUANTIZATIONS
from pagebinder.custom_ops.linear.weight_formats import FORMATS
from pagebinder.custom_ops.linear.weight_numbers import dequantize, quantize
from pagebinder.custom_ops.linear.weight_stacks import dequantize_stack, quantize_stack
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.graph_tools import attribute, calls
from pagebinder.passes.fuse_quantized_linear import fuse_quantized_linear
from pagebinder.passes.op_costs_ours import cost_model
from pagebinder.passes.quantize_weights import certify_weights, quantize_weights
from tests import moe_models
from tests.graphs import assert_metadata_kept, captured, clone, count, run
from tests.helpers import by_day
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("captured_once")

EXPERTS, WIDTH = 4, 64
ours = torch.ops.pagebinder
MIXTURE, DEQUANTIZE = ours.moe_experts.default, ours.dequantize_weight.default
QUANTIZED = ours.quantized_moe_experts.default
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
MODELS = {
    "mixtral": (moe_models.tiny_mixtral, 2),
    "qwen3-moe": (moe_models.tiny_qwen3_moe, 1),
    "gpt-oss": (moe_models.tiny_gpt_oss_moe, 2),  # its weights are [E, K, N]
    "deepseek-v3": (moe_models.tiny_deepseek_v3, 1),
}


class Mixture(nn.Module):
    """Router and experts; `scaled`: their weights are computed in the graph."""

    def __init__(self, inner=64, transposed=False, scaled=False, gate=None):
        super().__init__()
        self.transposed, self.scaled, self.gate = transposed, scaled, gate or Gate()
        self.router = nn.Linear(WIDTH, EXPERTS)
        generator = torch.Generator().manual_seed(1)
        rows = (2 if self.gate.gated else 1) * inner
        for name, shape in {"up": (EXPERTS, rows, WIDTH), "down": (EXPERTS, WIDTH, inner)}.items():
            weight = torch.randn(shape, generator=generator) * shape[2] ** -0.5
            setattr(self, name, nn.Parameter(weight.mT.contiguous() if transposed else weight))

    def forward(self, x, positions):
        weights, ids = self.router(x[0]).softmax(-1).topk(2)
        up = self.up * 2 if self.scaled else self.up
        options = {"transposed": self.transposed, **self.gate.as_options()}
        return ours.moe_experts(x[0], ids, weights, up, self.down, None, None, **options)[None]


def quantised(before, name):
    after = clone(before)
    return after, quantize_weights(after, format=name)


def with_values_of_codes(model, name):
    """The model with the weights of all linear layers and experts replaced by what their codes stand for."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and module.weight.shape[0] % 32 == 0:
                own = "int4_g32" if path == "lm_head" and FORMATS[name].bits == 4 else name
                module.weight.copy_(dequantize(*quantize(module.weight, own), own))
            for weight in module.parameters(recurse=False):
                if weight.dim() == 3:
                    turned = "GptOss" in type(module).__name__
                    values = dequantize_stack(*quantize_stack(weight, name, turned), name)
                    weight.copy_(values.mT if turned else values)
    return model


# ---- stacks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_is_its_weights_side_by_side(name, transposed):
    weight = torch.randn(3, 128, 192) * torch.tensor([1.0, 5.0, 0.0])[:, None, None]
    codes, scale = quantize_stack(weight.mT.contiguous() if transposed else weight, name, transposed)
    for expert in range(3):
        own = quantize(weight[expert], name)
        assert torch.equal(codes[expert], own[0]) and torch.equal(scale[expert], own[1])
    values = dequantize_stack(codes, scale, name)
    assert torch.equal(values[1], dequantize(codes[1], scale[1], name)) and values.shape == weight.shape
    op = ours.dequantize_weight(codes, scale, format=name, dtype=torch.bfloat16)
    assert torch.equal(op, values.bfloat16())
    meta = ours.dequantize_weight(codes.to("meta"), scale.to("meta"), format=name, dtype=torch.bfloat16)
    assert meta.shape == weight.shape and meta.dtype is torch.bfloat16


def test_a_stack_that_cannot_be_packed():
    with pytest.raises(ValueError, match="multiples of 32 rows and 64 columns"):
        quantize_stack(torch.randn(2, 64, 96), "int4_g64")


# ---- the passes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("transposed", [False, True], ids=["[E, N, K]", "[E, K, N]"])
def test_structure_and_values(name, transposed):
    before = captured(Mixture(transposed=transposed), width=WIDTH)
    after, result = quantised(before, name)
    assert [m.pattern for m in result.matches] == ["moe_experts"] and count(after, DEQUANTIZE) == 2
    assert [r.reason for r in result.refusals] == [
        "it chooses experts: another choice costs more than its few bytes"
    ]
    (mixture,) = calls(after.graph, MIXTURE)
    assert not mixture.kwargs["transposed"]
    fused = clone(after)
    result = fuse_quantized_linear(fused)
    assert count(fused, QUANTIZED) == 1 == len(result.matches)
    assert not count(fused, MIXTURE) and not count(fused, DEQUANTIZE)
    assert_metadata_kept(fused, QUANTIZED)
    for num_tokens in (1, 9):
        assert_close(run(fused, num_tokens), run(after, num_tokens))
    exact, rounded = run(before, 9), run(after, 9)
    most = 0.25 if name == "mxfp4" else 0.2 if FORMATS[name].bits == 4 else 0.06
    assert 0 < (exact - rounded).norm() / exact.norm() < most


@pytest.mark.parametrize("name", ["int8", "int4_g32"])
def test_gates_without_values(name):
    gate = Gate(activation="relu2", gated=False)
    after, result = quantised(captured(Mixture(gate=gate), width=WIDTH), name)
    fused = clone(after)
    fuse_quantized_linear(fused)
    assert result.matches and count(fused, QUANTIZED) == 1
    assert_close(run(fused, 5), run(after, 5))


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        (Mixture(inner=48), "int8", "multiples of 32 rows and 32 columns"),
        (Mixture(inner=96), "int4_g64", "multiples of 32 rows and 64 columns"),
        (Mixture(inner=96, transposed=True), "int4_g64", "[64, 96]"),
        (Mixture(scaled=True), "int8", "the weight is computed"),
    ],
    ids=["odd sizes", "odd groups", "transposed", "computed"],
)
def test_near_misses_are_refused(body, name, reason):
    """Both stacks or none."""
    before = captured(body, width=WIDTH)
    after, result = quantised(before, name)
    refusal = next(r for r in result.refusals if r.pattern == "moe_experts")
    assert reason in refusal.reason and not result.matches
    assert torch.equal(run(before, 5), run(after, 5)) and not fuse_quantized_linear(after).matches


@pytest.mark.parametrize("transposed", [False, True])
def test_wrong_codes_of_one_expert_are_no_certificate(transposed):
    before = captured(Mixture(transposed=transposed), width=WIDTH)
    after, result = quantised(before, "int4_g32")
    (certificate,) = certify_weights(before, after, result)
    assert certificate.count == 1 and 0 < certificate.max_rel_error < 0.1
    name = next(n.target for n in after.graph.nodes if str(n.target).endswith("down_int4_g32_scale"))
    attribute(after, name)[2, 0, 1] *= 1.5
    with pytest.raises(VerificationError, match=r"int4_g32 of body\.down"):
        certify_weights(before, after, result)


# ---- models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_day(QUANTIZATIONS, ("int8", "int4_g64")))
@pytest.mark.parametrize("model", by_day(MODELS, ("mixtral", "gpt-oss")))
def test_logits_are_those_of_the_values_of_the_codes(model, name):
    build, num_mixtures = MODELS[model]
    source = build(**SIZES)
    config = CompileConfig(executable="eager", quantization=name, verify="sample")
    compiled = pagebinder.compile_model(source, config)
    matches = next(p.matches for p in compiled.report.passes if p.name == "quantize_weights")
    assert sum(m.pattern == "moe_experts" for m in matches) == num_mixtures
    ids = torch.randint(60, (21,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = with_values_of_codes(source, name)(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(compiled.run_level("fused", ids), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", by_day(QUANTIZATIONS, ("int8", "int4_g64")))
@pytest.mark.parametrize("model", by_day(MODELS, ("mixtral", "gpt-oss")))
def test_an_engine_generates_the_tokens_of_the_values(model, name):
    """Two requests of different lengths, so decodes meet several experts and prompts all of them."""
    source, prompts = MODELS[model][0](**SIZES), [list(range(3, 20)), [7, 11]]
    engine = pagebinder.compile_model(source, CompileConfig(quantization=name, max_model_len=64)).engine()
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    values = with_values_of_codes(source, name)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = list(prompt)
        with torch.inference_mode():
            for _ in range(8):
                expected.append(int(values(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
        assert output.token_ids == expected[len(prompt) :]


def test_projections_that_are_single_ops_are_refused():
    config = CompileConfig(executable="eager", quantization="int8")
    report = pagebinder.compile_model(moe_models.tiny_jetmoe(), config).report
    refusals = next(p.refusals for p in report.passes if p.name == "quantize_weights")
    assert sum("whose projections are single ops" in r.reason for r in refusals) == 8


def test_costs_count_values_and_bytes():
    """The same products as without quantisation, and fewer bytes."""
    config = moe_models.tiny_mixtral(**SIZES).config
    plain, small = (explain_model(config, CompileConfig(quantization=q)) for q in (None, "int4_g64"))
    assert small.report.graph_weight_bytes < 0.4 * plain.report.graph_weight_bytes

    costs = []
    for compiled in (plain, small):
        gm = compiled.graphs["fused"]
        (node, *_) = (n for n in gm.graph.nodes if "experts" in str(n.target) and n.op == "call_function")
        costs.append(cost_model(gm).cost(node))
    assert (costs[0].flops - costs[1].flops).expand() == 0
    ratio = float((costs[1].weight_bytes / costs[0].weight_bytes).simplify())
    assert ratio == pytest.approx((4.25 / 8) / 4)  # of float32
