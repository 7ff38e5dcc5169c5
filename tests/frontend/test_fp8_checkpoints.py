"""Checkpoints that keep weights in fp8: the codes are served as they are stored, and what is not served is told."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import pagebinder
from pagebinder import CheckpointError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.compile import explain_model
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.linear.group_scales import scale_of_each
from pagebinder.frontend.quantized_module import QuantizedLinear
from pagebinder.frontend.source import source_from_dir
from tests.helpers import nightly, tiny_qwen3
from tests.moe_models import tiny_deepseek_v3, tiny_qwen3_moe

BLOCK = 128
DEEPSEEK = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
                "group_size": None, "block_structure": None,
            },
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*down_proj"],
    "quantization_status": "compressed",
}  # fmt: skip


def scaled(weight: torch.Tensor, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (e4m3, scale), as tools that write such checkpoints do it: subnormal codes, too."""
    rows, columns = weight.shape
    if granularity == "block":
        padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3)) / 448
        each = scale_of_each(scale, weight.shape)
    else:
        scale = each = (
            weight.abs().amax(1, keepdim=True) / 448 if granularity == "channel" else weight.abs().max() / 448
        )
    return (weight / each).to(torch.float8_e4m3fn), scale


def modelopt(algorithm: str) -> dict:
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }  # fmt: skip


def save_in_fp8(
    model,
    folder,
    options: dict,
    *,
    granularity="block",
    suffix="weight_scale_inv",
    kept=("lm_head",),
    by_dims=False,
):
    """Write a checkpoint of a model whose linear layers, but for those kept, are stored in fp8.

    `by_dims`: as ModelOpt does it.
    """
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    linear = {path for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    stored = {}
    for name, tensor in tensors.items():
        path, _, kind = name.rpartition(".")
        is_expert = ".experts." in path and kind == "weight"
        if kind != "weight" or not (path in linear or is_expert) or any(k in path for k in kept):
            stored[name] = tensor
            continue
        stored[name], scale = scaled(tensor.float(), granularity)
        if by_dims:
            scale = scale[:, None, :, None] if granularity == "block" else scale.squeeze()
            stored[f"{path}.input_scale"] = torch.ones(())
            if path.endswith("k_proj"):
                stored[f"{path}.k_scale"] = torch.ones(())
        elif suffix == "weight_scale" and not scale.dim():
            scale = scale.reshape(1)
        stored[f"{path}.{suffix}"] = scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    return stored


def qwen3(**sizes):
    """Sizes that are no multiples of 128, with biases."""
    options = {"hidden_size": 160, "intermediate_size": 288, "attention_bias": True, "head_dim": 32}
    return tiny_qwen3(**{**options, **sizes})


def plain_model(model, source):
    """The model with the weights that a loaded one's codes stand for."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for path, module in source.module.named_modules():
            if isinstance(module, QuantizedLinear):
                model.get_submodule(path).weight.copy_(module.weight())
    return model


VARIANTS = {
    "deepseek": (DEEPSEEK, {}, "fp8_block"),
    "per tensor": (
        {"quant_method": "fp8", "weight_block_size": None},
        {"granularity": "tensor"},
        "fp8_tensor",
    ),
    "per channel": (
        COMPRESSED,
        {"granularity": "channel", "suffix": "weight_scale", "kept": ("lm_head", "down_proj")},
        "fp8",
    ),
    "ModelOpt": (
        modelopt("FP8"),
        {"granularity": "tensor", "suffix": "weight_scale", "by_dims": True},
        "fp8_tensor",
    ),
    "ModelOpt, rows": (
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        {"granularity": "channel", "suffix": "weight_scale", "by_dims": True},
        "fp8",
    ),
    "ModelOpt, blocks": (
        modelopt("fp8_pb_wo"),
        {"granularity": "block", "suffix": "weight_scale", "by_dims": True},
        "fp8_block",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_layers_keep_the_codes_of_the_checkpoint(name, tmp_path):
    options, how, format = VARIANTS[name]
    stored = save_in_fp8(qwen3(), tmp_path, options, **how)
    source = source_from_dir(tmp_path)
    layers = {p: m for p, m in source.module.named_modules() if isinstance(m, QuantizedLinear)}
    scale_name = how.get("suffix", "weight_scale_inv")
    assert set(layers) == {key.removesuffix(f".{scale_name}") for key in stored if key.endswith(scale_name)}
    assert len(layers) == (12 if "down_proj" in how.get("kept", ()) else 14)
    assert {m.detail.split(",")[0] for m in source.stored_weights.matches} == {
        f"{format} as stored (quant_method {options['quant_method']})"
    }
    assert {r.module_path for r in source.stored_weights.refusals} >= {"lm_head"}
    num_subnormal = 0
    for path, layer in layers.items():
        codes, scale = stored[f"{path}.weight"], stored[f"{path}.{scale_name}"].float()
        scale = scale.reshape(len(scale), -1) if format == "fp8_block" else scale.reshape(-1)
        each = scale_of_each(scale, codes.shape)
        off = (layer.weight() - codes.float() * each).abs() / each
        is_subnormal = (codes.float() != 0) & (codes.float().abs() < 2**-6)
        assert not off[~is_subnormal].any() and off.max() <= 2**-7 * 1.001
        num_subnormal += int(is_subnormal.sum())
        assert layer.codes.nbytes == codes.nbytes and layer.scale.dtype is torch.float32
    assert num_subnormal  # or the test says nothing about them


@pytest.mark.parametrize("name", ["deepseek", "per channel", "per tensor"])
def test_rows_that_fill_no_panel_keep_their_codes(name, tmp_path):
    """Behind the last one lie others that nobody looks at, of scales and biases, too."""
    options, how, _ = VARIANTS[name]
    model = qwen3(head_dim=36, intermediate_size=296)
    save_in_fp8(model, tmp_path, options, **how)
    source = source_from_dir(tmp_path, dtype=torch.float32)
    layers = {p: m for p, m in source.module.named_modules() if isinstance(m, QuantizedLinear)}
    wide = {path: layer for path, layer in layers.items() if layer.num_rows is not None}
    assert {path.rpartition(".")[2] for path in wide} >= {"q_proj", "k_proj", "gate_proj"}
    for path, layer in wide.items():
        x = torch.randn(3, layer.weight().shape[1])
        bias = model.get_submodule(path).bias
        expected = torch.nn.functional.linear(x, layer.weight(), None if bias is None else bias.detach())
        assert layer.weight().shape == model.get_submodule(path).weight.shape
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)


def served(model_or_dir, **options):
    compiled = pagebinder.compile_model(model_or_dir, CompileConfig(executable="eager", **options))
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=48))
    prompts = [[1, 2, 3], list(range(20)), [7] * 45]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    return compiled, [o.token_ids for o in outputs]


def test_a_checkpoint_in_blocks_is_served_token_for_token(tmp_path):
    model = qwen3()
    save_in_fp8(model, tmp_path, DEEPSEEK | {"modules_to_not_convert": ["lm_head"]})
    compiled, tokens = served(tmp_path)
    nodes = {c.op: c.num_nodes for c in compiled.report.providers if c.op.startswith("quantized")}
    if cpu_build.problem() is None:
        assert nodes == {"quantized_linears": 2, "quantized_gated_linear": 2, "quantized_linear": 4}
    else:
        assert nodes == {"quantized_linear": 14}
    expected = served(plain_model(model, source_from_dir(tmp_path)), providers={"linear": "reference"})[1]
    assert tokens == expected
    text = compiled.explain()
    assert "stored_weights" in text and "fp8_block as stored" in str(compiled.report.to_dict())


def latent_mixture(folder):
    """(the model as its checkpoint in fp8 gives it, plain; what was loaded)"""
    model = tiny_deepseek_v3()
    save_in_fp8(model, folder, DEEPSEEK)
    source = source_from_dir(folder)
    plain = plain_model(model, source)
    with torch.no_grad():
        for name, parameter in source.module.named_parameters():
            plain.get_parameter(name).copy_(parameter)
    return model, plain, source


def test_what_has_no_kernel_is_expanded_and_said(tmp_path):
    """kv_b_proj and experts, whose weights transformers merges; the routers' and the head's are stored plain."""
    try:
        model, plain, source = latent_mixture(tmp_path)
    except CheckpointError as error:
        assert "leaves it so" in str(error)
        pytest.skip("transformers 5.17 does not expand experts, which is said")
    reasons = {r.module_path.rpartition(".")[2]: r.reason for r in source.stored_weights.refusals}
    assert "latent attention" in reasons["kv_b_proj"] and "experts" in reasons["experts"]
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.self_attn.kv_b_proj.weight"):
        given, got = model.get_parameter(name), source.module.get_parameter(name)
        error = (got - given).abs() / given.abs().amax()
        assert 0.001 < error.max() < 2**-4, name
    ids = torch.arange(30)[None]
    with torch.no_grad():
        got, expected = (m(ids, use_cache=False).logits for m in (source.module, plain))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@nightly
def test_a_latent_mixture_is_served_and_verified(tmp_path):
    _, plain, _ = latent_mixture(tmp_path)
    _, tokens = served(tmp_path, verify="full")
    assert tokens == served(plain, providers={"linear": "reference"})[1]


EXPERTS = "model.layers.1.mlp.experts"
MIXTURES = {name: VARIANTS[name] for name in ("deepseek", "per channel", "ModelOpt", "ModelOpt, blocks")}


def mixture(folder, name, **sizes):
    """A mixture that is stored in fp8 -> (what is loaded, the model that was saved, the checkpoint's tensors)."""
    options, how, _ = MIXTURES[name]
    model = tiny_qwen3_moe(**{"hidden_size": 96, "moe_intermediate_size": 128, **sizes})
    tensors = save_in_fp8(model, folder, options, **{**how, "kept": ("lm_head", "mlp.gate.")})
    config = json.loads((folder / "config.json").read_text())
    if name == "per channel":
        config["quantization_config"]["ignore"] = ["lm_head"]
        (folder / "config.json").write_text(json.dumps(config))
    try:
        return source_from_dir(folder), model, tensors
    except CheckpointError as error:
        assert "leaves it so" in str(error)
        pytest.skip("transformers 5.17 does not merge experts that are no plain weights, which is said")


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_keep_the_codes_of_the_checkpoint(name, tmp_path):
    source, model, tensors = mixture(tmp_path, name)
    experts = source.module.get_submodule(EXPERTS)
    format = {"ModelOpt": "fp8"}.get(name, MIXTURES[name][2])
    assert set(experts.formats.values()) == {format}
    (match,) = [m for m in source.stored_weights.matches if m.module_path == EXPERTS]
    assert match.pattern == "quantized_moe_experts" and match.detail.startswith(f"{format} as stored")
    assert "codes below 2^-6 rounded" in match.detail
    suffix = MIXTURES[name][1].get("suffix", "weight_scale_inv")
    for i in range(8):
        both = experts.exact_weight("gate_up_proj", i).chunk(2)
        weights = dict(zip(("gate_proj", "up_proj"), both)) | {
            "down_proj": experts.exact_weight("down_proj", i)
        }
        for kind, got in weights.items():
            codes = tensors[f"{EXPERTS}.{i}.{kind}.weight"].float()
            scale = tensors[f"{EXPERTS}.{i}.{kind}.{suffix}"]
            scale = scale.reshape(len(scale), -1) if format == "fp8_block" else scale.reshape(-1)
            each = scale_of_each(scale, codes.shape)
            off = (got - codes * each).abs() / each
            is_subnormal = (codes != 0) & (codes.abs() < 2**-6)
            assert not off[~is_subnormal].any() and off.max() <= 2**-7 * 1.001
    compiled, tokens = served(tmp_path)
    used = {c.op for c in compiled.report.providers}
    assert cpu_build.problem() is not None or "quantized_moe_routed_experts" in used
    plain = plain_model(model, source)
    with torch.no_grad():
        for name, parameter in source.module.named_parameters():
            plain.get_parameter(name).copy_(parameter)
        for path, module in plain.named_modules():
            if not path.endswith(".experts"):
                continue
            for kind in ("gate_up_proj", "down_proj"):
                for i, weight in enumerate(getattr(module, kind)):
                    weight.copy_(source.module.get_submodule(path).exact_weight(kind, i))
    assert tokens == served(plain, providers={"linear": "reference"})[1]


def test_gates_and_values_without_blocks_of_their_own_are_expanded(tmp_path):
    source, _, tensors = mixture(tmp_path, "deepseek", moe_intermediate_size=96)
    reasons = {r.module_path: r.reason for r in source.stored_weights.refusals}
    assert "they are expanded" in reasons[EXPERTS]
    (down,) = source.module.get_parameter(f"{EXPERTS}.down_proj")[:1]
    codes, scale = (tensors[f"{EXPERTS}.0.down_proj.{n}"].float() for n in ("weight", "weight_scale_inv"))
    assert torch.equal(down, codes * scale_of_each(scale, codes.shape))


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_are_plain_in_the_files_stay_so(name, tmp_path):
    """A config may name them one by one, in the checkpoint's own names, or not at all."""
    options, how, _ = MIXTURES[name]
    model = tiny_qwen3_moe(hidden_size=96, moe_intermediate_size=128)
    save_in_fp8(model, tmp_path, options, **{**how, "kept": ("lm_head", "mlp.gate.", ".experts.")})
    config = json.loads((tmp_path / "config.json").read_text())
    listed = "modules_to_not_convert" if name == "deepseek" else "ignore"
    names = [f"{EXPERTS}.{i}.{kind}_proj" for i in range(8) for kind in ("gate", "up", "down")]
    config["quantization_config"][listed] = ["lm_head", *names]
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = source_from_dir(tmp_path)
    for kind in ("gate_up_proj", "down_proj"):
        assert torch.equal(
            source.module.get_parameter(f"{EXPERTS}.{kind}"), model.get_parameter(f"{EXPERTS}.{kind}")
        )
    reasons = {r.module_path: r.reason for r in source.stored_weights.refusals}
    assert reasons[EXPERTS] == "they are stored plain"
    (tmp_path / "model.safetensors").unlink()
    (result,) = [p for p in explain_model(tmp_path).report.passes if p.name == "stored_weights"]
    assert {r.module_path: r.reason for r in result.refusals} == reasons


@pytest.mark.parametrize("name", ["deepseek", "ModelOpt", "ModelOpt, rows", "per channel"])
def test_a_plain_weight_beside_a_scale_is_not_rounded(name, tmp_path):
    options, how, _ = VARIANTS[name]
    tensors = save_in_fp8(qwen3(num_hidden_layers=1), tmp_path, options, **how)
    path = "model.layers.0.mlp.up_proj.weight"
    save_file(
        tensors | {path: tensors[path].float()}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=f"{path} is stored as F32 beside .*; e4m3 is read"):
        source_from_dir(tmp_path)


def test_a_tied_head_has_no_codes(tmp_path):
    model = qwen3(tie_word_embeddings=True)
    save_in_fp8(model, tmp_path, DEEPSEEK | {"modules_to_not_convert": []})
    source = source_from_dir(tmp_path)
    assert source.module.lm_head.weight is source.module.model.embed_tokens.weight
    (result,) = [p for p in explain_model(tmp_path).report.passes if p.name == "stored_weights"]
    assert [r.module_path for r in result.refusals] == ["lm_head"]


def test_a_tied_head_with_codes_of_its_own_is_an_error(tmp_path):
    save_in_fp8(
        qwen3(tie_word_embeddings=False), tmp_path, DEEPSEEK | {"modules_to_not_convert": []}, kept=()
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="lm_head is tied to the table.*files keep codes of a weight"):
        source_from_dir(tmp_path)


@pytest.mark.parametrize("beside", [False, True])
def test_a_cache_that_is_said_to_be_quantised_leaves_weights_plain(beside, tmp_path):
    """As ModelOpt writes it where it quantises nothing else."""
    model = tiny_qwen3()
    model.save_pretrained(tmp_path)
    if beside:
        said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        said = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    source = source_from_dir(tmp_path)
    assert source.stored_weights is None
    for name, parameter in model.named_parameters():
        assert torch.equal(source.module.get_parameter(name), parameter)
    assert "stored_weights" not in {p.name for p in explain_model(tmp_path).report.passes}


BROKEN_EXPERTS = {
    "a scale is NaN": ("weight_scale_inv", lambda t: t * float("nan"), "NaN or infinity"),
    "a code is NaN": ("weight", lambda t: (t.float() * float("nan")).to(t.dtype), "NaN or infinity"),
    "plain": ("weight", lambda t: t.float(), "is stored as F32 beside"),
    "other blocks": ("weight_scale_inv", lambda t: torch.ones(3, 3), "with a scale .3, 3."),
}


@pytest.mark.parametrize("name", BROKEN_EXPERTS)
def test_experts_that_contradict_themselves_are_errors(name, tmp_path):
    kind, change, message = BROKEN_EXPERTS[name]
    _, _, tensors = mixture(tmp_path, "deepseek")
    path = f"{EXPERTS}.3.up_proj.{kind}"
    changed = tensors | {path: change(tensors[path])}
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"up_proj.*{message}"):
        source_from_dir(tmp_path)


def test_explain_shows_the_format_without_weights(tmp_path):
    model = qwen3(num_hidden_layers=1)
    save_in_fp8(model, tmp_path, DEEPSEEK)
    (tmp_path / "model.safetensors").unlink()
    compiled = explain_model(tmp_path)
    (result,) = [p for p in compiled.report.passes if p.name == "stored_weights"]
    assert len(result.matches) == 7 and "fp8_block" in result.matches[0].detail
    num_weights = sum(m.weight.numel() for m in model.modules() if hasattr(m, "weight"))
    assert compiled.report.num_parameters >= num_weights  # codes are weights, too
    assert compiled.report.graph_weight_bytes < 2 * num_weights  # of float32 they would be four times as many


REFUSED = {
    "quip": ({"quant_method": "quip", "bits": 4}, "'quip'"),
    "blocks of another size": (DEEPSEEK | {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
    "e5m2": (DEEPSEEK | {"fmt": "e5m2"}, "fmt 'e5m2'"),
    "int4 experts": (DEEPSEEK | {"expert_dtype": "int4"}, "expert_dtype 'int4'"),
    "SVD": (modelopt("NVFP4_SVD"), "quant_algo 'NVFP4_SVD'"),
    "mixed": (modelopt("MIXED_PRECISION"), "MIXED_PRECISION without quantized_layers"),
    "two groups": (COMPRESSED | {"config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_are_not_served_are_refused_by_name(name, tmp_path):
    options, message = REFUSED[name]
    tiny_qwen3().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    for weights in (True, False):
        with pytest.raises(CheckpointError, match=message):
            source_from_dir(tmp_path, weights=weights)


def broken(tmp_path, change, options=DEEPSEEK):
    """The message about a checkpoint whose tensors were changed."""
    tensors = save_in_fp8(tiny_qwen3(num_hidden_layers=1), tmp_path, options)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        source_from_dir(tmp_path)
    return str(error.value)


NAME = "model.layers.0.mlp.up_proj.weight"


def test_checkpoints_that_contradict_themselves_are_errors(tmp_path):
    assert "lacks 1 tensor " in broken(tmp_path, lambda t: t.pop(f"{NAME}_scale_inv"))
    kept = DEEPSEEK | {"modules_to_not_convert": ["lm_head", "up_proj"]}
    assert "stored plain" in broken(tmp_path, lambda t: None, kept)
    assert "NaN" in broken(tmp_path, lambda t: t[NAME].view(torch.uint8)[3, 4].fill_(0x7F))
    assert "NaN" in broken(tmp_path, lambda t: t[f"{NAME}_scale_inv"].fill_(float("inf")))
    assert "e5m2" in broken(tmp_path, lambda t: t.update({NAME: t[NAME].float().to(torch.float8_e5m2)}))
    other_shape = broken(tmp_path, lambda t: t.update({f"{NAME}_scale_inv": torch.ones(7, 7)}))
    assert "up_proj" in other_shape and re.search(r"7, 7[])]", other_shape)


CODED = {
    "float8 and a scale": (torch.float8_e4m3fn, "weight_scale"),
    "float8 and something else": (torch.float8_e5m2, "weight_amax"),
    "int8 and a scale": (torch.int8, "SCB"),
    "int8 alone": (torch.int8, None),
    "uint8": (torch.uint8, "scales"),
}


@pytest.mark.parametrize("name", CODED)
def test_codes_of_which_the_config_says_nothing_are_refused(name, tmp_path):
    """transformers loads them as if they were weights, without a word."""
    dtype, beside = CODED[name]
    tiny_qwen3().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, layer = load_file(file), "model.layers.0.self_attn.q_proj"
    tensors[f"{layer}.weight"] = (tensors[f"{layer}.weight"] * 100).abs().to(dtype)
    if beside is not None:
        tensors[f"{layer}.{beside}"] = torch.full((1,), 0.01)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"codes of weights \(model\.layers\.0\S+ in .*no quantization_config"
    ):
        source_from_dir(tmp_path)


def test_plain_weights_may_be_stored_in_float8(tmp_path):
    tiny_qwen3().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(source_from_dir(tmp_path).module.get_parameter(name), tensors[name].float())
