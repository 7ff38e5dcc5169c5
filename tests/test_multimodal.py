"""Models of text and images: the text is served, by transformers' class for all inputs where there is no other."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import pagebinder
from pagebinder import CaptureError, CheckpointError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.compile import explain_model
from pagebinder.frontend.model_kinds import auto_class, parts_beside_text
from pagebinder.frontend.unsupported import refuse_unsupported
from tests.helpers import assert_source_chooses, tiny_llama
from tests.zoo.tiny_configs import telling_weights

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def qwen3_vl_config():
    ids = {
        "image_token_id": 120,
        "video_token_id": 121,
        "vision_start_token_id": 122,
        "vision_end_token_id": 123,
    }
    return transformers.Qwen3VLConfig(text_config=TEXT, vision_config=VISION, **ids)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, model) of a tiny Qwen3-VL."""
    path = tmp_path_factory.mktemp("qwen3_vl")
    model = telling_weights(transformers.Qwen3VLForConditionalGeneration(qwen3_vl_config()))
    model.save_pretrained(path)
    return path, model


def test_a_directory_is_served_as_text(checkpoint):
    path, model = checkpoint
    compiled = pagebinder.compile_model(path, CompileConfig(executable="eager"))
    prompt = torch.randint(4, 119, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    outputs = compiled.engine(EngineConfig(num_kv_blocks=32)).generate([prompt], params)
    assert_source_chooses(model, [prompt], outputs)
    assert "Text alone is served; nothing reads what belongs to vision_config" in compiled.explain()
    fused = next(p for p in compiled.report.passes if p.name == "fuse_qk_norm_rope_write")
    assert len(fused.matches) == TEXT["num_hidden_layers"]


def edited(path, to, change):
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(path, to, dirs_exist_ok=True)
    tensors = change(load_file(path / "model.safetensors"))
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_weights_that_nothing_reads_may_be_missing(checkpoint, tmp_path):
    config = CompileConfig(executable="eager")
    text = edited(checkpoint[0], tmp_path, lambda t: {k: v for k, v in t.items() if "visual" not in k})
    assert pagebinder.compile_model(text, config).report.notes
    without = edited(
        checkpoint[0], tmp_path, lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up" not in k}
    )
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        pagebinder.compile_model(without, config)


def test_tensors_that_are_left_over_are_told(checkpoint, tmp_path):
    more = {"model.language_model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}
    compiled = pagebinder.compile_model(
        edited(checkpoint[0], tmp_path, lambda t: t | more), CompileConfig(executable="eager")
    )
    assert any("1 tensors of the checkpoint are no part" in note for note in compiled.report.notes)


def test_explain_needs_no_weights(checkpoint, tmp_path):
    path, _ = checkpoint
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert "vision_config" in explain_model(tmp_path).explain()


def test_kinds_of_models():
    assert auto_class(qwen3_vl_config()).__name__ in (
        "AutoModelForMultimodalLM",
        "AutoModelForImageTextToText",
    )
    assert auto_class(tiny_llama().config) is transformers.AutoModelForCausalLM
    assert auto_class(transformers.Gemma3Config()) is transformers.AutoModelForCausalLM
    assert parts_beside_text(qwen3_vl_config()) == ["vision_config"]
    assert parts_beside_text(tiny_llama().config) == []


def test_a_model_that_needs_an_image_is_refused():
    class Captioner(torch.nn.Module):
        def forward(self, pixel_values, input_ids, position_ids=None):
            return input_ids

    with pytest.raises(CaptureError, match=r"takes pixel_values with every call"):
        refuse_unsupported(Captioner())


def test_a_model_that_is_only_a_holder_of_parts_is_refused():
    class Holder(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig
        _supports_sdpa = True

        def __init__(self, config):
            super().__init__(config)
            self.thinker = torch.nn.Linear(2, 2)

    with pytest.raises(CaptureError, match=r"no forward, only parts \(thinker\)"):
        pagebinder.compile_model(Holder(tiny_llama().config))
