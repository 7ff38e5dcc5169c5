"""The Llama family against `transformers`, on tiny random models with weights large enough to show errors."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.export import Dim

from pagebinder.errors import CheckpointError, UnsupportedLayerError
from pagebinder.models.llama import LlamaConfig, LlamaForCausalLM
from tests.helpers import by_day

WINDOW = 8
NUM_TOKENS = 40
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama_tied_bias": lambda: transformers.LlamaConfig(
        **SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama3_rope": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_mixed": lambda: transformers.Qwen3Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "mistral_window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "mistral_full": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
}


@torch.no_grad()
def _oracle(family: str) -> torch.nn.Module:
    config = FAMILIES[family]()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        std = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.2
        offset = 0.0 if parameter.ndim == 2 else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + offset)
    return model


def _ids(num_sequences: int = 2) -> torch.Tensor:
    return torch.randint(0, 96, (num_sequences, NUM_TOKENS), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(family, tmp_path):
    oracle = _oracle(family)
    oracle.save_pretrained(tmp_path)
    ours = LlamaForCausalLM.from_pretrained(tmp_path)
    expected = oracle(_ids()).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(ours(_ids()), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_window_changes_the_logits(tmp_path):
    _oracle("mistral_window").save_pretrained(tmp_path)
    ours = LlamaForCausalLM.from_pretrained(tmp_path)
    logits = ours(_ids())
    altered = _ids()
    altered[:, 0] = (altered[:, 0] + 1) % 96
    reach = 3 * (WINDOW - 1)  # each of three layers carries a token over W - 1 positions
    difference = (ours(altered) - logits).abs().amax(dim=(0, 2))
    assert (difference[: reach + 1] > 0).all()
    assert (difference[reach + 1 :] == 0).all()


@torch.no_grad()
def test_position_ids_shift_like_transformers(tmp_path):
    oracle = _oracle("qwen3")
    oracle.save_pretrained(tmp_path)
    positions = torch.arange(NUM_TOKENS)[None].expand(2, -1) * 2 + torch.tensor([[5], [11]])
    expected = oracle(_ids(), position_ids=positions).logits
    ours = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(ours(_ids(), positions), expected, atol=1e-5, rtol=1e-5)
    assert (ours(_ids()) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_transformers_reads_what_we_save(family, tmp_path):
    _oracle(family).save_pretrained(tmp_path / "theirs")
    ours = LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    load = transformers.AutoModelForCausalLM.from_pretrained
    reloaded = load(tmp_path / "ours", attn_implementation="sdpa")
    torch.testing.assert_close(reloaded(_ids()).logits, ours(_ids()), atol=1e-5, rtol=1e-5)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "ours").config == ours.config


@torch.no_grad()
def test_sharded_checkpoint(tmp_path):
    oracle = _oracle("llama")
    oracle.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(ours(_ids()), oracle(_ids()).logits, atol=1e-5, rtol=1e-5)
    min(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="lacks weight files: model-00001"):
        LlamaForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
def test_dtype_and_rotary_precision(tmp_path):
    oracle = _oracle("llama")
    oracle.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    far = torch.arange(NUM_TOKENS)[None] + 1000
    exact = oracle(_ids(1), position_ids=far).logits
    error = (model(_ids(1), far).float() - exact).abs().mean()
    their_error = (theirs(_ids(1), position_ids=far).logits.float() - exact).abs().mean()
    assert error < 1.2 * their_error
    assert LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("family", by_day(["llama", "mistral_window", "qwen3_mixed"], ["qwen3_mixed"]))
@pytest.mark.parametrize("num_inputs", [1, 2])
def test_exports_with_dynamic_length(family, num_inputs, tmp_path):
    _oracle(family).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    positions = torch.arange(NUM_TOKENS)[None].expand(2, -1).contiguous() + 4
    inputs = (_ids(), positions)[:num_inputs]
    length = Dim("T", min=2, max=128)
    exported = torch.export.export(model, inputs, dynamic_shapes=({1: length},) * num_inputs)
    short = tuple(tensor[:, :29] for tensor in inputs)
    torch.testing.assert_close(exported.module()(*short), model(*short), atol=1e-5, rtol=1e-5)


def test_trains_and_init_is_seeded():
    config = LlamaConfig.from_dict(FAMILIES["qwen3"]().to_dict())
    models = [LlamaForCausalLM(config) for _ in range(2)]
    for model in models:
        model.init_weights(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    ids, optimizer = _ids(), torch.optim.AdamW(models[0].parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(models[0](ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        assert all(p.grad is not None for p in models[0].parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def _damage(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), "unexpected model.extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), r"norm.weight is \[7\], .* says \[48\]"),
    ],
)
def test_bad_tensors_are_named(change, message, tmp_path):
    _oracle("llama").save_pretrained(tmp_path)
    _damage(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_tied_checkpoint_may_repeat_but_not_contradict_the_embedding(tmp_path):
    _oracle("llama_tied_bias").save_pretrained(tmp_path)
    _damage(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    _damage(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]().to_dict()))
    with pytest.raises(CheckpointError, match=r"lacks weight files: model\.safetensors"):
        LlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "mamba"}, UnsupportedLayerError, "mamba"),
        ({"hidden_act": "gelu"}, UnsupportedLayerError, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, UnsupportedLayerError, "yarn"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            UnsupportedLayerError,
            "per layer type",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedLayerError, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, CheckpointError, "low_freq_factor"),
        ({"num_hidden_layers": None}, CheckpointError, "num_hidden_layers"),
    ],
)
def test_unsupported_configs(change, error, message):
    raw = {k: v for k, v in (FAMILIES["llama"]().to_dict() | change).items() if v is not None}
    with pytest.raises(error, match=message):
        LlamaConfig.from_dict(raw)


def test_old_rope_spelling_equals_new():
    new = FAMILIES["llama3_rope"]().to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    assert LlamaConfig.from_dict(old) == LlamaConfig.from_dict(new)
