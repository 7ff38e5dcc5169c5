"""karpathy's teaching models, and two that began as nanoGPT."""

from __future__ import annotations

import torch

from tests.third_party.case import MAX_TOKENS, VOCAB_SIZE, Built, case, scaled
from tests.third_party.checkouts import Checkout, stub


@case("nanogpt", "karpathy/nanoGPT", "model.py", "GPT", "logits of the last token alone; tied embeddings")
def nanogpt(checkout: Checkout):
    module = checkout.load("model")
    config = module.GPTConfig(
        block_size=MAX_TOKENS, vocab_size=VOCAB_SIZE, n_layer=2, n_head=4, n_embd=64, dropout=0.0
    )
    model = scaled(module.GPT(config))
    return Built(model, lambda ids: model(torch.tensor([ids]), torch.tensor([ids]))[0][0])


@case(
    "mingpt",
    "karpathy/minGPT",
    "mingpt/model.py",
    "GPT",
    "a mask that is cut from a buffer; loss beside logits",
)
def mingpt(checkout: Checkout):
    module = checkout.load("mingpt.model")
    config = module.GPT.get_default_config()
    config.merge_from_dict(
        {"model_type": None, "n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": VOCAB_SIZE}
        | {"block_size": MAX_TOKENS}
    )
    return scaled(module.GPT(config))


def _nanochat(checkout: Checkout, pattern: str):
    module = checkout.load("nanochat.gpt")
    config = module.GPTConfig(
        sequence_len=MAX_TOKENS, vocab_size=VOCAB_SIZE, n_layer=4, n_head=4, n_kv_head=2, n_embd=64,
        window_pattern=pattern,
    )  # fmt: skip
    model = module.GPT(config)
    model.init_weights()
    return scaled(model)


NANOCHAT = "tokens smeared into the next, value embeddings with gates, residual taken back, capped logits"


@case("nanochat", "karpathy/nanochat", "nanochat/gpt.py", "GPT", NANOCHAT)
def nanochat(checkout: Checkout):
    return _nanochat(checkout, "L")


@case("nanochat-windows", "karpathy/nanochat", "nanochat/gpt.py", "GPT", f"{NANOCHAT}; windows of a quarter")
def nanochat_windows(checkout: Checkout):
    return _nanochat(checkout, "SSL")


@case(
    "llama2.c",
    "karpathy/llama2.c",
    "model.py",
    "Transformer",
    "real RoPE in pairs; logits of the last token alone",
)
def llama2_c(checkout: Checkout):
    module = checkout.load("model")
    args = module.ModelArgs(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=VOCAB_SIZE,
        multiple_of=32,
        max_seq_len=MAX_TOKENS,
    )
    model = scaled(module.Transformer(args))
    return Built(model, lambda ids: model(torch.tensor([ids]), torch.tensor([ids]))[0])


def _ngpt(checkout: Checkout, normalized: int):
    def attend(q, k, v, softmax_scale, **options):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale)
        return y.transpose(1, 2)

    stub("flash_attn", flash_attn_func=attend)
    module = checkout.load_edited("model.py", ("torch.bfloat16", "torch.float32"))
    config = module.GPTConfig(
        block_size=MAX_TOKENS, vocab_size=VOCAB_SIZE, n_layer=2, n_head=4, n_embd=64, base_scale=0.125,
        use_nGPT=normalized,
    )  # fmt: skip
    model = scaled(module.GPT(config))
    if normalized:
        model.sz.data.mul_(8.0)
    return Built(model, lambda ids: model(torch.tensor([ids]), torch.tensor([ids]))[0][0])


NGPT = "flash_attn a stub that calls SDPA; read with float32 for its bfloat16"


@case(
    "ngpt",
    "NVIDIA/ngpt",
    "model.py",
    "GPT",
    "rows of length one, learned steps between them",
    adaptation=NGPT,
)
def ngpt(checkout: Checkout):
    return _ngpt(checkout, 1)


@case(
    "ngpt-baseline",
    "NVIDIA/ngpt",
    "model.py",
    "GPT",
    "sinusoids made anew for RoPE in each layer",
    adaptation=NGPT,
)
def ngpt_baseline(checkout: Checkout):
    return _ngpt(checkout, 0)
