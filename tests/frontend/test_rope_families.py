"""The rotary embeddings of transformers' families: the style that each has, at every query and key."""

from __future__ import annotations

import pytest
import torch
import transformers

from pagebinder.frontend.capture import capture
from pagebinder.frontend.recognise import recognise_rope
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import clone
from tests.graphs import run
from tests.helpers import VOCAB_SIZE, scale_weights, tiny_gpt_oss, tiny_llama4

SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPTJ = {
    "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "n_positions": 128,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip


def build(name, **options):
    config = getattr(transformers, f"{name}Config")(**(GPTJ if name == "GPTJ" else SHAPE | options))
    return scale_weights(getattr(transformers, f"{name}ForCausalLM")(config))


FAMILIES = {
    "Cohere": (lambda: build("Cohere"), "every_two, dim=16"),
    "GLM-4": (lambda: build("Glm4", head_dim=16), "every_two, dim=8"),
    "GPT-J": (lambda: build("GPTJ"), "every_two, dim=8"),
    "Phi": (lambda: build("Phi"), "half, dim=8"),
    "Phi-3": (lambda: build("Phi3"), "half, dim=16"),
    "GPT-OSS": (lambda: tiny_gpt_oss(num_hidden_layers=1, layer_types=["full_attention"]), "chunked, dim=16"),
    "Llama-4": (lambda: tiny_llama4(num_hidden_layers=1), "interleaved, dim=16"),
    "DeepSeek-V2": (lambda: build("DeepseekV2", **LATENT), "interleaved, dim=8"),
    "DeepSeek-V3": (lambda: build("DeepseekV3", **LATENT), "deinterleaved, dim=8"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_and_keys_of_a_family(family):
    make, style = FAMILIES[family]
    before, _ = capture(source_from_module(make()))
    after = clone(before, "semantic")
    result = recognise_rope(after)
    assert [m.detail for m in result.matches] == [f"style={style}"] * 2 and not result.refusals
    exact = family not in ("Llama-4", "DeepSeek-V2")  # there products of complex numbers become real ones
    torch.testing.assert_close(run(after, 40), run(before, 40), **({"atol": 0, "rtol": 0} if exact else {}))
