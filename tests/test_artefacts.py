"""Artefacts: what is saved comes back bit for bit, and what does not fit is told."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import pagebinder
from pagebinder import (
    ArtefactError,
    CompileConfig,
    EngineConfig,
    SamplingParams,
)
from pagebinder.artefacts import machine as artefact_machine
from pagebinder.artefacts import save as artefact_save
from pagebinder.artefacts.graphs import graph_from_json, graph_to_json
from pagebinder.artefacts.sizes import SizeReader, size_to_json
from pagebinder.artefacts.values import from_json, to_json
from pagebinder.cli import app
from pagebinder.compile import explain_model
from pagebinder.compiled_model import LEVELS
from pagebinder.models import SHIPPED
from pagebinder.runtime.executables import InductorExecutable, ProgramExecutable
from pagebinder.runtime.executables.program import HELPERS, Program
from tests.encoder_decoders import tiny as tiny_encoder_decoder
from tests.helpers import tiny_llama, tiny_qwen3_next
from tests.moe_models import tiny_deepseek_v3

pytestmark = pytest.mark.usefixtures("captured_once")

PROMPT = "The open() function"
ROOT = Path(pagebinder.__file__).parents[1]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SMALL = EngineConfig(kv_cache_bytes=1 << 20, max_num_seqs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Two layers in bfloat16 with the shipped model's tokenizer, and tied embeddings."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_llama(vocab_size=3072, tie_word_embeddings=True).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED["tiny"]() / name, folder)
    return folder


@pytest.fixture(scope="module")
def compiled(checkpoint):
    """Compiled by inductor in float32, so that the checkpoint's weights are converted."""
    return pagebinder.compile_model(checkpoint, CompileConfig(dtype="float32", executable="inductor"))


@pytest.fixture(scope="module")
def saved(compiled, tmp_path_factory) -> Path:
    """Not to be changed; tests that damage it copy it."""
    folder = tmp_path_factory.mktemp("saved") / "artefact"
    compiled.save(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> Path:
    """The artefact of a module that came from no checkpoint: its weights are inside."""
    folder = tmp_path_factory.mktemp("eager") / "artefact"
    pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager")).save(folder)
    return folder


def tokens(compiled, prompt=PROMPT, **encoder) -> list[int]:
    return compiled.engine(SMALL).generate([prompt], GREEDY, **encoder)[0].token_ids


def levels(compiled, num_tokens: int = 21) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 3 + num_tokens)
    encoder = {} if compiled.source.encoder is None else {"encoder_input_ids": ids[:9]}
    return {level: compiled.run_level(level, ids, **encoder) for level in LEVELS}


def assert_same(one, other) -> None:
    before, after = levels(one), levels(other)
    assert all(torch.equal(before[level], after[level]) for level in LEVELS)
    assert (other.kv_spec, other.states, other.config) == (one.kv_spec, one.states, one.config)
    assert other.report.to_dict() == one.report.to_dict()
    assert other.report.blocks() == one.report.blocks()
    assert other.explain() == one.explain()
    assert other.source.eos_token_ids == one.source.eos_token_ids


def test_all_of_it_comes_back(compiled, saved, tmp_path):
    loaded = pagebinder.load(saved, verify=True)
    assert isinstance(loaded.executable, ProgramExecutable)
    assert_same(compiled, loaded)
    assert tokens(loaded) == tokens(compiled)
    loaded.save(tmp_path / "again")
    again = pagebinder.load(tmp_path / "again")
    assert isinstance(again.executable, ProgramExecutable)
    assert_same(compiled, again)
    compiled.write_lock(tmp_path / "before.lock")
    again.write_lock(tmp_path / "after.lock")
    assert (tmp_path / "after.lock").read_text() == (tmp_path / "before.lock").read_text()


def test_weights_are_references_shared_by_all_levels(saved, checkpoint):
    table = json.loads((saved / "weights.json").read_text())
    inside = [t for t in table["tensors"] if t["file"] == 0]
    assert len(inside) == 1, "the frequencies of RoPE, which no checkpoint holds"
    assert os.path.samefile(table["files"][1]["absolute"], checkpoint / "model.safetensors")
    graphs = pagebinder.load(saved).graphs
    for name, _ in graphs["captured"].named_parameters():
        pointers = {graph.get_parameter(name).data_ptr() for graph in graphs.values()}
        assert len(pointers) == 1, name


def test_it_starts_without_transformers_dynamo_and_inductor(saved, compiled):
    script = f"""
import sys, pagebinder
loaded = pagebinder.load({str(saved)!r})
params = pagebinder.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
print(loaded.engine(pagebinder.EngineConfig(kv_cache_bytes=1 << 20)).generate([{PROMPT!r}], params)[0].token_ids)
print([m for m in ("transformers", "torch._dynamo", "torch._inductor") if m in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == [str(tokens(compiled)), "[]"]
    assert not out.stderr


def test_a_program_checks_what_custom_ops_return():
    """Programs of torch 2.14 and later do, by a function that a kept program must not import."""
    check = HELPERS["assert_tensor_metadata"]
    check(torch.zeros(2, 3), (2, 3), (3, 1), torch.float32, "mylib::op")
    check(None, (2, 3), (3, 1), torch.float32, "mylib::op")
    with pytest.raises(RuntimeError, match="mylib::op gave torch.float32; its fake kernel said"):
        check(torch.zeros(2, 3), (2, 3), (3, 1), torch.bfloat16, "mylib::op")
    with pytest.raises(AssertionError):
        check(torch.zeros(3, 2), (2, 3), (3, 1), torch.float32, "mylib::op")


def test_a_place_that_is_saved_to_again_is_loaded_anew(checkpoint, tmp_path):
    """A library that the process has loaded from there would run on tensors of other sizes."""
    place, prompt = tmp_path / "artefact", [[3, 1, 4, 1, 5, 9, 2, 6]]
    for dtype in ("float32", "bfloat16"):
        compiled = pagebinder.compile_model(checkpoint, CompileConfig(dtype=dtype, executable="inductor"))
        compiled.save(place)
        loaded = pagebinder.load(place)
        assert isinstance(loaded.executable, ProgramExecutable) and loaded.report.dtype.endswith(dtype)
        got = [c.engine(SMALL).generate(prompt, GREEDY)[0].token_ids for c in (loaded, compiled)]
        assert got[0] == got[1]


def test_no_file_is_a_pickle(saved):
    kinds = {path.suffix for path in saved.rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors", ".so", ".py", ""}
    assert not any(
        path.read_bytes().startswith((b"\x80\x04", b"\x80\x05", b"PK")) for path in saved.rglob("*.*")
    )


@pytest.mark.parametrize(
    ("build", "encoder"),
    [
        (tiny_qwen3_next, {}),
        (tiny_deepseek_v3, {}),
        (lambda: tiny_encoder_decoder("t5"), {"encoder_prompts": [[4, 5, 6, 7]]}),
    ],
    ids=["recurrent", "mla_moe", "encoder_decoder"],
)
def test_families_without_a_checkpoint(build, encoder, tmp_path):
    compiled = pagebinder.compile_model(build(), CompileConfig(executable="eager"))
    compiled.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    assert_same(compiled, loaded)
    assert tokens(loaded, [5, 6, 7], **encoder) == tokens(compiled, [5, 6, 7], **encoder)


@pytest.mark.parametrize("name", ["torch", "CPU"])
def test_another_version_or_machine_compiles_again(name, saved, compiled, monkeypatch, caplog):
    here = artefact_machine.made_with()
    monkeypatch.setattr(artefact_machine, "made_with", lambda: here | {name: "another"})
    with caplog.at_level(logging.WARNING, "pagebinder"):
        loaded = pagebinder.load(saved)
    assert f"{name} {here[name]} there, another here" in caplog.text
    assert isinstance(loaded.executable, InductorExecutable)
    assert tokens(loaded) == tokens(compiled)
    assert "compiled again" in loaded.report.notes[-1]


def test_another_transformers_is_only_told(eager, monkeypatch, caplog):
    here = artefact_machine.made_with()
    monkeypatch.setattr(artefact_machine, "made_with", lambda: here | {"transformers": "9.0"})
    with caplog.at_level(logging.WARNING, "pagebinder"):
        notes = pagebinder.load(eager).report.notes
    assert "9.0 here" in caplog.text
    assert not any("compiled again" in note for note in notes)


def test_recompile_runs_no_code_of_the_artefact(saved, compiled, monkeypatch):
    monkeypatch.setattr(Program, "read", lambda folder: pytest.fail("read the saved program"))
    loaded = pagebinder.load(saved, recompile=True)
    assert tokens(loaded) == tokens(compiled)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("graphs/fused.json", lambda path: path.write_text(path.read_text()[:-100])),
        ("artefact.json", lambda path: path.write_text(path.read_text().replace("float32", "float16"))),
        ("kernels/core.so", lambda path: path.unlink()),
        ("program/fused/program.py", lambda path: path.write_text("import os\n")),
        ("SHA256SUMS", lambda path: path.write_text("")),
        ("SHA256SUMS", lambda path: path.write_text(path.read_text()[:-100])),
        ("SHA256SUMS", lambda path: path.write_text(path.read_text() + "0" * 64)),
        ("artefact.json", lambda path: path.unlink()),
    ],
)
def test_damage_is_told_before_anything_is_loaded(file, damage, copied):
    damage(copied / file)
    with pytest.raises(
        ArtefactError, match=f"{file}.*(missing|damaged|no artefact)|{file}, so it is no artefact"
    ):
        pagebinder.load(copied)


def test_the_checkpoint_may_move_but_not_change(checkpoint, tmp_path):
    own = shutil.copytree(checkpoint, tmp_path / "one" / "checkpoint")
    compiled = pagebinder.compile_model(own, CompileConfig(executable="eager"))
    compiled.save(tmp_path / "one" / "artefact")
    expected = levels(compiled)["fused"]
    moved = (tmp_path / "one").rename(tmp_path / "two")  # together: the relative path holds
    assert torch.equal(levels(pagebinder.load(moved / "artefact"))["fused"], expected)
    weights = moved / "checkpoint" / "model.safetensors"
    os.utime(weights)  # another time, the same content
    assert torch.equal(levels(pagebinder.load(moved / "artefact"))["fused"], expected)
    away = (moved / "checkpoint").rename(tmp_path / "away")
    with pytest.raises(
        ArtefactError,
        match="model.safetensors, which holds weights, is missing: .*checkpoint=.*--checkpoint DIR",
    ):
        pagebinder.load(moved / "artefact")
    assert torch.equal(levels(pagebinder.load(moved / "artefact", checkpoint=away))["fused"], expected)
    content = bytearray((away / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (away / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtefactError, match="is not the file that the weights were in"):
        pagebinder.load(moved / "artefact", checkpoint=away)


def test_only_artefacts_are_replaced_and_only_whole(eager, tmp_path, monkeypatch):
    compiled = pagebinder.load(eager)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtefactError, match="holds other files"):
        compiled.save(tmp_path / "full")
    with pytest.raises(ArtefactError, match="is a file"):
        compiled.save(tmp_path / "full" / "thesis.tex")
    target = tmp_path / "artefact"
    target.mkdir()  # an empty directory will do
    compiled.save(target)
    compiled.save(target)
    before = (target / "SHA256SUMS").read_text()

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(artefact_save, "save_weights", interrupted)
        compiled.save(target)
    assert (target / "SHA256SUMS").read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["artefact", "full"], "nothing half written"
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ArtefactError, match="notes.txt is none of its files"):
        compiled.save(target)


def test_a_place_where_no_directory_can_be(eager, tmp_path):
    compiled, file = pagebinder.load(eager), tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    for place, why in (
        (file / "x", f"{file} is no directory"),
        (file / "x" / "y", f"{file} is no directory"),
        (tmp_path / "link" / "x", f"{tmp_path / 'link'} is a link that leads nowhere"),
        (tmp_path / "link", f"{tmp_path / 'link'} is a link that leads nowhere"),
        (Path("/proc/x"), ""),
    ):
        with pytest.raises(ArtefactError, match=f"The directory {place} cannot be made: {why}"):
            compiled.save(place)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"] and file.read_text() == "mine"


def test_what_has_nothing_to_save_is_refused(checkpoint, tmp_path):
    with pytest.raises(ArtefactError, match="explain"):
        explain_model(checkpoint).save(tmp_path / "artefact")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("os.system", "none of the ops and functions"),
        ("builtins.eval", "none of the ops and functions"),
        ("aten::no_such_op.default", "there is no op"),
        ("inductor::_alloc_from_pool.default", "none of the ops and functions"),
    ],
)
def test_graphs_call_only_what_is_listed(target, message, eager):
    gm = pagebinder.load(eager).graphs["fused"]
    data = graph_to_json(gm)
    next(n for n in data["nodes"] if n["op"] == "call_function")["target"] = target
    with pytest.raises(ArtefactError, match=message):
        graph_from_json(data, dict(gm.named_parameters()) | dict(gm.named_buffers()), "Fused")


def test_an_op_with_another_schema_is_told(eager):
    data = graph_to_json(pagebinder.load(eager).graphs["fused"])
    data["schemas"]["aten::embedding.default"] = "(Tensor weight) -> Tensor"
    with pytest.raises(
        ArtefactError, match=r"aten::embedding.default takes \(Tensor weight, Tensor indices.* here"
    ):
        graph_from_json(data, {}, "Fused")


def test_values_without_a_form_and_forms_without_a_value():
    value = (
        1,
        [2.5, float("inf")],
        {"a": slice(1, None)},
        torch.bfloat16,
        ...,
        torch.device("cpu"),
        frozenset((3, 1)),
    )
    assert from_json(json.loads(json.dumps(to_json(value)))) == value
    with pytest.raises(ArtefactError, match="cannot hold a"):
        to_json(object())
    for data in ({"subprocess": []}, {"dtype": "nn"}, {"AttentionState": {"layer": "x"}}, {"a": 1, "b": 2}):
        with pytest.raises(ArtefactError):
            from_json(data)


def test_expressions_of_sizes_survive():
    symbols = {"s0": {"example": 40, "range": [2, 1 << 20]}, "s1": {"example": 7, "range": [0, None]}}
    reader = SizeReader(symbols)
    tree = ["Add", ["FloorDiv", "s0", 4], ["Mul", -1, "s1"], ["Max", 3, ["Mod", "s1", 5]]]
    size = reader.size(tree)
    assert int(size.node.hint) == 40 // 4 - 7 + 3
    assert SizeReader(symbols).size(size_to_json_renamed(size, reader)).node.hint == size.node.hint
    with pytest.raises(ArtefactError, match="none of the graph's symbols"):
        reader.size("__import__('os')")
    with pytest.raises(ArtefactError, match="not known here"):
        reader.size(["Lambda", "s0", "s0"])


def size_to_json_renamed(size, reader: SizeReader):
    """`size_to_json`, with the names that the symbols had when they were read."""
    new = {reader.size(name).node.expr.name: name for name in ("s0", "s1")}
    text = json.dumps(size_to_json(size))
    for now, then in new.items():
        text = text.replace(f'"{now}"', f'"{then}"')
    return json.loads(text)


def test_command_line(checkpoint, compiled, tmp_path):
    run = CliRunner().invoke
    target = str(tmp_path / "artefact")
    result = run(app, ["compile", str(checkpoint), "--save", target, "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    options = ["--max-tokens", "6", "--temperature", "0", "--ignore-eos", "--json"]
    result = run(app, ["generate", "--model", target, "--prompt", PROMPT, *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["token_ids"] == tokens(compiled)
    result = run(app, ["generate", "--model", target, "--prompt", PROMPT, "--executable", "eager"])
    assert result.exit_code == 2
    assert "is compiled already" in result.stderr
    result = run(app, ["compile", str(checkpoint), "--save", str(ROOT)])
    assert result.exit_code == 2
    assert "is no artefact" in result.stderr


@pytest.mark.parametrize("executable", ["eager", "native"])
def test_op_by_op_it_starts_without_dynamo_and_gives_the_same_bits(executable, checkpoint, tmp_path):
    """What is only run asks for no symbols of sizes, whose import takes as long as all else."""
    model = pagebinder.compile_model(checkpoint, CompileConfig(executable=executable))
    model.save(tmp_path / "artefact")
    script = f"""
import sys, pagebinder
loaded = pagebinder.load({str(tmp_path / "artefact")!r})
params = pagebinder.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
print(loaded.engine(pagebinder.EngineConfig(kv_cache_bytes=1 << 20)).generate([{PROMPT!r}], params)[0].token_ids)
print([m for m in ("transformers", "torch._dynamo", "torch._inductor") if m in sys.modules])
print(loaded.executable.name, loaded.graphs["fused"].graph.find_nodes(op="output")[0].args[0].meta["val"].dim())
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == [str(tokens(model)), "[]", f"{executable} 2"]
    loaded = pagebinder.load(tmp_path / "artefact")
    ids = torch.arange(1, 9)
    assert torch.equal(loaded.run_level("fused", ids), model.run_level("fused", ids))
