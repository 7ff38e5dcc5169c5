"""The small DeepSeek-V4 before training: its shape and its initial weights."""

import torch

from pagebinder.models import tiny_path
from pagebinder.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM, Rope, Yarn
from pagebinder.models.llama import LlamaForCausalLM

MAX_TOKENS = 1024


def tiny_config(tokenizer) -> DeepseekV4Config:
    """Sliding, sparse, heavy, sparse, heavy; the first two layers are hash-routed.

    At 512 tokens an index picks 32 of 128 entries, and the heavy layers see 16.
    """
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    yarn = Yarn(factor=4.0, original_max_position_embeddings=256, attention_factor=1.0)
    return DeepseekV4Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        head_dim=96,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=MAX_TOKENS,
        sliding_window=16,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=32,
        layer_types=("sliding_attention", sparse, heavy, sparse, heavy),
        mlp_layer_types=("hash_moe",) * 2 + ("moe",) * 3,
        rope=Rope(theta=10000.0, width=32),
        compress_rope=Rope(theta=160000.0, width=32, yarn=yarn),
        sparse_ratio=4,
        heavy_ratio=32,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


@torch.no_grad()
def init_weights(model: DeepseekV4ForCausalLM, seed: int) -> None:
    """Normal weights of variance 1/fan_in, smaller into the streams; the embedding and last norm of `tiny`.

    The streams start apart and mostly keep to themselves: alike, they would stay alike.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    depth_scale = (2 * config.num_hidden_layers) ** -0.5

    def normal(tensor: torch.Tensor, std: float) -> None:
        tensor.copy_(torch.empty(tensor.shape).normal_(0.0, std, generator=generator))

    for name, parameter in model.named_parameters():
        if name.endswith(("base", "hc_base")):
            normal(parameter, 0.5)
        elif name.endswith("scale"):
            parameter.fill_(0.3)
        elif parameter.ndim >= 2 and "position_bias" not in name:
            into_streams = name.endswith(("o_b_proj.weight", "down_proj.weight", "down_proj"))
            normal(parameter, parameter.shape[-1] ** -0.5 * (depth_scale if into_streams else 1.0))
    identity = 2.0 * torch.eye(config.hc_mult).flatten()
    for layer in model.model.layers:
        for connection in (layer.attn_hc, layer.ffn_hc):
            connection.base[2 * config.hc_mult :] += identity
        if layer.mlp.gate.is_hash:
            shuffled = torch.rand(config.vocab_size, config.n_routed_experts, generator=generator).argsort(
                dim=1
            )
            layer.mlp.gate.tid2eid.copy_(shuffled[:, : config.num_experts_per_tok])
    trained = LlamaForCausalLM.from_pretrained(tiny_path()).model
    model.model.embed_tokens.weight.copy_(trained.embed_tokens.weight)
    model.model.norm.weight.copy_(trained.norm.weight)
