"""Checkpoints that keep weights as integers or in 4 bits: GPTQ, AWQ, AutoRound, compressed-tensors, ModelOpt,
bitsandbytes. No number is changed.

What writes them here follows the tensors that these tools leave; docs/measurements.md says how files of the tools
themselves were compared.
"""

from __future__ import annotations

import copy
import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import pagebinder
from pagebinder import CheckpointError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.compile import explain_model
from pagebinder.custom_ops.latent.small_floats import from_e2m1
from pagebinder.custom_ops.linear.weight_formats import NF4_VALUES
from pagebinder.frontend.bnb_weights import expanded
from pagebinder.frontend.int_codes import unpacked
from pagebinder.frontend.int_format import INT_READERS
from pagebinder.frontend.quantized_module import QuantizedLinear
from pagebinder.frontend.source import source_from_dir
from pagebinder.frontend.stored_files import ints_of_files
from pagebinder.frontend.stored_format import stored_weights
from tests.helpers import by_day, nightly, tiny_qwen3
from tests.moe_models import tiny_qwen3_moe

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of 8 that each nibble holds


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of values -> rows of int32 words, as one stream of bits, the lowest first."""
    each = values.long()[..., None] >> torch.arange(bits) & 1
    stream = torch.nn.functional.pad(each.flatten(1), (0, -each[0].numel() % 32)).unflatten(1, (-1, 32))
    whole = (stream << torch.arange(32)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


class Chosen:
    """Codes, zero points and scales of a weight [N, K], and the plain weight that they stand for."""

    def __init__(
        self, weight, *, bits=4, group, symmetric=True, order=False, dtype=torch.float16, e2m1=False
    ):
        rows, columns = weight.shape
        generator = torch.Generator().manual_seed(rows)
        group, half = group or columns, 1 << (bits - 1)
        self.bits, self.groups = bits, torch.arange(columns) // group
        if order:
            self.groups = self.groups[torch.randperm(columns, generator=generator)]
        num_groups = -(-columns // group)
        self.scales = (
            weight.abs().max() / half * (0.5 + torch.rand(rows, num_groups, generator=generator))
        ).to(dtype)
        self.zeros = torch.full((rows, num_groups), half)
        if not symmetric:
            self.zeros = torch.randint(0, 2 * half, (rows, num_groups), generator=generator)
        self.codes = torch.randint(0, 2 * half, (rows, columns), generator=generator)
        if e2m1:
            self.scales = self.scales.float() * 4
            self.plain = from_e2m1(self.codes)
            return
        self.plain = (self.codes - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]


def bytes_of_pairs(c: Chosen) -> torch.Tensor:
    return (c.codes[:, ::2] + 16 * c.codes[:, 1::2]).to(torch.uint8)


def nvfp4(c: Chosen, **_) -> dict[str, torch.Tensor]:
    """Also with scales that are subnormal in e4m3, and 0."""
    whole = 400 / c.scales.max() * 1.01
    scales = (c.scales * whole).to(torch.float8_e4m3fn)
    scales.view(torch.uint8)[::3, ::2] %= 8
    c.plain = c.plain * (scales.float() / whole).repeat_interleave(16, dim=1)
    return {"weight_packed": bytes_of_pairs(c), "weight_scale": scales, "weight_global_scale": whole[None]}


def modelopt(c: Chosen, **_) -> dict[str, torch.Tensor]:
    whole = c.scales.max() / 441
    scales = (c.scales / whole).to(torch.float8_e4m3fn)
    scales.view(torch.uint8)[::3, ::2] %= 8
    c.plain = c.plain * (scales.float() * whole).repeat_interleave(16, dim=1)
    return {"weight": bytes_of_pairs(c), "weight_scale": scales, "weight_scale_2": whole}


def mxfp4(c: Chosen, **_) -> dict[str, torch.Tensor]:
    exponents = torch.frexp(c.scales).exponent
    c.plain = torch.ldexp(c.plain, exponents.repeat_interleave(32, dim=1))
    return {"weight_packed": bytes_of_pairs(c), "weight_scale": (exponents + 127).to(torch.uint8)}


def modelopt_mxfp4(c: Chosen, **_) -> dict[str, torch.Tensor]:
    written = mxfp4(c)
    return {"weight": written["weight_packed"], "weight_scale": written["weight_scale"]}


def gptq(c: Chosen, *, v2=False, **_) -> dict[str, torch.Tensor]:
    zeros = words(c.zeros.t() % (1 << c.bits), c.bits)
    if not v2:
        less = sum(1 << i for i in range(0, 32, c.bits))
        zeros = zeros - torch.tensor(less - (1 << 32) if less >= 1 << 31 else less).to(torch.int32)
        if 32 % c.bits:
            zeros = words((c.zeros.t() - 1) % (1 << c.bits), c.bits)
    return {
        "qweight": words(c.codes, c.bits).t().contiguous(),
        "qzeros": zeros,
        "scales": c.scales.t().contiguous(),
        "g_idx": c.groups.to(torch.int32),
    }


def awq(c: Chosen, **_) -> dict[str, torch.Tensor]:
    def packed(x):
        return words(x.unflatten(1, (-1, 8))[..., AWQ_NIBBLES].flatten(1), 4)

    return {
        "qweight": packed(c.codes.t()),
        "qzeros": packed(c.zeros.t()),
        "scales": c.scales.t().contiguous(),
    }


def packed(c: Chosen, *, symmetric=True, order=False, **_) -> dict[str, torch.Tensor]:
    stored = {
        "weight_packed": words(c.codes, c.bits),
        "weight_scale": c.scales,
        "weight_shape": torch.tensor(c.codes.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = words(c.zeros.t(), c.bits).t().contiguous()
    if order:
        stored["weight_g_idx"] = c.groups.to(torch.int32)
    return stored


def int8(c: Chosen, **_) -> dict[str, torch.Tensor]:
    return {"weight": (c.codes - 128).to(torch.int8), "weight_scale": c.scales}


def gemv(c: Chosen, **_) -> dict[str, torch.Tensor]:
    """Groups are padded to whole words, and to as many of them as 128 / group."""
    pad = (0, -c.zeros.shape[1] % (8 * 128 // 32))
    zeros, scales = (torch.nn.functional.pad(x, pad) for x in (c.zeros, c.scales))
    return {"qweight": words(c.codes, 4), "qzeros": words(zeros, 4), "scales": scales}


def bnb8(c: Chosen, **_) -> dict[str, torch.Tensor]:
    largest = c.scales[:, 0].float() * 127
    c.plain = (c.codes - 128).float() * (largest[:, None] / 127)
    return {
        "weight": (c.codes - 128).to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8),
    }  # fmt: skip


def old_packed(c: Chosen, **_) -> dict[str, torch.Tensor]:
    """compressed-tensors of 3 bits, once: ten values a word."""
    columns = torch.nn.functional.pad(c.codes, (0, -c.codes.shape[1] % 10)).unflatten(1, (-1, 10))
    return packed(c) | {"weight_packed": (columns << torch.arange(0, 30, 3)).sum(-1).to(torch.int32)}


def compressed(form: str, bits: int, group: int | None, symmetric: bool) -> dict:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group,
        "strategy": "group" if group else "channel", "dynamic": False,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def in_float4(form: str, group: int, strategy: str) -> dict:
    options = compressed(form, 4, group, True)
    options["config_groups"]["group_0"]["weights"] |= {"type": "float", "strategy": strategy}
    return options | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}


def by_gptq(bits, group, symmetric, **more) -> dict:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": False,
        **more,
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
OF_NVIDIA = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]},
    },
}  # fmt: skip
ROUNDED = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
# name -> (how it is written, options of that, quantization_config, format that is served)
G32 = dict(bits=4, group=32)
METHODS = {
    "gptq": (gptq, dict(bits=4, group=64, symmetric=True), by_gptq(4, 64, True), "int4_g64"),
    "gptq asymmetric": (gptq, dict(**G32, symmetric=False), by_gptq(4, 32, False), "uint4_g32"),
    "gptq v2": (
        functools.partial(gptq, v2=True),
        dict(**G32, symmetric=False),
        by_gptq(4, 32, False, checkpoint_format="gptq_v2"),
        "uint4_g32",
    ),
    "gptq by activation": (
        gptq,
        dict(**G32, symmetric=True, order=True),
        by_gptq(4, 32, True) | {"desc_act": True},
        "int4_g32",
    ),
    "gptq rows": (gptq, dict(bits=4, group=None, symmetric=True), by_gptq(4, None, True), "int4_g"),
    "gptq 8": (gptq, dict(bits=8, group=32, symmetric=True), by_gptq(8, 32, True), "int8_g32"),
    "gptq 3": (gptq, dict(bits=3, group=32, symmetric=False), by_gptq(3, 32, False), "int4_g32"),
    "gptq 2": (gptq, dict(bits=2, group=32, symmetric=False), by_gptq(2, 32, False), "int4_g32"),
    "awq": (awq, dict(**G32, symmetric=False), {**AWQ, "group_size": 32}, "uint4_g32"),
    "awq gemv": (
        gemv,
        dict(**G32, symmetric=False),
        AWQ | {"group_size": 32, "version": "gemv"},
        "uint4_g32",
    ),
    "auto-round": (gptq, dict(**G32, symmetric=True), ROUNDED, "int4_g32"),
    "auto-round as awq": (
        awq,
        dict(**G32, symmetric=False),
        ROUNDED | {"packing_format": "auto_round:auto_awq", "sym": False},
        "uint4_g32",
    ),
    "packed": (packed, dict(**G32, symmetric=True, dtype=torch.bfloat16), None, "int4_g32"),
    "packed asymmetric": (packed, dict(**G32, symmetric=False, order=True), None, "uint4_g32"),
    "packed 8": (packed, dict(bits=8, group=None, symmetric=True), None, "int8"),
    "packed 8 asymmetric": (packed, dict(bits=8, group=None, symmetric=False), None, "uint8_g"),
    "packed 3": (packed, dict(bits=3, group=32, symmetric=True), None, "int4_g32"),
    "old packed 3": (old_packed, dict(bits=3, group=32, symmetric=True), None, "int4_g32"),
    "bitsandbytes": (
        bnb8,
        dict(bits=8, group=None, symmetric=True),
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "int8",
    ),
    "nvfp4": (
        nvfp4,
        dict(group=16, e2m1=True),
        in_float4("nvfp4-pack-quantized", 16, "tensor_group"),
        "nvfp4",
    ),
    "modelopt": (modelopt, dict(group=16, e2m1=True), OF_NVIDIA, "nvfp4"),
    "modelopt mxfp4": (
        modelopt_mxfp4,
        dict(group=32, e2m1=True),
        {"quant_method": "modelopt", "quant_algo": "mxfp4", "ignore": ["lm_head"]},
        "mxfp4",
    ),
    "mxfp4": (mxfp4, dict(group=32, e2m1=True), in_float4("mxfp4-pack-quantized", 32, "group"), "mxfp4"),
    "int8": (int8, dict(bits=8, group=None, symmetric=True), None, "int8"),
}


def options_of(name: str) -> dict:
    write, how, options, _ = METHODS[name]
    form = "int-quantized" if write is int8 else "pack-quantized"
    return options or compressed(form, how["bits"], how["group"], how["symmetric"])


def save(model, folder, name, *, change=None, kept=("lm_head",), **more):
    """Write a checkpoint of a model, and give back the model with the plain weights that its codes stand for."""
    write, how, _, _ = METHODS[name]
    how = how | more
    model = copy.deepcopy(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not path.endswith(kept):
            chosen = Chosen(module.weight.detach(), **how)
            written = write(chosen, **how)
            module.weight.data.copy_(chosen.plain)
            del tensors[f"{path}.weight"]
            tensors |= {f"{path}.{kind}": tensor for kind, tensor in written.items()}
    if change is not None:
        change(tensors)
    save_file(
        {k: t.contiguous() for k, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options_of(name)}))
    return model


def qwen3(**sizes):
    options = {"hidden_size": 160, "intermediate_size": 288, "attention_bias": True, "head_dim": 32}
    return tiny_qwen3(**{**options, **sizes})


def small(name: str):
    """Groups of 64 need rows of a multiple of them, two levels of scales rows of 256."""
    if name == "modelopt":
        return qwen3(hidden_size=256, intermediate_size=512, head_dim=64)
    return qwen3(hidden_size=192, intermediate_size=320) if "64" in METHODS[name][3] else qwen3()


@pytest.mark.parametrize("name", METHODS)
def test_codes_stand_for_the_very_weights(name, tmp_path):
    plain = save(small(name), tmp_path, name)
    source = source_from_dir(tmp_path)
    layers = {p: m for p, m in source.module.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == 14 and all(m.format.startswith(METHODS[name][3]) for m in layers.values())
    for path, layer in layers.items():
        assert torch.equal(layer.weight(), plain.get_submodule(path).weight)
    assert {r.module_path for r in source.stored_weights.refusals} == {"lm_head"}
    ids = torch.arange(30)[None]
    with torch.no_grad():
        got, expected = (m.eval()(ids, use_cache=False).logits for m in (source.module, plain))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def tokens_of(compiled):
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=48))
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return [list(o.token_ids) for o in engine.generate([[1, 2, 3], list(range(20)), [7] * 45], sampling)]


def exact(folder, plain, **options):
    compiled = pagebinder.compile_model(folder, CompileConfig(dtype=torch.float32, **options))
    tokens = tokens_of(compiled)
    assert tokens == tokens_of(pagebinder.compile_model(plain))
    return compiled, tokens


@pytest.mark.parametrize("name", ["gptq by activation", "awq", "nvfp4", "modelopt"])
def test_a_checkpoint_is_served_token_for_token(name, tmp_path):
    plain = save(small(name), tmp_path, name)
    compiled, tokens = exact(tmp_path, plain, verify="full")
    assert METHODS[name][3] in str(compiled.report.to_dict())
    compiled.save(tmp_path / "saved")
    assert tokens_of(pagebinder.load(tmp_path / "saved")) == tokens


@nightly
@pytest.mark.parametrize("name", METHODS)
def test_checkpoints_are_served_token_for_token(name, tmp_path):
    exact(tmp_path, save(small(name), tmp_path, name), verify="full")


def state_space(kind: str):
    """Mamba layers, whose projections have 1,160 rows; alone, or beside attention."""
    sizes = {"vocab_size": 96, "hidden_size": 256, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {"eos_token_id": None, "bos_token_id": None, "tie_word_embeddings": False}
    own = {
        "mamba": {"state_size": 16, "time_step_rank": 64},
        "mamba2": {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1, "chunk_size": 16},
        "falcon_h1": {
            "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_ssm": 512, "mamba_d_state": 64, "mamba_n_groups": 1,
            "mamba_chunk_size": 16, "attention_bias": True,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **own[kind])).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05)
    return model


@pytest.mark.parametrize("name", ["gptq", "nvfp4"])
@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_h1"])
def test_mamba_layers_keep_their_codes(kind, name, tmp_path):
    """All rows of them: kernels read 32 together, so codes have some behind the last one."""
    plain = save(state_space(kind), tmp_path, name)
    source, told = (source_from_dir(tmp_path, dtype=torch.float32, weights=w) for w in (True, False))
    reasons = {refusal.reason for refusal in source.stored_weights.refusals}
    of_mamba = {"Mamba reads its weight as a matrix: it is expanded"} if kind == "mamba" else set()
    assert reasons == {"it is stored plain"} | of_mamba
    assert [m.module_path for m in told.stored_weights.matches] == [
        m.module_path for m in source.stored_weights.matches
    ]
    layers = [m for m in source.module.modules() if isinstance(m, QuantizedLinear)]
    assert kind == "mamba" or any(layer.num_rows == 1160 for layer in layers)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected, logits = plain(ids).logits, source.module(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_layers_of_other_sizes_are_read_from_the_files(tmp_path):
    """`dynamic` and its kind: a layer in 8 bits, one in larger groups, one that is plain."""

    def change(tensors):
        for layer, how in (("q_proj", dict(bits=8, group=32)), ("k_proj", dict(bits=4, group=160))):
            path = f"model.layers.0.self_attn.{layer}"
            rows = tensors[f"{path}.scales"].shape[1]
            chosen = Chosen(torch.ones(rows, 160) / 50, **how, symmetric=True)
            made[path] = chosen.plain
            tensors.update({f"{path}.{kind}": tensor for kind, tensor in gptq(chosen).items()})
        path = "model.layers.1.mlp.up_proj"
        for kind in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{path}.{kind}"]
        tensors[f"{path}.weight"] = made[path] = torch.randn(288, 160) / 20

    made = {}
    save(qwen3(), tmp_path, "auto-round", change=change)
    module = source_from_dir(tmp_path).module
    formats = {path: getattr(module.get_submodule(path), "format", None) for path in made}
    assert list(formats.values()) == ["int8_g32", "int4_g32", None]
    for path, weight in made.items():
        layer = module.get_submodule(path)
        assert torch.equal(layer.weight() if formats[path] else layer.weight, weight)


def mixture(folder, name, change=None, **more):
    """A mixture's checkpoint whose experts are integers -> the model that it stands for."""
    width = 256 if name == "modelopt" else 64
    model = tiny_qwen3_moe(hidden_size=width, moe_intermediate_size=width)
    model.save_pretrained(folder)
    write, how, _, _ = METHODS[name]
    how = {**how, **({} if how.get("e2m1") else {"group": 32}), **more}
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for key in list(tensors):
        if ".experts." in key:
            chosen = Chosen(tensors.pop(key), **how)
            written = write(chosen, **how)
            plain[key] = chosen.plain
            tensors |= {f"{key.removesuffix('.weight')}.{k}": t for k, t in written.items()}
    if change is not None:
        change(tensors, plain)
    write_to = functools.partial(save_file, filename=folder / "model.safetensors", metadata={"format": "pt"})
    write_to(plain)
    expected = source_from_dir(folder).module
    write_to({k: t.contiguous() for k, t in tensors.items()})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options_of(name)}))
    return expected


def loaded(folder):
    try:
        return source_from_dir(folder)
    except CheckpointError as error:
        assert "of no linear layer and no experts" in str(error)
        pytest.skip(
            "this version of transformers does not merge experts that are no plain weights, which is said"
        )


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    "name",
    ["auto-round", "awq", "packed", "gptq 8", "gptq 3", "nvfp4", "modelopt", "mxfp4", "modelopt mxfp4"],
)
def test_experts_keep_their_codes(name, tmp_path):
    expected = mixture(tmp_path, name)
    source = loaded(tmp_path)
    experts = source.module.get_submodule(EXPERTS)
    assert {*experts.formats.values()} == {METHODS[name][3]} and type(experts).__name__ == "Qwen3MoeExperts"
    for kind in ("gate_up_proj", "down_proj"):
        for i, weight in enumerate(expected.get_parameter(f"{EXPERTS}.{kind}")):
            assert torch.equal(experts.exact_weight(kind, i), weight)
    (match,) = [m for m in source.stored_weights.matches if m.module_path == EXPERTS]
    assert match.pattern == "quantized_moe_experts" and METHODS[name][3] in match.detail


@pytest.mark.parametrize("name", ["int8", "packed 8"])
def test_experts_with_a_scale_for_each_row_keep_their_codes(name, tmp_path):
    expected = mixture(tmp_path, name, group=None)
    loaded(tmp_path)
    exact(tmp_path, expected)
    experts = source_from_dir(tmp_path).module.get_submodule(EXPERTS)
    assert {*experts.formats.values()} == {"int8"}
    for kind in ("gate_up_proj", "down_proj"):
        for i, weight in enumerate(expected.get_parameter(f"{EXPERTS}.{kind}")):
            assert torch.equal(experts.exact_weight(kind, i), weight)


@pytest.mark.parametrize(
    "name",
    by_day(["awq", "auto-round", "packed", "gptq 8", "nvfp4", "modelopt", "mxfp4"], ("awq", "modelopt")),
)
def test_experts_are_served_from_codes(name, tmp_path):
    expected = mixture(tmp_path, name)
    loaded(tmp_path)
    compiled, tokens = exact(tmp_path, expected, verify="full")
    used = {c.op for c in compiled.report.providers}
    assert "quantized_moe_routed_experts" in used and "moe_routed_experts" not in used
    assert compiled.report.num_parameters == sum(p.numel() for p in expected.parameters())
    compiled.save(tmp_path / "saved")
    assert tokens_of(pagebinder.load(tmp_path / "saved")) == tokens


def test_experts_in_an_order_of_their_own_are_expanded_and_said(tmp_path):
    expected = mixture(tmp_path, "gptq by activation")
    source = loaded(tmp_path)
    for key, parameter in expected.named_parameters():
        assert torch.equal(source.module.get_parameter(key), parameter), key
    reasons = {r.module_path: r.reason for r in source.stored_weights.refusals}
    assert "they are expanded" in reasons[EXPERTS]


def test_experts_of_other_sizes_than_the_config_says_are_expanded(tmp_path):
    """As GPTQModel's `dynamic` makes them: 8 bits in one expert."""

    def change(tensors, plain):
        name = f"{EXPERTS}.3.up_proj"
        chosen = Chosen(plain[f"{name}.weight"], bits=8, group=32, symmetric=True)
        plain[f"{name}.weight"] = chosen.plain
        tensors.update({f"{name}.{kind}": tensor for kind, tensor in gptq(chosen).items()})

    expected = mixture(tmp_path, "auto-round", change=change)
    source = loaded(tmp_path)
    for key, parameter in expected.named_parameters():
        assert torch.equal(source.module.get_parameter(key), parameter), key


def test_experts_of_which_some_are_plain_are_expanded(tmp_path):
    """A layer's down projections, in the checkpoint's own dtype."""

    def change(tensors, plain):
        for name in [name for name in plain if name.startswith(EXPERTS) and "down_proj" in name]:
            tensors[name] = plain[name] = (plain[name] / 3).bfloat16()
            for kind in ("qweight", "qzeros", "scales", "g_idx"):
                del tensors[f"{name.removesuffix('.weight')}.{kind}"]

    expected = mixture(tmp_path, "auto-round", change=change)
    source = loaded(tmp_path)
    for key, parameter in expected.named_parameters():
        got = source.module.get_parameter(key)
        assert got.dtype == torch.float32 and torch.equal(got, parameter.float()), key


def test_experts_with_zero_points_of_which_the_config_does_not_speak(tmp_path):
    mixture(tmp_path, "auto-round", symmetric=False)
    with pytest.raises(CheckpointError, match="experts.*(zero points|no experts that the model has)"):
        source_from_dir(tmp_path)


@pytest.mark.parametrize("name", ["gptq", "gptq 8", "awq", "packed asymmetric", "int8", "nvfp4", "modelopt"])
def test_explain_shows_the_format_without_weights(name, tmp_path):
    plain = save(small(name), tmp_path, name)
    (tmp_path / "model.safetensors").unlink()
    report = explain_model(tmp_path).report
    (result,) = [p for p in report.passes if p.name == "stored_weights"]
    assert len(result.matches) == 14 and METHODS[name][3] in result.matches[0].detail
    assert report.num_parameters == sum(p.numel() for p in plain.parameters())
    assert report.weight_bytes < 3 * report.num_parameters  # of float32 they would be 4


def test_groups_that_no_kernel_reads_are_expanded(tmp_path):
    plain = save(qwen3(), tmp_path, "auto-round", group=8)
    source = source_from_dir(tmp_path)
    assert {r.reason for r in source.stored_weights.refusals} == {
        "it is stored plain",
        *(f"no kernel reads {k} columns of codes in groups of 8: it is expanded" for k in (128, 160, 288)),
    }  # fmt: skip
    for path, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert torch.equal(source.module.get_submodule(path).weight, module.weight)


def test_padding_behind_the_last_words_is_cut(tmp_path):
    """A layer of 3 rows, whose zero points fill a part of a word, and one of 136 columns in 3 bits."""
    weight = torch.randn(3, 160) / 20
    stored = gptq(chosen := Chosen(weight, bits=4, group=32, symmetric=False))
    codes = INT_READERS["gptq"](by_gptq(4, 32, False)).read(stored, 160)
    assert torch.equal(codes.weight(torch.float32), chosen.plain)
    stored = packed(chosen := Chosen(torch.randn(32, 136), bits=3, group=136, symmetric=True))
    options = compressed("pack-quantized", 3, None, True)
    codes = stored_weights({"quantization_config": options}, "").read(stored, 136)
    assert torch.equal(codes.weight(torch.float32), chosen.plain)


@pytest.mark.parametrize("name", ["auto-round", "packed asymmetric"])
def test_the_last_group_may_be_smaller(name, tmp_path):
    """192 columns in groups of 128; where columns have an order, groups say themselves which they are."""
    plain = save(qwen3(hidden_size=192, intermediate_size=320), tmp_path, name, group=128, order=False)
    config = json.loads((tmp_path / "config.json").read_text())
    options = config["quantization_config"]
    if name == "auto-round":
        options["group_size"] = 128
    else:
        options["config_groups"]["group_0"]["weights"]["group_size"] = 128
    (tmp_path / "config.json").write_text(json.dumps(config))
    layers = {
        p: m for p, m in source_from_dir(tmp_path).module.named_modules() if isinstance(m, QuantizedLinear)
    }
    assert len(layers) == 14 and {m.format.rpartition("_g")[2] for m in layers.values()} == {"64", "128"}
    for path, layer in layers.items():
        assert torch.equal(layer.weight(), plain.get_submodule(path).weight)


NAME = "model.layers.0.mlp.up_proj"
BROKEN = {
    "no scales": (lambda t: t.pop(f"{NAME}.scales"), f"{NAME} cannot be read: .*scales, which is missing"),
    "no zero points": (
        lambda t: t.pop(f"{NAME}.qzeros"),
        f"{NAME} cannot be read: .*qzeros, which is missing",
    ),
    "floats": (
        lambda t: t.update({f"{NAME}.qweight": t[f"{NAME}.qweight"].float()}),
        f"{NAME}.qweight is stored as F32; I32 is read",
    ),
    "other sizes": (
        lambda t: t.update({f"{NAME}.qweight": t[f"{NAME}.qweight"][:, :64]}),
        f"{NAME}.*\\[64, 160\\]",
    ),
    "NaN": (lambda t: t[f"{NAME}.scales"].fill_(float("nan")), f"{NAME} cannot be read: a scale is NaN"),
    "groups": (lambda t: t[f"{NAME}.g_idx"].zero_(), f"{NAME} cannot be read: its columns"),
    "another layer": (
        lambda t: t.update({"model.layers.0.mlp.gates.qweight": t[f"{NAME}.qweight"].clone()}),
        "gates.qweight",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_checkpoints_that_contradict_themselves_are_errors(name, tmp_path):
    change, message = BROKEN[name]
    save(qwen3(num_hidden_layers=1), tmp_path, "auto-round", change=change)
    with pytest.raises(CheckpointError, match=message):
        source_from_dir(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gptq by activation", "g_idx"), ("awq", "qzeros"), ("packed 8 asymmetric", "weight_zero_point")],
)
def test_what_the_config_promises_is_not_left_out_in_silence(name, kind, tmp_path):
    save(qwen3(num_hidden_layers=1), tmp_path, name, change=lambda t: t.pop(f"{NAME}.{kind}"))
    with pytest.raises(CheckpointError, match=f"{NAME} cannot be read: .*{kind}, which is missing"):
        source_from_dir(tmp_path)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path):
    """And layers of another stack with names that end alike: of a head for several tokens."""
    plain = save(qwen3(), tmp_path, "auto-round")
    whole = tmp_path / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({n: tensors[n] for n in some}, tmp_path / file, metadata={"format": "pt"})
    stale = {n: t[:, :32].contiguous() for n, t in tensors.items() if n.endswith("qweight")}
    save_file(stale, tmp_path / "old.safetensors", metadata={"format": "pt"})
    weight_map = {n: file for file, some in parts.items() for n in some}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map, "metadata": {}})
    )
    whole.unlink()
    for path, layer in source_from_dir(tmp_path).module.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert torch.equal(layer.weight(), plain.get_submodule(path).weight)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="index.json names no files"):
        source_from_dir(tmp_path)


def test_layers_of_other_parts_that_are_named_alike_stay_plain():
    """A vision tower's layers beside those of the language model, whose names begin otherwise in the files."""
    end = "layers.0.self_attn.q_proj"
    layers = {
        f"language_model.model.{end}": {"qweight": ("I32", (20, 160))},
        f"mtp.{end}": {"qweight": ("I32", (8, 64))},
        f"vision_tower.encoder.{end}": {"weight": ("F32", (64, 64))},
    }
    stored = ints_of_files(INT_READERS["gptq"](by_gptq(4, 32, True)), layers)
    assert stored.found(f"model.language_model.{end}") == {"qweight": (20, 160)}
    assert stored.found(f"model.vision_tower.encoder.{end}") is None
    assert stored.found(f"mtp.{end}") == {"qweight": (8, 64)}
    assert stored.found(f"model.{end.replace('q_proj', 'k_proj')}") is None


def test_codes_without_a_config_of_them(tmp_path):
    save(qwen3(num_hidden_layers=1), tmp_path, "auto-round")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="keeps codes of weights .*no quantization_config"):
        source_from_dir(tmp_path)


@pytest.mark.parametrize("value", [float("inf"), 1e-39, 0.0])
def test_global_scales_that_leave_no_numbers_are_errors(value, tmp_path):
    def change(tensors):
        tensors[f"{NAME}.weight_global_scale"].fill_(value)

    save(qwen3(num_hidden_layers=1), tmp_path, "nvfp4", change=change)
    with pytest.raises(CheckpointError, match="up_proj cannot be read: weight_global_scale is"):
        source_from_dir(tmp_path)


def test_weights_beyond_the_dtype_are_errors(tmp_path):
    def change(tensors):
        tensors[f"{NAME}.weight_scale"][3, 1] = 254

    save(qwen3(num_hidden_layers=1), tmp_path, "mxfp4", change=change)
    with pytest.raises(CheckpointError, match="up_proj: a weight is NaN, or too large for torch.float32"):
        source_from_dir(tmp_path)


MALFORMED = {
    "groups as a list": in_float4("nvfp4-pack-quantized", 16, "tensor_group") | {"config_groups": [1]},
    "weights as a string": compressed("pack-quantized", 4, 32, True)
    | {"config_groups": {"a": {"weights": "int4"}}},
    "numbers to ignore": OF_NVIDIA | {"ignore": [1]},
    "no expression": in_float4("nvfp4-pack-quantized", 16, "tensor_group") | {"ignore": ["re:["]},
    "groups of strings": OF_NVIDIA | {"config_groups": ["a"]},
    "a list of methods": {"quant_method": ["gptq"]},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_configs_that_are_malformed_are_errors(name, tmp_path):
    tiny_qwen3().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": MALFORMED[name]}))
    for weights in (True, False):
        with pytest.raises(CheckpointError):
            source_from_dir(tmp_path, weights=weights)


REFUSED = {
    "bits": (by_gptq(5, 32, True), "'gptq' with bits 5"),
    "marlin": (by_gptq(4, 32, True, checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
    "a string": (by_gptq("4", 32, True), "bits '4'"),
    "another string": (AWQ | {"group_size": "32"}, "group_size '32'"),
    "rotated": (
        compressed("pack-quantized", 4, 32, True) | {"transform_config": {"a": {}}},
        "a transform_config",
    ),
    "adapter": (by_gptq(4, 32, True, adapter={"name": "eora"}), "adapter"),
    "gemv_fast": (AWQ | {"version": "gemv_fast"}, "version 'gemv_fast'"),
    "packing": (ROUNDED | {"packing_format": "auto_round:llm_compressor"}, "packing_format"),
    "6 bits": (compressed("pack-quantized", 6, 32, True), "num_bits 6 as pack-quantized"),
    "formats": (compressed("marlin-24", 4, 16, True), "format 'marlin-24'"),
    "integers": (compressed("nvfp4-pack-quantized", 4, 16, True), "weights of num_bits 4, type int"),
    "larger groups": (in_float4("nvfp4-pack-quantized", 32, "tensor_group"), "group_size 32"),
    "floats as words": (in_float4("pack-quantized", 16, "group"), "weights of num_bits 4, type float"),
    "scaled inputs": (OF_NVIDIA | {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
    "groups of NVIDIA": (OF_NVIDIA | {"config_groups": {}, "group_size": 32}, r"group_size \[32\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_variants_that_are_not_served_are_refused_by_name(name, tmp_path):
    options, message = REFUSED[name]
    tiny_qwen3().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    for weights in (True, False):
        with pytest.raises(CheckpointError, match=f"{message}.*served are"):
            source_from_dir(tmp_path, weights=weights)


def in_table(
    weight: torch.Tensor, nested: bool, block: int = 64
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of bitsandbytes' nf4, by what their names add to the weight's, and the weight that they stand for."""
    generator = torch.Generator().manual_seed(weight.numel())
    codes = torch.randint(0, 16, (weight.numel(),), generator=generator)
    table = torch.tensor(NF4_VALUES)
    state = {"shape": list(weight.shape), "blocksize": block}
    absmax = torch.rand(-(-weight.numel() // block), generator=generator) * weight.abs().max()
    tensors = {"": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None], ".quant_map": table}
    if nested:
        of_blocks = torch.randint(0, 256, absmax.shape, generator=generator)
        numbers, times = (
            torch.linspace(-1, 1, 256),
            torch.rand(-(-len(absmax) // 256), generator=generator) / 20,
        )
        absmax = numbers[of_blocks] * times.repeat_interleave(256)[: len(absmax)] + 0.03
        tensors |= {
            ".absmax": of_blocks.to(torch.uint8), ".nested_quant_map": numbers, ".nested_absmax": times,
        }  # fmt: skip
        state |= {"nested_blocksize": 256, "nested_offset": 0.03}
    else:
        tensors[".absmax"] = absmax
    tensors[".quant_state.bitsandbytes__nf4"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return tensors, (table[codes] * absmax.repeat_interleave(block)[: len(codes)]).view_as(weight)


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize("nested", [False, True])
def test_tables_of_bitsandbytes_are_expanded_and_said(nested, tmp_path):
    """Layers and experts in nf4; the last block of a weight may be smaller."""
    model = tiny_qwen3_moe(hidden_size=80, moe_intermediate_size=24)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = dict(tensors)
    linear = {
        path for path, m in model.named_modules() if isinstance(m, torch.nn.Linear) and path != "lm_head"
    }
    stored = [n for n in tensors if n.removesuffix(".weight") in linear or ".experts." in n]
    for name in stored:
        written, plain[name] = in_table(tensors.pop(name), nested)
        tensors |= {name + kind: tensor for kind, tensor in written.items()}
    save_file(
        {n: t.contiguous() for n, t in plain.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    expected = source_from_dir(tmp_path).module
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": NF4}))
    source = source_from_dir(tmp_path)
    for key, parameter in expected.named_parameters():
        assert torch.equal(source.module.get_parameter(key), parameter), key
    reasons = {r.module_path: r.reason for r in source.stored_weights.refusals}
    assert reasons["lm_head"] == "it is stored plain" and "nf4" in reasons[EXPERTS]
    assert all("nf4: its weight is expanded" in reasons[path] for path in linear if "o_proj" not in path)
    (tmp_path / "model.safetensors").unlink()
    (result,) = [p for p in explain_model(tmp_path).report.passes if p.name == "stored_weights"]
    assert {r.reason for r in result.refusals} == {*reasons.values()}


def save_in_tables(folder, nested=False, block=64, change=None):
    """A model of which a layer has rows that no blocks fit -> the model that its codes stand for."""
    model = qwen3(hidden_size=192, intermediate_size=320, num_hidden_layers=2)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path != "lm_head":
            name = f"{path}.weight"
            written, module.weight.data = in_table(tensors.pop(name), nested, block)
            tensors |= {name + kind: tensor for kind, tensor in written.items()}
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": NF4}))
    return model


@pytest.mark.parametrize(("nested", "block", "served"), [(False, 64, 14), (True, 64, 14), (True, 128, 2)])
def test_layers_in_nf4_keep_their_codes(nested, block, served, tmp_path):
    """192 and 320 columns are no whole blocks of 128, those of o_proj are."""
    plain = save_in_tables(tmp_path, nested, block)
    source = source_from_dir(tmp_path)
    layers = {p: m for p, m in source.module.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == served and {m.format for m in layers.values()} == {"nf4_g64"}
    for path, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear):
            got = source.module.get_submodule(path)
            assert torch.equal(got.weight() if path in layers else got.weight, module.weight)
    if block == 64:
        (tmp_path / "saved").mkdir()
        compiled, tokens = exact(tmp_path, plain, verify="full")
        compiled.save(tmp_path / "saved")
        assert tokens_of(pagebinder.load(tmp_path / "saved")) == tokens


TABLES = {
    "another table": ("quant_map", lambda t: t + 0.01, "its table is not that of nf4"),
    "NaN": ("absmax", lambda t: t * float("nan"), "a scale is NaN"),
    "fewer codes": ("", lambda t: t[:-64], "cannot be read"),
}


@pytest.mark.parametrize("name", TABLES)
def test_layers_in_nf4_that_cannot_be_served_are_errors(name, tmp_path):
    kind, change, message = TABLES[name]
    path = f"model.layers.1.mlp.up_proj.weight{'.' if kind else ''}{kind}"
    save_in_tables(tmp_path, change=lambda tensors: tensors.update({path: change(tensors[path])}))
    with pytest.raises(CheckpointError, match=f"up_proj.weight cannot be read.*{message}|{message}"):
        source_from_dir(tmp_path)


def test_what_modelopt_says_in_a_file_of_its_own(tmp_path):
    plain = save(small("modelopt"), tmp_path, "modelopt")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_*"],
    }
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    for path, layer in source_from_dir(tmp_path).module.named_modules():
        if isinstance(layer, torch.nn.Linear | QuantizedLinear) and path != "lm_head":
            assert layer.format == "nvfp4" and torch.equal(layer.weight(), plain.get_submodule(path).weight)
    (result,) = [p for p in explain_model(tmp_path).report.passes if p.name == "stored_weights"]
    assert len(result.matches) == 14 and {r.module_path for r in result.refusals} == {"lm_head"}
    beside.write_text("[")
    with pytest.raises(CheckpointError, match="hf_quant_config.json cannot be read"):
        source_from_dir(tmp_path)


def test_two_levels_of_compressed_tensors_are_exact_to_a_rounding_of_float32(tmp_path):
    plain = save(small("modelopt"), tmp_path, "nvfp4")
    for path, layer in source_from_dir(tmp_path).module.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert layer.scale.dtype is torch.uint8
            torch.testing.assert_close(layer.weight(), plain.get_submodule(path).weight, rtol=2**-22, atol=0)


FLOAT4 = {
    "no global scale": (lambda t: t.pop(f"{NAME}.weight_scale_2"), "weight_scale_2|no linear layer"),
    "no scales": (lambda t: t.pop(f"{NAME}.weight_scale"), "weight_scale, which is missing"),
    "NaN": (lambda t: t[f"{NAME}.weight_scale"].view(torch.uint8).fill_(0x7F), "a scale is NaN"),
    "infinity": (lambda t: t[f"{NAME}.weight_scale_2"].fill_(float("inf")), "a scale is NaN or infinity"),
    "two of them": (lambda t: t.update({f"{NAME}.weight_scale_2": torch.ones(2)}), "one number is read"),
    "scales of others": (
        lambda t: t.update({f"{NAME}.weight_scale": t[f"{NAME}.weight_scale"].float()}),
        "is stored as F32; F8_E4M3 is read",
    ),
    "fewer rows": (lambda t: t.update({f"{NAME}.weight": t[f"{NAME}.weight"][:64]}), r"\[64, 256\]"),
    "scaled inputs": (
        lambda t: t.update({f"{NAME}.pre_quant_scale": torch.ones(256)}),
        "up_proj.pre_quant_scale beside codes of that weight: nothing reads it",
    ),
}


@pytest.mark.parametrize("name", FLOAT4)
def test_float4_that_contradicts_itself_is_an_error(name, tmp_path):
    change, message = FLOAT4[name]
    save(qwen3(num_hidden_layers=1, hidden_size=256), tmp_path, "modelopt", change=change)
    with pytest.raises(CheckpointError, match=message):
        source_from_dir(tmp_path)


def test_tables_that_contradict_themselves_are_errors(tmp_path):
    for broken in ("quant_map", "absmax", "quant_state.bitsandbytes__nf4", "nested_quant_map"):
        written, _ = in_table(torch.randn(32, 80), nested=True)
        tensors = {f"weight{kind}": tensor for kind, tensor in written.items()}
        assert expanded(tensors, torch.float32).shape == (32, 80)
        del tensors[f"weight.{broken}"]
        with pytest.raises(CheckpointError, match=broken):
            expanded(tensors, torch.float32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_of_any_bits(bits):
    values = torch.randint(0, 1 << bits, (5, 96), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpacked(words(values, bits), bits), values.to(torch.uint8))
