"""Latent attention in GGUF files: what files say of it, and what is not served."""

from __future__ import annotations

import pytest
import torch

from pagebinder import CheckpointError
from pagebinder.frontend.model_path import source_from_path
from tests.frontend.gguf_files import write_gguf
from tests.frontend.test_gguf import IDS, check_tokens


def config_of(path, name, **options):
    write_gguf(path / "model.gguf", name, **options)
    return source_from_path(path / "model.gguf", weights=False).module.config


def test_tokens(tmp_path):
    path = tmp_path / "model.gguf"
    plain = write_gguf(path, "deepseek2 v3", {"ffn_down": "Q6_K", "attn_k_b": "Q5_0", "": "Q4_K"})
    check_tokens(path, plain)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("deepseek2 lite", {"expert_gating_func": 3}, "expert_gating_func = 3 is not served"),
        ("deepseek2 lite", {"expert_weights_norm": True}, "expert_weights_norm = True is not served"),
        ("deepseek2 lite", {"rope.scaling.yarn_log_multiplier": None}, "lacks deepseek2.rope.scaling.yarn_log_mul"),
        ("deepseek2 lite", {"rope.scaling.type": "linear"}, "rope.scaling.type = 'linear' is not served"),
        ("deepseek2 lite", {"expert_gating_func": 2}, None),
        ("deepseek2 v3", {"expert_gating_func": 1, "expert_weights_norm": False}, r"its blk.1.exp_probs_b.bias"),
        ("deepseek2 v3", {"attention.key_length": 80}, "attention.key_length = 80 is not served"),
        ("deepseek2 v3", {"attention.head_count_kv": 4}, "attention.head_count_kv = 4 is not served"),
        ("deepseek2 v3", {"attention.value_length_mla": None}, "lacks deepseek2.attention.value_length_mla"),
        ("deepseek2 v3", {"attention.key_length_mla": 32}, "attention.key_length_mla = 32 is not served"),
        ("deepseek2 v3", {"attention.key_length_mla": 81}, r"q_b_proj.weight is .320, 96. there, and .324, 96. in"),
        ("deepseek2 v3", {"attention.temperature_scale": 0.1}, "attention.temperature_scale = 0.1"),
        ("deepseek2 v3", {"expert_group_count": 3}, "expert_group_count = 3 is not served"),
        ("deepseek2 v3", {"expert_group_count": 8}, "expert_group_count = 8 is not served"),
        ("deepseek2 v3", {"expert_group_used_count": 1}, "expert_group_used_count = 1 is not served"),
        ("deepseek2 v3", {"leading_dense_block_count": 4}, "leading_dense_block_count = 4 is not served"),
        ("deepseek2 v3", {"leading_dense_block_count": 0}, "nothing in a deepseek_v3 .* is its blk.0.ffn_gate"),
        ("deepseek2 v3", {"expert_shared_count": 0}, "expert_shared_count = 0 is not served"),
        ("youtu", {"leading_dense_block_count": 1}, "leading_dense_block_count = 1 is not served"),
        ("youtu", {"expert_used_count": 2}, "expert_used_count = 2 is not served"),
        ("deepseek2 whole", {"attention.head_count_kv": 1}, "attention.head_count_kv = 1 is not served"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said(name, more, said, tmp_path):
    write_gguf(tmp_path / "model.gguf", name, more=more)
    if said is None:  # nothing of a file of V2 with sigmoids says that it is not V3
        assert (
            source_from_path(tmp_path / "model.gguf", weights=False).module.config.model_type == "deepseek_v3"
        )
        return
    with pytest.raises(CheckpointError, match=said):
        source_from_path(tmp_path / "model.gguf", weights=False)


def test_gating_that_is_not_said_is_a_softmax(tmp_path):
    assert config_of(tmp_path, "deepseek2", more={"expert_gating_func": None}).model_type == "deepseek_v2"


def test_glm_flash_has_sigmoids(tmp_path):
    """As llama.cpp, whose converter writes none of its gating: it is known by its layers and tokens."""
    sizes = {"num_hidden_layers": 47, "vocab_size": 154_880, "hidden_size": 32, "intermediate_size": 32}
    config = config_of(
        tmp_path,
        "deepseek2 without yarn",
        more={"expert_gating_func": None},
        **sizes,
        moe_intermediate_size=64,
    )
    assert config.model_type == "deepseek_v3"


def test_files_of_groups_that_say_none_have_one(tmp_path):
    more = {"expert_group_count": None, "expert_group_used_count": None, "expert_weights_scale": 0.0}
    config = config_of(tmp_path, "deepseek2 v3", more=more)
    assert (config.n_group, config.topk_group, config.routed_scaling_factor) == (1, 1, 1.0)


def test_yarn_has_the_factor_of_attention(tmp_path):
    assert config_of(tmp_path, "deepseek2 lite").rope_parameters["mscale_all_dim"] == 0.707


def test_layers_that_guess_tokens_are_left_out(tmp_path):
    plain = write_gguf(
        tmp_path / "model.gguf", "deepseek2 v3", num_hidden_layers=3, more={"nextn_predict_layers": 1}
    )
    source = source_from_path(tmp_path / "model.gguf", dtype=torch.float32)
    assert source.module.config.num_hidden_layers == 2
    assert "blk.2.attn_k_b.weight" in source.tensors.left_over
    plain.model.layers = plain.model.layers[:2]
    with torch.no_grad():
        torch.testing.assert_close(
            source.module(IDS).logits, plain(IDS, use_cache=False).logits, rtol=2e-4, atol=2e-4
        )


def test_matrices_of_latents_come_in_pairs(tmp_path, monkeypatch):
    from tests.frontend import gguf_files

    tensors, path = gguf_files.TENSORS["deepseek2"], tmp_path / "model.gguf"
    for change, said in (
        (lambda found: found.pop("blk.1.attn_v_b.weight"), r"kv_b_proj.weight cannot be made of .4, 64, 48."),
        (
            lambda found: found.update({"blk.1.attn_kv_b.weight": found["blk.1.attn_v_b.weight"]}),
            "not go with others",
        ),
    ):

        def changed(model, change=change):
            found = tensors(model)
            change(found)
            return found

        monkeypatch.setitem(gguf_files.TENSORS, "deepseek2", changed)
        write_gguf(path, "deepseek2 v3")
        with pytest.raises(CheckpointError, match=said):
            source_from_path(path, weights=False)
