"""GGUF files: every kind of block against the package `gguf`, every architecture against transformers, bad files."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

import pagebinder
from pagebinder import CheckpointError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.compile import explain_model
from pagebinder.custom_ops.linear import weight_numbers
from pagebinder.errors import ConfigError
from pagebinder.frontend.coded_experts import QuantizedExperts
from pagebinder.frontend.gguf.architectures import ARCHITECTURES
from pagebinder.frontend.gguf.blocks import BLOCK_KINDS, expanded, packed, widest
from pagebinder.frontend.gguf.file import KINDS, gguf_path, read_gguf
from pagebinder.frontend.model_path import source_from_path
from pagebinder.frontend.quantized_module import QuantizedLinear
from pagebinder.frontend.small_groups import fit_for_gpu
from tests.frontend.gguf_files import (
    EXPANDED,
    MODELS,
    TENSORS,
    named_tensors,
    random_blocks,
    write_gguf,
)
from tests.tolerances import assert_close

OF_6_BITS = {"Q5_0": "int6_g32", "Q5_1": "uint6_g32", "Q5_K": "uint6_g32", "Q6_K": "int6_g16"}
PROMPTS = [[1, 2, 3], list(range(20)), [7] * 45]
IDS = torch.arange(60)[None] % 90


def tokens_of(compiled):
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=48))
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    return [list(output.token_ids) for output in engine.generate(PROMPTS, params)]


def tokens_of_plain(model):
    found = []
    for prompt in PROMPTS:
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=10, do_sample=False,
                min_new_tokens=10, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        found.append(ids[0, len(prompt) :].tolist())
    return found


def check_tokens(path, plain, **options):
    """Those of the plain model, compiled, and saved and loaded again without the file; returns the CompiledModel."""
    compiled = pagebinder.compile_model(path, CompileConfig(dtype="float32", **options))
    tokens = tokens_of_plain(plain)
    assert tokens_of(compiled) == tokens
    compiled.save(path.parent / "saved")
    path.unlink()
    assert tokens_of(pagebinder.load(path.parent / "saved")) == tokens
    return compiled


# ---- blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_are_what_gguf_says(kind):
    blocks = random_blocks((96, 512), kind)
    exact = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))
    assert torch.equal(expanded(blocks, kind, torch.float32), exact)
    format = BLOCK_KINDS[kind].format
    codes, scale = packed([(blocks, kind)])
    values = weight_numbers.dequantize(codes, scale, format)
    assert torch.equal(values, exact) or kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K")
    torch.testing.assert_close(values, exact, rtol=0, atol=2e-7 * exact.abs().max().item())
    if kind != "MXFP4":
        wide = widest({format, "uint8_g32"})
        values = weight_numbers.dequantize(*packed([(blocks, kind)], wide), wide)
        torch.testing.assert_close(values, exact, rtol=0, atol=2e-7 * exact.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "format"),
    [
        (kind, format)  # where there are two, whatever processor this is
        for kind, block in BLOCK_KINDS.items()
        for format in sorted(
            {block.format, block.format.replace("int6", "int8"), OF_6_BITS.get(kind, block.format)}
        )
    ],
)
def test_kernels_read_blocks(kind, format, dtype):
    blocks = random_blocks((64, 512), kind)
    exact, (codes, scale) = expanded(blocks, kind, torch.float64), packed([(blocks, kind)], format)
    for rows in (1, 3, 9, 40):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).to(dtype)
        y = torch.ops.pagebinder.quantized_linear(x, codes, scale, None, format=format)
        assert_close(y, torch.nn.functional.linear(x.double(), exact))


def test_sizes_of_kinds_are_those_of_gguf():
    for number, (name, size, num_bytes) in KINDS.items():
        kind = GGMLQuantizationType(number)
        assert (kind.name, GGML_QUANT_SIZES[kind]) == (name, (size, num_bytes))
    for name, kind in BLOCK_KINDS.items():
        assert (name, kind.size, kind.num_bytes) in KINDS.values()


# ---- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["F32", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_architectures(name, kinds, tmp_path):
    """The modules compute what transformers does with the plain weights, in a file's own order of rows."""
    mixed = {"ffn_down": "Q6_K", "attn_v": "Q8_0", "ffn_up": "Q5_K", "token_embd": "Q6_K", "": "Q4_K"}
    mixed = {"ssm_a": "F32", "ssm_b": "F32", "attn_gate": "Q5_K"} | mixed  # the first have a few rows
    if name == "gpt-oss":  # as its files are: rows of both take turns
        mixed = {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4"} | mixed
    path = tmp_path / "model.gguf"
    plain = write_gguf(path, name, mixed if kinds == "mixed" else kinds)
    source = source_from_path(path, dtype=torch.float32)
    assert source.module.config.model_type == MODELS[name][1]
    with torch.no_grad():
        expected, logits = plain(IDS).logits, source.module(IDS).logits
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())
    coded = [m for m in source.module.modules() if isinstance(m, QuantizedLinear | QuantizedExperts)]
    assert len(coded) == len(source.stored_weights.matches)
    refused = {refusal.reason for refusal in source.stored_weights.refusals}
    if kinds == "F32":
        assert not coded and refused <= {"it is stored plain", "they are stored plain"}
    else:  # what is left is Qwen 2's gate of its shared expert, and what Mamba reads
        reasons = {"it is stored plain"} | EXPANDED.get(MODELS[name][0], set())
        assert coded and all(reason in reasons or "reads" in reason for reason in refused)


def test_rows_that_take_turns_may_be_of_two_kinds(tmp_path):
    """They have codes in the format that holds both; of e2m1 and integers there is none."""
    path = tmp_path / "model.gguf"
    for gates, format in (("Q4_K", "uint8_g32"), ("MXFP4", None)):
        plain = write_gguf(path, "gpt-oss", {"ffn_gate_exps": gates, "ffn_up_exps": "Q8_0", "": "Q4_0"})
        source = source_from_path(path, dtype=torch.float32)
        formats = {
            m.formats["gate_up_proj"] for m in source.module.modules() if isinstance(m, QuantizedExperts)
        }
        assert formats == ({format} if format else set())
        if format is None:
            reasons = {r.module_path: r.reason for r in source.stored_weights.refusals}
            assert "MXFP4, Q4_0, Q8_0, for which experts have no" in reasons["model.layers.0.mlp.experts"]
        with torch.no_grad():
            expected, logits = plain(IDS).logits, source.module(IDS).logits
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4 * expected.abs().max().item())


def test_every_architecture_has_a_model():
    assert {architecture for architecture, *_ in MODELS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", {"token_embd": "Q4_K", "output": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q5_K", "": "Q4_K"}),
        (
            "qwen3",
            {"token_embd": "Q2_K", "attn_q.": "Q3_K", "attn_k.": "IQ4_XS", "ffn_up": "Q4_1", "": "Q5_0"},
        ),
        ("qwen3moe", {"ffn_down_exps": "Q6_K", "": "Q4_K"}),
        ("gpt-oss", {"exps": "MXFP4", "": "Q8_0"}),
        ("lfm2", {"ffn": "IQ4_XS", "": "Q8_0"}),
        ("qwen35", {"ssm_a": "F32", "ssm_b": "F32", "": "Q4_K"}),
        ("granitemoe", "Q4_0"),
        ("gemma2", {"ffn_gate": "IQ4_NL", "": "Q5_1"}),
    ],
)
def test_tokens(name, kinds, tmp_path):
    path = tmp_path / "model.gguf"
    plain = write_gguf(path, name, kinds)
    compiled = check_tokens(path, plain, verify="full" if "moe" in name else "off")
    if name == "qwen3moe":  # each weight of an expert in as many bits as the file has
        experts = compiled.graphs["fused"].graph.nodes
        formats = {node.kwargs["format"] for node in experts if "moe" in str(node.target)}
        assert formats == {f"uint4_g32/{BLOCK_KINDS['Q6_K'].format}"}


def test_explain_needs_no_weights(tmp_path):
    write_gguf(tmp_path / "model.gguf", "qwen3moe", "Q4_K")
    explained = explain_model(tmp_path / "model.gguf")
    found = next(result for result in explained.report.passes if result.name == "stored_weights")
    loaded = source_from_path(tmp_path / "model.gguf").stored_weights
    assert found.matches == loaded.matches and found.refusals == loaded.refusals
    assert {m.detail for m in found.matches} >= {"uint4_g32: Q4_K of a GGUF file"}


def test_kinds_without_a_kernel_are_expanded(tmp_path):
    plain = write_gguf(tmp_path / "model.gguf", "llama", {"ffn_up": "IQ3_XXS", "": "Q8_0"})
    source = source_from_path(tmp_path / "model.gguf", dtype=torch.float32)
    assert {r.reason for r in source.stored_weights.refusals} == {"no kernel reads IQ3_XXS: it is expanded"}
    with torch.no_grad():
        expected = plain(IDS).logits
        torch.testing.assert_close(source.module(IDS).logits, expected, rtol=2e-4, atol=2e-4)


def test_what_no_gpu_reads_is_expanded_for_one(tmp_path):
    plain = write_gguf(
        tmp_path / "model.gguf", "qwen3moe", {"ffn_down_exps": "Q6_K", "attn_v": "Q6_K", "": "Q8_0"}
    )
    source = source_from_path(tmp_path / "model.gguf", dtype=torch.float32)
    fit_for_gpu(source.module, torch.float32, source.stored_weights)
    modules = [*source.module.modules()]
    assert {m.format for m in modules if isinstance(m, QuantizedLinear)} == {"int8_g32"}
    assert not any(isinstance(m, QuantizedExperts) for m in modules)
    reasons = [r.reason for r in source.stored_weights.refusals]
    assert reasons == ["no kernel of a GPU reads int8_g16: it is expanded"] * 4
    with torch.no_grad():
        expected = plain(IDS).logits
        torch.testing.assert_close(source.module(IDS).logits, expected, rtol=2e-4, atol=2e-4)


def test_codes_of_6_bits_get_8_for_a_gpu(tmp_path):
    plain = write_gguf(tmp_path / "model.gguf", "qwen3moe", {"ffn_down_exps": "Q5_K", "": "Q5_0"})
    source = source_from_path(tmp_path / "model.gguf", dtype=torch.float32)
    fit_for_gpu(source.module, torch.float32, source.stored_weights)
    found = set()
    for module in source.module.modules():
        if isinstance(module, QuantizedExperts):
            found |= {*module.formats.values()}
        elif isinstance(module, QuantizedLinear):
            found.add(module.format)
    assert found == {"int8_g32", "uint8_g32"} and not source.stored_weights.refusals
    assert not any("int6" in match.detail for match in source.stored_weights.matches)
    with torch.no_grad():
        torch.testing.assert_close(source.module(IDS).logits, plain(IDS).logits, rtol=2e-4, atol=2e-4)
    explained = explain_model(tmp_path / "model.gguf", CompileConfig(device="cuda"))
    stored = next(result for result in explained.report.passes if result.name == "stored_weights")
    assert [m.detail for m in stored.matches] == [m.detail for m in source.stored_weights.matches]


# ---- what files say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attention.clamp_kqv": 4.0}, "llama.attention.clamp_kqv = 4.0 is not served"),
        ({"attention.sliding_window": 16}, "llama.attention.sliding_window = 16 is not served"),
        ({"rope.scaling.type": "su"}, "llama.rope.scaling.type = 'su' is not served"),
        ({"rope.scaling.type": "yarn"}, "lacks llama.rope.scaling.factor"),
        ({"rope.dimension_count": 32}, "llama.rope.dimension_count = 32 is not served"),
        ({"rope.freq_base": 0.0}, "llama.rope.freq_base = 0.0 is not served"),
        ({"rope.freq_base": float("nan")}, "llama.rope.freq_base = nan is not served"),
        ({"context_length": 0}, "llama.context_length = 0 is not served"),
        ({"block_count": "two"}, "llama.block_count = 'two' is not served"),
        ({"expert_count": 2, "expert_used_count": 3}, "llama.expert_used_count = 3 is not served"),
        ({"split.count": 2}, "is one of 2 files"),
        ({"attention.value_length": 32}, "llama.attention.value_length = 32 is not served"),
        ({"attention.causal": False}, "llama.attention.causal = False is not served"),
        ({"attention.head_count": None}, "lacks llama.attention.head_count"),
        ({"attention.head_count_kv": [2, 4]}, "differs from layer to layer"),
        ({"feed_forward_length": 128}, r"ffn_|mlp.* \[256, 256\] there, and \[128, 256\]"),
        ({"block_count": 3}, "says that it has 3 layers, and holds tensors of 2"),
        ({"attention.causal": 0}, "llama.attention.causal = 0 is not served"),
        ({"block_count": 2.0}, "llama.block_count = 2.0 is not served"),
        ({"context_length": 1 << 31}, "llama.context_length = 2147483648 is not served"),
        ({"block_count": 1}, "nothing in a llama of transformers is its blk.1"),
        ({"general.architecture": "mamba9"}, "of the architecture 'mamba9'"),
        ({"general.type": "adapter"}, "holds no model: it is of the type 'adapter'"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_said(more, said, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", more=more)
    with pytest.raises(CheckpointError, match=said):
        source_from_path(path)


def test_granite_without_positions_is_refused(tmp_path):
    """llama.cpp takes this for a switch, of this architecture alone."""
    write_gguf(tmp_path / "model.gguf", "granite", more={"rope.scaling.finetuned": False})
    with pytest.raises(CheckpointError, match=r"granite.rope.scaling.finetuned = False is not served"):
        source_from_path(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("cohere2", {"attention.sliding_window": None}, "lacks cohere2.attention.sliding_window"),
        ("command-r", {"logit_scale": None}, "lacks command-r.logit_scale"),
        (
            "phi2",
            {"attention.layer_norm_epsilon": 0.0},
            "phi2.attention.layer_norm_epsilon = 0.0 is not served",
        ),
        ("gptneox", {"use_parallel_residual": 1}, "gptneox.use_parallel_residual = 1 is not served"),
        ("minicpm", {"residual_scale": 0.0}, "minicpm.residual_scale = 0.0 is not served"),
        (
            "qwen3vl",
            {"rope.dimension_sections": [12, 10, 8, 2]},
            r"sections = \[12, 10, 8, 2\] is not served",
        ),
        ("qwen2vl", {"rope.dimension_sections": [8, 12]}, r"sections = \[8, 12\] is not served"),
        ("qwen3vl", {"rope.dimension_sections": None}, "sections = None is not served"),
        (
            "starcoder2",
            {"attention.sliding_window": 16},
            "starcoder2.attention.sliding_window = 16 is not served",
        ),
    ],
)
def test_what_architectures_cannot_mean_is_refused(name, more, said, tmp_path):
    write_gguf(tmp_path / "model.gguf", name, more=more)
    with pytest.raises(CheckpointError, match=said):
        source_from_path(tmp_path / "model.gguf")


def test_biases_that_starcoder2_always_has_may_not_be_missing(tmp_path, monkeypatch):
    def without(model):
        tensors = named_tensors(model, "starcoder2")
        return {name: stored for name, stored in tensors.items() if "attn_output.bias" not in name}

    monkeypatch.setitem(TENSORS, "starcoder2", without)
    write_gguf(tmp_path / "model.gguf", "starcoder2")
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors .*self_attn.o_proj.bias"):
        source_from_path(tmp_path / "model.gguf")


def test_factors_beside_another_scaling_are_refused(tmp_path):
    more = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "model.gguf", "phi3", more=more)
    with pytest.raises(CheckpointError, match="phi3.rope.scaling.type = 'linear' is not served"):
        source_from_path(tmp_path / "model.gguf")


def test_windows_may_be_said_for_each_layer(tmp_path):
    more = {"attention.sliding_window_pattern": [1, 0, 1, 1, 1, 0]}
    write_gguf(tmp_path / "model.gguf", "gemma3", more=more)
    types = source_from_path(tmp_path / "model.gguf", weights=False).module.config.layer_types
    assert [kind == "sliding_attention" for kind in types] == [True, False, True, True, True, False]


def test_large_bases_of_frequencies(tmp_path):
    write_gguf(tmp_path / "model.gguf", "qwen3", more={"rope.freq_base": 1e9})
    config = source_from_path(tmp_path / "model.gguf", weights=False).module.config
    assert config.rope_parameters["rope_theta"] == 1e9


def test_equal_values_of_layers_are_one(tmp_path):
    write_gguf(tmp_path / "model.gguf", "llama", more={"attention.head_count_kv": [2, 2]})
    assert source_from_path(tmp_path / "model.gguf", weights=False).module.config.num_key_value_heads == 2


def test_damaged_files(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", "Q8_0")
    whole = path.read_bytes()
    for length in (0, 3, 4, 8, 23, 40, 300, 1500, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is no GGUF file, or a damaged one|ends"):
            read_gguf(path)
    for at, value in (
        (0, b"GGML"),
        (4, struct.pack("<I", 1)),
        (4, struct.pack(">I", 3)),
        (8, b"\xff" * 8),
        (16, b"\xff" * 8),
    ):
        path.write_bytes(whole[:at] + value + whole[at + len(value) :])
        with pytest.raises(CheckpointError, match="is no GGUF file, or a damaged one"):
            read_gguf(path)


def edited(path, change) -> None:
    """A file again, with `change(writer)` behind its own options and tensors."""
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(path)
    writer = GGUFWriter(path.with_suffix(".new"), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data.copy(), raw_dtype=tensor.tensor_type)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").rename(path)


FLOATS = np.zeros(256, dtype=np.float32)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("output", np.zeros((96, 256), dtype=np.float32), "nothing in a qwen3 of transformers is its output"),
        ("blk.0.attn_q.scale", FLOATS, "nothing in a qwen3 of transformers is its blk.0.attn_q.scale"),
        ("blk.0.attn_q.bias", FLOATS, "lacks 5 tensors of its model"),
        ("rope_freqs.weight", FLOATS[:32], "nothing in a qwen3 of transformers is its rope_freqs.weight"),
        (
            "output.weight",
            np.zeros((96, 256), dtype=np.int32),
            "output.weight is stored in I32, which no weights",
        ),
        (
            "output.weight",
            np.zeros((96, 256, 1), dtype=np.float32),
            r"lm_head.weight is \[96, 256, 1\] there",
        ),
    ],
)
def test_tensors_without_a_place(name, values, said, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", "Q8_0")
    edited(path, lambda writer: writer.add_tensor(name, values))
    with pytest.raises(CheckpointError, match=said):
        source_from_path(path)


def test_scales_that_are_no_numbers(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", "Q4_K")
    at = read_gguf(path).tensors["blk.0.attn_q.weight"].data
    whole = bytearray(path.read_bytes())
    begin = whole.index(at.tobytes())
    whole[begin : begin + 2] = np.array([np.nan], dtype=np.float16).tobytes()
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="a block of Q4_K has a scale that is NaN or infinity"):
        source_from_path(path)


def test_factors_of_frequencies(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama")
    at = read_gguf(path).tensors["rope_freqs.weight"].data
    whole = bytearray(path.read_bytes())
    begin = whole.index(at.tobytes())
    whole[begin : begin + 4] = np.zeros(1, dtype=np.float32).tobytes()
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight \[32\] in F32 is not 32 positive factors"):
        source_from_path(path)


@pytest.mark.parametrize("window", [None, 0])
def test_gemma_3_without_windows(window, tmp_path):
    write_gguf(tmp_path / "model.gguf", "gemma3", more={"attention.sliding_window": window})
    source = source_from_path(tmp_path / "model.gguf", dtype=torch.float32)
    assert set(source.module.config.layer_types) == {"full_attention"}
    assert source.module(IDS).logits.isfinite().all()


def test_caps_that_are_not_said(tmp_path):
    """Gemma 2 has them as llama.cpp does; of Gemma 3 a cap of 0 is none."""
    missing = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    write_gguf(tmp_path / "a.gguf", "gemma2", more=missing)
    config = source_from_path(tmp_path / "a.gguf", weights=False).module.config
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
    write_gguf(tmp_path / "b.gguf", "gemma3", more={"final_logit_softcapping": 0.0})
    assert source_from_path(tmp_path / "b.gguf", weights=False).module.config.final_logit_softcapping is None


def test_paths(tmp_path):
    write_gguf(tmp_path / "a.gguf", "qwen3")
    assert gguf_path(tmp_path) == gguf_path(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    os.link(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 models \(a.gguf, b.gguf\): name the file"):
        gguf_path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert gguf_path(tmp_path) is None
    with pytest.raises(CheckpointError, match="does not exist"):
        source_from_path(tmp_path / "c.gguf")
    os.link(tmp_path / "a.gguf", tmp_path / "mmproj-a.gguf")
    (tmp_path / "config.json").unlink()
    (tmp_path / "b.gguf").rename(tmp_path / "B.GGUF")
    (tmp_path / "a.gguf").unlink()
    assert gguf_path(tmp_path) == gguf_path(tmp_path / "B.GGUF") == tmp_path / "B.GGUF"
    with pytest.raises(CheckpointError, match=r"name the first, a-00001-of-00002.gguf"):
        gguf_path(tmp_path / "a-00002-of-00002.gguf")


def test_a_model_in_parts(tmp_path):
    """Tensors in the second file, options in the first."""
    from gguf import GGUFWriter

    plain = write_gguf(tmp_path / "whole.gguf", "qwen3", "Q8_0")
    whole = read_gguf(tmp_path / "whole.gguf")
    (tmp_path / "whole.gguf").rename(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match="all lie in one directory"):
        source_from_path(tmp_path / "m-00001-of-00002.gguf")
    for options, said in (
        ({"qwen3.block_count": 9}, "say different things of qwen3.block_count"),
        ({"split.no": 4}, "says that its split.no is 4"),
        ({}, None),
    ):
        writer = GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "qwen3")
        for name, value in options.items():
            writer.add_uint32(name, value)
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(256, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if said is not None:
            with pytest.raises(CheckpointError, match=said):
                read_gguf(tmp_path / "m-00001-of-00002.gguf")
    parts = read_gguf(tmp_path / "m-00001-of-00002.gguf")
    assert parts.tensors.keys() == whole.tensors.keys() | {"blk.0.attn_q.bias"}
    assert parts.options["qwen3.block_count"] == plain.config.num_hidden_layers


def test_rare_kinds_name_the_package_they_need(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", "llama", {"ffn_up": "IQ3_XXS", "": "Q8_0"})
    monkeypatch.setitem(__import__("sys").modules, "gguf.quants", None)
    with pytest.raises(ConfigError, match=r"IQ3_XXS need the package gguf"):
        source_from_path(tmp_path / "model.gguf")
