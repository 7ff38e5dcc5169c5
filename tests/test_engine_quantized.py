"""Quantised weights from end to end: tokens, verification, plan lock, report, and what it costs in bits per byte."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

import pagebinder
from pagebinder import CompileConfig, ConfigError, EngineConfig, SamplingParams, VerificationError
from pagebinder.compile import explain_model
from pagebinder.config import QUANTIZATIONS
from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.linear.weight_formats import FORMATS
from pagebinder.custom_ops.linear.weight_numbers import dequantize, quantize
from pagebinder.models import tiny_path
from tests.broken_passes import break_pass, ops, with_option
from tests.helpers import VOCAB_SIZE, tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")

EXCERPT = (Path(__file__).parent / "models" / "held_out_excerpt.txt").read_text(encoding="utf-8")
# Bits per byte that a format may cost on the excerpt: measured, and half as much again.
COSTS = {"int8": 0.002, "fp8": 0.008, "int4_g32": 0.03}
PROMPT = [5, 17, 99, 3, 64, 21, 8]


@pytest.fixture(scope="module")
def llama():
    return tiny_llama(tie_word_embeddings=False)


def compiled(model, quantization, **options):
    return pagebinder.compile_model(
        model, CompileConfig(executable="eager", quantization=quantization, max_model_len=64, **options)
    )


def with_values_of_codes(model, name):
    """The model with every weight replaced by what its codes stand for."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for path, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                own = "int4_g32" if path == "lm_head" and FORMATS[name].bits == 4 else name
                layer.weight.copy_(dequantize(*quantize(layer.weight, own), own))
    return model


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_tokens_are_those_of_the_quantised_model(llama, name):
    model = compiled(llama, name)
    nodes = {c.op: c.num_nodes for c in model.report.providers if c.op.startswith("quantized")}
    if build.problem() is None:  # q, k and v are one call, and so are gate, up and the gate
        assert nodes == {"quantized_linears": 2, "quantized_gated_linear": 2, "quantized_linear": 5}
    else:
        assert nodes == {"quantized_linear": 15}
    engine = model.engine(EngineConfig(num_kv_blocks=64, max_num_seqs=2, check_integrity=True))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    outputs = engine.generate([PROMPT, PROMPT[:3]], params)
    expected_model, expected = with_values_of_codes(llama, name), list(PROMPT)
    with torch.inference_mode():
        for _ in range(12):
            expected.append(int(expected_model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert outputs[0].token_ids == expected[len(PROMPT) :] and len(outputs[1].token_ids) == 12


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_it_is_verified_around_the_change(llama, verify):
    report = compiled(llama, "int4_g32", verify=verify).report
    steps = [s for s in report.verified if s.name == "quantize_weights"]
    assert steps and not any(s.judged for s in steps)
    assert any(s.max_rel_error > 100 * s.tolerance for s in steps)
    others = [s for s in report.verified if s.name != "quantize_weights"]
    assert len(others) > 3 and all(s.judged for s in others)
    position = max(i for i, s in enumerate(report.verified) if s.name == "quantize_weights")
    assert report.verified[position + 1].level == "fused"  # what follows is compared with the quantised graph
    if verify == "full":
        (certificate,) = next(p.certificates for p in report.passes if p.name == "quantize_weights")
        assert certificate.count == 15 and not certificate.reason and certificate.max_rel_error < 0.1


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_a_fault_behind_the_change_is_found(llama, verify, monkeypatch):
    break_pass(
        monkeypatch, "fuse_quantized_linear", with_option(ops.quantized_linear.default, 3, format="fp8")
    )
    with pytest.raises(VerificationError) as error:
        compiled(llama, "int8", verify=verify)
    assert verify == "sample" or error.value.pass_name == "fuse_quantized_linear"


def test_the_lock_and_the_report_show_it(llama, tmp_path):
    model = compiled(llama, "int4_g64", lock=tmp_path / "plan.lock")
    text = (tmp_path / "plan.lock").read_text()
    assert 'quantization = "int4_g64"' in text and 'by = "quantize_weights"' in text and '"int4_g32"' in text
    assert compiled(llama, "int4_g64", locked=tmp_path / "plan.lock")
    with pytest.raises(pagebinder.PlanDriftError):
        compiled(llama, "int8", locked=tmp_path / "plan.lock")
    report = model.report
    assert (
        report.graph_weight_bytes < 0.45 * report.weight_bytes
        and "the compiled graph reads" in model.explain()
    )


def test_explained_without_weights(llama):
    config = copy.deepcopy(llama.config)
    plain, small = (explain_model(config, CompileConfig(quantization=q)).report for q in (None, "int4_g64"))
    assert small.graph_weight_bytes < 0.45 * plain.graph_weight_bytes
    assert sum(p.name == "quantize_weights" and len(p.matches) == 15 for p in small.passes) == 1


def test_bits_per_byte_of_unseen_text():
    costs, source = {}, transformers.AutoModelForCausalLM.from_pretrained(tiny_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_path())
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(EXCERPT)["input_ids"]])
    for name in (None, *COSTS):
        model = pagebinder.compile_model(source, CompileConfig(executable="eager", quantization=name))
        logits = model.run_level("fused", ids[:-1])
        costs[name] = F.cross_entropy(logits.float(), ids[1:], reduction="sum").item()
    bits = {name: nats / math.log(2) / len(EXCERPT.encode()) for name, nats in costs.items()}
    lost = {name: bits[name] - bits[None] for name in COSTS}
    assert all(abs(lost[name]) < limit for name, limit in COSTS.items()), lost


def test_bad_options(llama):
    with pytest.raises(ConfigError, match="int4_g64"):
        CompileConfig(quantization="int4")
    assert VOCAB_SIZE % 32 == 0  # so that the LM head of these tests is quantised, too
