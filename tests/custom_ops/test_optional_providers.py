"""Adapters of attention libraries: their metadata, their reasons, and torch's flex_attention for real."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.custom_ops import providers
from pagebinder.custom_ops.attention.paged import PAGED_ATTENTION
from pagebinder.custom_ops.mla.paged_mla import PAGED_MLA_ATTENTION
from pagebinder.custom_ops.optional.flashinfer import page_lists
from pagebinder.custom_ops.providers import OpNeed, registered_providers, select_provider
from pagebinder.errors import ProviderError
from tests.custom_ops import attention_stand_ins
from tests.custom_ops.paged_cases import Case, make_inputs
from tests.helpers import tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")

DOCS = Path(__file__).parents[2] / "docs" / "providers.md"
MIXED = ((0, 5), (20, 1), (30, 0), (10, 17))
CASES = {
    "mixed": Case(MIXED),
    "padding, sinks, strided": Case(MIXED, padding=3, sinks="finite", strided=True),
    "some sinks": Case(MIXED, sinks="some -inf"),
    "window and soft cap": Case(MIXED, options={"window": 4, "soft_cap": 5.0}),
    "bf16": Case(MIXED, dtype=torch.bfloat16),
}
MORE = {
    "alibi": Case(MIXED, alibi=True),
    "chunk": Case(MIXED, options={"chunk": 8}),
    "bidirectional": Case(MIXED, options={"causal": False}),
    "bidirectional window": Case(MIXED, options={"causal": False, "window": 3}),
}
ALL = {
    "flex_attention": CASES | MORE,
    "flash_attn": CASES | {name: MORE[name] for name in ("alibi", "bidirectional", "bidirectional window")},
    "flashinfer": CASES,
}


@pytest.fixture
def stand_ins(monkeypatch):
    for name in ("flash_attn", "flashinfer", "flash_mla"):
        monkeypatch.setitem(sys.modules, name, getattr(attention_stand_ins, name))


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in ALL.items() for case in cases])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_an_adapter_gives_what_the_reference_gives(name, case, stand_ins):
    case = ALL[name][case]
    inputs = make_inputs(case)
    expected = PAGED_ATTENTION.reference(*inputs.operands, **inputs.options)
    got = registered_providers()[name].paged_attention(*inputs.operands, **inputs.options)
    tolerance = 1e-5 if case.dtype == torch.float32 else 2e-2
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_flashinfer_plans_once_for_layers_that_are_alike(stand_ins, monkeypatch):
    plans = []
    plan = attention_stand_ins.BatchPrefillWithPagedKVCacheWrapper.plan
    monkeypatch.setattr(
        attention_stand_ins.BatchPrefillWithPagedKVCacheWrapper,
        "plan",
        lambda *args, **options: (plans.append(options["window_left"]), plan(*args, **options)),
    )
    inputs = make_inputs(Case(MIXED, options={"soft_cap": 3.5}))  # of no other test
    q, cache, table, seq_lens, *rest = inputs.operands

    def layer(**options):
        operands = (q, torch.randn_like(cache), table, seq_lens, *rest)
        expected = PAGED_ATTENTION.reference(*operands, **inputs.options, **options)
        got = registered_providers()["flashinfer"].paged_attention(*operands, **inputs.options, **options)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    for _ in range(3):
        layer()
        layer(window=4)
    assert plans == [-1, 3]
    seq_lens[0] += 1  # the next step, written in place
    layer()
    layer(window=4)
    layer()
    assert plans == [-1, 3, -1, 3]


@pytest.mark.parametrize("lengths", [MIXED, ((7, 1), (70, 1)), ((0, 0), (3, 1), (4, 2))], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_flashmla_gives_what_the_reference_gives(lengths, padding, stand_ins):
    torch.manual_seed(0)
    num_tokens, num_heads = sum(new for _, new in lengths) + padding, 2
    q_nope, q_rope = torch.randn(num_tokens, num_heads, 16), torch.randn(num_tokens, num_heads, 64)
    w_k, w_v = torch.randn(num_heads, 16, 512) / 16, torch.randn(num_heads, 8, 512) / 16
    cache = torch.randn(12, 64, 576)
    lens = torch.tensor([context + new for context, new in lengths], dtype=torch.int32)
    starts = torch.tensor([0, *(new for _, new in lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.randperm(12)[: 2 * len(lengths)].view(-1, 2).int()
    operands = (q_nope, q_rope, w_k, w_v, cache, table, lens, starts)
    expected = PAGED_MLA_ATTENTION.reference(*operands, scale=0.05)
    got = registered_providers()["flashmla"].paged_mla_attention(*operands, scale=0.05)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for unserved in ({"window": 4}, {"sinks": torch.zeros(num_heads)}):
        with pytest.raises(ValueError, match=r"latents of 512 \+ 64 in blocks of 64 tokens"):
            registered_providers()["flashmla"].paged_mla_attention(*operands, scale=0.05, **unserved)


def test_lists_of_pages():
    table = torch.tensor([[2, 5, 0], [4, 0, 0], [9, 9, 9], [1, 3, 0]])
    indptr, indices, last = page_lists(table, torch.tensor([20, 9, 0, 32]), 16)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == (
        [0, 2, 3, 3, 5],
        [2, 5, 4, 1, 3],
        [4, 9, 0, 16],
    )


NEED = {"op": "paged_attention", "device": "cuda", "dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128}
REFUSALS = [
    ("flash_attn", {"block_size": 64}, "pages are multiples of 256"),
    ("flash_attn", {"dtype": "float32"}, "dtype float32"),
    ("flash_attn", {"features": frozenset({"chunk"})}, "cannot do chunk"),
    ("flash_attn", {"head_dim": 512, "head_dim_v": 512}, "at most 256"),
    ("flashinfer", {"head_dim_v": 64}, "must be as wide"),
    ("flashinfer", {"features": frozenset({"alibi"})}, "cannot do alibi"),
    ("flashinfer", {"kv_dtype": "float8_e4m3fn"}, "must have q's dtype"),
    ("flex_attention", {"op": "rope"}, "no kernel for rope"),
    ("flashmla", {"op": "paged_mla_attention", "dtype": "float16"}, "not bfloat16"),
    ("flashmla", {"op": "paged_mla_attention", "features": frozenset({"indices"})}, "cannot do indices"),
    ("flashmla", {"op": "paged_mla_attention", "features": frozenset({"sinks"})}, "cannot do sinks"),
    ("flashmla", {"op": "paged_mla_attention", "features": frozenset({"groups"})}, "cannot do groups"),
]


@pytest.mark.parametrize(("name", "change", "reason"), REFUSALS)
def test_what_a_library_cannot_do_is_refused_with_the_reason(name, change, reason):
    reasons = registered_providers()[name].reasons_against(OpNeed(**{**NEED, **change}))
    assert any(reason in one for one in reasons), reasons


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_a_library_that_is_not_there_is_named(name, monkeypatch):
    provider = registered_providers()[name]
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(ProviderError, match=rf"{name} is not installed \(pip install flash"):
        select_provider(OpNeed(**NEED), name)
    assert f"{name} is not installed" in str(provider.problem())
    rejected = select_provider(OpNeed(**NEED), prepare=False).rejected
    assert name in rejected and next(iter(rejected)) == "triton"


def test_an_older_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    inputs = make_inputs(CASES["mixed"])
    with pytest.raises(ProviderError, match="flash_attn has no flash_attn_varlen_func; install a later one"):
        registered_providers()["flash_attn"].paged_attention(*inputs.operands, **inputs.options)


def tokens(model, **options):
    engine = model.engine(
        EngineConfig(num_kv_blocks=30, max_num_seqs=3, max_num_batched_tokens=32, **options)
    )
    prompts = [[5, 9, 2], list(range(1, 41)), [7]]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0))
    return [output.token_ids for output in outputs], engine.stats()


@pytest.fixture(scope="module")
def model():
    return pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager", block_size=16))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_serves_a_model_in_captured_pieces(model):
    config = CompileConfig(executable="eager", block_size=16, providers={"paged_attention": "flex_attention"})
    flexible = pagebinder.compile_model(tiny_llama(), config)
    choice = next(c for c in flexible.report.providers if c.op == "paged_attention")
    assert (choice.provider, choice.why) == ("flex_attention", "flex_attention was requested")
    found, stats = tokens(flexible, capture="on")
    assert found == tokens(model)[0]
    assert stats.graph_replays and not stats.uncaptured_steps
    assert "cut at 2 places" in flexible.explain()


def test_the_example_of_a_provider_of_ones_own(model, monkeypatch):
    """What docs/providers.md shows, run as it stands."""
    monkeypatch.setattr(providers, "_providers", dict(registered_providers()))
    example = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[1]
    names: dict = {}
    exec(compile(example, str(DOCS), "exec"), names)
    config = CompileConfig(executable="eager", block_size=16, providers={"paged_attention": "mine"})
    own = pagebinder.compile_model(tiny_llama(), config)
    assert tokens(own)[0] == tokens(model)[0]
    assert "pagebinder_mine.paged_attention" in own.graphs["fused"].code
    with pytest.raises(ProviderError, match="mine: it does without soft caps"):
        select_provider(OpNeed(op="paged_attention", features=frozenset({"soft_cap"})), "mine")
