"""Serving models that mix kinds of state (full, window, chunk, recurrent): the tokens are the source model's."""

from __future__ import annotations

import functools

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from tests.helpers import (
    VOCAB_SIZE,
    by_day,
    tiny_cohere2,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_lfm2,
    tiny_llama4,
    tiny_mamba2,
    tiny_qwen3_next,
)

pytestmark = pytest.mark.usefixtures("captured_once")

MODELS = {
    "llama4-chunk-16": tiny_llama4,
    "llama4-chunk-24": lambda: tiny_llama4(24),
    "gemma3": tiny_gemma3,
    "gemma2": tiny_gemma2,
    "cohere2": tiny_cohere2,
    "gpt-oss": tiny_gpt_oss,
    "qwen3-next": tiny_qwen3_next,
    "mamba2": tiny_mamba2,
    "lfm2": tiny_lfm2,
}
# The others take the same paths, and their levels are compared in test_mixed_layer_levels.py.
BY_DAY = ("llama4-chunk-24", "gemma2", "qwen3-next", "mamba2", "lfm2")
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
# How far below the best logit a chosen one may be: rounding decides between two that are as close as this.
TIE = 1e-4


@functools.cache
def compiled_pair(name: str):
    model = MODELS[name]()
    return model, pagebinder.compile_model(model, CompileConfig(executable="eager"))


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(
        VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed * 1000 + num_tokens)
    ).tolist()


def assert_greedy(model, prompt_ids: list[int], continuation: list[int]) -> None:
    """Every token has the source's largest logit, given all tokens before it; one run of the whole sequence."""
    ids = torch.tensor([prompt_ids + continuation])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() <= TIE


@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_a_mixed_batch_in_small_steps(name):
    """Prompts around and beyond chunks and windows, prefilled 24 tokens a step beside decodes."""
    model, compiled = compiled_pair(name)
    engine = compiled.engine(EngineConfig(num_kv_blocks=200, max_num_seqs=3, max_num_batched_tokens=24))
    prompts = [prompt(n) for n in (5, 16, 37, 70, 19)]
    for ids, output in zip(prompts, engine.generate(prompts, GREEDY)):
        assert len(output.token_ids) == GREEDY.max_tokens
        assert_greedy(model, ids, list(output.token_ids))


@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_a_cached_prefix_changes_nothing(name):
    model, compiled = compiled_pair(name)
    engine = compiled.engine(EngineConfig(num_kv_blocks=200, max_num_seqs=2, max_num_batched_tokens=64))
    shared = prompt(140)
    engine.generate([shared], GREEDY)
    prompts = [shared + prompt(9, seed=1), shared[:133] + prompt(30, seed=2), shared]
    outputs = engine.generate(prompts, GREEDY)
    assert any(output.num_cached_tokens for output in outputs)
    for ids, output in zip(prompts, outputs):
        assert_greedy(model, ids, list(output.token_ids))


@pytest.mark.parametrize(
    "name", by_day(["llama4-chunk-24", "gemma3", "qwen3-next", "mamba2"], ["llama4-chunk-24", "mamba2"])
)
def test_a_cache_that_is_too_small_for_all_preempts_and_changes_nothing(name):
    model, compiled = compiled_pair(name)
    roomy = compiled.engine(EngineConfig(num_kv_blocks=200, max_num_seqs=4, max_num_batched_tokens=64))
    prompts = [prompt(n, seed=3) for n in (60, 61, 62, 63)]
    expected = [o.token_ids for o in roomy.generate(prompts, GREEDY)]
    for num_blocks in (40, 24, 16):
        config = EngineConfig(num_kv_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=64)
        engine = compiled.engine(config)
        assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == expected
    for ids, continuation in zip(prompts, expected):
        assert_greedy(model, ids, list(continuation))


@pytest.mark.parametrize("retention", ["dense", "sparse"])
@pytest.mark.parametrize(
    "name",
    by_day(["llama4-chunk-24", "gemma3", "qwen3-next", "mamba2", "lfm2"], ["llama4-chunk-24", "qwen3-next"]),
)
def test_swapping_forks_and_sparse_retention_change_nothing(name, retention):
    """Preempted requests come back from host memory, samples share their prompt, few checkpoints are kept."""
    model, compiled = compiled_pair(name)
    needed = compiled.kv_spec.min_blocks(130, 64)
    config = EngineConfig(
        num_kv_blocks=needed + needed // 2,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        swap_bytes=1 << 26,
        swap_policy="always",
        prefix_retention=retention,
        check_integrity=True,
    )
    engine = compiled.engine(config)
    params = SamplingParams(max_tokens=40, temperature=0.0, n=2)
    prompts = [prompt(n, seed=5) for n in (60, 81, 62, 33)]
    outputs = engine.generate(prompts, params)
    for i, ids in enumerate(prompts):
        for output in outputs[2 * i : 2 * i + 2]:
            assert len(output.token_ids) == 40
            assert_greedy(model, ids, list(output.token_ids))
    stats = engine.stats()
    assert stats.preemptions and stats.swaps_out
    again = engine.generate(prompts, GREEDY)
    for ids, output in zip(prompts, again):
        assert_greedy(model, ids, list(output.token_ids))
