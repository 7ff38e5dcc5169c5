"""More of what groups published beside papers: norms, retention, layers that run again."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from tests.third_party.case import MAX_TOKENS, VOCAB_SIZE, case, scaled
from tests.third_party.checkouts import Checkout, stub


def _open_lm(checkout: Checkout, **options):
    class SwiGLU(nn.Module):
        def __init__(self, width, hidden, out, bias=True):
            super().__init__()
            self.w12, self.w3 = nn.Linear(width, 2 * hidden, bias), nn.Linear(hidden, out, bias)

        def forward(self, x):
            gate, up = self.w12(x).chunk(2, -1)
            return self.w3(F.silu(gate) * up)

    stub("xformers.ops", SwiGLU=SwiGLU)
    module = checkout.load("open_lm.model")
    params = module.Params(
        dim=64, n_layers=2, n_heads=4, vocab_size=VOCAB_SIZE, seq_len=2 * MAX_TOKENS, **options
    )
    return scaled(module.Transformer(params))


SWIGLU = "xformers a stub with its SwiGLU in two linear layers"
OPEN_LM = ("mlfoundations/open_lm", "open_lm/model.py", "Transformer")


@case(
    "open-lm",
    *OPEN_LM,
    "logits first of three results, tables of RoPE that grow",
    adaptation=SWIGLU,
)
def open_lm(checkout: Checkout):
    return _open_lm(checkout, apply_qk_norm=True)


@case("open-lm-heads", *OPEN_LM, "RoPE over heads where others have tokens", adaptation=SWIGLU)
def open_lm_heads(checkout: Checkout):
    return _open_lm(checkout, positional_embedding_type="head_rotary")


TORCHSCALE = {"adaptation": "fairscale and timm stubs", "needs": ("einops",)}


def _torchscale(checkout: Checkout, file: str):
    stub("fairscale.nn", checkpoint_wrapper=lambda layer: layer, wrap=lambda layer, **options: layer)
    stub("timm.models.layers")
    return checkout.load(f"torchscale.architecture.{file}"), checkout.load("torchscale.architecture.config")


def _decoder(checkout: Checkout, **options):
    module, configs = _torchscale(checkout, "decoder")
    config = configs.DecoderConfig(
        decoder_embed_dim=64, decoder_attention_heads=4, decoder_ffn_embed_dim=96, decoder_layers=2,
        vocab_size=VOCAB_SIZE, **options,
    )  # fmt: skip
    model = module.Decoder(config, embed_tokens=nn.Embedding(VOCAB_SIZE, 64))
    return scaled(model)


DECODER = ("microsoft/torchscale", "torchscale/architecture/decoder.py", "Decoder")


@case(
    "torchscale-subln",
    *DECODER,
    "norms inside attention and MLP, T5's buckets, no positions else",
    **TORCHSCALE,
)
def torchscale_subln(checkout: Checkout):
    return _decoder(checkout, rel_pos_buckets=32, max_rel_pos=128)


@case("torchscale-xpos", *DECODER, "xPos: RoPE whose lengths grow with the distance", **TORCHSCALE)
def torchscale_xpos(checkout: Checkout):
    return _decoder(checkout, xpos_rel_pos=True)


@case("torchscale-deepnorm", *DECODER, "norms behind residuals that are weighed", **TORCHSCALE)
def torchscale_deepnorm(checkout: Checkout):
    return _decoder(checkout, deepnorm=True, subln=False, rel_pos_buckets=32, max_rel_pos=128)


@case(
    "retnet", "microsoft/torchscale", "torchscale/architecture/retnet.py", "RetNetDecoder",
    "retention: products of q and k with a decay, no softmax", **TORCHSCALE,
)  # fmt: skip
def retnet(checkout: Checkout):
    module, configs = _torchscale(checkout, "retnet")
    config = configs.RetNetConfig(
        decoder_embed_dim=64, decoder_value_embed_dim=64, decoder_retention_heads=4, decoder_ffn_embed_dim=96,
        decoder_layers=2, vocab_size=VOCAB_SIZE,
    )  # fmt: skip
    return scaled(module.RetNetDecoder(config, embed_tokens=nn.Embedding(VOCAB_SIZE, 64)))
