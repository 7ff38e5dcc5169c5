"""Tiny models whose weights make errors visible, and what their engines must serve; shared by the tests."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model

VOCAB_SIZE = 128

# For what takes long and says little that a shorter test does not: `make nightly`.
NIGHTLY = os.environ.get("PAGEBINDER_NIGHTLY") == "1"
nightly = pytest.mark.skipif(not NIGHTLY, reason="takes long: PAGEBINDER_NIGHTLY=1")


def by_day(values, day) -> list:
    """Parameters of a test: those of `day` always, the others, which take the same paths, in the nightly run."""
    values = list(values)
    assert set(day) <= set(values), set(day) - set(values)
    parameters = {value: value if isinstance(value, tuple) else (value,) for value in values}
    return [value if value in day else pytest.param(*parameters[value], marks=nightly) for value in values]


_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def scale_weights(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Matrices ~ N(0, 1 / fan_in), vectors near one. With the usual 0.02, attention is uniform and errors hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(1.0 + 0.1 * noise)
    return model.eval()


def tiny_llama(**overrides) -> PreTrainedModel:
    return scale_weights(LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **overrides})))


def tiny_qwen3(**overrides) -> PreTrainedModel:
    """With head_dim 32 != hidden / heads, and QK norms."""
    return scale_weights(Qwen3ForCausalLM(Qwen3Config(**{**_SHAPE, "head_dim": 32, **overrides})))


def tiny_mistral(window: int, **overrides) -> PreTrainedModel:
    return scale_weights(
        MistralForCausalLM(MistralConfig(**{**_SHAPE, "sliding_window": window, **overrides}))
    )


_MIXED = {**_SHAPE, "num_hidden_layers": 4, "head_dim": 16}
_WINDOW_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def tiny_llama4(chunk: int = 16, **overrides) -> PreTrainedModel:
    """Three chunked layers with RoPE and L2 norms, then a full one whose queries are scaled by position. Dense."""
    options = {"intermediate_size_mlp": 128, "moe_layers": [], "attention_chunk_size": chunk}
    options |= {"floor_scale": 8, "attn_scale": 0.3}
    return scale_weights(Llama4ForCausalLM(Llama4TextConfig(**{**_MIXED, **options, **overrides})))


def tiny_gemma3(window: int = 16, **overrides) -> PreTrainedModel:
    """Window layers between full ones, each with a RoPE of its own."""
    options = {"sliding_window": window, "layer_types": _WINDOW_AND_FULL, "query_pre_attn_scalar": 16}
    return scale_weights(Gemma3ForCausalLM(Gemma3TextConfig(**{**_MIXED, **options, **overrides})))


def tiny_gemma2(window: int = 16, **overrides) -> PreTrainedModel:
    """Window layers between full ones, scores and logits soft-capped (by transformers 5.17's SDPA not)."""
    options = {"sliding_window": window, "layer_types": _WINDOW_AND_FULL, "query_pre_attn_scalar": 16}
    options |= {
        "attn_implementation": "eager",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    }
    return scale_weights(Gemma2ForCausalLM(Gemma2Config(**{**_MIXED, **options, **overrides})))


def tiny_cohere2(window: int = 16, **overrides) -> PreTrainedModel:
    """Window layers with interleaved RoPE between full ones without; attention and MLP side by side."""
    options = {"sliding_window": window, "layer_types": _WINDOW_AND_FULL, "logit_scale": 1.0}
    return scale_weights(Cohere2ForCausalLM(Cohere2Config(**{**_MIXED, **options, **overrides})))


class _DenseMLP(torch.nn.Module):
    """In place of GPT-OSS's experts; returns the pair that its decoder layer expects."""

    def __init__(self, config):
        super().__init__()
        self.up = torch.nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = torch.nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x))), None


def tiny_gpt_oss(window: int = 16, **overrides) -> PreTrainedModel:
    """Window layers between full ones, with a sink per head; its experts replaced by dense MLPs."""
    options = {"sliding_window": window, "layer_types": _WINDOW_AND_FULL, "num_local_experts": 2}
    options |= {"num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    model = GptOssForCausalLM(GptOssConfig(**{**_MIXED, **options, **overrides}))
    for layer in model.model.layers:
        layer.mlp = _DenseMLP(model.config)
    return scale_weights(model)


def _remembering(model: PreTrainedModel) -> PreTrainedModel:
    """Scaled weights, and recurrences that forget slowly: otherwise a wrong state is forgotten before it shows."""
    scale_weights(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(4.0)
            elif name.endswith("dt_bias"):
                parameter.sub_(1.0)
    return model


def tiny_qwen3_next(**overrides) -> PreTrainedModel:
    """Three gated delta nets with grouped heads, then gated attention with partial RoPE; dense MLPs."""
    options = {"mlp_only_layers": [0, 1, 2, 3], "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    options |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4}
    return _remembering(Qwen3NextForCausalLM(Qwen3NextConfig(**{**_MIXED, **options, **overrides})))


def tiny_mamba2(**overrides) -> PreTrainedModel:
    """Two mixers with two groups of B and C each, and no attention at all."""
    options = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8}
    options |= {"head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16}
    options |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return _remembering(Mamba2ForCausalLM(Mamba2Config(**{**options, **overrides})))


def tiny_lfm2(**overrides) -> PreTrainedModel:
    """Short convolutions of three taps between attention layers."""
    options = {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False}
    return scale_weights(Lfm2ForCausalLM(Lfm2Config(**{**_MIXED, **options, **overrides})))


# ---- served tokens beside the source's -------------------------------------------------------------------------


def assert_source_chooses(model: PreTrainedModel, prompts: list[list[int]], outputs) -> None:
    """Every served token is the first of the source's largest logits, given all before it; one run a sequence."""
    for ids, output in zip(prompts, outputs, strict=True):
        whole = torch.tensor([ids + list(output.token_ids)])
        with torch.no_grad():
            best = model(input_ids=whole, use_cache=False).logits[0, len(ids) - 1 : -1].argmax(-1)
        assert list(output.token_ids) == best.tolist()


def assert_serves_as_source(
    model: PreTrainedModel, ids_of: Callable[[int], torch.Tensor], executable: str
) -> None:
    """In chunks and from a cached prefix; then with a cache so small that requests are preempted.

    ids_of: length -> token ids of a prompt.
    """
    compiled = compile_model(model, CompileConfig(executable=executable))
    roomy = compiled.engine(EngineConfig(num_kv_blocks=200, max_num_batched_tokens=24, check_integrity=True))
    prompts = [ids_of(n).tolist() for n in (150, 9, 1)]
    prompts.append(prompts[0] + prompts[1])
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        assert_source_chooses(model, prompts, roomy.generate(prompts, params))
    assert roomy.stats().prefix_hit_tokens
    blocks = compiled.kv_spec.min_blocks(200, 16) + 3
    tight = compiled.engine(
        EngineConfig(num_kv_blocks=blocks, max_num_batched_tokens=16, check_integrity=True)
    )
    crowd = [ids_of(n).tolist() for n in (100, 50, 60, 61)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    assert_source_chooses(model, crowd, tight.generate(crowd, params))
    assert tight.stats().preemptions
