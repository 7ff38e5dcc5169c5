"""`save(dir, executable="aot")`: libraries that run without Python, and compute what the inductor executable does."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pagebinder
from pagebinder import ArtefactError, CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.artefacts import load as compiled_load
from pagebinder.artefacts.aot import _packing
from pagebinder.custom_ops.linear import packed_weights
from pagebinder.graph_tools import attribute
from pagebinder.runtime.executables import AOTExecutable, EagerExecutable, input_names
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.helpers import tiny_llama

ROOT = Path(pagebinder.__file__).parents[1]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], list(range(3, 120))]
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SMALL = EngineConfig(kv_cache_bytes=1 << 20, max_num_seqs=2)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """In bfloat16 with tied embeddings: two weights are one, and where there are matrix tiles some are packed."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_llama(tie_word_embeddings=True).bfloat16().save_pretrained(folder)
    return pagebinder.compile_model(folder, CompileConfig(executable="inductor"))


@pytest.fixture(scope="module")
def saved(compiled, tmp_path_factory) -> Path:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "artefact"
    compiled.save(folder, executable="aot")
    return folder


@pytest.fixture(scope="module")
def plan(saved) -> dict:
    return json.loads((saved / "step_plan.json").read_text())


def tokens(compiled) -> list[list[int]]:
    """Of each prompt alone: how many rows share a step may change the last bit in bfloat16."""
    return [compiled.engine(SMALL).generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


def logits(compiled) -> torch.Tensor:
    inputs = single_sequence_inputs(compiled.kv_spec, compiled.states, torch.arange(1, 71))
    return compiled.executable.run(inputs)


def test_loaded_in_python_it_has_the_bits_of_inductor(compiled, saved, tmp_path):
    loaded = pagebinder.load(saved)
    assert isinstance(loaded.executable, AOTExecutable)
    assert (loaded.report.executable, compiled.report.executable) == ("aot", "inductor")
    assert torch.equal(logits(loaded), logits(compiled))
    assert tokens(loaded) == tokens(compiled)
    loaded.save(tmp_path / "again")  # copied, not compiled
    again = pagebinder.load(tmp_path / "again", verify=True)
    assert isinstance(again.executable, AOTExecutable)
    assert torch.equal(logits(again), logits(compiled))
    for name in ("program/fused/model.so", "program/ops/schemas.so"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """examples/aot_step, built."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        pytest.skip("no cmake")
    if torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("the CMake files of a CUDA build of torch look for CUDA")
    environment = {**os.environ, "PATH": path}
    options = [
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Debug",
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
    ]
    source, build = ROOT / "examples" / "aot_step", tmp_path_factory.mktemp("aot_step")
    for command in ([cmake, "-S", source, "-B", build, *options], [cmake, "--build", build]):
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return build / "aot_step"


def run(program: Path, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)


def check_tokens(program: Path, saved: Path, compiled) -> None:
    for prompt, expected in zip(PROMPTS, tokens(compiled)):
        done = run(program, saved, NUM_TOKENS, *prompt)
        assert done.returncode == 0, done.stderr
        assert done.stdout == " ".join(map(str, expected)) + "\n"


def test_a_program_without_python_generates_the_engines_tokens(compiled, saved, program, tmp_path):
    check_tokens(program, saved, compiled)
    for arguments, words in (
        ((tmp_path, 1, 2), "step_plan.json cannot be read"),
        ((saved, 1, 128), "token 128 is outside the vocabulary"),
        ((saved, 1, "-3"), "is no whole number"),
        ((saved, 512, 1), "more than the model's 512 tokens"),
    ):
        bad = run(program, *arguments)
        assert bad.returncode == 1
        assert words in bad.stderr


def test_a_program_without_python_codes_weights_itself(program, tmp_path):
    model = tiny_llama(hidden_size=256, intermediate_size=256, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "checkpoint")  # in float32: converted, then coded
    config = CompileConfig(pack_weights="coded", dtype=torch.bfloat16)
    compiled = pagebinder.compile_model(tmp_path / "checkpoint", config)
    if not any("without loss" in line for line in compiled.report.weight_layout):
        pytest.skip("this processor reads no packed weights")
    compiled.save(tmp_path / "saved", executable="aot")
    inputs = json.loads((tmp_path / "saved/step_plan.json").read_text())["programs"]["fused"]["inputs"]
    coded = [entry for entry in inputs if "coded_by" in entry]
    assert coded and {e["stored_dtype"] for e in coded} == {"float32"}
    assert {e["dtype"] for e in coded} == {"uint8"}
    assert tokens(pagebinder.load(tmp_path / "saved")) == tokens(compiled)
    check_tokens(program, tmp_path / "saved", compiled)


def test_the_plan_names_every_input_in_call_order(compiled, saved, plan):
    program = plan["programs"]["fused"]
    names = [entry["name"] for entry in program["inputs"]]
    facts = json.loads((saved / "artefact.json").read_text())["executables"]["fused"]
    assert names == input_names(compiled.graphs["fused"]) + facts["weights"]
    steps = [entry for entry in program["inputs"] if entry["role"] not in ("cache", "weight")]
    assert all(entry["meaning"] for entry in steps)
    assert {s for e in steps for s in e["shape"] if isinstance(s, str) and "table" not in s} <= set(
        plan["sizes"]
    )
    assert program["outputs"] == [{"name": "logits", "dtype": "bfloat16", "shape": ["num_logits", 128]}]
    assert all((saved / name).is_file() for name in plan["libraries"])
    assert (plan["vocab_size"], plan["max_model_len"]) == (128, 512)


def test_weights_are_references_into_the_checkpoint(compiled, saved, plan):
    weights = [e for e in plan["programs"]["fused"]["inputs"] if e["role"] == "weight"]
    inside = [e["name"] for e in weights if e["file"] == 0]
    assert inside == ["model.rotary_emb.inv_freq"], "the frequencies of RoPE, which no checkpoint holds"
    assert (saved / "program/fused/model.so").stat().st_size < 4 << 20
    graph = compiled.graphs["fused"]
    for entry in weights:
        data = np.fromfile(saved / plan["files"][entry["file"]]["path"], np.uint8)[entry["offset_bytes"] :]
        stored_dtype, count = getattr(torch, entry["stored_dtype"]), int(np.prod(entry["stored_shape"]))
        value = torch.from_numpy(data)[: count * stored_dtype.itemsize].clone().view(stored_dtype)
        value = value.view(entry["stored_shape"]).to(getattr(torch, entry["dtype"]))
        if "view" in entry:
            value = value.view(entry["view"]).permute(entry["permute"]).contiguous()
        assert list(value.shape) == entry["shape"]
        assert torch.equal(value, attribute(graph, entry["name"]))


def test_caches_are_passed_on_and_not_copied(saved):
    calls = json.loads((saved / "program/fused/model.json").read_text())["nodes"]
    caches = [
        argument["arg"]["as_tensor"]["name"]
        for call in calls
        for argument in call["node"]["inputs"]
        if argument["name"] == "kv_cache"
    ]
    assert len(caches) == 4, "a write and an attention in each of two layers"
    assert all(name.startswith("arg") for name in caches), "an input of the program itself"


def test_it_loads_without_transformers_dynamo_and_inductor(saved):
    script = f"""
import sys, pagebinder
print(pagebinder.load({str(saved)!r}).executable.name)
print([m for m in ("transformers", "torch._dynamo", "torch._inductor") if m in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["aot", "[]"]


def test_packed_weights_are_described_as_views_of_stored_ones():
    stored = torch.randn(64, 96).bfloat16()
    packed = packed_weights.pack(stored)
    entry = _packing(packed)
    assert torch.equal(stored.view(entry["view"]).permute(entry["permute"]).contiguous(), packed)


def test_elsewhere_it_is_compiled_again(saved, monkeypatch, caplog):
    monkeypatch.setattr(compiled_load, "InductorExecutable", EagerExecutable)  # faster
    again = pagebinder.load(saved, recompile=True)
    assert again.executable.name == again.report.executable == "eager"

    def damaged(*_):
        raise RuntimeError("cannot be loaded")

    monkeypatch.setattr(
        compiled_load, "AOTExecutable", type("Damaged", (), {"name": "aot", "__new__": damaged})
    )
    with caplog.at_level(logging.WARNING, "pagebinder"):
        assert pagebinder.load(saved).executable.name == "eager"
    assert "cannot be loaded" in caplog.text


def test_ops_that_need_python_are_refused_by_name(tmp_path):
    config = CompileConfig(executable="eager", providers={"paged_attention": "reference"})
    compiled = pagebinder.compile_model(tiny_llama(), config)
    with pytest.raises(ArtefactError, match="pagebinder::paged_attention, which is written in Python"):
        compiled.save(tmp_path / "artefact", executable="aot")
    with pytest.raises(ConfigError, match='use "aot", or None'):
        compiled.save(tmp_path / "artefact", executable="inductor")
    assert not list(tmp_path.iterdir())
