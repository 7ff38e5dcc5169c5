"""Mixtures of experts in GGUF files: what they say of routers, and what is not served."""

from __future__ import annotations

import pytest
import torch

from pagebinder import CheckpointError
from pagebinder.frontend.model_path import source_from_path
from tests.frontend.gguf_files import write_gguf

SIGMOIDS = ("glm4moe", "dots1", "exaone-moe", "lfm2moe", "minimax-m2")


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        *((name, {"expert_gating_func": 1}, "expert_gating_func = 1 is not served") for name in SIGMOIDS),
        *((name, {"expert_gating_func": None}, "gating_func = None is not served") for name in SIGMOIDS[1:]),
        ("glm4moe", {"rope.dimension_count": 128}, "rope.dimension_count = 128 is not served"),
        ("glm4moe", {"rope.dimension_count": 31}, "rope.dimension_count = 31 is not served"),
        ("glm4moe", {"expert_weights_norm": 1}, "expert_weights_norm = 1 is not served"),
        ("glm4moe", {"expert_weights_scale": -1.0}, "expert_weights_scale = -1.0 is not served"),
        ("glm4moe", {"rope.dimension_sections": [8, 12, 12, 0]}, "glm4moe.rope.dimension_sections = "),
        ("exaone-moe", {"expert_shared_feed_forward_length": 64}, "shared_feed_forward_length = 64 is not served"),
        ("exaone-moe", {"rope.freq_base_swa": 1e4}, "rope.freq_base_swa = 10000.0 is not served"),
        ("ernie4_5-moe", {"expert_shared_feed_forward_length": 64}, "shared_feed_forward_length = 64 is not served"),
        ("ernie4_5-moe", {"expert_shared_count": 1.0}, "expert_shared_count = 1.0 is not served"),
        ("ernie4_5-moe", {"expert_weights_scale": 2.0}, "expert_weights_scale = 2.0 is not served"),
        ("ernie4_5-moe", {"interleave_moe_layer_step": None}, "lacks ernie4_5-moe.interleave_moe_layer_step"),
        ("lfm2moe", {"expert_weights_scale": 2.0}, "expert_weights_scale = 2.0 is not served"),
        ("hunyuan-moe", {"expert_feed_forward_length": 64}, "expert_feed_forward_length = 64 is not served"),
        ("hunyuan-moe", {"expert_shared_count": 2}, "expert_shared_count = 2 is not served"),
        ("hunyuan-moe", {"rope.scaling.factor": 2.0}, "rope.scaling.factor = 2.0 is not served"),
        ("minimax-m2", {"expert_feed_forward_length": 64}, "expert_feed_forward_length = 64 is not served"),
        ("ministral3", {"rope.scaling.type": "linear"}, "attention.temperature_scale = 0.1"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said(name, more, said, tmp_path):
    write_gguf(tmp_path / "model.gguf", name, more=more)
    with pytest.raises(CheckpointError, match=said):
        source_from_path(tmp_path / "model.gguf", weights=False)


@pytest.mark.parametrize("name", ["deepseek2 v3", "glm4moe", "ernie4_5-moe", "hunyuan-moe", "minimax-m2"])
def test_routers_in_float32_stay_so(name, tmp_path):
    """As far as transformers keeps them so in a model of bfloat16."""
    plain = write_gguf(tmp_path / "model.gguf", name)
    source = source_from_path(tmp_path / "model.gguf", dtype=torch.bfloat16)
    found, exact = source.module.state_dict(), plain.state_dict()
    routers = [key for key in found if ".gate." in key or "correction" in key]
    assert routers and all(torch.equal(found[key], exact[key].to(found[key].dtype)) for key in routers)


def test_layers_that_guess_tokens_are_left_out(tmp_path):
    write_gguf(tmp_path / "model.gguf", "glm4moe", num_hidden_layers=3, more={"nextn_predict_layers": 1})
    source = source_from_path(tmp_path / "model.gguf", weights=False)
    assert source.module.config.num_hidden_layers == 2
    assert "blk.2.exp_probs_b.bias" in source.tensors.left_over


def test_scores_need_no_correction(tmp_path):
    """Where no layer has one it is zero, as in llama.cpp; where some have, all must."""
    from tests.frontend import gguf_files

    def without(*layers):
        def tensors(model):
            found = gguf_files.named_tensors(model, "dots1")
            return {name: tensor for name, tensor in found.items() if name not in layers}

        return tensors

    path, names = tmp_path / "model.gguf", [f"blk.{layer}.exp_probs_b.bias" for layer in (1, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gguf_files.TENSORS, "dots1", without(*names))
        write_gguf(path, "dots1", num_hidden_layers=3)
        kept = source_from_path(path).module.state_dict()
        assert not any(kept[name].any() for name in kept if "correction" in name)
        patch.setitem(gguf_files.TENSORS, "dots1", without(names[1]))
        write_gguf(path, "dots1", num_hidden_layers=3)
        with pytest.raises(
            CheckpointError, match=r"lacks 1 .* model.layers.2.mlp.gate.e_score_correction_bias"
        ):
            source_from_path(path)
