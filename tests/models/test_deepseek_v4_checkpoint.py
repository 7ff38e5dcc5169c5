"""DeepSeek-V4 checkpoints go both ways between us and `transformers`, and bad ones are refused with the reason."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from pagebinder.errors import CheckpointError, UnsupportedLayerError
from pagebinder.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM
from pagebinder.models.deepseek_v4_checkpoint import keeps_float32
from tests.deepseek_v4_models import oracle_config, oracle_model, random_ids, relative_error

DTYPES = [torch.float32, torch.bfloat16]
NUM_TOKENS = 40


def _theirs(directory, dtype="auto"):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def _assert_same_tensors(ours, theirs) -> None:
    expected = theirs.state_dict()
    actual = {name: tensor for name, tensor in ours.state_dict().items() if not name.startswith("mtp.")}
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shards", ["one file", "sharded"])
def test_we_read_what_transformers_writes(dtype, shards, tmp_path):
    oracle = oracle_model(oracle_config()).to(dtype)
    oracle.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "sharded")
    _assert_same_tensors(DeepseekV4ForCausalLM.from_pretrained(tmp_path), _theirs(tmp_path))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shards", ["one file", "sharded"])
@torch.no_grad()
def test_transformers_reads_what_we_write(dtype, shards, tmp_path):
    oracle_model(oracle_config()).save_pretrained(tmp_path / "a")
    ours = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "a", dtype=dtype)
    ours.save_pretrained(tmp_path / "b", max_shard_bytes=20_000 if shards == "sharded" else None)
    assert (tmp_path / "b/model.safetensors.index.json").exists() == (shards == "sharded")
    theirs = _theirs(tmp_path / "b")
    _assert_same_tensors(ours, theirs)
    _assert_same_tensors(DeepseekV4ForCausalLM.from_pretrained(tmp_path / "b"), theirs)
    wide = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    expected = _theirs(tmp_path / "b", dtype=torch.float32)(random_ids(NUM_TOKENS)).logits
    assert relative_error(wide(random_ids(NUM_TOKENS)), expected) < 1e-5


@torch.no_grad()
def test_bfloat16_logits_are_near_those_of_transformers(tmp_path):
    norm = modeling_deepseek_v4.DeepseekV4RMSNorm(2)
    if norm(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.float32:
        pytest.skip(
            "this release of transformers cannot run DeepSeek-V4 in bf16: it gives float32 to bf16 layers"
        )
    oracle_model(oracle_config()).to(torch.bfloat16).save_pretrained(tmp_path)
    logits = DeepseekV4ForCausalLM.from_pretrained(tmp_path)(random_ids(NUM_TOKENS))
    expected = _theirs(tmp_path)(random_ids(NUM_TOKENS)).logits
    assert logits.dtype == expected.dtype == torch.bfloat16
    # The median: a rounding may flip the choice of an expert or an entry, and then a whole row differs.
    assert (logits - expected).float().abs().median() < 0.03 * expected.float().std()


def test_the_config_survives(tmp_path):
    theirs = oracle_config(heavy_ratio=128, sliding_window=32, tie_word_embeddings=True)
    config = DeepseekV4Config.from_dict(theirs.to_dict())
    assert DeepseekV4Config.from_dict(config.to_dict()) == config
    again = transformers.DeepseekV4Config(**config.to_dict())
    for name, value in config.to_dict().items():
        if name not in ("rope_theta", "compress_rope_theta", "rope_parameters", "architectures"):
            assert getattr(again, name) == getattr(theirs, name) == value, name
    for kind, parameters in theirs.rope_parameters.items():
        assert parameters.items() <= again.rope_parameters[kind].items()


@torch.no_grad()
def test_tied_embeddings_are_stored_once(tmp_path):
    oracle = oracle_model(oracle_config(tie_word_embeddings=True))
    oracle.save_pretrained(tmp_path / "a")
    ours = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "a")
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    ours.save_pretrained(tmp_path / "b")
    assert "head.weight" not in load_file(tmp_path / "b/model.safetensors")
    assert relative_error(_theirs(tmp_path / "b")(random_ids(9)).logits, oracle(random_ids(9)).logits) < 1e-5


def test_prediction_layers_are_stored_and_skipped_by_transformers(tmp_path):
    oracle_model(oracle_config()).save_pretrained(tmp_path / "a")
    config = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "a").config
    ours = DeepseekV4ForCausalLM(config, with_mtp=True)
    ours.save_pretrained(tmp_path / "b")
    again = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "b")
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in ours.named_parameters()]
    assert len(again.mtp) == config.num_nextn_predict_layers == 1
    stored = load_file(tmp_path / "b/model.safetensors")
    assert {"mtp.0.e_proj.weight", "mtp.0.hc_head_fn", "mtp.0.attn.wkv.weight"} <= stored.keys()
    _assert_same_tensors(again, _theirs(tmp_path / "b"))


def test_small_parameters_stay_in_float32():
    kept = [
        "norm.weight",
        "self_attn.sinks",
        "attn_hc.fn",
        "compressor.kv_norm.weight",
        "indexer.position_bias",
    ]
    kept += ["gate.e_score_correction_bias", "model.hc_head.hc_scale", "mtp.0.enorm.weight"]
    assert all(keeps_float32(f"model.layers.0.{name}") for name in kept)
    cast = ["self_attn.kv_proj.weight", "mlp.gate.weight", "compressor.gate_proj.weight", "lm_head.weight"]
    assert not any(keeps_float32(f"model.layers.0.{name}") for name in cast)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    oracle_model(oracle_config()).save_pretrained(directory)
    return directory


def _changed(saved, directory, tensors=None, **config):
    stored, raw = load_file(saved / "model.safetensors"), json.loads((saved / "config.json").read_text())
    raw |= config
    (directory / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))
    stored |= tensors or {}
    save_file({k: v for k, v in stored.items() if v is not None}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"model.layers.1.attn.indexer.wq_b.weight": None},
            "missing model.layers.1.attn.indexer.wq_b.weight",
        ),
        ({"model.layers.1.ffn.experts.3.w2.weight": None}, r"missing .*experts\.3\.w2"),
        ({"model.layers.1.ffn.experts.4.w2.weight": torch.ones(32, 16)}, r"unexpected .*experts\.4\.w2"),
        ({"model.layers.9.attn.wkv.weight": torch.ones(2)}, r"unexpected model.layers.9"),
        ({"model.layers.0.attn.attn_sink": torch.ones(5)}, r"attn_sink is \[5\], config.json says \[4\]"),
        ({"model.layers.0.ffn.gate.tid2eid": torch.ones(64, 2)}, "tid2eid is torch.float32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        DeepseekV4ForCausalLM.from_pretrained(_changed(saved, tmp_path, tensors))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_lora_rank": "absent"}, CheckpointError, "lacks a key: 'q_lora_rank'"),
        ({"rope_parameters": {"main": {}}}, CheckpointError, "lacks a key"),
        ({"compress_rates": {}}, CheckpointError, "lacks a key"),
        ({"scoring_func": "sigmoid"}, UnsupportedLayerError, "scoring_func 'sigmoid'"),
        ({"model_type": "deepseek_v3"}, UnsupportedLayerError, "model_type 'deepseek_v3'"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedLayerError, "quantization_config"),
        ({"layer_types": ["full_attention"] * 4}, UnsupportedLayerError, "'full_attention'"),
        ({"mlp_layer_types": ["moe"]}, UnsupportedLayerError, "each of 4 layers; it has 1"),
        ({"o_groups": 3}, CheckpointError, "no multiple of o_groups 3"),
        ({"num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok 9 of 4"),
        ({"index_head_dim": 4}, CheckpointError, "rotary width 8 exceeds"),
        ({"index_topk": 0}, CheckpointError, "index_topk is 0"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_configs_that_cannot_be_served_are_refused(saved, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        DeepseekV4ForCausalLM.from_pretrained(_changed(saved, tmp_path, **change))


def test_an_unknown_rotary_type_is_refused(saved):
    raw = json.loads((saved / "config.json").read_text())
    for change in ({"rope_type": "longrope"}, {"mscale": 1.0}):
        rope = {kind: {**raw["rope_parameters"][kind], **change} for kind in ("main", "compress")}
        rope["main"]["rope_type"] = "default"
        with pytest.raises(UnsupportedLayerError, match="supported: default, yarn"):
            DeepseekV4Config.from_dict({**raw, "rope_parameters": rope})
