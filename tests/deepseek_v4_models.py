"""Tiny random DeepSeek-V4 models of transformers, with every weight large enough to show an error.

16 index heads: with few of them ReLU makes scores of exactly 0, and which of several equal entries is taken is
undefined in transformers.
"""

import torch
import transformers

VOCAB = 64
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 24,
    "q_lora_rank": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "max_position_embeddings": 1024,
    "layer_types": ["sliding_attention", SPARSE, HEAVY, SPARSE],
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "swiglu_limit": 1.5,  # low, so that it clamps
    "qk_rope_head_dim": 8,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def oracle_config(heavy_ratio: int = 8, **changes) -> transformers.DeepseekV4Config:
    return transformers.DeepseekV4Config(
        **SHAPE | {"compress_rates": {SPARSE: 4, HEAVY: heavy_ratio}} | changes
    )


@torch.no_grad()
def oracle_model(config: transformers.DeepseekV4Config, comb_spread: float = 1.0):
    """A float32 model of transformers. `comb_spread` scales the logits of the stream-mixing matrices: the larger,
    the slower Sinkhorn's iteration converges."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.copy_(1.0 + 0.2 * normal(parameter))
        elif parameter.ndim == 1:  # sinks, bases and scales of the hyper-connections
            parameter.copy_(0.5 * normal(parameter))
        else:
            std = 1.0 if "position_bias" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(std * normal(parameter))
        if name.endswith("_hc.base"):
            parameter[2 * config.hc_mult :] *= comb_spread
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * normal(buffer))
        elif name.endswith("tid2eid"):
            buffer.copy_(torch.rand(VOCAB, config.n_routed_experts, generator=generator).argsort(1)[:, :2])
    return model


def random_ids(num_tokens: int, num_sequences: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, VOCAB, (num_sequences, num_tokens), generator=generator)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
