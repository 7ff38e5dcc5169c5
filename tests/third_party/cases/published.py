"""What the makers of open weights published beside them."""

from __future__ import annotations

import torch
from torch import nn

from tests.third_party.case import MAX_TOKENS, VOCAB_SIZE, Built, case, scaled
from tests.third_party.checkouts import Checkout, stay_on_cpu, stub

FAIRSCALE = "fairscale a stub: its parallel layers are nn.Linear and nn.Embedding; .cuda() does nothing"


def _fairscale() -> None:
    class Linear(nn.Linear):
        def __init__(self, width, out, bias=True, **options):
            super().__init__(width, out, bias)

    class Embedding(nn.Embedding):
        def __init__(self, rows, width, **options):
            super().__init__(rows, width)

    layers = {"ColumnParallelLinear": Linear, "RowParallelLinear": Linear}
    stub("fairscale.nn.model_parallel.initialize", get_model_parallel_world_size=lambda: 1)
    stub(
        "fairscale.nn.model_parallel.layers",
        **layers, ParallelEmbedding=Embedding, VocabParallelEmbedding=Embedding,
    )  # fmt: skip
    stay_on_cpu()


def _llama(checkout: Checkout):
    _fairscale()
    module = checkout.load("model", under="llama")
    args = module.ModelArgs(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCAB_SIZE, multiple_of=32, max_batch_size=2,
        max_seq_len=MAX_TOKENS,
    )  # fmt: skip
    model = scaled(module.Transformer(args))
    return Built(model, lambda ids: model(torch.tensor([ids]), 0)[0])


LLAMA = "complex RoPE, a cache of its own, called with start_pos, in inference mode"


@case("llama", "meta-llama/llama", "llama/model.py", "Transformer", LLAMA, adaptation=FAIRSCALE)
def llama(checkout: Checkout):
    return _llama(checkout)


@case("llama3", "meta-llama/llama3", "llama/model.py", "Transformer", LLAMA, adaptation=FAIRSCALE)
def llama3(checkout: Checkout):
    return _llama(checkout)


def _deepseek(checkout: Checkout, attention: str, dense_layers: int = 3):
    stub("kernel")
    module = checkout.load("model", under="inference")
    module.attn_impl = attention
    args = module.ModelArgs(
        max_batch_size=2, max_seq_len=MAX_TOKENS, vocab_size=VOCAB_SIZE, dim=64, inter_dim=96, moe_inter_dim=32,
        n_layers=3, n_dense_layers=dense_layers, n_heads=4, n_routed_experts=8, n_shared_experts=1,
        n_activated_experts=2, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, original_seq_len=64, rope_factor=4.0,
    )  # fmt: skip
    return scaled(module.Transformer(args))


DEEPSEEK = {"adaptation": "its Triton kernels for fp8 a stub; weights in float32"}
WHERE = ("deepseek-ai/DeepSeek-V3", "inference/model.py", "Transformer")


@case("deepseek-v3-absorb", *WHERE, "MLA with absorbed weights and caches of latents, YaRN", **DEEPSEEK)
def deepseek_absorb(checkout: Checkout):
    return _deepseek(checkout, "absorb")


@case("deepseek-v3-naive", *WHERE, "MLA written out, caches of K and V, YaRN", **DEEPSEEK)
def deepseek_naive(checkout: Checkout):
    return _deepseek(checkout, "naive")


@case("deepseek-v3-experts", *WHERE, "experts left out by their counts", **DEEPSEEK)
def deepseek_experts(checkout: Checkout):
    return _deepseek(checkout, "absorb", dense_layers=1)


@case(
    "gpt-oss", "openai/gpt-oss", "gpt_oss/torch/model.py", "Transformer",
    "flat ids without a batch, sinks, windows by layer, weights of experts gathered by token",
    adaptation="its reader of checkpoints a stub; weights in float32",
)  # fmt: skip
def gpt_oss(checkout: Checkout):
    stub("gpt_oss.torch.weights")
    module = checkout.load_edited("gpt_oss/torch/model.py")
    config = module.ModelConfig(
        num_hidden_layers=2, num_experts=8, experts_per_token=2, vocab_size=VOCAB_SIZE, hidden_size=64,
        intermediate_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2, sliding_window=16,
        initial_context_length=4096,
    )  # fmt: skip
    model = scaled(module.Transformer(config, torch.device("cpu")))
    return Built(model, lambda ids: model(torch.tensor(ids)))


def _minimind(checkout: Checkout, **options):
    module = checkout.load("model.model_minimind")
    config = module.MiniMindConfig(
        hidden_size=64, num_hidden_layers=2, vocab_size=VOCAB_SIZE, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=MAX_TOKENS, eos_token_id=None, bos_token_id=None, **options,
    )  # fmt: skip
    return scaled(module.MiniMindForCausalLM(config))


MINIMIND = ("jingyaogong/minimind", "model/model_minimind.py", "MiniMindForCausalLM")


@case("minimind", *MINIMIND, "a PreTrainedModel of another library; tables made again if weights say so")
def minimind(checkout: Checkout):
    return _minimind(checkout)


@case("minimind-no-flash", *MINIMIND, "its attention written out, the mask added to a slice of the scores")
def minimind_no_flash(checkout: Checkout):
    return _minimind(checkout, flash_attn=False)


@case("minimind-experts", *MINIMIND, "experts that pick tokens by a mask, left out if nobody chose them")
def minimind_experts(checkout: Checkout):
    return _minimind(checkout, use_moe=True, num_experts_per_tok=2)
