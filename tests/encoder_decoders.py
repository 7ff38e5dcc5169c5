"""Tiny encoder-decoders whose weights make errors visible, and what eager transformers says of them."""

from __future__ import annotations

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    BlenderbotSmallConfig,
    BlenderbotSmallForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PLBartConfig,
    PLBartForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from tests.helpers import VOCAB_SIZE, scale_weights

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}

# A relative bias that tells distances below 20 tokens apart, so that tests also go beyond.
_T5_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}

FAMILIES = {
    "bart": (BartForConditionalGeneration, BartConfig),
    "mbart": (MBartForConditionalGeneration, MBartConfig),
    "plbart": (PLBartForConditionalGeneration, PLBartConfig),
    "marian": (MarianMTModel, MarianConfig),
    "pegasus": (PegasusForConditionalGeneration, PegasusConfig),
    "blenderbot": (BlenderbotForConditionalGeneration, BlenderbotConfig),
    "blenderbot-small": (BlenderbotSmallForConditionalGeneration, BlenderbotSmallConfig),
    "t5": (T5ForConditionalGeneration, T5Config),
    "mt5": (MT5ForConditionalGeneration, MT5Config),
    "umt5": (UMT5ForConditionalGeneration, UMT5Config),
}
WITH_RELATIVE_BIAS = ("t5", "mt5", "umt5")


def tiny(family: str, **overrides) -> PreTrainedModel:
    """Two encoder layers of 4 heads, three decoder layers (of 8, but for T5), so that halves cannot be mixed up."""
    model, config = FAMILIES[family]
    shape = _T5_SHAPE if family in WITH_RELATIVE_BIAS else _SHAPE
    model = scale_weights(model(config(**{**shape, **overrides})))
    if family in ("t5", "umt5"):  # made for embeddings of variance one: they scale their output down
        with torch.no_grad():
            model.shared.weight.mul_(model.config.d_model**0.5)
    return model


def tokens(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator)


def eager_logits(model: PreTrainedModel, encoder_ids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of the source model for one encoder prompt and one decoder sequence."""
    with torch.no_grad():
        return model(input_ids=encoder_ids[None], decoder_input_ids=ids[None], use_cache=False).logits[0]


def eager_states(model: PreTrainedModel, encoder_ids: torch.Tensor) -> torch.Tensor:
    """Encoder states [E, C] of the source model."""
    with torch.no_grad():
        return model.get_encoder()(input_ids=encoder_ids[None]).last_hidden_state[0]
