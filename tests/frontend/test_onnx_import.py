"""ONNX decoders become semantic graphs: what we exported comes back as it was, others' models are served exactly."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import warnings

import numpy as np
import onnx
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PhiConfig, PhiForCausalLM

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.frontend.onnx_file import read_onnx
from pagebinder.graph_tools import CASTS, aten, attribute, val
from tests.frontend.onnx_decoders import FORMS, Decoder, greedy
from tests.helpers import (
    VOCAB_SIZE,
    scale_weights,
    tiny_gemma2,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mistral,
    tiny_qwen3,
)

NIGHTLY = pytest.mark.skipif(
    os.environ.get("PAGEBINDER_NIGHTLY") != "1", reason="seconds each: PAGEBINDER_NIGHTLY=1"
)
PROMPTS = ([5, 24, 7], [90, 9, 33, 4, 5, 6, 7, 8, 9, 90, 11, 12, 13, 14, 15])
NUM_TOKENS = 16
OPS = torch.ops.pagebinder
LAYOUT = {
    aten.unsqueeze.default, aten.select.int, aten.transpose.int, aten.permute.default, aten.reshape.default,
    aten.view.default, aten.expand.default, aten.contiguous.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.dropout.default, *CASTS,
}  # fmt: skip


def compiled_from(model):
    return pagebinder.compile_model(model, CompileConfig(executable="eager"))


def served(compiled) -> list[list[int]]:
    """Greedy tokens, both prompts in one batch, prefilled in chunks."""
    engine = compiled.engine(EngineConfig(num_kv_blocks=16, max_num_batched_tokens=8))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [list(out.token_ids) for out in engine.generate([list(p) for p in PROMPTS], params)]


def digest(value) -> str:
    data = (
        value.detach().float().contiguous().numpy().tobytes()
        if isinstance(value, torch.Tensor)
        else repr(value)
    )
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()


def value_of(gm) -> str:
    """What the output of a float32 graph is computed from and how: weights by content, layout and names left out.

    Numbers are compared in float32, in which ONNX keeps them. A weight is what multiplies: W^T in an addmm, 1 + w of
    an offset norm; casts, factors of one and dropout do nothing in such a graph.
    """
    known: dict[torch.fx.Node, str] = {}

    def of(value):
        if isinstance(value, torch.fx.Node):
            return known[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(of, value))
        return str(np.float32(value)) if type(value) in (int, float) else str(value)

    def weight(node):
        return attribute(gm, node.target).detach()

    for node in gm.graph.nodes:
        args, target, kwargs = of(node.args), node.target, {k: of(v) for k, v in node.kwargs.items()}
        if node.op == "get_attr":
            known[node] = of(weight(node).item()) if weight(node).numel() == 1 else digest(weight(node))
            continue
        if node.op == "placeholder" or isinstance(node.meta.get("val"), torch.SymInt):
            known[node] = str(target)
            continue
        whole = target is aten.slice.Tensor and val(node).shape == val(node.args[0]).shape
        if (
            node.op == "output"
            or target in LAYOUT
            or whole
            or (target is aten.mul.Tensor and args[1] == "1.0")
        ):
            known[node] = args[0]
            continue
        if target is aten.slice.Tensor:  # an end beyond the end is the end
            x, dim, start, end = (*node.args, None)[:4]
            width = val(x).shape[dim]
            args = (
                args[0],
                dim % val(x).dim() - val(x).dim(),
                start or 0,
                min(width if end is None else end, width),
            )
        elif target is aten.addmm.default:
            target, args = aten.linear.default, (args[1], digest(weight(node.args[2]).t()), args[0])
        elif target is OPS.rms_norm.default:
            factor = weight(node.args[1]) + (1.0 if kwargs.pop("tail") == "offset" else 0.0)
            args = (args[0], digest(factor))
        elif target is aten.embedding.default:
            args = args[:2]
        known[node] = digest((str(target), args, sorted(kwargs.items())))
    return known[next(n for n in gm.graph.nodes if n.op == "output")]


def gpt2():
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=1,
        n_head=4,
        n_positions=48,
        bos_token_id=None,
        eos_token_id=None,
    )
    return scale_weights(GPT2LMHeadModel(config))


def phi():
    """Rotary embeddings of half a head, attention and MLP side by side."""
    config = PhiConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return scale_weights(PhiForCausalLM(config))


MODELS = {
    "qwen3": lambda: tiny_qwen3(num_hidden_layers=1),
    "gemma2": lambda: tiny_gemma2(
        8, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": gpt2,
    "llama": lambda: tiny_llama(num_hidden_layers=1),
    "mistral": lambda: tiny_mistral(8, num_hidden_layers=1),
    "phi": phi,
    "gpt_oss": lambda: tiny_gpt_oss(
        8, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    ),
}
EVERY_DAY = ("gemma2",)


@pytest.mark.parametrize("name", [n if n in EVERY_DAY else pytest.param(n, marks=NIGHTLY) for n in MODELS])
def test_what_was_exported_comes_back(name, tmp_path):
    """Export, import, compile again: the same semantic graph and the same tokens."""
    compiled = compiled_from(MODELS[name]())
    compiled.export_onnx(tmp_path)
    again = compiled_from(tmp_path)
    assert value_of(again.graphs["semantic"]) == value_of(compiled.graphs["semantic"])
    assert served(again) == served(compiled)
    states = [[dataclasses.replace(s, layer="") for s in c.states] for c in (again, compiled)]
    assert states[0] == states[1]
    if name == "gpt2":
        assert again.max_model_len == compiled.max_model_len == 48  # rows of the table of positions


@pytest.fixture(scope="module")
def handmade(tmp_path_factory):
    """form -> (path, CompiledModel) of a decoder written by hand."""
    folder = tmp_path_factory.mktemp("handmade")

    @functools.cache
    def of(form: str):
        (folder / form).mkdir()
        return Decoder(form).save(folder / form / "model.onnx"), compiled_from(folder / form)

    return of


@pytest.mark.parametrize("form", FORMS)
def test_caches_of_others_are_paged(form, handmade):
    """ONNX Runtime decodes step by step with the model's own caches, the engine with pages."""
    path, compiled = handmade(form)
    assert served(compiled) == [greedy(path, list(p), NUM_TOKENS) for p in PROMPTS]
    attention = [m for r in compiled.report.passes for m in r.matches if m.pattern == "attention"]
    assert [m.detail for m in attention] == ["causal"] * 2
    assert [m.module_path for m in attention] == ["layers.0", "layers.1"]
    assert compiled.max_model_len == 48 and compiled.source.vocab_size == 96
    assert [s.num_kv_heads for s in compiled.states] == [2, 2]  # and not as often as the queries have heads
    targets = [n.target for n in compiled.graphs["semantic"].graph.nodes]
    assert targets.count(aten.linear.default) == 13 and aten.matmul.default not in targets


def test_a_soft_cap_and_a_window_of_the_operator(tmp_path, handmade):
    compiled = compiled_from(
        Decoder("attention", opset=25, softcap=2.0, left_window_size=5).save(tmp_path / "x.onnx")
    )
    details = [m.detail for r in compiled.report.passes for m in r.matches if m.pattern == "attention"]
    assert details == ["causal, window=6, soft_cap=2"] * 2
    plain = handmade("attention")[1].graphs["semantic"]
    before = value_of(plain)
    assert value_of(compiled.graphs["semantic"]) != before  # the hash sees numbers,
    weight = attribute(plain, "layers.1.up.weight")
    with torch.no_grad():
        weight[0, 0] += 1
        assert value_of(plain) != before  # and weights
        weight[0, 0] -= 1


def test_model_local_functions_are_inlined(tmp_path, handmade):
    def with_function(model):
        function = onnx.parser.parse_function("""
            <opset_import: ["" : 24], domain: "local"> Squashed <scale> (x) => (y) {
                half = Constant <value_float: float = @scale> ()
                one = Constant <value_float = 1.0> ()
                narrow = Mul (x, half)
                turned = Tanh (narrow)
                sum = Add (turned, one)
                y = Mul (sum, half)
            }""")
        model.functions.append(function)
        model.opset_import.append(onnx.helper.make_opsetid("local", 1))
        for node in model.graph.node:
            if node.op_type == "Sigmoid":  # (tanh(x / 2) + 1) / 2
                node.op_type, node.domain = "Squashed", "local"
                node.attribute.append(onnx.helper.make_attribute("scale", 0.5))

    compiled = compiled_from(Decoder("attention").save(tmp_path / "model.onnx", with_function))
    assert served(compiled) == served(handmade("attention")[1])


class Bare(torch.nn.Module):
    """A decoder as one exports it without a cache."""

    def __init__(self, model, *, with_positions: bool):
        super().__init__()
        self.model, self.with_positions = model, with_positions

    def forward(self, input_ids, position_ids):
        positions = {"position_ids": position_ids} if self.with_positions else {}
        return self.model(input_ids=input_ids, use_cache=False, **positions).logits


def exported_by_torch(model, path, *, opset: int, with_positions: bool):
    names = ["input_ids", "position_ids"]
    ids = torch.zeros(2, 7, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Bare(model, with_positions=with_positions), (ids, torch.arange(7).expand(2, 7).clone()), dynamo=True,
            opset_version=opset, input_names=names, output_names=["logits"],
            dynamic_shapes=({0: "batch", 1: "length"},) * 2, verbose=False,
        )  # fmt: skip
    program.save(path, external_data=True)
    return path


@pytest.mark.parametrize(
    ("make", "opset", "with_positions", "window"),
    [
        pytest.param(MODELS["gpt2"], 18, True, None, id="gpt2"),
        pytest.param(MODELS["llama"], 23, True, None, id="Attention", marks=NIGHTLY),
        pytest.param(MODELS["llama"], 23, False, None, id="counts its tokens", marks=NIGHTLY),
        pytest.param(MODELS["mistral"], 20, True, 8, id="window", marks=NIGHTLY),
        pytest.param(MODELS["llama"], 18, True, None, id="raw", marks=NIGHTLY),
    ],
)
def test_a_decoder_that_torch_exported_without_a_cache(make, opset, with_positions, window, tmp_path):
    """Masks, positions and repeated heads as torch's exporter writes those of transformers."""
    path = exported_by_torch(make(), tmp_path / "model.onnx", opset=opset, with_positions=with_positions)
    compiled = compiled_from(path)
    assert served(compiled) == [greedy(path, list(p), NUM_TOKENS) for p in PROMPTS]
    assert [s.window for s in compiled.states] == [window]
    matches = {r.name: len(r.matches) for r in compiled.report.passes}
    if make is not MODELS["gpt2"]:
        assert matches["fuse_qk_norm_rope_write"] == matches["fuse_gated_linear"] == 1


def test_weights_are_mapped_and_only_products_are_turned(tmp_path, handmade):
    """A table of embeddings is a view of the file; a weight [K, N] of a product is kept as [N, K]."""
    path, _ = handmade("attention")
    onnx.save(
        onnx.load(path),
        tmp_path / "model.onnx",
        save_as_external_data=True,
        size_threshold=0,
        location="data",
    )
    read = read_onnx(tmp_path / "model.onnx").constants
    ends = [read[name].data_ptr() for name in ("embed.weight", "lm_head.weight")]
    assert 0 < abs(ends[1] - ends[0]) < (tmp_path / "data").stat().st_size  # views of one mapping
    compiled = compiled_from(tmp_path / "model.onnx")
    module = compiled.source.module
    assert module.flipped >= {"layers.0.q.weight", "lm_head.weight"} and "embed.weight" not in module.flipped
    assert served(compiled) == [greedy(path, list(p), NUM_TOKENS) for p in PROMPTS]


def test_verification_and_artefacts_work_for_imported_models(tmp_path, handmade):
    path, _ = handmade("raw")
    compiled = pagebinder.compile_model(path, CompileConfig(executable="eager", verify="full"))
    compiled.save(tmp_path / "artefact")
    assert served(pagebinder.load(tmp_path / "artefact")) == served(compiled)
