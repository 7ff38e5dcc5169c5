"""Checkpoints that keep some layers in one format and some in another, or only some of them in one: config_groups of
compressed-tensors, quantized_layers of ModelOpt."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import pagebinder
from pagebinder import CheckpointError, CompileConfig
from pagebinder.compile import explain_model
from pagebinder.frontend.quantized_module import QuantizedLinear
from pagebinder.frontend.source import source_from_dir
from tests.frontend.test_fp8_checkpoints import scaled
from tests.frontend.test_int_checkpoints import (
    Chosen,
    int8,
    loaded,
    modelopt,
    nvfp4,
    packed,
    qwen3,
    tokens_of,
)
from tests.helpers import tiny_qwen3_next
from tests.moe_models import tiny_mixtral, tiny_qwen3_moe

ATTENTION, MLP, DOWN = "re:.*self_attn.*", "re:.*[.]mlp[.].*", "re:.*down_proj$"
SAID = {"symmetric": True, "dynamic": False, "group_size": None, "block_structure": None}


def in_e4m3(weight, granularity):
    """Without codes below 2^-6, which kernels round."""
    codes, scale = scaled(weight, granularity)
    codes.view(torch.uint8)[codes.float().abs() < 2**-6] = 0
    return codes, scale


def in_fp8(weight):
    codes, scale = in_e4m3(weight, "channel")
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def in_ints(write, **how):
    def written(weight):
        chosen = Chosen(weight, **how)
        tensors = write(chosen, **how)
        return tensors, chosen.plain

    return written


# name -> (how a weight is written, the group's options, format that is served)
FORMS = {
    "fp8": (
        in_fp8,
        {"format": "float-quantized", "weights": {**SAID, "num_bits": 8, "type": "float", "strategy": "channel"}},
        "fp8",
    ),
    "int4": (
        in_ints(packed, bits=4, group=32),
        {
            "format": "pack-quantized",
            "weights": {**SAID, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        },
        "int4_g32",
    ),
    "uint4": (
        in_ints(packed, bits=4, group=32, symmetric=False),
        {
            "format": "pack-quantized",
            "weights": {
                **SAID, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False,
            },
        },
        "uint4_g32",
    ),
    "int8": (
        in_ints(packed, bits=8, group=None),
        {"format": "pack-quantized", "weights": {**SAID, "num_bits": 8, "type": "int", "strategy": "channel"}},
        "int8",
    ),
    "w8a8": (
        in_ints(int8, bits=8, group=None),
        {"format": "int-quantized", "weights": {**SAID, "num_bits": 8, "type": "int", "strategy": "channel"}},
        "int8",
    ),
    "nvfp4": (
        in_ints(nvfp4, group=16, e2m1=True),
        {
            "format": "nvfp4-pack-quantized",
            "weights": {
                **SAID, "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
            },
        },
        "nvfp4",
    ),
}  # fmt: skip
# name -> (form, targets) of each config group
MIXES = {
    "nvfp4 and fp8": [("nvfp4", [MLP]), ("fp8", [ATTENTION])],
    "int8 in two ways": [("w8a8", [MLP]), ("int8", [ATTENTION])],
    "4 bits and 8": [("int4", ["Linear"]), ("int8", [DOWN])],
    "with and without zero points": [("uint4", [MLP]), ("int4", ["Linear"])],
    "fp8 and 4 bits": [("fp8", ["model.layers.1.mlp.up_proj", "re:.*o_proj"]), ("int4", [MLP])],
    "fp8 of some layers": [("fp8", [DOWN])],
    "4 bits of some layers": [("int4", [ATTENTION])],
}


def group_of(groups, path: str) -> str | None:
    """The form of a layer: by its path, an expression, or as every linear layer."""
    for kind in (
        lambda target: target == path,
        lambda target: target.startswith("re:") and re.match(target[3:], path),
        lambda target: target == "Linear",
    ):
        for form, targets in groups:
            if any(map(kind, targets)):
                return form
    return None


def config_of(groups) -> dict:
    forms = {form for form, _ in groups}
    said = {f"group_{i}": {"targets": targets} | FORMS[form][1] for i, (form, targets) in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(forms) > 1 else FORMS[forms.pop()][1]["format"],
        "config_groups": said,
        "ignore": ["lm_head"],
    }


def save(model, folder, form_of, options, change=None):
    """Write a checkpoint of a model whose weights are in the forms that form_of says -> {path: plain weight}.

    Args:
        form_of: path of a layer -> what writes it, None = plain. change: gets all tensors before they are written.
    """
    model.save_pretrained(folder)
    tensors, plain = load_file(folder / "model.safetensors"), {}
    linear = {f"{path}.weight" for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for key in [key for key in tensors if key in linear or ".experts." in key]:
        path = key.removesuffix(".weight")
        write = None if path == "lm_head" or path.endswith("mlp.gate") else form_of(path)
        if write is not None:
            written, plain[path] = write(tensors.pop(key))
            tensors |= {f"{path}.{kind}": tensor.contiguous() for kind, tensor in written.items()}
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    return plain


def save_mix(model, folder, groups, change=None):
    def form_of(path):
        form = group_of(groups, path)
        return None if form is None else FORMS[form][0]

    return save(model, folder, form_of, config_of(groups), change)


def with_weights(model, plain):
    with torch.no_grad():
        for path, weight in plain.items():
            model.get_submodule(path).weight.copy_(weight)
    return model


@pytest.mark.parametrize("name", MIXES)
def test_every_layer_keeps_its_codes(name, tmp_path):
    groups = MIXES[name]
    plain = save_mix(qwen3(), tmp_path, groups)
    source = source_from_dir(tmp_path)
    layers = {p: m for p, m in source.module.named_modules() if isinstance(m, QuantizedLinear)}
    assert {p: m.format for p, m in layers.items()} == {p: FORMS[group_of(groups, p)][2] for p in plain}
    for path, layer in layers.items():
        assert torch.equal(layer.weight(), plain[path])
    reasons = {r.module_path: r.reason for r in source.stored_weights.refusals}
    assert set(reasons.values()) == {"it is stored plain"} and not reasons.keys() & plain.keys()


@pytest.mark.parametrize("name", MIXES)
def test_explain_says_the_same_without_weights(name, tmp_path):
    save_mix(qwen3(), tmp_path, MIXES[name])

    def said(source):
        return {(m.module_path, m.detail.partition(" ")[0]) for m in source.stored_weights.matches}

    with_files = said(source_from_dir(tmp_path))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert with_files == said(source_from_dir(tmp_path, weights=False))
    assert explain_model(tmp_path).explain()


@pytest.mark.parametrize("name", ["nvfp4 and fp8", "fp8 and 4 bits"])
def test_a_mix_is_served_token_for_token(name, tmp_path):
    plain = save_mix(qwen3(), tmp_path, MIXES[name])
    compiled = pagebinder.compile_model(tmp_path, CompileConfig(dtype=torch.float32, verify="full"))
    assert tokens_of(compiled) == tokens_of(pagebinder.compile_model(with_weights(qwen3(), plain)))


def in_fp8_of_modelopt(weight):
    codes, scale = in_e4m3(weight, "tensor")
    tensors = {"weight": codes, "weight_scale": scale.reshape(()), "input_scale": torch.ones(())}
    return tensors, codes.float() * scale


ALGORITHMS = {"NVFP4": in_ints(modelopt, group=16, e2m1=True), "FP8": in_fp8_of_modelopt}


def save_by_modelopt(model, folder, algorithm_of, by_module):
    """by_module: experts are named as one, as newer versions do it."""
    layers = {}

    def form_of(path):
        algorithm = algorithm_of(path)
        if algorithm is None:
            return None
        said = {"quant_algo": algorithm, **({"group_size": 16} if algorithm == "NVFP4" else {})}
        layers[path.partition(".experts.")[0] + ".experts" if by_module and ".experts." in path else path] = (
            said
        )
        return ALGORITHMS[algorithm]

    options = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return save(model, folder, form_of, options)


def wide_mixture():
    return tiny_qwen3_moe(hidden_size=256, moe_intermediate_size=256)


def with_weights_of_mixture(plain, path):
    """[E, N, K] of up and down."""
    experts = sorted({key.split(".")[-2] for key in plain if key.startswith(f"{path}.")}, key=int)
    each = {
        p: torch.stack([plain.pop(f"{path}.{e}.{p}_proj") for e in experts]) for p in ("gate", "up", "down")
    }
    return {"gate_up_proj": torch.cat((each["gate"], each["up"]), dim=1), "down_proj": each["down"]}


@pytest.mark.parametrize("by_module", [False, True])
def test_what_modelopt_says_of_each_layer(by_module, tmp_path):
    """Experts in nvfp4, attention in fp8; what it says lies in a file of its own, too."""

    def algorithm_of(path):
        return "NVFP4" if ".experts." in path else "FP8" if "self_attn" in path else None

    plain = save_by_modelopt(wide_mixture(), tmp_path, algorithm_of, by_module)
    source = loaded(tmp_path)
    for path, module in source.module.named_modules():
        if isinstance(module, QuantizedLinear):
            assert module.format == "fp8_tensor" and torch.equal(module.weight(), plain.pop(path))
    for path in {key.partition(".experts.")[0] + ".experts" for key in plain}:
        experts = source.module.get_submodule(path)
        assert {*experts.formats.values()} == {"nvfp4"}
        for kind, weights in with_weights_of_mixture(plain, path).items():
            for i, weight in enumerate(weights):
                assert torch.equal(experts.exact_weight(kind, i), weight)
    assert not plain
    config = json.loads((tmp_path / "config.json").read_text())
    said = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    again = source_from_dir(tmp_path)
    assert again.stored_weights.matches == source.stored_weights.matches
    without_files = source_from_dir(tmp_path, weights=False).stored_weights
    said = [{(m.module_path, m.detail) for m in s.matches} for s in (source.stored_weights, without_files)]
    assert said[0] == said[1]


def test_experts_whose_projections_differ_are_expanded_and_said(tmp_path):
    groups = [("fp8", [DOWN]), ("int4", [MLP])]
    plain = save_mix(wide_mixture(), tmp_path, groups)
    source = loaded(tmp_path)
    path = "model.layers.1.mlp.experts"
    experts = source.module.get_submodule(path)
    for kind, weights in with_weights_of_mixture(plain, path).items():
        assert torch.equal(experts.get_parameter(kind), weights)
    (reason,) = {r.reason for r in source.stored_weights.refusals if r.module_path == path}
    assert "expanded" in reason


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_experts_of_which_one_is_missing_are_named(form, tmp_path):
    """In one format, and in two."""
    for groups in ([(form, ["Linear"])], [(form, [MLP]), ("w8a8", [ATTENTION])]):

        def change(tensors):
            for key in [key for key in tensors if ".experts.2.down_proj." in key]:
                del tensors[key]

        save_mix(wide_mixture(), tmp_path, groups, change)
        with pytest.raises(
            CheckpointError, match=r"hold down_proj of 7 experts of model.layers.1.mlp.experts"
        ):
            source_from_dir(tmp_path)


def test_groups_that_keep_weights_alike_are_one_part(tmp_path):
    """They differ in activations only."""
    groups = [("nvfp4", ["re:.*[.](gate|up)_proj$"]), ("nvfp4", ["re:.*down_proj$"]), ("fp8", [ATTENTION])]
    save_mix(wide_mixture(), tmp_path, groups)
    experts = loaded(tmp_path).module.get_submodule("model.layers.1.mlp.experts")
    assert {*experts.formats.values()} == {"nvfp4"}


@pytest.mark.parametrize("form", [None, "int4"])
def test_experts_of_a_layer_that_guesses_tokens_are_not_the_models(form, tmp_path):
    """Plain or not, Qwen3-Next leaves them out; their names end like those of the model's layers."""

    def change(tensors):
        prefix = "model.layers.1.mlp.experts."
        for name in {key.rpartition(".")[0] for key in tensors if key.startswith(prefix)}:
            weight = torch.randn(64, 64)
            written = {"weight": weight} if form is None else FORMS[form][0](weight)[0]
            other = f"mtp{name.removeprefix('model')}"
            tensors.update({f"{other}.{kind}": tensor.contiguous() for kind, tensor in written.items()})

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = tiny_qwen3_next(**layers, **experts, shared_expert_intermediate_size=64)
    save_mix(model, tmp_path, [("int4", ["re:.*[.]experts[.].*"]), ("fp8", [ATTENTION])], change)
    experts = loaded(tmp_path).module.get_submodule("model.layers.1.mlp.experts")
    assert {*experts.formats.values()} == {"int4_g32"}


MIXTRAL = {  # groups, or what is left out -> what becomes of experts
    "named by expressions": (
        [("nvfp4", ["re:.*block_sparse_moe[.]experts.*"]), ("fp8", [ATTENTION])],
        (),
        "nvfp4",
    ),
    "their parts": ([("fp8", ["re:.*[.]w2$"]), ("int4", ["Linear"])], (), None),
    "left out": ([("int4", ["Linear"])], ("re:.*block_sparse_moe.*",), None),
}


@pytest.mark.parametrize("name", MIXTRAL)
def test_experts_are_named_as_in_the_checkpoint(name, tmp_path):
    """block_sparse_moe.experts.0.w1, whatever transformers calls it."""
    groups, kept, format = MIXTRAL[name]

    def form_of(path):
        form = None if kept and "block_sparse_moe" in path else group_of(groups, path)
        return None if form is None else FORMS[form][0]

    options = config_of(groups)
    options["ignore"] += kept
    save(tiny_mixtral(hidden_size=256, intermediate_size=256), tmp_path, form_of, options)
    for weights in (True, False):
        stored = (loaded(tmp_path) if weights else source_from_dir(tmp_path, weights=False)).stored_weights
        details = {m.detail.partition(" ")[0] for m in stored.matches if "experts" in m.pattern}
        reasons = {r.reason for r in stored.refusals if r.module_path.endswith("experts")}
        assert details == ({format} if format else set())
        assert all(("plain" in reason) == bool(kept) for reason in reasons) and bool(reasons) == (
            format is None
        )


def test_expressions_are_taken_in_the_order_of_their_letters(tmp_path):
    """As compressed-tensors does it, whatever the order of the groups is."""
    save_mix(qwen3(), tmp_path, [("nvfp4", ["re:.*down_proj$"]), ("int8", ["re:.*mlp.*"])])
    config = json.loads((tmp_path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"], groups["group_1"] = groups["group_1"], groups["group_0"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for weights in (True, False):
        matches = source_from_dir(tmp_path, weights=weights).stored_weights.matches
        details = {m.detail for m in matches if m.module_path.endswith("down_proj")}
        assert len(details) == 1 and details.pop().startswith("nvfp4")


def drop(name):
    return lambda tensors: tensors.pop(name)


def recode(name, dtype):
    def change(tensors):
        tensors[name] = tensors[name].to(dtype)

    return change


UP = "model.layers.0.mlp.up_proj"
BROKEN = {
    "no scale": (drop(f"{UP}.weight_scale"), f"{UP}.weight_packed holds codes in none of the formats"),
    "no whole scale": (drop(f"{UP}.weight_global_scale"), "none of the formats that its config describes"),
    "no scale of fp8": (
        drop("model.layers.0.self_attn.q_proj.weight_scale"),
        r"q_proj.weight holds codes in none .* beside it lie bias F32 \[128\], weight F8_E4M3",
    ),
    "e5m2": (recode("model.layers.0.self_attn.q_proj.weight", torch.float8_e5m2), "stored in e5m2"),
    "no weight": (drop("model.layers.0.self_attn.q_proj.weight"), "q_proj.weight_scale"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_contradict_the_config_are_errors(name, tmp_path):
    change, message = BROKEN[name]
    save_mix(qwen3(), tmp_path, MIXES["nvfp4 and fp8"], change)
    with pytest.raises(CheckpointError, match=message):
        source_from_dir(tmp_path)


MIX = config_of(MIXES["nvfp4 and fp8"])
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
NOT_SERVED = {
    "an expression that is none": (config_of([("fp8", ["re:*"])]), "no regular expression"),
    "targets that are no names": (config_of([("fp8", [1])]), r"targets \[1\]"),
    "a group of another format": (
        MIX | {"config_groups": MIX["config_groups"] | {"c": {**FORMS["int4"][1], "format": "marlin-24"}}},
        "format 'marlin-24'",
    ),
    "no format of its own": (
        MIX | {"config_groups": {"a": {**FORMS["int4"][1], "format": None}}},
        "format 'mixed-precision'",
    ),
    "no layer": (MODELOPT | {"quantized_layers": {}}, "MIXED_PRECISION without quantized_layers"),
    "layers in a list": (MODELOPT | {"quantized_layers": ["a"]}, "cannot be read"),
    "a layer without an algorithm": (MODELOPT | {"quantized_layers": {"a": {}}}, "quant_algo None"),
    "an algorithm": (
        MODELOPT | {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
        "quant_algo 'W4A8_AWQ'",
    ),
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_refused_by_name(name, tmp_path):
    options, message = NOT_SERVED[name]
    save(qwen3(num_hidden_layers=1), tmp_path, lambda path: None, options)
    with pytest.raises(CheckpointError, match=message):
        source_from_dir(tmp_path)
