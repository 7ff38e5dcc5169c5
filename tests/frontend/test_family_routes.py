"""What single families need to be captured as they are: offsets of positions, expanded latents, own masks."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
    XmodConfig,
    XmodForCausalLM,
    ZayaConfig,
    ZayaForCausalLM,
)

import pagebinder
from pagebinder import CaptureError, CompileConfig
from pagebinder.frontend.numbering import Numbering, numbering
from tests.helpers import VOCAB_SIZE, by_day, scale_weights, tiny_llama

EAGER = CompileConfig(executable="eager")
_SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 128}
_BART = {"vocab_size": VOCAB_SIZE, "d_model": 64, "max_position_embeddings": 128, "decoder_layers": 2}
_BART |= {
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
}
_MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}


def tiny_roberta():
    return RobertaForCausalLM(RobertaConfig(**_SHAPE, is_decoder=True))


def tiny_bart():
    return BartForCausalLM(BartConfig(**_BART))


def tiny_big_bird_pegasus():
    return BigBirdPegasusForCausalLM(BigBirdPegasusConfig(**_BART))


def tiny_diff_llama():
    return DiffLlamaForCausalLM(DiffLlamaConfig(**_SHAPE, num_key_value_heads=2))


def tiny_minicpm3():
    return MiniCPM3ForCausalLM(MiniCPM3Config(**_SHAPE, **_MLA, num_key_value_heads=4))


def tiny_phimoe():
    """Its mask has a window that its attention is not told."""
    return PhimoeForCausalLM(
        PhimoeConfig(**_SHAPE, num_key_value_heads=2, sliding_window=16, num_local_experts=4)
    )


def tiny_xmod():
    languages = {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"}
    return XmodForCausalLM(XmodConfig(**_SHAPE, is_decoder=True, **languages))


def tiny_xlm():
    shape = {"vocab_size": VOCAB_SIZE, "emb_dim": 64, "n_layers": 2, "n_heads": 4}
    return XLMWithLMHeadModel(XLMConfig(**shape, max_position_embeddings=128, causal=True))


def tiny_roformer():
    return RoFormerForCausalLM(RoFormerConfig(**_SHAPE, embedding_size=64, is_decoder=True))


def tiny_gpt():
    return OpenAIGPTLMHeadModel(
        OpenAIGPTConfig(vocab_size=VOCAB_SIZE, n_positions=128, n_embd=64, n_layer=2, n_head=4)
    )


def tiny_zaya():
    shape = {**_SHAPE, "head_dim": 16, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 1}
    return ZayaForCausalLM(ZayaConfig(**shape))


MODELS = [tiny_xmod, tiny_xlm, tiny_roformer, tiny_gpt, tiny_zaya]


def tiny_qwen2_moe():
    """The same, in every second layer."""
    options = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "num_experts": 4}
    options |= {"num_key_value_heads": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**_SHAPE, **options))


MODELS += [
    tiny_phimoe,
    tiny_qwen2_moe,
    tiny_roberta,
    tiny_bart,
    tiny_big_bird_pegasus,
    tiny_diff_llama,
    tiny_minicpm3,
]


BY_DAY = (tiny_roformer, tiny_zaya, tiny_phimoe, tiny_roberta, tiny_bart, tiny_diff_llama)


@pytest.mark.parametrize("build", by_day(MODELS, BY_DAY))
def test_the_levels_equal_the_source_given_nothing_but_ids(build):
    model = scale_weights(build())
    ids = torch.randint(4, VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0]
        first = model(ids[None, :25], use_cache=False).logits[0]
    if not torch.allclose(first, expected[:25], atol=1e-4):  # RoFormer of transformers 5.17
        with pytest.raises(CaptureError, match="attends to later tokens"):
            pagebinder.compile_model(model, EAGER)
        return
    compiled = pagebinder.compile_model(model, EAGER)
    for level in ("captured", "fused"):
        torch.testing.assert_close(compiled.run_level(level, ids), expected, atol=3e-5, rtol=3e-5)


def test_positions_are_numbered_from_behind_the_padding_id():
    assert numbering(tiny_roberta()) == Numbering(offset=2, uncounted_id=1)
    assert numbering(tiny_llama()) == Numbering()


def test_an_expansion_that_is_not_the_known_one_is_an_error(monkeypatch):
    model = scale_weights(tiny_minicpm3())
    attention = type(model.model.layers[0].self_attn)
    original = attention.expand_kv

    def swapped(self, kv_nope, k_rot):
        key, value = original(self, kv_nope, k_rot)
        return key.flip(-1), value

    monkeypatch.setattr(attention, "expand_kv", swapped)
    with pytest.raises(CaptureError, match="expands its latent otherwise"):
        pagebinder.compile_model(model, EAGER)


class PicksByValue(torch.nn.Module):
    """A decoder whose rows are those of ids above one."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB_SIZE, 16)

    def forward(self, input_ids, positions):
        rows = self.embed(input_ids)
        return rows @ self.embed.weight.T + rows[input_ids > 1].sum()


def test_code_that_picks_entries_by_value_is_told_as_that():
    with pytest.raises(CaptureError, match="picks entries by their values"):
        pagebinder.compile_model(PicksByValue(), EAGER)


def test_an_adapter_needs_a_language():
    model = tiny_xmod()
    model.config.default_language = None
    with pytest.raises(CaptureError, match="set_default_language"):
        pagebinder.compile_model(model, EAGER)
