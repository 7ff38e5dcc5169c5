"""Serving latent attention: over pages of latents, with and without an indexer, the tokens are the source model's.

One engine a family goes through prompts cut into steps beside decodes, a cached prefix, and preemption. More
families: tests/zoo.
"""

from __future__ import annotations

import functools

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.helpers import by_day, nightly
from tests.test_engine_exact import prompts_with_shared_prefix, serve_staggered
from tests.zoo.architectures import architectures
from tests.zoo.reference import Reference, source_logits
from tests.zoo.tiny_configs import telling_weights, tiny_config

pytestmark = pytest.mark.usefixtures("captured_once")

NEW_TOKENS = 24
# family -> kinds of states, in order; the keys of an indexer come before the latents of its attention.
FAMILIES = {
    "deepseek_v2": ["mla_latent"] * 2,
    "deepseek_v3": ["mla_latent"] * 2,
    "deepseek_v32": ["mla_latent"] * 4,
    "glm_moe_dsa": ["mla_latent"] * 6,  # every second layer shares an indexer
    "hy_v4": ["mla_latent"] * 6,  # and so here; with sinks
}


@functools.cache
def source(family: str, **overrides) -> torch.nn.Module:
    architecture = next(a for a in architectures("causal") if a.name == family)
    config = tiny_config(architecture)
    if family == "glm_moe_dsa":
        config.indexer_types = ["full", "shared"] * 2
    if family == "deepseek_v32":
        config.num_hidden_layers = 2  # one dense, one of experts
    for name, value in overrides.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return telling_weights(architecture.model_class(config).float())


@functools.cache
def compiled_pair(family: str, executable: str):
    model = source(family)
    return model, pagebinder.compile_model(model, CompileConfig(executable=executable, block_size=16))


# Compiled, the graph of deepseek_v2 has the ops of deepseek_v3's, and indexers are those of DeepSeek-V4, which is
# compiled in test_engine_v4.py: two minutes for the nightly run.
COMBINATIONS = [
    pytest.param(family, executable, marks=nightly)
    if executable == "inductor" and family != "deepseek_v3"
    else (family, executable)
    for family in FAMILIES
    for executable in ("eager", "inductor")
]


@pytest.mark.parametrize(("family", "executable"), COMBINATIONS)
def test_greedy_equals_the_source_under_chunking_prefix_hits_and_preemption(family, executable):
    model, compiled = compiled_pair(family, executable)
    assert [state.kind for state in compiled.states] == FAMILIES[family]
    prompts = prompts_with_shared_prefix(compiled.source.vocab_size)
    blocks = compiled.kv_spec.min_blocks(max(map(len, prompts)) + NEW_TOKENS, 24, 0)
    engine = compiled.engine(
        EngineConfig(num_kv_blocks=int(2.5 * blocks), max_num_seqs=6, max_num_batched_tokens=24)
    )
    done = serve_staggered(
        engine, prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, logprobs=0)
    )
    assert len(done) == len(prompts)
    reference = Reference(model)
    for i, prompt in enumerate(prompts):
        tokens = done[f"r{i}"]
        logits = source_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        reference._expect(logits.amax(1) - chosen, 1e-4, prompt, "is below the best logit")
    stats = engine.stats()
    assert stats.preemptions > 0, "the pool was meant to be too small"
    assert stats.prefix_hit_tokens > 0, "the shared prefix was meant to hit"


def executable_logits(compiled, ids: torch.Tensor) -> torch.Tensor:
    return compiled.executable.run(single_sequence_inputs(compiled.kv_spec, compiled.states, ids))


@pytest.mark.parametrize(("family", "executable"), [("deepseek_v3", "inductor"), ("deepseek_v32", "eager")])
@pytest.mark.parametrize("length", [1, 17, 200])
def test_logits_of_a_whole_prompt(family, executable, length):
    """200 tokens are long enough for the expanded form."""
    model, compiled = compiled_pair(family, executable)
    ids = torch.randint(4, 128, (length,), generator=torch.Generator().manual_seed(length))
    expected = source_logits(model, ids.tolist())
    assert float((executable_logits(compiled, ids) - expected).abs().max()) < 1e-4


def test_a_latent_layer_keeps_one_row_a_token():
    model, compiled = compiled_pair("deepseek_v3", "eager")
    config = model.config
    row = (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    assert [state.entry_bytes for state in compiled.states] == [row] * 2


@pytest.mark.parametrize("family", by_day(["deepseek_v3", "deepseek_v32"], ["deepseek_v32"]))
def test_eight_bit_rows(family):
    """The layout of DeepSeek-V3.2: rounded to e4m3 (4 bits of precision), so logits are near and not equal."""
    model = source(family, kv_lora_rank=128, num_hidden_layers=2)
    config = CompileConfig(executable="eager", kv_dtype="fp8_ds_mla")
    compiled = pagebinder.compile_model(model, config)
    layouts = {state.layout for state in compiled.states}
    assert layouts == ({"fp8_v32", "fp8_index"} if family == "deepseek_v32" else {"fp8_v32"})
    ids = torch.randint(
        4, 128, (15,), generator=torch.Generator().manual_seed(1)
    )  # fewer than the indexer's top-k
    expected = source_logits(model, ids.tolist())
    error = float((executable_logits(compiled, ids) - expected).abs().max() / expected.std())
    assert 1e-4 < error < 0.5
