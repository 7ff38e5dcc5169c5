"""`pagebinder compile DIR`: options, the plan lock from the shell, exit codes."""

import json
import tomllib

import pytest
from typer.testing import CliRunner

from pagebinder.cli import app
from tests.helpers import tiny_llama, tiny_mistral

pytestmark = pytest.mark.usefixtures("captured_once")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lock(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("lock") / "plan.lock"
    result = run(checkpoint, "--lock", path)
    assert result.exit_code == 0 and f"wrote {path}" in " ".join(result.stderr.split()), result.output
    assert "LlamaForCausalLM" in result.stdout and "executable: eager (requested)" in result.stdout
    return path


def run(model, *args):
    return CliRunner().invoke(app, ["compile", str(model), "--executable", "eager", *map(str, args)])


def fail(*args) -> str:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    return result.stderr


def test_a_plan_that_agrees_ends_well_and_says_so(checkpoint, lock):
    assert tomllib.loads(lock.read_text())["layers"]
    result = run(checkpoint, "--locked", lock, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["notes"] == [f"the plan is the one in {lock}"] and report["executable"] == "eager"


def test_a_gpu_that_is_not_there_is_said(checkpoint):
    assert 'error: device="cuda": no CUDA GPU' in fail(checkpoint, "--device", "cuda")
    assert run(checkpoint, "--device", "cpu").exit_code == 0


def test_drift_fails_with_the_place_and_the_remedy(checkpoint, lock):
    text = fail(checkpoint, "--locked", lock, "--dtype", "bfloat16")
    assert "error: The plan differs from the lock" in text
    assert "model.dtype\n  expected  float32\n  found     bfloat16\n  remedy" in text
    text = fail(checkpoint, "--locked", lock, "--block-size", "16")
    assert "options.block_size" in text and "write the lock again (--lock)" in text


def test_a_lock_of_another_model_and_a_missing_one(lock, checkpoint, tmp_path):
    tiny_mistral(16).save_pretrained(tmp_path)
    assert "expected  LlamaForCausalLM\n  found     MistralForCausalLM" in fail(tmp_path, "--locked", lock)
    assert "cannot be read: No such file" in fail(checkpoint, "--locked", tmp_path / "absent.lock")


def test_bad_options_are_told_before_the_compilation(checkpoint, tmp_path):
    assert "verify='much' is unknown" in fail(checkpoint, "--verify", "much")
    assert "dtype 'int7' is not supported" in fail(checkpoint, "--dtype", "int7")
    assert "executable='magic' is unknown" in fail(checkpoint, "--executable", "magic")
    assert "does not exist" in fail(tmp_path / "nowhere")


def test_the_page_and_the_graphs(checkpoint, tmp_path):
    result = run(checkpoint, "--html", tmp_path / "page.html", "--dump-graphs", tmp_path / "graphs")
    assert result.exit_code == 0 and result.stdout == ""
    assert "The four graphs" in (tmp_path / "page.html").read_text()
    assert "paged_attention" in (tmp_path / "graphs" / "fused.py").read_text()
