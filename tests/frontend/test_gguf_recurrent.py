"""GGUF files of models with Mamba layers: what is particular to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagebinder import CheckpointError
from pagebinder.frontend.gguf.file import read_gguf
from pagebinder.frontend.model_path import source_from_path
from pagebinder.frontend.small_groups import fit_for_gpu
from tests.frontend.gguf_files import write_gguf
from tests.frontend.test_gguf import IDS, check_tokens, edited

TWO_GROUPS = {"ssm.group_count": 2}
EIGHT_HEADS = {"ssm.time_step_rank": 8}


def config_of(path):
    return source_from_path(path, weights=False).module.config


def check_logits(path, plain) -> None:
    source = source_from_path(path, dtype=torch.float32)
    with torch.no_grad():
        expected, logits = plain(IDS).logits, source.module(IDS).logits
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("name", "kinds", "more", "options"),
    [
        ("nemotron_h_moe", {"ffn_down": "Q6_K", "": "Q4_K"}, {}, {}),
        ("mamba2", "Q8_0", EIGHT_HEADS, {"num_heads": 8, "head_dim": 64}),
    ],
)
def test_tokens(name, kinds, more, options, tmp_path):
    path = tmp_path / "model.gguf"
    plain = write_gguf(path, name, kinds, more=more, **options)
    check_tokens(path, plain)


def test_rows_that_fill_no_panel_keep_their_codes(tmp_path):
    """z, x, B, C and time steps of 8 heads are 1,064 rows."""
    options = {"mamba_n_heads": 8, "mamba_d_head": 64}
    plain = write_gguf(tmp_path / "model.gguf", "granitehybrid", "Q4_K", more=EIGHT_HEADS, **options)
    check_logits(tmp_path / "model.gguf", plain)
    sources = [source_from_path(tmp_path / "model.gguf", weights=weights) for weights in (True, False)]
    for source in sources:
        layer = source.module.model.layers[0].mamba.in_proj
        assert (layer.num_rows, layer.codes.shape[0]) == (1064, 34)
    weight = plain.model.layers[0].mamba.in_proj.weight
    torch.testing.assert_close(
        sources[0].module.model.layers[0].mamba.in_proj.weight(), weight, rtol=0, atol=1e-6
    )


def test_such_rows_are_expanded_for_a_gpu_without_the_others(tmp_path):
    plain = write_gguf(tmp_path / "model.gguf", "qwen2", "Q6_K", head_dim=40)
    source = source_from_path(tmp_path / "model.gguf", dtype=torch.float32)
    fit_for_gpu(source.module, torch.float32, source.stored_weights)
    layer = source.module.model.layers[0].self_attn.k_proj
    assert type(layer) is torch.nn.Linear and layer.weight.shape == (80, 256) and layer.bias.shape == (80,)
    with torch.no_grad():
        expected = plain(IDS).logits
        torch.testing.assert_close(source.module(IDS).logits, expected, rtol=2e-4, atol=2e-4)


def test_such_rows_with_biases(tmp_path):
    plain = write_gguf(tmp_path / "model.gguf", "qwen2", "Q8_0", head_dim=40)
    layer = source_from_path(tmp_path / "model.gguf").module.model.layers[0].self_attn.k_proj
    assert layer.num_rows == 80 and layer.bias.shape == (96,)
    check_logits(tmp_path / "model.gguf", plain)


def test_such_rows_are_expanded_for_a_gpu_that_does_not_read_them(tmp_path):
    options = {"mamba_n_heads": 8, "mamba_d_head": 64}
    plain = write_gguf(tmp_path / "model.gguf", "granitehybrid", "Q6_K", more=EIGHT_HEADS, **options)
    source = source_from_path(tmp_path / "model.gguf", dtype=torch.float32)
    fit_for_gpu(source.module, torch.float32, source.stored_weights)
    assert source.module.model.layers[0].mamba.in_proj.weight.shape == (1064, 256)
    with torch.no_grad():
        torch.testing.assert_close(source.module(IDS).logits, plain(IDS).logits, rtol=2e-4, atol=2e-4)


# ---- Mamba -------------------------------------------------------------------------------------------------------


def test_a_is_what_the_file_says(tmp_path):
    plain = write_gguf(tmp_path / "model.gguf", "mamba2")
    stored = read_gguf(tmp_path / "model.gguf").tensors["blk.0.ssm_a"]
    a_log = source_from_path(tmp_path / "model.gguf").module.backbone.layers[0].mixer.A_log
    assert a_log.dtype is torch.float32 and stored.shape == (32, 1)
    torch.testing.assert_close(a_log, plain.backbone.layers[0].mixer.A_log, rtol=0, atol=2e-7)
    assert torch.equal(a_log, torch.from_numpy(-stored.data[:, 0]).log())


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_above_0_is_refused(name, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, name)
    stored = read_gguf(path).tensors["blk.1.ssm_a"].data.tobytes()
    whole = bytearray(path.read_bytes())
    at = whole.index(stored)
    whole[at : at + 4] = np.array([0.5], dtype=np.float32).tobytes()
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="ssm_a holds a number that no"):
        source_from_path(path)


@pytest.mark.parametrize(("name", "option"), [("mamba2", "n_groups"), ("granitehybrid", "mamba_n_groups")])
def test_norms_of_groups(name, option, tmp_path):
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    plain = write_gguf(tmp_path / "model.gguf", name, more=TWO_GROUPS, **{option: 2})
    if hasattr(MambaRMSNormGated(64, 32), "group_size"):
        check_logits(tmp_path / "model.gguf", plain)
    else:
        with pytest.raises(CheckpointError, match="norms of 2 groups, which transformers"):
            source_from_path(tmp_path / "model.gguf")


def test_norms_of_groups_need_a_transformers_that_has_them(tmp_path, monkeypatch):
    from transformers.models.mamba2 import modeling_mamba2

    write_gguf(tmp_path / "model.gguf", "mamba2", more=TWO_GROUPS, n_groups=2)
    monkeypatch.setattr(modeling_mamba2, "MambaRMSNormGated", type("Norm", (torch.nn.Identity,), {}))
    with pytest.raises(CheckpointError, match=r"norms of 2 groups, which .* does not compute; 5.23 does"):
        source_from_path(tmp_path / "model.gguf")


def test_codes_that_a_model_reads_itself_are_expanded(tmp_path):
    write_gguf(tmp_path / "model.gguf", "mamba", "Q8_0")
    refusals = source_from_path(tmp_path / "model.gguf").stored_weights.refusals
    assert {refusal.module_path: refusal.reason for refusal in refusals} == {
        "backbone.layers.0.mixer.dt_proj": "Mamba reads its weight as a matrix: it is expanded",
        "backbone.layers.1.mixer.dt_proj": "Mamba reads its weight as a matrix: it is expanded",
        "lm_head": "its model reads the dtype of its weight: it is expanded",
    }


# ---- hybrids -----------------------------------------------------------------------------------------------------


def test_a_tied_head_has_the_multiplier_of_embeddings(tmp_path):
    """llama.cpp's converter multiplies the table, of which the head is made."""
    plain = write_gguf(tmp_path / "model.gguf", "falcon-h1", tie_word_embeddings=True)
    config = config_of(tmp_path / "model.gguf")
    assert config.tie_word_embeddings and config.lm_head_multiplier == config.embedding_multiplier == 1
    check_logits(tmp_path / "model.gguf", plain)


def test_time_steps_of_nemotron_are_not_clamped(tmp_path):
    """transformers clamps those of its checkpoints; small ones would change."""
    write_gguf(tmp_path / "model.gguf", "nemotron_h")
    module = source_from_path(tmp_path / "model.gguf", weights=False).module
    least = module.model.layers[0].mixer.time_step_limit[0]
    assert 0 < least < 1e-20


def test_experts_of_nemotron(tmp_path):
    """Without a latent size they see the model's channels; without a length of their own they share the layer's."""
    more = {
        "moe_latent_size": None, "expert_feed_forward_length": None, "feed_forward_length": [0, 1024, 0],
        "attention.layer_norm_rms_epsilon": 1e-3,
    }  # fmt: skip
    options = {"moe_latent_size": None, "layer_norm_epsilon": 1e-3}
    plain = write_gguf(tmp_path / "model.gguf", "nemotron_h_moe", more=more, **options)
    check_logits(tmp_path / "model.gguf", plain)


def test_routers_have_the_dtype_that_transformers_gives_them(tmp_path):
    """Float32 in later versions, whatever the model has."""
    path = tmp_path / "model.gguf"
    plain = write_gguf(path, "nemotron_h_moe")
    sources = [source_from_path(path, dtype=torch.bfloat16, weights=weights) for weights in (True, False)]
    weight, on_meta, expected = (
        model.model.layers[1].mixer.gate.weight for model in (*(source.module for source in sources), plain)
    )
    assert weight.dtype is on_meta.dtype and torch.equal(weight, expected.to(on_meta.dtype))


def test_layers_of_nemotron_that_guess_tokens_are_left_out(tmp_path):
    path = tmp_path / "model.gguf"
    more = {
        "block_count": 4, "nextn_predict_layers": 1, "attention.head_count_kv": [0, 0, 2, 2],
        "feed_forward_length": [0, 512, 0, 512],
    }  # fmt: skip
    plain = write_gguf(path, "nemotron_h_moe", more=more)
    guesses = np.zeros((256, 512), dtype=np.float32)
    edited(path, lambda writer: writer.add_tensor("blk.3.nextn.eh_proj.weight", guesses))
    assert source_from_path(path, weights=False).tensors.left_over == ("blk.3.nextn.eh_proj.weight",)
    check_logits(path, plain)


def test_layers_of_jamba_without_experts(tmp_path):
    more = {"expert_count": 1, "expert_used_count": 1, "attention.head_count_kv": [0, 2, 0]}
    plain = write_gguf(
        tmp_path / "model.gguf", "jamba", more=more, num_experts=1, tie_word_embeddings=True
    )  # fmt: skip
    check_logits(tmp_path / "model.gguf", plain)


def test_granite_4_without_mamba_layers(tmp_path):
    """Its files have the name of older ones, and say sizes of what they lack."""
    more = {
        "expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": 256, "ssm.conv_kernel": 4,
        "ssm.state_size": 16, "ssm.group_count": 1, "ssm.inner_size": 512, "ssm.time_step_rank": 32,
        "rope.scaling.finetuned": True,
    }  # fmt: skip
    check_logits(tmp_path / "model.gguf", write_gguf(tmp_path / "model.gguf", "granite", more=more))


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("granitehybrid", {"rope.dimension_count": 32}, "rope.dimension_count = 32 is not served"),
        ("granitehybrid", {"attention.head_count_kv": [0, 8]}, r"head_count_kv = \[0, 8\] is not served"),
        ("granitehybrid", {"attention.head_count_kv": 0}, "head_count_kv = 0 is not served"),
        ("granitehybrid", {"ssm.inner_size": 500}, "ssm.time_step_rank = 32 is not served"),
        ("granitehybrid", {"ssm.group_count": 3}, "ssm.group_count = 3 is not served"),
        ("granitehybrid", {"expert_count": 4, "expert_used_count": 2}, "lacks 6 tensors of its model"),
        ("granite", {"expert_count": 4}, "granite.expert_count = 4 is not served"),
        ("nemotron_h", {"feed_forward_length": [0, 0, 0]}, r"feed_forward_length = \[0, 0, 0\] is not served"),
        ("nemotron_h", {"feed_forward_length": [64, 256, 0]}, r"feed_forward_length = \[64, 256, 0\] is not"),
        ("nemotron_h", {"attention.head_count_kv": [2, 0, 0]}, "is its blk.0.ssm_in.weight"),
        ("nemotron_h", {"attention.scale": 0.5}, "attention.scale = 0.5 is not served"),
        ("nemotron_h_moe", {"expert_used_count": [0, 2, 1]}, "expert_used_count differs from layer to layer"),
        ("nemotron_h_moe", {"moe_latent_size": 64}, r"_latent_proj.weight is \[256, 256\] there, and \["),
        ("mamba2", {"ssm.inner_size": 520}, "ssm.time_step_rank = 32 is not served"),
        ("mamba", {"ssm.inner_size": 500}, "ssm.inner_size = 500 is not served"),
        ("lfm2moe", {"expert_gating_func": 1}, "expert_gating_func = 1 is not served"),
        ("jamba", {"attention.head_count_kv": [0, 0, 0]}, "is not served"),
        ("jamba", {"attention.head_count_kv": [2, 2, 0]}, "no even distance"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said(name, more, said, tmp_path):
    write_gguf(tmp_path / "model.gguf", name, more=more)
    with pytest.raises(CheckpointError, match=said):
        source_from_path(tmp_path / "model.gguf")
