"""Checkpoints in microscaled formats: a weight is its code times its scale, exactly, and what was done is told."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import pagebinder
from pagebinder import CheckpointError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.compile import explain_model
from pagebinder.custom_ops.latent.small_floats import E2M1_VALUES
from pagebinder.frontend import stored_loading
from pagebinder.frontend.coded_experts import QuantizedExperts
from pagebinder.frontend.mx_numbers import times_scale
from pagebinder.frontend.quantized_module import QuantizedLinear
from pagebinder.frontend.source import source_from_dir
from tests.frontend.test_inkling_leaves import architecture, built
from tests.helpers import by_day, tiny_qwen3
from tests.moe_models import tiny_gpt_oss_moe, tiny_qwen3_moe
from tests.v4_models import v4_model

BLOCK, GROUP = 128, 32
POSITIVE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
E2M1 = (*E2M1_VALUES, *(-x for x in E2M1_VALUES))
GROUPED = {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
INKLING_2 = GROUPED | {"modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
MXFP8 = {"quant_method": "mxfp8", "modules_to_not_convert": ["lm_head"]}
DEEPSEEK_V4 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
# The linear layers of DeepSeek-V4 that are stored in fp8, by their names in the checkpoint.
V4_LINEAR = (".wq_a.", ".wq_b.", ".attn.wkv.", ".wo_a.", ".wo_b.", ".shared_experts.")


# ---- a quantiser ------------------------------------------------------------------------------------------------


def grouped(weight: torch.Tensor, largest_exponent: int):
    """weight [..., K] -> (weight [..., K/32, 32] over its scale, byte of the scale [..., K/32])."""
    groups = weight.double().unflatten(-1, (-1, GROUP))
    exponent = groups.abs().amax(-1).log2().floor().clamp(min=-100) - largest_exponent
    return groups / 2.0 ** exponent[..., None], (exponent + 127).to(torch.uint8)


def in_e2m1(weight: torch.Tensor):
    """-> (bytes [..., K/2] of two codes, scale [..., K/32], the weight [..., K] that they stand for)."""
    groups, byte = grouped(weight, 2)
    code = (groups.abs()[..., None] - POSITIVE).abs().argmin(-1)
    values = POSITIVE[code].double() * groups.sign()
    code = (code + 8 * (groups < 0)).flatten(-2).to(torch.uint8)
    plain = values * 2.0 ** (byte.double() - 127)[..., None]
    return code[..., 0::2] | code[..., 1::2] << 4, byte, plain.flatten(-2).to(weight.dtype)


def in_mx_e4m3(weight: torch.Tensor):
    """-> (codes [..., K], scale [..., K/32], the weight)."""
    groups, byte = grouped(weight, 8)
    codes = groups.clamp(-448, 448).to(torch.float8_e4m3fn)
    plain = codes.double() * 2.0 ** (byte.double() - 127)[..., None]
    return codes.flatten(-2), byte, plain.flatten(-2).to(weight.dtype)


def in_blocks(weight: torch.Tensor):
    """-> (codes [N, K], scale of 128 x 128 [N/128, K/128], the weight); no code is subnormal."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.double(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    largest = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3))
    exponent = (largest / 448).log2().ceil()
    each = 2.0 ** exponent.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    scaled = weight.double() / each
    codes = scaled.where(scaled.abs() >= 2**-6, 0.0).to(torch.float8_e4m3fn)
    return codes, (exponent + 127).to(torch.uint8), (codes.double() * each).to(weight.dtype)


# ---- checkpoints ------------------------------------------------------------------------------------------------


def gpt_oss_layout(name: str, tensor: torch.Tensor):
    """One tensor of a plain checkpoint -> (those that are stored, the plain one that they stand for)."""
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return {name: tensor}, tensor
    codes, scale, plain = in_e2m1(tensor.transpose(1, 2))
    blocks = codes.unflatten(-1, (-1, GROUP // 2))
    return {f"{name}_blocks": blocks, f"{name}_scales": scale}, plain.transpose(1, 2).contiguous()


def inkling_2_layout(name: str, tensor: torch.Tensor):
    if not name.endswith(("w13_weight", "w2_weight")):
        return {name: tensor}, tensor
    codes, scale, plain = in_mx_e4m3(tensor)
    return {name: codes, f"{name}_scale": scale}, plain


def mxfp8_layout(name: str, tensor: torch.Tensor):
    if tensor.dim() != 2 or any(part in name for part in ("lm_head", "embed", "mlp.gate.", "norm")):
        return {name: tensor}, tensor
    codes, scale, plain = in_mx_e4m3(tensor)
    return {name: codes, f"{name}_scale_inv": scale.view(torch.float8_e8m0fnu)}, plain


def deepseek_v4_layout(name: str, tensor: torch.Tensor):
    is_expert = ".ffn.experts." in name
    if not is_expert and ("compressor" in name or not any(part in name for part in V4_LINEAR)):
        return {name: tensor}, tensor
    codes, scale, plain = in_e2m1(tensor) if is_expert else in_blocks(tensor)
    scale = scale if "wo_b" in name else scale.view(torch.float8_e8m0fnu)
    scale_name = name.removesuffix(".weight") + ".scale"
    return {name: codes.view(torch.int8) if is_expert else codes, scale_name: scale}, plain


def save_both(model, folder, layout, **config):
    """Write what is stored to folder/stored, and what it stands for to folder/plain; return the stored tensors."""
    model.save_pretrained(folder / "plain")
    stored, plain = {}, {}
    for name, tensor in load_file(folder / "plain" / "model.safetensors").items():
        tensors, plain[name] = layout(name, tensor)
        stored |= {key: value.contiguous() for key, value in tensors.items()}
    for kind, tensors in (("stored", stored), ("plain", plain)):
        (folder / kind).mkdir(exist_ok=True)
        save_file(tensors, folder / kind / "model.safetensors", metadata={"format": "pt"})
    options = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "stored" / "config.json").write_text(json.dumps(options | config))
    return stored


def gpt_oss(**options):
    return tiny_gpt_oss_moe(hidden_size=64, intermediate_size=32, **options).bfloat16()


def qwen3_moe(**options):
    return tiny_qwen3_moe(intermediate_size=64, moe_intermediate_size=32, **options).bfloat16()


def inkling_2():
    architecture("inkling2_text")
    return copy.deepcopy(built("inkling2_text")).bfloat16()


# name: (model, layout, what config.json says, format of the experts)
FORMATS = {
    "gpt-oss": (gpt_oss, gpt_oss_layout, {"quantization_config": MXFP4}, "mxfp4"),
    "inkling2": (inkling_2, inkling_2_layout, {"quantization_config": INKLING_2}, "mxfp8"),
    "mxfp8": (qwen3_moe, mxfp8_layout, {"quantization_config": MXFP8}, "mxfp8"),
}


def both(name: str, folder) -> None:
    """Write the stored and the plain checkpoint of a format."""
    make, layout, config, _ = FORMATS[name]
    save_both(make(), folder, layout, **config)


def served(folder, **options):
    compiled = pagebinder.compile_model(folder, CompileConfig(executable="eager", **options))
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=48))
    prompts = [[1, 2, 3], list(range(20)), [7] * 45]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    return compiled, [o.token_ids for o in outputs]


def parameters_of(module) -> dict[str, torch.Tensor]:
    """With the weights that codes of experts stand for."""
    coded = {path: m for path, m in module.named_modules() if isinstance(m, QuantizedExperts)}
    weights = {f"{path}.{name}": m.expert_weight(name) for path, m in coded.items() for name in m.formats}
    return dict(module.named_parameters()) | weights


def assert_same_weights(stored, plain):
    got, expected = (parameters_of(m) for m in (stored.module, plain.module))
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert got[name].dtype is weight.dtype and torch.equal(got[name], weight), name


# ---- what is served ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_its_code_times_its_scale(name, tmp_path):
    both(name, tmp_path)
    format = FORMATS[name][-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = source_from_dir(tmp_path / "stored")
    assert stored.dtype is torch.bfloat16
    plain = source_from_dir(tmp_path / "plain")
    assert_same_weights(stored, plain)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        got, expected = (s.module(ids, use_cache=False).logits for s in (stored, plain))
    assert torch.equal(got, expected) and expected.std() > 0.1
    experts = {path for path, m in stored.module.named_modules() if path.endswith(".experts")}
    reasons = {r.module_path: r.reason for r in stored.stored_weights.refusals}
    linear = {path for path, m in stored.module.named_modules() if isinstance(m, torch.nn.Linear)}
    said = {m.module_path: m.detail for m in stored.stored_weights.matches}
    assert set(reasons) == linear | (set() if format == "mxfp4" else experts)
    assert said == (
        dict.fromkeys(experts, "mxfp4 as stored (quant_method mxfp4)") if format == "mxfp4" else {}
    )
    of_format = {path for path, reason in reasons.items() if f"stored in {format} and expanded" in reason}
    assert of_format >= set(reasons) - linear and reasons["lm_head"] == "it is stored plain"
    assert bool(of_format & linear) == (name == "mxfp8")


@pytest.mark.parametrize("name", by_day(FORMATS, ["gpt-oss"]))
def test_the_tokens_are_those_of_the_plain_weights(name, tmp_path):
    both(name, tmp_path)
    compiled, tokens = served(tmp_path / "stored")
    assert tokens == served(tmp_path / "plain")[1]
    what = "mxfp4 as stored" if name == "gpt-oss" else "stored in mxfp8 and expanded"
    assert what in str(compiled.report.to_dict())


def test_experts_in_mxfp4_are_served_from_their_codes(tmp_path):
    """Verified with random weights, too, and kept by an artefact."""
    both("gpt-oss", tmp_path)
    compiled, tokens = served(tmp_path / "stored", verify="full")
    assert sum("quantized_moe" in str(n.target) for n in compiled.graphs["fused"].graph.nodes) == 2
    compiled.save(tmp_path / "artefact")
    engine = pagebinder.load(tmp_path / "artefact").engine(EngineConfig(num_kv_blocks=64))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    assert engine.generate([[1, 2, 3]], params)[0].token_ids == tokens[0]


@pytest.mark.parametrize("beside", [True, False])
def test_deepseek_v4_keeps_the_codes_of_its_blocks(beside, tmp_path):
    """`expert_dtype` stands beside the quantization_config (V4), or in it (V4.1)."""
    experts = {"expert_dtype": "fp4"}
    options = DEEPSEEK_V4 | ({} if beside else experts)
    config = {"quantization_config": options, **(experts if beside else {})}
    model = v4_model(hidden_size=64, q_lora_rank=32, o_lora_rank=32, head_dim=96, num_hidden_layers=3)
    if not beside:  # as it is published: in bfloat16, and by other names
        model.bfloat16()
    stored = save_both(model, tmp_path, deepseek_v4_layout, **config)
    if not beside:
        renamed = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
        save_file(renamed, tmp_path / "stored" / "model.safetensors", metadata={"format": "pt"})
    source, plain = source_from_dir(tmp_path / "stored"), source_from_dir(tmp_path / "plain")
    layers = {path: m for path, m in source.module.named_modules() if isinstance(m, QuantizedLinear)}
    assert {path.rpartition(".")[2] for path in layers} >= {"q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"}
    for path, layer in layers.items():
        weight = plain.module.get_submodule(path).weight
        assert layer.scale.dtype is torch.float32 and torch.equal(layer.weight(), weight.float()), path
        source.module.get_submodule(path).register_parameter("weight_of_codes", torch.nn.Parameter(weight))
    got = {n.replace("weight_of_codes", "weight"): p for n, p in parameters_of(source.module).items()}
    for name, weight in plain.module.named_parameters():
        assert torch.equal(got[name].float(), weight.float()), name
    experts = {m.module_path for m in source.stored_weights.matches if m.detail.startswith("mxfp4 as stored")}
    assert experts == {f"model.layers.{i}.mlp.experts" for i in range(3)}
    reasons = {r.module_path: r.reason for r in source.stored_weights.refusals}
    assert "GroupedLinear" in reasons["model.layers.0.self_attn.o_a_proj"]
    if beside:
        tokens = served(tmp_path / "stored", providers={"linear": "reference"})[1]
        assert tokens == served(tmp_path / "plain", providers={"linear": "reference"})[1]


def test_inkling_2_as_it_is_published(tmp_path):
    """With a tower for images; before transformers 5.24 without a quantization_config: its config class has one."""
    text, sizes = (
        inkling_2().config,
        {"hidden_size": 32, "num_attention_heads": 2, "projection_hidden_dim": 32},
    )
    images = {
        **sizes,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "patch_size": 4,
        "posemb_grid_size": 4,
    }
    images["text_hidden_size"] = text.hidden_size
    config = transformers.Inkling2Config(text_config=text.to_dict(), vision_config=images)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).bfloat16()
    save_both(model, tmp_path, inkling_2_layout)
    file = tmp_path / "stored" / "config.json"
    options = json.loads(file.read_text())
    del options["transformers_version"]
    file.write_text(json.dumps(options))
    if not hasattr(transformers.Inkling2Config.from_dict(options), "quantization_config"):  # from 5.24 on
        with pytest.raises(CheckpointError, match=r"codes of weights .*scale.*no quantization_config"):
            source_from_dir(tmp_path / "stored")
        kept = ["lm_head", "model.vision_tower", "model.language_model.layers.*.self_attn"]
        options["quantization_config"] = GROUPED | {"modules_to_not_convert": kept}
        file.write_text(json.dumps(options))
    source = source_from_dir(tmp_path / "stored")
    assert_same_weights(source, source_from_dir(tmp_path / "plain"))
    for found in (source, source_from_dir(tmp_path / "stored", weights=False)):
        reasons = {r.module_path: r.reason for r in found.stored_weights.refusals}
        for i in range(4):
            assert "stored in mxfp8" in reasons[f"model.language_model.layers.{i}.mlp.experts"]
    # other tensors of a multimodal model may be missing
    tensors = load_file(tmp_path / "stored" / "model.safetensors")
    del tensors["model.llm.layers.2.mlp.experts.w2_weight_scale"]
    save_file(tensors, tmp_path / "stored" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"lacks 1 tensor .*layers\.2\.mlp\.experts\.down_proj_scale_inv"
    ):
        source_from_dir(tmp_path / "stored")


def test_experts_that_are_stored_plain(tmp_path):
    """Of a model of which other experts are not."""

    def layout(name, tensor):
        return gpt_oss_layout(name, tensor) if "layers.1" in name else ({name: tensor}, tensor)

    kept = MXFP4 | {"modules_to_not_convert": ["model.layers.0", "lm_head"]}
    save_both(gpt_oss(), tmp_path, layout, quantization_config=kept)
    source = source_from_dir(tmp_path / "stored")
    assert_same_weights(source, source_from_dir(tmp_path / "plain"))
    assert [m.module_path for m in source.stored_weights.matches] == ["model.layers.1.mlp.experts"]
    reasons = {r.module_path: r.reason for r in source.stored_weights.refusals}
    assert reasons["model.layers.0.mlp.experts"] == "they are stored plain"


def test_experts_that_are_not_known_as_such(tmp_path, monkeypatch):
    """They are expanded before transformers merges them, where it does."""
    both("mxfp8", tmp_path)
    monkeypatch.setattr(stored_loading, "experts_modules", lambda model: {})
    try:
        source = source_from_dir(tmp_path / "stored")
    except CheckpointError as error:
        assert "does not expand these" in str(error)
        pytest.skip("transformers 5.17 does not expand experts, which is said")
    assert_same_weights(source, source_from_dir(tmp_path / "plain"))


def test_gpt_oss_is_what_transformers_makes_of_it(tmp_path):
    save_both(gpt_oss(), tmp_path, gpt_oss_layout, quantization_config=MXFP4)
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "stored", quantization_config=transformers.Mxfp4Config(dequantize=True), dtype="bfloat16"
    )
    got = parameters_of(source_from_dir(tmp_path / "stored").module)
    for name, weight in expected.named_parameters():
        assert torch.equal(got[name], weight), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_codes_times_all_scales(dtype):
    """Every byte of e2m1 and every scale with which its numbers are below the largest of the dtype."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(250, 1)
    scale = torch.arange(250, dtype=torch.uint8)[:, None].expand(250, 16)
    numbers = torch.tensor(E2M1, dtype=torch.float64)
    low_then_high = torch.stack((numbers[codes.int() & 15], numbers[codes.int() >> 4]), dim=-1).flatten(1)
    expected = low_then_high * 2.0 ** (scale.double() - 127).repeat_interleave(GROUP, 1)
    got = times_scale(codes, scale, dtype)
    assert got.dtype is dtype and torch.equal(got.double(), expected)
    assert torch.equal(times_scale(codes.view(torch.int8), scale.view(torch.float8_e8m0fnu), dtype), got)
    scale = scale.where(scale > 2, 3)[:240]
    codes = codes.where(codes & 0x7F != 0x7F, 0)[:240].view(torch.float8_e4m3fn)
    expected = codes.double() * 2.0 ** (scale[:, :8].double() - 127).repeat_interleave(GROUP, 1)
    assert torch.equal(times_scale(codes, scale[:, :8], dtype).double(), expected)


@pytest.mark.parametrize(
    "codes, scale, message",
    [
        (torch.full((2, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), 127, "NaN"),
        (torch.full((2, 16), 0x77, dtype=torch.uint8), 253, "too large for torch.bfloat16"),
        (torch.zeros(2, 16, dtype=torch.uint8), 255, "NaN"),
        (torch.zeros(2, 32), 127, "codes are torch.float32"),
        (
            torch.zeros(2, 32, dtype=torch.uint8),
            127,
            r"the scale of \[2, 64\] weights is \[2, 1\], not \[2, 2\]",
        ),
        (torch.zeros(2, 8, dtype=torch.uint8), 127, "rows of 16 weights"),
    ],
)
def test_numbers_that_are_none(codes, scale, message):
    with pytest.raises(CheckpointError, match=message):
        times_scale(codes, torch.full((2, 1), scale, dtype=torch.uint8), torch.bfloat16)


@pytest.mark.parametrize("name", by_day([*FORMATS, "deepseek-v4"], ["gpt-oss", "deepseek-v4"]))
def test_explain_needs_config_json_alone(name, tmp_path):
    if name == "deepseek-v4":
        model, format = v4_model(hidden_size=64, num_hidden_layers=2), "mxfp4"
        config = {"quantization_config": DEEPSEEK_V4, "expert_dtype": "fp4"}
    else:
        make, _, config, format = FORMATS[name]
        model = make()
    options = model.config.to_dict() | config
    (tmp_path / "config.json").write_text(json.dumps(options))
    compiled = explain_model(tmp_path)
    (result,) = [p for p in compiled.report.passes if p.name == "stored_weights"]
    kept = {
        m.module_path.rpartition(".")[2] for m in result.matches if m.detail.startswith("mxfp4 as stored")
    }
    assert kept == ({"experts"} if format == "mxfp4" else set())
    assert any("stored in mxfp8 and expanded" in r.reason for r in result.refusals) == (format == "mxfp8")


# ---- what is not ------------------------------------------------------------------------------------------------


REFUSED = {
    "quip": ({"quant_method": "quip", "bits": 4}, "'quip'"),
    "gptq": ({"quant_method": "gptq", "bits": 5}, "'gptq' with bits 5"),
    "nvfp4": ({"quant_method": "nvfp4"}, "'nvfp4'"),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf8"},
        "'bitsandbytes' with bnb_4bit_quant_type 'nf8'",
    ),
    "blocks of 64": (GROUPED | {"weight_block_size": [1, 64]}, r"weight_block_size \[1, 64\]"),
    "mxfp8 in blocks": (MXFP8 | {"weight_block_size": [128, 128]}, r"weight_block_size \[128, 128\]"),
    "scales in e5m3": (GROUPED | {"scale_fmt": "ue5m3"}, "scale_fmt 'ue5m3'"),
    "e5m2": (MXFP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name_with_a_list(name, tmp_path):
    options, message = REFUSED[name]
    config = tiny_qwen3_moe().config.to_dict() | {"quantization_config": options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for weights in (True, False):
        with pytest.raises(
            CheckpointError, match=f"{message}.*not served; served are 'fp8'.*'mxfp8'.*'mxfp4'"
        ):
            source_from_dir(tmp_path, weights=weights)


def test_experts_that_a_model_has_not(tmp_path):
    save_both(tiny_qwen3(num_hidden_layers=1), tmp_path, gpt_oss_layout, quantization_config=MXFP4)
    for weights in (True, False):
        with pytest.raises(CheckpointError, match="'mxfp4' is about experts, and Qwen3ForCausalLM has none"):
            source_from_dir(tmp_path / "stored", weights=weights)
    options = tiny_gpt_oss_moe().config.to_dict() | {"quantization_config": MXFP4}  # rows of 48
    (tmp_path / "stored" / "config.json").write_text(json.dumps(options))
    with pytest.raises(CheckpointError, match="rows of 48 weights"):
        source_from_dir(tmp_path / "stored", weights=False)


def broken(folder, name, change, **options):
    """The message about a checkpoint whose tensors were changed."""
    make, layout, config, _ = FORMATS[name]
    tensors = save_both(make(), folder, layout, **config)
    if options:
        said = json.loads((folder / "stored" / "config.json").read_text())
        said["quantization_config"] |= options
        (folder / "stored" / "config.json").write_text(json.dumps(said))
    change(tensors)
    save_file(tensors, folder / "stored" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        source_from_dir(folder / "stored")
    return str(error.value)


EXPERTS = "model.layers.0.mlp.experts"
UP_SCALES, UP_BLOCKS = f"{EXPERTS}.gate_up_proj_scales", f"{EXPERTS}.gate_up_proj_blocks"


def test_gpt_oss_checkpoints_that_contradict_themselves(tmp_path):
    def message(change, **options):
        return broken(tmp_path, "gpt-oss", change, **options)

    def replace(name, make):
        return lambda tensors: tensors.update({name: make(tensors[name])})

    assert "gate_up_proj_scales" in message(lambda t: t.pop(UP_SCALES))
    assert "gate_up_proj_blocks" in message(lambda t: t.pop(UP_BLOCKS))
    assert "(4, 64, 1)" in message(replace(UP_SCALES, lambda s: s[..., :1].contiguous()))
    assert "(4, 64, 2, 8)" in message(replace(UP_BLOCKS, lambda b: b[..., :8].contiguous()))
    told = message(lambda t: t[UP_SCALES][2, 3, 1].fill_(255))
    assert f"{EXPERTS}.gate_up_proj of expert 2" in told and "255" in told
    assert "too large" in message(lambda t: t[UP_SCALES].fill_(254))
    assert "torch.int32" in message(replace(UP_BLOCKS, torch.Tensor.int))
    assert "e5m2" in message(replace("lm_head.weight", lambda w: w.to(torch.float8_e5m2)))
    assert "stored plain" in message(lambda t: None, modules_to_not_convert=["model.layers.*.mlp"])


def test_grouped_checkpoints_that_contradict_themselves(tmp_path):
    linear, experts = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts"

    def message(change):
        return broken(tmp_path, "mxfp8", change)

    def narrow(tensors, ending):
        cut = {name: t[..., :1].contiguous() for name, t in tensors.items() if name.endswith(ending)}
        tensors.update(cut)

    def nan(tensors, name):
        tensors[f"{name}_scale_inv"].view(torch.uint8)[1, 0] = 255

    assert "lacks 1 tensor " in message(lambda t: t.pop(f"{linear}_scale_inv"))
    assert "cannot be loaded" in message(lambda t: t.pop(f"{experts}.3.up_proj.weight_scale_inv"))
    assert "q_proj" in message(lambda t: narrow(t, "0.self_attn.q_proj.weight_scale_inv"))
    ups = tuple(f"experts.{i}.{name}_proj.weight_scale_inv" for i in range(8) for name in ("gate", "up"))
    assert "(8, 64, 2)" in message(lambda t: narrow(t, ups))
    assert "layers.0.self_attn.q_proj: its weight or its scale holds NaN" in message(lambda t: nan(t, linear))
    told = message(lambda t: nan(t, f"{experts}.3.down_proj.weight"))
    assert f"{experts}.down_proj of expert 3" in told and "255" in told
    odd = {f"{linear}_scale_inv": torch.full((64, 2), 0.3)}
    assert (
        "q_proj: a scale is NaN" in (told := message(lambda t: t.update(odd))) and "no power of two" in told
    )


def test_deepseek_v4_checkpoints_that_contradict_themselves(tmp_path):
    config = {"quantization_config": DEEPSEEK_V4, "expert_dtype": "fp4"}
    model = v4_model(hidden_size=64, num_hidden_layers=1)
    file = tmp_path / "stored" / "model.safetensors"

    def message(change, **options):
        tensors = save_both(model, tmp_path, deepseek_v4_layout, **(config | options))
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as error:
            source_from_dir(tmp_path / "stored")
        return str(error.value)

    def nan(tensors, name):
        tensors[name].view(torch.uint8).fill_(255)

    assert "NaN" in message(lambda t: nan(t, "model.layers.0.ffn.experts.1.w2.scale"))
    assert "NaN" in message(lambda t: nan(t, "model.layers.0.attn.wq_a.scale"))
    assert "NaN" in message(lambda t: nan(t, "model.layers.0.attn.wo_b.scale"))
    assert "lacks" in message(lambda t: t.pop("model.layers.0.attn.wq_a.scale"))
    message(lambda t: None, expert_dtype="fp8")


def test_a_file_that_ends_too_early_is_named(tmp_path):
    both("gpt-oss", tmp_path)
    file = tmp_path / "stored" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        source_from_dir(tmp_path / "stored")
