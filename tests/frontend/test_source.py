"""Where models come from: modules and checkpoint directories, and what is said when one is broken."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from pagebinder import CheckpointError, CompileConfig, ConfigError
from pagebinder.compile import load_source
from pagebinder.frontend.source import DEFAULT_MAX_MODEL_LEN, source_from_dir, source_from_module
from tests.helpers import VOCAB_SIZE, tiny_llama
from tests.moe_models import tiny_deepseek_v3


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.register_buffer("table", torch.ones(4), persistent=False)


def test_facts_of_a_plain_module():
    source = source_from_module(Plain())
    assert (source.vocab_size, source.max_model_len) == (50, DEFAULT_MAX_MODEL_LEN)
    assert not source.is_transformers and source.num_attention_layers is None
    assert source.dtype is torch.float32 and source.tokenizer() is None


def test_facts_of_a_transformers_model():
    source = source_from_module(tiny_llama(eos_token_id=[5, 7], bos_token_id=3))
    assert source.is_transformers
    assert (source.vocab_size, source.max_model_len, source.num_attention_layers) == (VOCAB_SIZE, 512, 2)
    assert source.eos_token_ids == {5, 7} and source.bos_token_id == 3


@pytest.mark.parametrize(
    ("said", "ends"),
    [(None, set()), (6, {6}), ([6, 7], {6, 7}), (torch.tensor([6, 7]), {6, 7}), (torch.tensor(6), {6})],
)
def test_the_generation_config_of_a_module_says_what_ends_a_sequence(said, ends):
    """As for transformers' generate, which goes on where it says nothing, whatever the config says."""
    model = tiny_llama(eos_token_id=5)
    model.generation_config.eos_token_id = said
    assert source_from_module(model).eos_token_ids == ends


def test_end_tokens_outside_the_vocabulary_are_ignored():
    assert source_from_module(tiny_llama(eos_token_id=VOCAB_SIZE + 9)).eos_token_ids == frozenset()


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_without_conversion_the_module_is_shared(dtype):
    model = tiny_llama()
    assert source_from_module(model, dtype=dtype).module is model


def test_conversion_leaves_the_users_model_alone():
    model = tiny_llama()
    source = source_from_module(model, dtype=torch.bfloat16)
    assert source.dtype is torch.bfloat16
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert source.module is not model


def test_conversion_does_not_round_rope_frequencies(tmp_path):
    """As transformers loads a checkpoint in bfloat16; rounded frequencies turn far tokens by wrong angles."""
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    converted = source_from_module(model, dtype=torch.bfloat16).module
    loaded = source_from_dir(tmp_path, dtype=torch.bfloat16).module
    assert converted.model.rotary_emb.inv_freq.dtype is torch.float32
    assert torch.equal(converted.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
    ids = torch.arange(40)[None] % VOCAB_SIZE
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversion_keeps_in_float32_what_loading_keeps(tmp_path, dtype):
    """Routers of many mixtures: rounded scores choose other experts."""
    model = tiny_deepseek_v3()
    model.save_pretrained(tmp_path)
    converted = source_from_module(model, dtype=dtype).module
    loaded = source_from_dir(tmp_path, dtype=dtype).module
    described = source_from_dir(tmp_path, dtype=dtype, weights=False).module
    router = model.model.layers[1].mlp.gate
    for found in (converted, loaded, described):
        gate = found.model.layers[1].mlp.gate
        assert {gate.weight.dtype, gate.e_score_correction_bias.dtype} == {torch.float32}
    expected = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert expected == {name: tensor.dtype for name, tensor in converted.state_dict().items()}
    assert expected == {name: tensor.dtype for name, tensor in described.state_dict().items()}
    assert torch.equal(converted.model.layers[1].mlp.gate.weight, router.weight)
    assert source_from_module(loaded, dtype=dtype).module is loaded
    wide = source_from_module(loaded, dtype=torch.float32).module
    assert all(p.dtype is torch.float32 for p in wide.parameters())


def test_conversion_of_a_plain_module_converts_its_buffers_too():
    assert source_from_module(Plain(), dtype=torch.bfloat16).module.table.dtype is torch.bfloat16


@pytest.fixture
def checkpoint(tmp_path):
    tiny_llama(eos_token_id=5).save_pretrained(tmp_path)
    return tmp_path


def test_a_checkpoint_directory(checkpoint):
    source = source_from_dir(str(checkpoint))
    assert source.path == checkpoint and source.is_transformers and not source.module.training
    assert source.dtype is torch.float32 and source.eos_token_ids == {5}
    expected = tiny_llama(eos_token_id=5).state_dict()
    for name, tensor in source.module.state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize(
    ("has_gpu", "device", "there"),
    [(True, "auto", "cuda"), (True, "cuda:1", "cuda:1"), (True, "cpu", "cpu"), (False, "auto", "cpu")],
)
def test_a_checkpoint_directory_goes_to_the_gpu_if_there_is_one(
    has_gpu, device, there, checkpoint, monkeypatch
):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nn.Module, "to", lambda self, device: asked.append(device))
    load_source(checkpoint, CompileConfig(device=device))
    assert asked == [there]


def test_a_gpu_that_is_not_there_is_an_error(checkpoint, monkeypatch):
    with pytest.raises(ConfigError, match="no CUDA GPU is available"):
        load_source(checkpoint, CompileConfig(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="there are 2 GPUs here, counted from 0"):
        load_source(checkpoint, CompileConfig(device="cuda:2"))


def test_another_dtype_than_the_stored_one(checkpoint):
    assert source_from_dir(checkpoint, dtype=torch.bfloat16).dtype is torch.bfloat16


def test_no_weights_are_needed_for_the_meta_device(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    assert source_from_dir(checkpoint, weights=False).device.type == "meta"


def test_the_generation_config_says_what_ends_a_sequence(checkpoint):
    (checkpoint / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [6, 7], "bos_token_id": 2})
    )
    source = source_from_dir(checkpoint)
    assert source.eos_token_ids == {6, 7} and source.bos_token_id == 2


def test_a_generation_config_without_end_tokens_has_none(checkpoint):
    file = checkpoint / "generation_config.json"
    file.write_text(json.dumps({"bos_token_id": 2}))
    for weights in (True, False):
        assert source_from_dir(checkpoint, weights=weights).eos_token_ids == frozenset()
    file.unlink()
    for weights in (True, False):
        assert source_from_dir(checkpoint, weights=weights).eos_token_ids == {5}


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_a_tensor(directory):
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


BROKEN = {
    "no config.json": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "broken JSON": (lambda d: (d / "config.json").write_text('{"model_type": '), "not valid JSON"),
    "JSON that is no dict": (lambda d: (d / "config.json").write_text("[1]"), "holds a list"),
    "unknown model_type": (lambda d: edit_config(d, model_type="llamma"), "model_type 'llamma'"),
    "no model_type": (lambda d: (d / "config.json").write_text("{}"), "cannot be read"),
    "no width": (
        lambda d: edit_config(d, hidden_size=0),
        r"config\.json: hidden_size is 0, and must be at least 1",
    ),
    "no tokens": (lambda d: edit_config(d, vocab_size=0), "vocab_size is 0"),
    "no dtype": (
        lambda d: edit_config(d, dtype="bfloat17"),
        "dtype is 'bfloat17', and must be the name of a dtype",
    ),
    "no quantisation": (
        lambda d: edit_config(d, quantization_config=3),
        "quantization_config is 3, and must be",
    ),
    "no safetensors": (lambda d: (d / "model.safetensors").unlink(), "no \\*.safetensors"),
    "truncated safetensors": (truncate, "cannot be loaded"),
    "empty safetensors": (lambda d: (d / "model.safetensors").write_bytes(b""), "cannot be loaded"),
    "missing tensors": (drop_a_tensor, "lacks 1 tensor .*q_proj"),
    "other shapes": (
        lambda d: edit_config(d, intermediate_size=64),
        "_proj.weight has the shape .* and the model",
    ),
    "broken generation config": (lambda d: (d / "generation_config.json").write_text("{"), "not valid JSON"),
    "generation config that is no dict": (
        lambda d: (d / "generation_config.json").write_text("7"),
        "holds a int, not",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_named(name, checkpoint):
    break_it, message = BROKEN[name]
    break_it(checkpoint)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as error:
        source_from_dir(checkpoint)
    assert str(checkpoint) in str(error.value)


def test_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        source_from_dir(tmp_path / "absent")


def test_a_broken_tokenizer_is_named(checkpoint):
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        source_from_dir(checkpoint).tokenizer()
