"""Weights and activations in fp8 from end to end: tokens, counts, verification, plan lock, artefacts, refusals."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from safetensors.torch import save_file

import pagebinder
from pagebinder import CompileConfig, ConfigError, EngineConfig, SamplingParams, VerificationError
from pagebinder.compile import explain_model
from pagebinder.compiler import pipeline
from pagebinder.config import ACTIVATION_QUANTIZATIONS
from pagebinder.custom_ops.fp8.quant import dequantise, scaled_fp8_quant_reference
from pagebinder.custom_ops.linear.weight_numbers import dequantize, quantize
from pagebinder.graph_tools import aten, calls, clone
from pagebinder.passes.fuse_attention_fp8_quant import fuse_attention_fp8_quant
from pagebinder.passes.fuse_quantized_linear import fuse_quantized_linear
from pagebinder.passes.manager import run_passes
from pagebinder.passes.quantize_activations import quantize_activations
from pagebinder.passes.quantize_weights import quantize_weights
from tests.broken_passes import break_pass, ops, with_option
from tests.helpers import tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")

PROMPT = [5, 17, 99, 3, 64, 21, 8]
FUSIONS = {"fuse_rms_norm_fp8_quant": 4, "fuse_gated_activation_fp8_quant": 2, "fuse_attention_fp8_quant": 2}


@functools.cache
def llama():
    return tiny_llama(tie_word_embeddings=False, hidden_size=160, intermediate_size=320, head_dim=32)


def compiled(model, activations, weights="fp8", **options):
    options = {"executable": "eager", "max_model_len": 64, **options}
    return pagebinder.compile_model(
        model, CompileConfig(quantization=weights, activation_quantization=activations, **options)
    )


def matches(model) -> dict[str, int]:
    return {p.name: len(p.matches) for p in model.report.passes if p.name in FUSIONS}


def simulated(model, weights: str, granularity: str):
    """The source model, with weights that are replaced by what their codes stand for, and inputs, too."""
    model = copy.deepcopy(model)

    def through_codes(layer, inputs):
        return dequantise(*scaled_fp8_quant_reference(inputs[0][0], granularity=granularity))[None]

    with torch.no_grad():
        for path, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(dequantize(*quantize(layer.weight, weights), weights))
                if path != "lm_head":
                    layer.register_forward_pre_hook(through_codes)
    return model


def mean_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().mean() / expected.std())


@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        *(("fp8", a) for a in ACTIVATION_QUANTIZATIONS),
        ("fp8_tensor", "fp8_per_token"),
        ("fp8_block", "fp8_per_group"),
    ],
)
def test_logits_are_those_of_the_quantised_model(weights, activations):
    """Codes that rounding puts next to each other differ in few tokens; another scale would be seen in all."""
    model = compiled(llama(), activations, weights)
    assert matches(model) == FUSIONS
    chosen = {c.op: (c.provider, c.num_nodes) for c in model.report.providers}
    counts = {"fp8_linear": 14, "add_rms_norm_fp8_quant": 3, "rms_norm_fp8_quant": 1, "quantized_linear": 1}
    counts |= {"gated_activation_fp8_quant": 2, "paged_attention_fp8_quant": 2}
    assert (
        counts.items() <= {op: n for op, (_, n) in chosen.items()}.items()
        and "scaled_fp8_quant" not in chosen
    )
    ids = torch.tensor(PROMPT * 4)
    with torch.inference_mode():
        wanted = simulated(llama(), weights, activations.removeprefix("fp8_per_"))(ids[None]).logits[0]
        plain = llama()(ids[None]).logits[0]
    found = model.run_level("fused", ids)
    assert mean_difference(found, wanted) < 0.02 < 0.05 < mean_difference(found, plain)


@pytest.mark.parametrize(
    ("activations", "executable"), [("fp8_per_token", "inductor"), ("fp8_per_group", "eager")]
)
def test_a_request_does_not_depend_on_its_company(activations, executable):
    model = compiled(llama(), activations, executable=executable)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    options = EngineConfig(num_kv_blocks=64, max_num_seqs=3, check_integrity=True, prefix_caching=False)
    prompts = [PROMPT, PROMPT[:3], PROMPT[::-1]]
    together = [o.token_ids for o in model.engine(options).generate(prompts, params)]
    alone = [model.engine(options).generate([p], params)[0].token_ids for p in prompts]
    assert together == alone and all(len(tokens) == 12 for tokens in together)


@pytest.mark.parametrize(
    ("activations", "kv_dtype"),
    [("fp8_per_token", "fp8_e4m3"), ("fp8_per_tensor", "auto")],
)
def test_fusions_change_no_bit(activations, kv_dtype, monkeypatch):
    """With norms and gates of torch on both sides, as those of the kernels sum in another order."""
    ops = (
        "rms_norm_fp8_quant",
        "add_rms_norm_fp8_quant",
        "gated_activation_fp8_quant",
        "rms_norm",
        "add_rms_norm",
    )
    references = dict.fromkeys(ops, "reference")
    fused = compiled(llama(), activations, providers=references, kv_dtype=kv_dtype)
    monkeypatch.setattr("pagebinder.compiler.pipeline.FP8_QUANT_FUSIONS", ())
    separate = compiled(llama(), activations, providers=references, kv_dtype=kv_dtype)
    assert matches(fused) == FUSIONS and not matches(separate)
    ids = torch.tensor(PROMPT)
    assert torch.equal(fused.run_level("fused", ids), separate.run_level("fused", ids))


@pytest.mark.parametrize(("activations", "verify"), [("fp8_per_token", "full"), ("fp8_per_tensor", "sample")])
def test_it_is_verified_around_the_change(activations, verify):
    report = compiled(llama(), activations, verify=verify).report
    steps = [s for s in report.verified if s.name == "quantize_activations"]
    assert steps and all(s.max_rel_error > 0.05 and not s.judged for s in steps)
    position = max(i for i, s in enumerate(report.verified) if s.name == "quantize_activations")
    behind = report.verified[position + 1 :]
    assert behind and all(s.judged and s.max_rel_error < 0.6 * steps[-1].max_rel_error for s in behind)
    if verify == "full":
        certificates = {
            p.name: p.certificates for p in report.passes if p.name in {*FUSIONS, "quantize_activations"}
        }
        (certificate,) = certificates["quantize_activations"]
        assert certificate.count == 14 and 0 < certificate.max_rel_error < 0.05
        for name in ("fuse_rms_norm_fp8_quant", "fuse_gated_activation_fp8_quant"):
            assert sum(c.count for c in certificates[name]) == FUSIONS[name]
            assert all(c.max_abs_error == 0 and not c.reason for c in certificates[name])


FAULTS = {
    "fuse_rms_norm_fp8_quant": with_option(ops.add_rms_norm_fp8_quant.default, 1, eps=1e-3),
    "fuse_attention_fp8_quant": with_option(ops.paged_attention_fp8_quant.default, 1, scale=5.0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_fusion_is_found(name, monkeypatch):
    break_pass(monkeypatch, name, FAULTS[name])
    monkeypatch.setattr(
        "pagebinder.compiler.pipeline.FP8_QUANT_FUSIONS", tuple(getattr(pipeline, n) for n in FUSIONS)
    )
    with pytest.raises(VerificationError) as error:
        compiled(llama(), "fp8_per_token", verify="full")
    assert error.value.pass_name == name


@pytest.mark.parametrize("change", ["read twice", "gated"])
def test_an_output_that_is_not_only_quantised_is_refused(change):
    gm = clone(compiled(llama(), None).graphs["paged"], "changed")
    output = next(calls(gm.graph, ops.paged_attention.default))
    with gm.graph.inserting_after(output):
        other = gm.graph.call_function(aten.sigmoid.default, (output,))
    other.meta["val"] = output.meta["val"]
    if change == "gated":
        output.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    else:
        next(n for n in gm.graph.nodes if n.op == "output").prepend(other)
        last = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        last.args = ((last.args[0], other),)
    run_passes(gm, (functools.partial(quantize_weights, format="fp8"), fuse_quantized_linear,
                    functools.partial(quantize_activations, granularity="token")))  # fmt: skip
    result = fuse_attention_fp8_quant(gm)
    assert len(result.matches) == 1
    reason = {"read twice": "read more than once", "gated": f"not quantised: {other.name} reads it"}[change]
    assert len(result.refusals) == 1 and reason in result.refusals[0].reason


def static_scales(model, amax: float) -> dict[str, torch.Tensor]:
    layers = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    return {f"{layer}.input_scale": torch.tensor(amax / 448) for layer in layers}


def test_static_scales_come_from_a_file(tmp_path):
    path, config = (
        tmp_path / "scales.safetensors",
        {"activations": "fp8_per_tensor", "activation_scales": None},
    )
    save_file(static_scales(llama(), 8.0), path)
    config["activation_scales"] = path
    model, ids = compiled(llama(), **config, verify="sample"), torch.tensor(PROMPT * 4)
    assert matches(model) == FUSIONS
    assert not any(p.mixes_tokens for p in model.report.passes)  # packed sequences are compared, too
    exact = compiled(llama(), None).run_level("fused", ids)
    assert mean_difference(model.run_level("fused", ids), exact) < 0.1
    save_file(static_scales(llama(), 1.0), path)
    assert mean_difference(compiled(llama(), **config).run_level("fused", ids), exact) > 0.3  # it saturates
    save_file({"lm_head.input_scale": torch.ones(())}, path)
    with pytest.raises(ConfigError, match="activation_scales lack"):
        compiled(llama(), **config)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be read"):
        compiled(llama(), **config)


def test_the_lock_and_an_artefact_keep_it(tmp_path):
    model = compiled(llama(), "fp8_per_token", lock=tmp_path / "plan.lock")
    text = (tmp_path / "plan.lock").read_text()
    assert 'activation_quantization = "fp8_per_token"' in text and 'by = "fuse_rms_norm_fp8_quant"' in text
    with pytest.raises(pagebinder.PlanDriftError):
        compiled(llama(), "fp8_per_group", locked=tmp_path / "plan.lock")
    model.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    ids = torch.tensor(PROMPT)
    assert torch.equal(loaded.run_level("fused", ids), model.run_level("fused", ids))


def test_explained_without_weights():
    config = CompileConfig(quantization="fp8", activation_quantization="fp8_per_token")
    model = explain_model(copy.deepcopy(llama().config), config)
    assert matches(model) == FUSIONS
    assert "fp8_linear" in model.explain() and "fuse_attention_fp8_quant" in model.explain()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quantization": "fp8", "activation_quantization": "fp8"}, "fp8_per_token"),
        ({"activation_quantization": "fp8_per_token"}, "needs weights in fp8"),
        ({"quantization": "int8", "activation_quantization": "fp8_per_token"}, "needs weights in fp8"),
        ({"quantization": "fp8", "activation_scales": "x"}, "activation_scales"),
        (
            {"quantization": "fp8", "activation_quantization": "fp8_per_group", "activation_scales": "x"},
            "fp8_per_tensor",
        ),
    ],
)
def test_bad_options(options, problem):
    with pytest.raises(ConfigError, match=problem):
        CompileConfig(**options)
