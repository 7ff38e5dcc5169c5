"""What a process made by fork() may do, and what is an error instead of waiting without an end."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

PROGRAM = """
import os
import torch
import pagebinder
from pagebinder.models import tiny_path

torch.set_num_threads(2)
config = pagebinder.EngineConfig(num_kv_blocks=64)

def compiled(**options):
    return pagebinder.compile_model(tiny_path(), pagebinder.CompileConfig(**options))

def text(engine):
    return engine.generate(["The open function"], pagebinder.SamplingParams(max_tokens=8, temperature=0.0))[0].text

def in_child(name, body):
    if not (pid := os.fork()):
        try:
            print(name, repr(body()), flush=True)
        except pagebinder.ForkedProcessError as error:
            print(name, error, flush=True)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

in_child("before:", lambda: text(compiled().engine(config)))
ours = compiled()
engine = ours.engine(config)
print("parent:", repr(text(engine)), flush=True)
in_child("inherited:", lambda: text(engine))
unused = ours.engine(config)
in_child("unused:", lambda: text(unused))
floats = compiled(dtype=torch.float32).engine(pagebinder.EngineConfig(num_kv_blocks=512))
prompts = [list(range(5 + i, 205 + i)) for i in range(24)]  # products of many rows in float32 are torch's
few = pagebinder.SamplingParams(max_tokens=2, temperature=0.0)
wide = lambda: [output.token_ids for output in floats.generate(prompts, few)]
print("wide parent:", wide(), flush=True)
in_child("wide:", wide)
by_torch = compiled(providers={"paged_attention": "reference"}).engine(config)
in_child("by torch:", lambda: text(by_torch))
many = pagebinder.SamplingParams(max_tokens=8, temperature=0.0, n=3)
long = [list(range(5, 205))]  # its last block is shared, and copied
copied = lambda: [list(output.token_ids) for output in engine.generate(long, many)]
print("copied parent:", copied(), flush=True)
in_child("copied:", copied)
beams = lambda: [list(beam.token_ids) for beam in engine.beam_search(long[0], beam_width=4, max_tokens=6)]
print("beams parent:", beams(), flush=True)
in_child("beams:", beams)
in_child("engine:", lambda: ours.engine(config))
in_child("compile:", compiled)
import threading
busy = threading.Event()
def others():  # in the middle of a step, and one that waits for its turn
    while not busy.is_set():
        text(engine)
threads = [threading.Thread(target=others) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(4):
    in_child("beside threads:", lambda: text(engine))
busy.set()
for thread in threads:
    thread.join()
print("parent after it:", repr(text(engine)), flush=True)
in_child("one thread:", lambda: torch.set_num_threads(1) or text(ours.engine(config)))
"""


def test_what_would_hang_in_a_child_is_an_error_and_the_rest_works():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    said = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    served = ("before", "inherited", "unused", "by torch", "one thread", "beside threads", "parent after it")
    assert {said[who] for who in served} == {said["parent"]} != {""}
    for what in ("wide", "copied", "beams"):
        assert said[what] == said[f"{what} parent"] != ""
    refused = {"engine": "a new engine in", "compile": "compile_model in"}
    for what, begins in refused.items():
        assert said[what].startswith(begins)
        assert "fork()" in said[what] and "spawn" in said[what] and "set_num_threads(1)" in said[what]
