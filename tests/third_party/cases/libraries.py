"""Model code of libraries and courses that build many decoders out of options."""

from __future__ import annotations

import torch

from tests.third_party.case import MAX_TOKENS, VOCAB_SIZE, Called, case, scaled
from tests.third_party.checkouts import Checkout, package, stub

LITGPT = {
    "adaptation": "lightning a stub; the package's __init__ left out",
    "needs": ("lightning_utilities",),
}


def _litgpt(checkout: Checkout, name: str, **options):
    for absent in (
        "lightning.fabric.loggers", "lightning.fabric.strategies", "lightning.fabric.utilities.load",
        "lightning.pytorch.cli", "lightning.pytorch.loggers",
    ):  # fmt: skip
        stub(absent)
    package("litgpt", checkout.path / "litgpt")
    module = checkout.load("litgpt.model")
    shape = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 64,
        "block_size": MAX_TOKENS,
        "padded_vocab_size": VOCAB_SIZE,
    }
    config = module.Config.from_name(name, **shape, vocab_size=VOCAB_SIZE, intermediate_size=96, **options)
    return scaled(module.GPT(config))


def _litgpt_case(name: str, model: str, unusual: str, **options) -> None:
    @case(name, "Lightning-AI/litgpt", "litgpt/model.py", "GPT", f"{model}: {unusual}", **LITGPT)
    def build(checkout: Checkout):
        return _litgpt(checkout, model, **options)


_litgpt_case("litgpt-llama", "Llama-3.2-1B", "RoPE stretched by frequency", n_query_groups=2, head_size=16)
_litgpt_case("litgpt-neox", "pythia-160m", "a quarter of each head rotated, parallel residual")
_litgpt_case("litgpt-phi", "phi-2", "one norm for attention and MLP", head_size=16, rotary_percentage=0.5)
_litgpt_case(
    "litgpt-gemma2", "Gemma-2-2b", "windows by layer, soft caps, norms after", n_query_groups=2, head_size=16,
    sliding_window_size=16,
)  # fmt: skip
_litgpt_case(
    "litgpt-gemma3", "Gemma-3-1b-it", "two RoPE tables indexed by layer, norms of q and k", n_query_groups=1,
    head_size=16, sliding_window_size=16, sliding_window_indices=[1, 0], rope_indices=[0, 1],
)  # fmt: skip
_litgpt_case("litgpt-falcon", "falcon-7b", "one head of K and V", head_size=16)
_litgpt_case(
    "litgpt-mixtral", "Mixtral-8x7B-v0.1", "a loop that picks tokens by a mask", n_query_groups=2, n_expert=4
)

RASBT = ("rasbt/LLMs-from-scratch",)


@case(
    "from-scratch-gpt", *RASBT, "pkg/llms_from_scratch/ch04.py", "GPTModel", "a mask's buffer, filled in place",
    adaptation="tiktoken a stub",
)  # fmt: skip
def from_scratch_gpt(checkout: Checkout):
    return _from_scratch(checkout, "ch04", "GPTModel")


@case(
    "from-scratch-gpt-fast", *RASBT, "pkg/llms_from_scratch/ch04.py", "GPTModelFast", "qkv permuted at once, SDPA",
    adaptation="tiktoken a stub",
)  # fmt: skip
def from_scratch_gpt_fast(checkout: Checkout):
    return _from_scratch(checkout, "ch04", "GPTModelFast")


@case(
    "from-scratch-llama3", *RASBT, "pkg/llms_from_scratch/llama3.py", "Llama3Model",
    "whole tables of RoPE for each block",
    adaptation="tiktoken a stub",
)  # fmt: skip
def from_scratch_llama3(checkout: Checkout):
    return _from_scratch(checkout, "llama3", "Llama3Model")


@case(
    "from-scratch-qwen3", *RASBT, "pkg/llms_from_scratch/qwen3.py", "Qwen3Model", "norms of q and k, queries scaled",
    adaptation="tiktoken a stub",
)  # fmt: skip
def from_scratch_qwen3(checkout: Checkout):
    return _from_scratch(checkout, "qwen3", "Qwen3Model")


@case(
    "from-scratch-qwen3-moe", *RASBT, "pkg/llms_from_scratch/qwen3.py", "Qwen3Model",
    "a loop over torch.unique of ids",
    adaptation="tiktoken a stub",
)  # fmt: skip
def from_scratch_qwen3_moe(checkout: Checkout):
    return _from_scratch(
        checkout, "qwen3", "Qwen3Model", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )


def _from_scratch(checkout: Checkout, file: str, name: str, **options):
    for absent in ("tiktoken.load", "requests"):
        stub(absent)
    module = checkout.load(f"llms_from_scratch.{file}", under="pkg")
    config = {
        "vocab_size": VOCAB_SIZE, "context_length": MAX_TOKENS, "emb_dim": 64, "n_heads": 4, "n_layers": 2,
        "drop_rate": 0.0, "qkv_bias": True, "hidden_dim": 96, "head_dim": 16, "qk_norm": True, "n_kv_groups": 2,
        "rope_base": 10_000.0, "rope_freq": None, "dtype": torch.float32,
    }  # fmt: skip
    return scaled(getattr(module, name)(config | options))


X_TRANSFORMERS = ("lucidrains/x-transformers", "x_transformers/x_transformers.py", "TransformerWrapper")
X_NEEDS = {"needs": ("einops", "einx", "loguru", "torch_einops_utils")}


def _x_case(name: str, unusual: str, **options) -> None:
    @case(name, *X_TRANSFORMERS, unusual, **X_NEEDS)
    def build(checkout: Checkout):
        module = checkout.load("x_transformers.x_transformers")
        layers = module.Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **options)
        positions = not ({"rotary_pos_emb", "alibi_pos_bias", "rel_pos_bias"} & set(options))
        return scaled(
            module.TransformerWrapper(
                num_tokens=VOCAB_SIZE, max_seq_len=MAX_TOKENS, attn_layers=layers, use_abs_pos_emb=positions
            )
        )


_x_case("x-transformers-absolute", "learned positions, scaled")
_x_case("x-transformers-rotary", "half of each head rotated", rotary_pos_emb=True)
_x_case("x-transformers-xpos", "RoPE with lengths of its own (xPos)", rotary_pos_emb=True, rotary_xpos=True)
_x_case("x-transformers-alibi", "ALiBi for half of the heads", alibi_pos_bias=True, alibi_num_heads=2)
_x_case("x-transformers-t5", "T5's buckets of distances", rel_pos_bias=True)
_x_case("x-transformers-flash", "SDPA, gates of values, GLU, RMSNorm", rotary_pos_emb=True, attn_flash=True,
        attn_gate_values=True, ff_glu=True, use_rmsnorm=True)  # fmt: skip
_x_case(
    "x-transformers-qk-norm",
    "q and k of length one, one head of K and V",
    attn_qk_norm=True,
    attn_one_kv_head=True,
)
_x_case(
    "x-transformers-shift", "half of the channels shifted by a token", shift_tokens=1, rotary_pos_emb=True
)
_x_case("x-transformers-talking", "heads mixed before the softmax", attn_pre_talking_heads=True)
_x_case("x-transformers-memory", "learned keys and values before the tokens", attn_num_mem_kv=4)


@case(
    "palm", "lucidrains/PaLM-rlhf-pytorch", "palm_rlhf_pytorch/palm.py", "PaLM",
    "xPos RoPE cached by length, attention and MLP of one projection, one head of K and V",
    adaptation="the package's __init__ left out", needs=("einops", "beartype"),
)  # fmt: skip
def palm(checkout: Checkout):
    package("palm_rlhf_pytorch", checkout.path / "palm_rlhf_pytorch")
    module = checkout.load("palm_rlhf_pytorch.palm")
    return scaled(module.PaLM(dim=64, num_tokens=VOCAB_SIZE, depth=2, dim_head=16, heads=4))


@case(
    "gpt-fast", "pytorch-labs/gpt-fast", "model.py", "Transformer", "a cache written at positions that are given",
    adaptation="a wrapper gives it its positions",
)  # fmt: skip
def gpt_fast(checkout: Checkout):
    module = checkout.load("model")
    config = module.ModelArgs(
        block_size=MAX_TOKENS, vocab_size=VOCAB_SIZE, n_layer=2, n_head=4, dim=64, n_local_heads=2,
        intermediate_size=96,
    )  # fmt: skip
    model = scaled(module.Transformer(config))
    model.setup_caches(max_batch_size=1, max_seq_length=MAX_TOKENS)
    return Called(model, lambda model, ids: model(ids, torch.arange(ids.shape[1])))
