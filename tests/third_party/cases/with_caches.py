"""Published models whose forward wants caches, masks and lengths from outside: a wrapper makes them for each call."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.third_party.case import MAX_TOKENS, VOCAB_SIZE, Called, case, scaled
from tests.third_party.checkouts import Checkout, package, stub

GEMMA = ("google/gemma_pytorch", "gemma/model.py", "GemmaForCausalLM")
GEMMA_ADAPTATION = {
    "adaptation": "a wrapper makes its caches, masks and positions; sentencepiece and its tokenizer stubs"
}


def _gemma(checkout: Checkout, generation: int, **options):
    stub("sentencepiece")
    package("gemma", checkout.path / "gemma")
    stub("gemma.tokenizer", Tokenizer=lambda path: None)
    module = checkout.load("gemma.model")
    kinds = module.gemma_config.AttentionType
    if generation > 1:
        options |= {"attn_types": (kinds.LOCAL_SLIDING, kinds.GLOBAL), "sliding_window_size": 16}
        options |= {"use_pre_ffw_norm": True, "use_post_ffw_norm": True}
    if generation == 3:
        options["rope_wave_length"] = {kinds.LOCAL_SLIDING: 10_000, kinds.GLOBAL: 1_000_000}
    config = module.gemma_config.GemmaConfig(
        architecture=module.gemma_config.Architecture(generation), vocab_size=VOCAB_SIZE, num_hidden_layers=2,
        max_position_embeddings=MAX_TOKENS, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
        intermediate_size=96, head_dim=16, dtype="float32", **options,
    )  # fmt: skip

    def call(model, ids):
        length = ids.shape[1]
        places = torch.arange(length)
        caches = [(torch.zeros(1, length, 2, 16), torch.zeros(1, length, 2, 16)) for _ in range(2)]
        mask = torch.full((1, 1, length, length), -2.3819763e38).triu(1)
        local = mask + torch.full((1, 1, length, length), -2.3819763e38).tril(-16)
        return model(ids, places, places, caches, mask, places[-1:], None, None, None, local_mask=local)[1]

    return Called(scaled(module.GemmaForCausalLM(config)), call)


@case("gemma", *GEMMA, "caches written with index_copy, logits of the position asked for", **GEMMA_ADAPTATION)
def gemma(checkout: Checkout):
    return _gemma(checkout, 1)


@case("gemma-2", *GEMMA, "two masks of which layers take one, soft caps", **GEMMA_ADAPTATION)
def gemma_2(checkout: Checkout):
    return _gemma(
        checkout, 2, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=16
    )


@case("gemma-3", *GEMMA, "complex RoPE of two bases, norms of q and k", **GEMMA_ADAPTATION)
def gemma_3(checkout: Checkout):
    return _gemma(checkout, 3, use_qk_norm=True)


MISTRAL = ("mistralai/mistral-inference", "src/mistral_inference/transformer.py", "Transformer")
MISTRAL_OPTIONS = {"needs": ("simple_parsing", "safetensors")}


def _mistral(checkout: Checkout, causal: bool, experts: bool = False):
    def attend(q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    stub("xformers.ops.fmha", memory_efficient_attention=attend)
    stub("xformers.ops.fmha.attn_bias")
    module = checkout.load("mistral_inference.transformer", under="src")
    from mistral_inference.moe import MoeArgs

    args = module.TransformerArgs(
        dim=64, n_layers=2, head_dim=16, hidden_dim=96, n_heads=4, n_kv_heads=2, norm_eps=1e-5, vocab_size=VOCAB_SIZE,
        max_batch_size=1, moe=MoeArgs(num_experts=4, num_experts_per_tok=2) if experts else None,
    )  # fmt: skip
    model = scaled(module.Transformer(args))
    return Called(model, lambda model, ids: model(ids[0], [ids.shape[1]])[None])


CAUSAL = "xformers a stub whose attention is SDPA, causal as with a cache; a wrapper says the length"


@case(
    "mistral",
    *MISTRAL,
    "flat ids, RoPE by positions of lengths in a list",
    adaptation=CAUSAL,
    **MISTRAL_OPTIONS,
)
def mistral(checkout: Checkout):
    return _mistral(checkout, causal=True)


@case(
    "mistral-experts",
    *MISTRAL,
    "experts by torch.where, added in place",
    adaptation=CAUSAL,
    **MISTRAL_OPTIONS,
)
def mistral_experts(checkout: Checkout):
    return _mistral(checkout, causal=True, experts=True)


@case(
    "mistral-no-cache", *MISTRAL, "without a cache it attends without any mask",
    adaptation="xformers a stub whose attention is SDPA; a wrapper says the length", **MISTRAL_OPTIONS,
)  # fmt: skip
def mistral_no_cache(checkout: Checkout):
    return _mistral(checkout, causal=False)


@case(
    "gpt-fast-flex", "meta-pytorch/gpt-fast", "model.py", "Transformer", "flex_attention with a mask that is code",
    adaptation="a wrapper gives it its mask and positions",
)  # fmt: skip
def gpt_fast_flex(checkout: Checkout):
    from torch.nn.attention.flex_attention import create_block_mask

    module = checkout.load("model")
    config = module.ModelArgs(
        block_size=MAX_TOKENS, vocab_size=VOCAB_SIZE, n_layer=2, n_head=4, dim=64, n_local_heads=2,
        intermediate_size=96,
    )  # fmt: skip
    model = scaled(module.Transformer(config))
    model.setup_caches(max_batch_size=1, max_seq_length=MAX_TOKENS)

    def call(model, ids):
        length = ids.shape[1]
        mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, length, MAX_TOKENS, device="cpu")
        return model(mask, ids, torch.arange(length))

    return Called(model, call)
