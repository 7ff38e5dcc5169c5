"""The script that `bisect` writes makes the ops of every provider callable, each its own way, on its own device."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
import torch
from torch.fx import Graph, GraphModule

from pagebinder.compiler.locate import Divergence
from pagebinder.compiler.repro import _plain, write_script
from pagebinder.custom_ops import library, providers
from pagebinder.custom_ops.library import op_info
from pagebinder.custom_ops.providers import Provider, register_provider, registered_providers
from tests.helpers import nightly

OPERANDS = [torch.linspace(-1, 1, 32).view(2, 16), torch.ones(16)]


class Own(Provider):
    """A user's own provider: its ops are there only after `prepare`."""

    name = "own"
    prepared: list[str] = []

    def prepare(self, op: str | None = None) -> None:
        self.prepared.append(op)

    def overload(self, op: str):
        return library.overload(self.namespace, op)


@pytest.fixture
def own():
    provider, info = Own(), op_info("rms_norm")
    library.define_schema(provider.namespace, info)
    library.library(provider.namespace).impl(info.name, info.reference, "CPU")
    register_provider(provider)
    yield provider
    del providers._providers[provider.name]


def norm(overload) -> GraphModule:
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("x", "weight")]
    graph.output(graph.call_function(overload, tuple(inputs), {"eps": 1e-5, "tail": "cast_scale"}))
    return GraphModule(torch.nn.Module(), graph)


def script_of(overload, tmp_path):
    gm = norm(overload)
    right = norm(torch.ops.pagebinder.rms_norm.default)
    found = Divergence(node=list(gm.graph.nodes)[-2], graph=gm, inputs=OPERANDS, expected_graph=right)
    return write_script(found, tmp_path, "a test", 1e-4)


def test_a_provider_of_ones_own_is_imported_and_prepared(own, tmp_path, capsys):
    script = script_of(own.overload("rms_norm"), tmp_path)
    text = script.read_text()
    assert f"import {__name__}  # registers the provider 'own'" in text and "TRITON" not in text
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code in (0, False) and Own.prepared == ["rms_norm"]
    assert "largest error 0" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "op"), [("cpu", "linear"), ("triton", "rms_norm")])
def test_what_the_script_says_of_our_providers(name, op, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    text = script_of(registered_providers()[name].overload(op), tmp_path).read_text()
    wanted = f"for op in [{op!r}]:  # registers torch.ops.pagebinder_{name}\n"
    assert wanted + f"    registered_providers()['{name}'].prepare(op)" in text
    assert ('os.environ["TRITON_INTERPRET"] = "1"' in text) == (name == "triton")
    plain = script_of(torch.ops.pagebinder.rms_norm.default, tmp_path).read_text()
    assert "prepare" not in plain and "TRITON" not in plain


def test_inputs_stay_on_their_device():
    whole = torch.empty(4, 4, device="meta")
    assert _plain(whole[:, 1]).device == whole.device
    assert _plain(OPERANDS[0][:, ::2]).untyped_storage().nbytes() < OPERANDS[0].untyped_storage().nbytes()


@nightly
def test_the_script_runs_in_a_new_process(tmp_path, monkeypatch):
    """Of the CPU's kernels: `test_bisect.py`."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    script = script_of(registered_providers()["triton"].overload("rms_norm"), tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "largest error" in done.stdout, done.stderr
