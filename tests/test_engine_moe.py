"""Serving mixtures of experts: the tokens are the source model's, whoever shares the batch."""

from __future__ import annotations

import functools

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from tests import moe_models
from tests.helpers import by_day
from tests.test_engine_mixed_layers import assert_greedy, prompt

pytestmark = pytest.mark.usefixtures("captured_once")

MODELS = {
    "mixtral": (moe_models.tiny_mixtral, {"moe_experts": 2}),
    "qwen3-moe": (moe_models.tiny_qwen3_moe, {"moe_experts": 1}),
    "gpt-oss": (moe_models.tiny_gpt_oss_moe, {"moe_experts": 2}),
    "glm4-moe": (moe_models.tiny_glm4_moe, {"moe_experts": 1}),
    "deepseek-v3": (moe_models.tiny_deepseek_v3, {"moe_experts": 1}),
    "jetmoe": (moe_models.tiny_jetmoe, {"expert_linear": 8}),
    "llama4": (moe_models.tiny_llama4_moe, {"expert_linear": 4}),
    "longcat-flash": (moe_models.tiny_longcat_flash, {"expert_linear": 2}),
}
BY_DAY = ("mixtral", "gpt-oss", "llama4")  # DeepSeek-V3: test_engine_mla.py
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@functools.cache
def compiled_pair(name: str):
    model = MODELS[name][0]()
    return model, pagebinder.compile_model(model, CompileConfig(executable="eager"))


@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_mixed_batches_and_a_cached_prefix(name):
    """Chunked prefills beside decodes, then a prompt that begins as one served before."""
    model, compiled = compiled_pair(name)
    engine = compiled.engine(EngineConfig(num_kv_blocks=200, max_num_seqs=3, max_num_batched_tokens=24))
    prompts = [prompt(n) for n in (1, 37, 16, 60)]
    outputs = engine.generate(prompts, GREEDY)
    prompts.append(prompts[-1][:48] + prompt(7, seed=1))
    outputs += engine.generate(prompts[-1:], GREEDY)
    assert outputs[-1].num_cached_tokens
    for ids, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == GREEDY.max_tokens
        assert_greedy(model, ids, list(output.token_ids))


@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_each_mixture_is_one_match_of_the_report(name):
    _, compiled = compiled_pair(name)
    matches = [m for m in compiled.report.matches if m.pattern == "moe_experts" or "expert" in m.detail]
    names = [m.detail if m.detail == "expert_linear" else m.pattern for m in matches]
    assert {op: names.count(op) for op in set(names)} == MODELS[name][1]
    assert "expert" in compiled.explain()


def test_a_model_in_bfloat16_keeps_its_rounding():
    model = moe_models.tiny_mixtral().to(torch.bfloat16)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    ids = torch.tensor(prompt(40))
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
    assert expected.std() > 0.3
    for level in ("captured", "fused"):
        torch.testing.assert_close(compiled.run_level(level, ids), expected, rtol=0.05, atol=0.05)
