"""Models of text and images: the text is served, by transformers' class for all inputs where there is no other."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import pagebinder
from pagebinder import CaptureError, CheckpointError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.compile import explain_model
from pagebinder.frontend.capture import capture
from pagebinder.frontend.experts_interface import experts_modules, hooked_experts
from pagebinder.frontend.model_kinds import auto_class, parts_beside_text
from pagebinder.frontend.source import source_from_dir, source_from_module
from pagebinder.frontend.unsupported import refuse_unsupported
from tests.helpers import assert_source_chooses, by_day, tiny_llama
from tests.zoo.architectures import architectures
from tests.zoo.reference import source_logits, tokens
from tests.zoo.tiny_configs import telling_weights, tiny_model

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
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor .*layers\.1\.mlp\.up_proj"):
        pagebinder.compile_model(without, config)


def test_tensors_that_are_left_over_are_told(checkpoint, tmp_path):
    more = {"model.language_model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}
    compiled = pagebinder.compile_model(
        edited(checkpoint[0], tmp_path, lambda t: t | more), CompileConfig(executable="eager")
    )
    assert any("1 tensors of the checkpoint are no part" in note for note in compiled.report.notes)


def in_zoo(name):
    """The zoo's tiny model of a type; skips where this transformers has none."""
    found = [a for a in architectures("multimodal") if a.name == name]
    if not found:
        pytest.skip(f"this transformers has no {name}")
    return tiny_model(found[0])


def greedy(source, prompts, encoder_prompt=None):
    """(compiled, its outputs): 8 tokens for each prompt."""
    compiled = pagebinder.compile_model(source, CompileConfig(executable="eager"))
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    more = {} if encoder_prompt is None else {"encoder_prompt": encoder_prompt}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params, **more)
    outputs = {}
    while engine.has_unfinished:
        outputs |= {int(o.request_id): o for o in engine.step() if o.finished}
    return compiled, [outputs[i] for i in range(len(prompts))]


OMNI = ["qwen2_5_omni", "qwen3_omni_moe"]


@pytest.mark.parametrize("name", by_day(OMNI, OMNI[1:]))
def test_of_a_holder_of_parts_the_thinker_is_served(name, tmp_path):
    model, prompts = in_zoo(name), [tokens(20), tokens(5)]
    parts = [child for child, _ in model.named_children() if child != "thinker"]
    assert len(parts) == 2, "a talker, and what makes sounds of its codes"
    compiled, outputs = greedy(model, prompts)
    assert_source_chooses(model.thinker, prompts, outputs)
    whole = tmp_path / "whole"
    model.save_pretrained(whole)
    loaded, from_directory = greedy(whole, prompts)
    assert [o.token_ids for o in from_directory] == [o.token_ids for o in outputs]
    for served in (compiled, loaded, explain_model(whole)):
        assert ", ".join(f"{part}_config" for part in parts) in served.report.notes[0]
        assert served.report.model_class == type(model.thinker).__name__
    assert not any("are no part of the model" in note for note in loaded.report.notes)
    more = {"thinker.model.layers.7.weight": torch.zeros(2)}
    told = source_from_dir(edited(whole, tmp_path / "more", lambda t: t | more)).tensors.note()
    assert told.startswith("1 tensors") and told.endswith("layers.7.weight.")


def test_a_holder_in_fp8_is_refused(tmp_path):
    in_zoo("qwen3_omni_moe").config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | fp8))
    with pytest.raises(CheckpointError, match="qwen3_omni_moe in 8 or 4 bits"):
        explain_model(tmp_path)


def test_a_holder_in_another_dtype_stays_as_it_is():
    model = in_zoo("qwen3_omni_moe")
    source = source_from_module(model, dtype=torch.bfloat16)
    assert source.dtype is torch.bfloat16 and source.module is not model.thinker
    assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", ["chameleon", "ernie4_5_vl_moe"])
def test_other_directories_are_served_as_text(name, tmp_path):
    model, prompts = in_zoo(name), [tokens(20), tokens(5)]
    model.save_pretrained(tmp_path)
    assert_source_chooses(model, prompts, greedy(tmp_path, prompts)[1])


def test_an_encoder_decoder_is_served_from_its_directory(tmp_path):
    model, prompts, encoder_ids = in_zoo("florence2"), [tokens(6), tokens(1)], tokens(9)
    model.save_pretrained(tmp_path)
    _, outputs = greedy(tmp_path, prompts, encoder_ids)
    for ids, output in zip(prompts, outputs, strict=True):
        logits = source_logits(model, ids + list(output.token_ids), encoder_ids)[len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(output.token_ids)


def test_experts_for_images_alone_need_not_be_in_the_graph():
    model = in_zoo("ernie4_5_vl_moe")
    gm, _ = capture(source_from_module(model))
    experts = experts_modules(model)
    of_text = [path for path in experts if "text_moe" in path]
    for_images = [path for path in experts if "vision_moe" in path]
    assert len(of_text) == len(for_images) > 0
    assert [m.module_path for m in hooked_experts(model, gm).matches] == of_text
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        gm.graph.create_node("get_attr", f"{for_images[0]}.down_proj")
    with pytest.raises(CaptureError, match="vision_moe"):
        hooked_experts(model, gm)


def test_what_a_config_class_says_of_weights_is_heard(tmp_path):
    """Inkling 2 is published without a word on its weights in blocks of 32 in config.json: before transformers 5.24
    the class of its config says it."""
    config = in_zoo("inkling2").config.to_dict()
    config.pop("transformers_version")
    if not hasattr(transformers.Inkling2Config.from_dict(dict(config)), "quantization_config"):
        pytest.skip("the config class of this release of transformers says nothing of weights")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "stored in mxfp8" in explain_model(tmp_path).explain()


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
