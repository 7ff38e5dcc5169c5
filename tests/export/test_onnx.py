"""`export_onnx`: what ONNX Runtime computes with an exported model is what the engine and the graphs compute."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

import pagebinder
from pagebinder import CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.cli import app
from pagebinder.errors import ExportError
from pagebinder.models import tiny_path
from tests.encoder_decoders import tiny as tiny_encoder_decoder
from tests.export.evaluated import EvaluatedModel
from tests.export.onnx_runs import in_steps, session
from tests.helpers import by_day, tiny_llama
from tests.zoo.reference import tokens
from tests.zoo.test_fast_zoo import EXACT, architecture
from tests.zoo.tiny_configs import tiny_model

pytestmark = pytest.mark.usefixtures("captured_once")

EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx_generate.py"
PROMPTS = ([511, 24, 7], [1200, 9, 33, 4, 5, 6, 7, 8, 9, 100])
NUM_TOKENS = 24

NIGHTLY = os.environ.get("PAGEBINDER_NIGHTLY") == "1"


def two_layers(folder: Path) -> Path:
    """A random checkpoint with the shipped model's tokenizer."""
    tiny_llama(vocab_size=3072).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_path() / name, folder)
    return folder


@pytest.mark.parametrize("num_layers", by_day([2, 6], [2]))
def test_it_generates_the_engines_tokens(num_layers, tmp_path):
    """From the command line to the example, which knows nothing of Pagebinder; two prompts of different lengths. The
    shipped model has six layers."""
    checkpoint = tiny_path() if num_layers == 6 else two_layers(tmp_path / "checkpoint")
    command = ["export", "--onnx", "--dtype", "float32", str(checkpoint), str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert EXAMPLE.read_text().count("\n") < 60 and "import pagebinder" not in EXAMPLE.read_text()
    prompts = [",".join(map(str, prompt)) for prompt in PROMPTS]
    command = [sys.executable, EXAMPLE, tmp_path / "model.onnx", *prompts, "--max-tokens", str(NUM_TOKENS)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    config = CompileConfig(device="cpu", dtype="float32", executable="eager")
    engine = pagebinder.compile_model(checkpoint, config).engine(EngineConfig(num_kv_blocks=16))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    served = [list(out.token_ids) for out in engine.generate(PROMPTS, params)]
    assert [[int(t) for t in line.split(",")] for line in output.splitlines()] == served

    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Attention") == num_layers and kinds.count("TensorScatter") == 2 * num_layers
    assert kinds.count("RotaryEmbedding") == 2 * num_layers
    assert kinds.count("RMSNormalization") == 2 * num_layers + 1
    weights = {i.name: i for i in model.graph.initializer}
    assert weights["model.layers.0.mlp.up_proj.weight"].data_location == onnx.TensorProto.EXTERNAL
    assert [d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim] == ["batch", "length"]

    # The export has its tokenizer, so Pagebinder serves it as text, too.
    options = [
        "--prompt",
        "The open function",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        "--dtype",
        "float32",
    ]
    texts = [
        CliRunner().invoke(app, ["generate", "--model", str(path), "--executable", "eager", *options]).stdout
        for path in (checkpoint, tmp_path / "model.onnx")
    ]
    assert texts[0] == texts[1] and len(texts[0].split()) > 4


def assert_equal_logits(compiled, models) -> None:
    """Two rows, fed in steps. An encoder's prompts differ in length, so the second is padded."""
    ids = np.array([tokens(25, seed=1), tokens(25, seed=2)])
    lengths, mask = (25, 18), np.array([[1] * 25, [1] * 18 + [0] * 7])
    unpadded = [(torch.from_numpy(row[:n]),) for row, n in zip(ids, lengths)]
    sequences, inputs = [(torch.from_numpy(row),) for row in ids], {}
    if "packed" in compiled.graphs:
        got, sequences = models["model"].run(None, {"input_ids": ids, "attention_mask": mask})[0], unpadded
    else:
        if "encoder" in models:
            states = models["encoder"].run(None, {"input_ids": ids, "attention_mask": mask})[0]
            inputs = {"encoder_states": states, "encoder_attention_mask": mask}
            sequences = [row + prompt for row, prompt in zip(sequences, unpadded)]
        got = in_steps(models["model"], ids, (18, 19, 20, 25), **inputs)
    for row, sequence in zip(got, sequences, strict=True):
        expected = compiled.run_level("semantic", *sequence).numpy()
        np.testing.assert_allclose(row[: len(expected)], expected, rtol=0, atol=1e-4)


def test_an_encoder_decoder_is_two_models(monkeypatch):
    model = tiny_encoder_decoder("t5", num_layers=1, num_decoder_layers=1)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    encoder = EvaluatedModel(compiled.graphs["encoder"], monkeypatch, cached=False)
    decoder = EvaluatedModel(compiled.graphs["semantic"], monkeypatch)
    assert_equal_logits(compiled, {"encoder": encoder, "model": decoder})


@pytest.mark.skipif(not NIGHTLY, reason="seconds for each architecture: PAGEBINDER_NIGHTLY=1")
@pytest.mark.parametrize(("family", "name"), EXACT)
def test_logits_of_the_fast_zoo_in_onnx_runtime(family, name, tmp_path):
    model = tiny_model(architecture(family, name))
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    assert_equal_logits(compiled, {path.stem: session(path) for path in compiled.export_onnx(tmp_path)})


def test_a_place_where_no_directory_can_be(tmp_path):
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager"))
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "x"):
        with pytest.raises(
            ExportError, match=f"The directory {place} cannot be made: {file} is no directory"
        ):
            compiled.export_onnx(place)


def test_options_that_the_graph_does_not_hold_are_refused(tmp_path):
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager", kv_dtype="int8"))
    with pytest.raises(ConfigError, match="kv_dtype"):
        compiled.export_onnx(tmp_path)
    result = CliRunner().invoke(app, ["export", str(tiny_path()), str(tmp_path)])
    assert result.exit_code == 2 and "--onnx" in result.output
