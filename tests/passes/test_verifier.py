"""CompileConfig(verify=...): sound compilations pass with small errors, broken ones are refused by name."""

from __future__ import annotations

import functools

import pytest
import torch

import pagebinder
import pagebinder.compile as compiler
from pagebinder import CompileConfig, ConfigError, VerificationError
from pagebinder.compile import explain_model
from pagebinder.compiler.verify import rescale
from pagebinder.compiler.verify_runs import lengths_to_test
from pagebinder.passes.verifier import difference
from tests.broken_passes import (
    break_pass,
    capped_kernel,
    ops,
    reversed_requests,
    swapped_tables,
    with_argument,
    with_option,
)
from tests.captures import capture_once
from tests.helpers import tiny_gpt_oss, tiny_mistral

pytestmark = pytest.mark.usefixtures("captured_once")

WINDOW = 16
PASSES = [
    ("semantic", "recognise_rms_norm"),
    ("semantic", "recognise_rope"),
    ("paged", "page_attention"),
    ("paged", "gather_logits"),
    ("fused", "fuse_add_rms_norm"),
]


@functools.cache
def mistral():
    return tiny_mistral(WINDOW)


@functools.cache
def gpt_oss():
    layers = ["sliding_attention", "full_attention"]
    return tiny_gpt_oss(WINDOW, num_hidden_layers=2, layer_types=layers)


def compiled(model, verify="full", **options):
    config = CompileConfig(executable="eager", verify=verify, block_size=8, **options)
    return pagebinder.compile_model(model, config)


@functools.cache
def verified():
    model = mistral()
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = compiled(model)
    assert model.training and all(m.training for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.eval()
    return result


def test_every_pass_is_run_before_and_after_with_both_weights():
    steps, passes = verified().report.verified, verified().report.passes
    ran = [
        ("captured", "capture"),
        *((p.level, p.name) for p in passes if p.level),
        ("fused", "select_providers"),
    ]
    assert set(PASSES) < set(ran)
    assert [(s.level, s.name) for s in steps if s.weights == "model"] == ran
    assert [(s.level, s.name) for s in steps if s.weights == "rescaled"] == ran
    assert {s.dtype for s in steps} == {"float32"} and {s.chain for s in steps} == {"decoder"}
    assert all(s.max_rel_error <= s.tolerance / 10 and s.judged for s in steps)
    assert any(s.max_rel_error > 0 for s in steps)


def test_errors_and_certificates_are_in_the_passes_results():
    by_name = {(p.level, p.name): p for p in verified().report.passes}
    for key in PASSES:
        assert 0 <= by_name[key].max_abs_error < 1e-4 and 0 <= by_name[key].max_rel_error < 1e-4
    norms = by_name["semantic", "recognise_rms_norm"]
    assert [c.count for c in norms.certificates] == [5] and not norms.certificates[0].reason
    paged = by_name["paged", "page_attention"].certificates
    assert [c.count for c in paged] == [2] and "caches" in paged[0].reason
    data = verified().report.to_dict()
    assert data["verified"][0]["name"] == "capture" and data["passes"][-1]["certificates"] is not None


def test_explain_prints_errors_and_certificates():
    text = verified().explain()
    section = text[text.index("Verification") :]
    line = next(line for line in section.splitlines() if "recognise_rms_norm" in line)
    assert "5/5" in line and "0.0e+00" in line
    assert "page_attention: not tested alone" in section
    assert "Verification" not in compiled(mistral(), "off").explain()


def test_the_verified_graphs_are_the_users():
    result, ids = verified(), torch.arange(20)
    with torch.no_grad():
        expected = mistral()(ids[None]).logits[0]
    torch.testing.assert_close(result.run_level("fused", ids), expected, atol=1e-4, rtol=1e-4)


BROKEN = {
    "eps": (
        "recognise_rms_norm", with_option(ops.rms_norm.default, 2, eps=1e-5), "semantic", "layers.1.input_layernorm",
    ),
    "rope": ("recognise_rope", swapped_tables, "semantic", "layers.1.self_attn"),
    "scale": (
        "page_attention", with_option(ops.paged_attention.default, 1, scale=0.2), "paged", "layers.1.self_attn"
    ),
    "window off by one": (
        "page_attention", with_option(ops.paged_attention.default, 1, window=WINDOW + 1), "paged",
        "layers.1.self_attn",
    ),
    "packing": ("page_attention", reversed_requests, "paged", "layers.1.self_attn"),
    "wrong provider": (
        "select_providers", capped_kernel, "fused", ""
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_pass_is_named(what, monkeypatch):
    name, change, level, place = BROKEN[what]
    break_pass(monkeypatch, name, change)
    with pytest.raises(VerificationError) as caught:
        compiled(mistral())
    error = caught.value
    assert (error.pass_name, error.level) == (name, level)
    assert not place or any(place in p for p in error.places)
    assert name in str(error) and "tolerated" in str(error) and "tokens" in error.sequence
    if what == "window off by one":
        assert int(error.sequence.split()[0]) > WINDOW
    if what == "packing":
        assert "packed" in error.sequence


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_dropped_sink_is_found(dtype, monkeypatch):
    break_pass(monkeypatch, "page_attention", with_argument(ops.paged_attention.default, 1, 5, None))
    with pytest.raises(VerificationError, match="page_attention") as caught:
        compiled(gpt_oss(), dtype=dtype)
    assert caught.value.level == "paged"


def test_what_the_hook_loses_is_found(monkeypatch):
    """A window that is wrong from the capture on: every later level agrees with it, the source model does not."""

    def narrow(source, report):
        captured, encoder = capture_once(source, report)
        with_option(ops.attention.default, 1, window=WINDOW - 1)(captured)
        return captured, encoder

    monkeypatch.setattr(compiler, "_capture", narrow)
    with pytest.raises(VerificationError) as caught:
        compiled(mistral(), "sample")
    assert (caught.value.pass_name, caught.value.level) == ("captured level", "captured")


def test_sample_runs_each_level_once(monkeypatch):
    steps = compiled(mistral(), "sample").report.verified
    assert [s.level for s in steps] == ["captured", "semantic", "paged", "fused"]
    assert {s.weights for s in steps} == {"model"} and steps[0].num_sequences <= 4
    break_pass(monkeypatch, "page_attention", with_option(ops.paged_attention.default, 1, window=WINDOW + 1))
    with pytest.raises(VerificationError, match="paged level"):
        compiled(mistral(), "sample")


def test_lengths_are_at_the_edges():
    result = verified()
    lengths = lengths_to_test(result.kv_spec, result.states, result.source, full=True)
    assert {1, 2, 7, 8, 9, WINDOW - 1, WINDOW, WINDOW + 1} <= set(lengths) and lengths[-1] > 3 * WINDOW


def test_a_model_without_weights_is_refused():
    with pytest.raises(ConfigError, match="meta device"):
        explain_model(mistral().config, CompileConfig(verify="sample"))


def test_difference():
    a = torch.tensor([0.0, 1.0, torch.nan, torch.inf])
    assert difference(a, a).absolute == 0
    assert difference(torch.tensor([0.0, 1.5, torch.nan, torch.inf]), a).absolute == 0.5
    assert difference(a, torch.tensor([0.0, 1.0, 2.0, 3.0])).relative == float("inf")
    assert difference(a, a[:2], "here").relative == float("inf")
    assert difference(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])).relative == 2


def test_random_vectors_keep_the_size_that_a_model_counts_in():
    """Dory keeps parameters in units of 0.0177; 56 times as large, rounding alone would show."""
    module = torch.nn.Module()
    module.small, module.ones = (torch.nn.Parameter(torch.full((64,), size)) for size in (0.0177, 1.0))
    module.zeros, module.matrix = (
        torch.nn.Parameter(torch.zeros(64)),
        torch.nn.Parameter(torch.zeros(64, 256)),
    )
    rescale(module)
    means = [float(p.mean()) for p in (module.small, module.ones, module.zeros)]
    assert means == pytest.approx([0.0177, 1.0, 1.0], rel=0.05) and len(set(module.small.tolist())) == 64
    assert float(module.matrix.std()) == pytest.approx(1 / 16, rel=0.05)
