"""What a process made by fork() may do, and what is an error instead of waiting without an end."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

PROGRAM = """
import os, sys
import torch
import pagebinder
from pagebinder.models import tiny_path

torch.set_num_threads(2)
sampling = pagebinder.SamplingParams(max_tokens=8, temperature=0.0)
config = pagebinder.EngineConfig(num_kv_blocks=64)
if {before}:
    compiled = pagebinder.compile_model(tiny_path())
    engine = compiled.engine(config)
    expected = engine.generate(["The open function"], sampling)[0].text

def child():
    {child}

if not (pid := os.fork()):
    code = 1
    try:
        child()
        code = 0
    except pagebinder.ForkedProcessError as error:
        print(error, flush=True)
        code = 3
    finally:
        os._exit(code)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def run(child: str, before: bool = True) -> list[str]:
    program = PROGRAM.format(before=before, child="\n    ".join(child.splitlines()))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_an_inherited_engine_goes_on():
    assert run('assert engine.generate(["The open function"], sampling)[0].text == expected') == ["child 0"]


@pytest.mark.parametrize("what", ["pagebinder.compile_model(tiny_path())", "compiled.engine(config)"])
def test_what_would_hang_is_an_error(what):
    said, ended = run(what)
    assert ended == "child 3"
    assert "fork()" in said and "spawn" in said and "set_num_threads(1)" in said


def test_one_thread_waits_for_none():
    child = """torch.set_num_threads(1)
other = pagebinder.compile_model(tiny_path()).engine(config)
assert other.generate(["The open function"], sampling)[0].text == expected"""
    assert run(child) == ["child 0"]


def test_a_parent_without_threads_leaves_none_behind():
    child = 'pagebinder.compile_model(tiny_path()).engine(config).generate(["The open function"], sampling)'
    assert run(child, before=False) == ["child 0"]
