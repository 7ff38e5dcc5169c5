"""Architectures that are refused are refused with the true reason, and only they are."""

from __future__ import annotations

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

import pagebinder
from pagebinder import CaptureError, CompileConfig
from pagebinder.frontend.unsupported import TRAITS, refuse_unsupported
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import tiny_config

REASONS = {
    ("causal", "blt"): "reduces bytes to patches",
    ("causal", "cpmant"): "prompt tokens in front",
    ("causal", "doge"): "dynamic mask",
    ("causal", "prophetnet"): "a stream of queries for each of the next tokens",
    ("causal", "reformer"): "within chunks of the whole padded sequence",
    ("causal", "xlnet"): "embeddings of the distance",
    ("encoder", "convbert"): "convolutions",
    ("encoder", "fnet"): "Fourier transform",
    ("encoder", "funnel"): "pooling neighbours",
    ("encoder", "longformer"): "global tokens",
    ("encoder", "mobilebert"): "both neighbours",
    ("encoder", "mra"): "blocks that it picks",
    ("encoder", "nystromformer"): "landmarks",
    ("encoder", "perceiver"): "latents",
    ("encoder", "yoso"): "hashes collide",
    ("seq2seq", "led"): "global tokens",
    ("seq2seq", "longt5"): "within and beside blocks",
    ("seq2seq", "pegasus_x"): "global tokens beside the sequence",
    ("seq2seq", "encoder-decoder"): "count the rows of a call",
    ("seq2seq", "t5gemma2"): "in one softmax",
}
# One of each kind of attention, recurrence and encoder that is served, and those nearest to a trait.
SERVED = {
    "causal": (
        "llama",
        "deepseek_v3",
        "deepseek_v4",
        "bloom",
        "mamba2",
        "qwen3_next",
        "qwen4_exp_text",
        "gpt_oss",
        "hy_v4",
        "llama4_text",
        "xmod",
        "xlm",
    ),
    "encoder": ("bert", "mpnet", "deberta", "modernbert", "tapas"),
    "seq2seq": ("bart", "t5", "t5gemma", "m2m_100", "nllb-moe"),
    "multimodal": ("glm5_next",),
}


def on_meta(family: str, name: str) -> torch.nn.Module:
    """A tiny model without weights."""
    architecture = next((a for a in architectures(family) if a.name == name), None)
    if architecture is None:
        pytest.skip(f"this release of transformers has no {name}")
    try:
        config = tiny_config(architecture)
    except StrictDataclassError as error:
        pytest.skip(f"the {name} of this release of transformers is another one: {error}")
    with torch.device("meta"):
        return architecture.model_class(config)


def big_bird(attention_type: str) -> torch.nn.Module:
    architecture = next(a for a in architectures("encoder") if a.name == "big_bird")
    config = tiny_config(architecture)
    config.attention_type = attention_type
    with torch.device("meta"):
        return architecture.model_class(config)


def dory(mode: str) -> torch.nn.Module:
    model = on_meta("causal", "dory")
    model.config.recurrent_kv_cache_mode = mode
    return model


def test_loops_with_one_cache_for_all_passes_are_refused():
    """Their results depend on how a prompt is cut into steps."""
    with pytest.raises(CaptureError, match=r"cut into steps.*per_loop"):
        refuse_unsupported(dory("last_loop"))
    refuse_unsupported(dory("per_loop"))
    once = dory("last_loop")
    once.config.n_recurrent_loops = 1
    refuse_unsupported(once)


def another_indexer() -> torch.nn.Module:
    """All indexers of this release are served; those of the next one are refused until they have been read."""
    model = on_meta("causal", "glm_moe_dsa")
    attention = model.model.layers[0].self_attn
    attention.__class__ = type("AnotherAttention", (type(attention),), {})
    return model


def test_big_bird_is_served_only_without_random_blocks():
    refuse_unsupported(big_bird("original_full"))
    with pytest.raises(CaptureError, match="chosen at random"):
        refuse_unsupported(big_bird("block_sparse"))


@pytest.mark.parametrize(("family", "name"), REASONS)
def test_the_reason_is_told(family, name):
    with pytest.raises(CaptureError, match=REASONS[family, name]):
        refuse_unsupported(on_meta(family, name))


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in SERVED.items() for name in names]
)
def test_a_model_without_a_trait_is_not_refused(family, name):
    refuse_unsupported(on_meta(family, name))


def test_every_trait_is_that_of_a_model_above():
    """A trait that transformers no longer has would refuse nothing, and nobody would notice."""
    models = [*(on_meta(*key) for key in REASONS), big_bird("block_sparse"), another_indexer()]
    models.append(dory("last_loop"))
    for trait in TRAITS:
        assert any(trait.found(part) for model in models for part in model.modules()), trait.reason


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BertForSequenceClassification", "its head judges a text"),
        ("LlamaForSequenceClassification", "its head judges a text"),
        ("LlamaModel", "returns hidden states and no logits"),
    ],
)
def test_models_without_a_head_that_writes_are_told_by_their_head(name, reason, tmp_path):
    config = {"B": transformers.BertConfig, "L": transformers.LlamaConfig}[name[0]](**SMALL)
    model = getattr(transformers, name)(config)
    with pytest.raises(CaptureError, match=f"{name} .*{reason}"):
        pagebinder.compile_model(model, CompileConfig(executable="eager"))
    if "Classification" in name:
        model.save_pretrained(tmp_path)
        with pytest.raises(CaptureError, match=f"{name} .*{reason}"):
            pagebinder.compile_model(tmp_path, CompileConfig(executable="eager"))
