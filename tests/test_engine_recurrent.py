"""Serving families with recurrent layers of every kind: the tokens are the source model's.

One engine a family goes through what can go wrong with its states: prompts cut into steps beside decodes, a prefix
resumed from a checkpoint, and requests preempted for want of blocks. More families: tests/zoo.
"""

from __future__ import annotations

import functools

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from tests import recurrent_models
from tests.helpers import VOCAB_SIZE, by_day

pytestmark = pytest.mark.usefixtures("captured_once")

SHORT_CONV_AND_STATE = ["short_conv", "recurrent"]
KINDS = {
    "bamba": [*SHORT_CONV_AND_STATE, "full_attention", *SHORT_CONV_AND_STATE],
    "falcon_h1": [*SHORT_CONV_AND_STATE, "full_attention"] * 2,
    "nemotron_h": [*SHORT_CONV_AND_STATE, "full_attention", *SHORT_CONV_AND_STATE],
    "jamba": [*SHORT_CONV_AND_STATE, "full_attention", *SHORT_CONV_AND_STATE],
    "zamba2": [*SHORT_CONV_AND_STATE, "full_attention", *SHORT_CONV_AND_STATE] * 2,
    "recurrent_gemma": [*SHORT_CONV_AND_STATE * 2, "sliding_window"],
    "mamba": SHORT_CONV_AND_STATE * 2,
    "rwkv": ["short_conv", "recurrent", "short_conv"] * 3,
    "xlstm": ["recurrent"] * 2,
    "minimax": ["recurrent", "full_attention"],
}
BY_DAY = ("recurrent_gemma", "mamba", "rwkv", "minimax")
# Checkpoints every 64 tokens, so that short prompts reach them.
SHORT = {"contexts": ((64, 1.0),), "concurrency": 4, "chunk_tokens": 24, "tokens_in_flight": 8.0}
# For two requests at once, where the blocks of one are not enough to begin a second.
MORE_BLOCKS = {"recurrent_gemma": 5}
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
# How far below the best logit a chosen one may be: rounding decides between two that are as close as this.
TIE = 1e-4


@functools.cache
def compiled_pair(name: str):
    model = getattr(recurrent_models, name)()
    config = CompileConfig(executable="eager", max_model_len=128, workload=SHORT)
    return model, pagebinder.compile_model(model, config)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + num_tokens)
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def assert_greedy(model, prompt_ids: list[int], output) -> None:
    """Every token has the source's largest logit, given all tokens before it; one run of the whole sequence."""
    continuation = list(output.token_ids)
    assert len(continuation) == GREEDY.max_tokens
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + continuation]), use_cache=False).logits[0]
    logits = logits[len(prompt_ids) - 1 : -1]
    assert logits.std() > 0.3, "weights too small to show errors"
    chosen = logits.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() <= TIE


@pytest.mark.parametrize("name", by_day(KINDS, BY_DAY))
def test_served_in_steps_and_from_a_prefix(name):
    model, compiled = compiled_pair(name)
    assert [state.kind for state in compiled.states] == KINDS[name]
    engine = compiled.engine(EngineConfig(num_kv_blocks=200, max_num_seqs=3, max_num_batched_tokens=24))
    shared = prompt(75)
    prompts = [prompt(5), shared, prompt(37), prompt(1), shared[:70] + prompt(9, seed=1), shared]
    outputs = engine.generate(prompts, GREEDY)
    assert any(output.num_cached_tokens for output in outputs)
    for ids, output in zip(prompts, outputs):
        assert_greedy(model, ids, output)


@pytest.mark.parametrize("name", by_day(KINDS, BY_DAY))
def test_preempted_for_want_of_blocks(name):
    model, compiled = compiled_pair(name)
    prompts = [prompt(n, seed=3) for n in (58, 59, 60)]  # each begins a block while it decodes
    num_blocks = compiled.kv_spec.min_blocks(70, 32) + MORE_BLOCKS.get(name, 0)
    config = EngineConfig(
        num_kv_blocks=num_blocks, max_num_seqs=3, max_num_batched_tokens=32, check_integrity=True
    )
    engine = compiled.engine(config)
    outputs = engine.generate(prompts, GREEDY)
    assert engine.stats().preemptions
    for ids, output in zip(prompts, outputs):
        assert_greedy(model, ids, output)
