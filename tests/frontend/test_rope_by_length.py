"""RoPE whose frequencies hang on the length: served up to the original length, with transformers' tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import pagebinder
import pagebinder.custom_ops
from pagebinder import CaptureError, CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.frontend.leaves.rope_by_length import length_limit

ORIGINAL, LONGEST = 64, 256
SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
HALF = 4  # frequencies of a head


def longrope():
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [3.0] * HALF}
    config = Phi3Config(
        **SIZES,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope | {"rope_theta": 100.0},
    )
    return Phi3ForCausalLM(config)


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=ORIGINAL, rope_parameters=rope))


def default():
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=ORIGINAL))


@pytest.fixture(params=[longrope, dynamic], ids=["longrope", "dynamic"])
def model(request):
    torch.manual_seed(0)
    return request.param().eval()


def compiled(model, **options):
    return pagebinder.compile_model(model, CompileConfig(executable="eager", **options))


def test_tokens_are_those_of_transformers_up_to_the_original_length(model):
    served = compiled(model)
    assert served.max_model_len == ORIGINAL == length_limit(model)
    prompt = torch.randint(2, 97, (1, 40)).tolist()[0]
    params = SamplingParams(max_tokens=ORIGINAL - len(prompt), temperature=0.0, ignore_eos=True)
    (answer,) = served.engine(EngineConfig(num_kv_blocks=64)).generate([prompt], params)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(params.max_tokens):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert answer.token_ids == ids[len(prompt) :]
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_limit_is_told():
    torch.manual_seed(0)
    assert any("RoPE's original frequencies" in note for note in compiled(longrope().eval()).report.notes)
    with pytest.raises(ConfigError, match=f"more than the {ORIGINAL} tokens.*RoPE's original frequencies"):
        compiled(longrope().eval(), max_model_len=ORIGINAL + 1)


def test_frequencies_of_a_long_sequence_are_not_captured(model):
    with torch.no_grad():
        model(torch.randint(2, 97, (1, ORIGINAL + 8)), use_cache=False)
    with pytest.raises(
        CaptureError, match="rotary_emb has the frequencies of a sequence beyond its original length"
    ):
        compiled(model)
    with torch.no_grad():
        model(torch.randint(2, 97, (1, 8)), use_cache=False)
    assert compiled(model).max_model_len == ORIGINAL


def test_other_rope_has_no_limit():
    assert length_limit(default()) is None
