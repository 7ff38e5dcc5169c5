"""`bisect`: the first wrong step, layer and node by name, and a script that shows it without the engine."""

from __future__ import annotations

import functools
import runpy
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import pagebinder
import pagebinder.compile as compiler
from pagebinder import CompileConfig, ConfigError
from pagebinder.cli import app
from tests.broken_passes import (
    break_pass,
    capped_kernel,
    ops,
    reversed_requests,
    swapped_tables,
    with_option,
)
from tests.captures import capture_once
from tests.helpers import by_day, tiny_mistral

pytestmark = pytest.mark.usefixtures("captured_once")

WINDOW = 16


@functools.cache
def model():
    return tiny_mistral(WINDOW)


def bisect(out_dir=None, **options):
    config = CompileConfig(block_size=8, dtype=options.pop("dtype", None))
    return pagebinder.bisect(model(), config, out_dir=out_dir, **options)


def exit_code(script, capsys) -> tuple[int, str]:
    """Run a script in this process: what it exits with, and what it prints."""
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return int(ended.value.code), capsys.readouterr().out


def test_nothing_diverges():
    result = bisect()
    assert not result.diverged and result.script is None and result.node == ""
    assert {s.weights for s in result.steps} == {"model", "rescaled"}
    text = result.describe()
    assert text.startswith("nothing diverges") and "page_attention" in text and "select_providers" in text


BROKEN = {
    "eps": (
        "recognise_rms_norm", with_option(ops.rms_norm.default, 2, eps=1e-5), "semantic",
        "model.layers.1.input_layernorm", "rms_norm",
    ),
    "rope": ("recognise_rope", swapped_tables, "semantic", "model.layers.1.self_attn", "rope"),
    "window": (
        "page_attention", with_option(ops.paged_attention.default, 1, window=WINDOW - 1), "paged",
        "model.layers.1.self_attn", "paged_attention",
    ),
    "scale": (
        "page_attention", with_option(ops.paged_attention.default, 0, scale=0.2), "paged", "model.layers.0.self_attn",
        "paged_attention",
    ),
    "packing": ("page_attention", reversed_requests, "paged", "model.layers.1.self_attn", "paged_attention"),
    "provider": ("select_providers", capped_kernel, "fused", "model.layers.1.self_attn", "paged_attention"),
    "fused eps": (
        "fuse_add_rms_norm", with_option(ops.add_rms_norm.default, 1, eps=1e-5), "fused",
        "model.layers.1.input_layernorm", "getitem",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", by_day(BROKEN, ["window", "packing", "provider"]))
def test_the_pass_and_the_layer_are_named_and_the_script_shows_it(what, tmp_path, monkeypatch, capsys):
    name, change, level, path, op = BROKEN[what]
    break_pass(monkeypatch, name, change)
    result = bisect(tmp_path / "out")
    assert result.diverged and (result.pass_name, result.level) == (name, level)
    assert result.module_path == path and op in result.op and result.error > result.tolerance
    assert name in result.describe() and path in result.describe()
    code, printed = exit_code(result.script, capsys)
    assert code == 1 and "largest error" in printed
    source = result.script.read_text()
    assert "torch.ops" in source and "pagebinder.compile" not in source and "runtime" not in source


def narrow_capture(monkeypatch):
    def narrow(source, report):
        captured, encoder = capture_once(source, report)
        with_option(ops.attention.default, 1, window=WINDOW - 1)(captured)
        return captured, encoder

    monkeypatch.setattr(compiler, "_capture", narrow)


def test_a_wrong_capture_is_traced_to_the_module_of_the_source(tmp_path, monkeypatch, capsys):
    narrow_capture(monkeypatch)
    result = bisect(tmp_path)
    assert (result.pass_name, result.module_path) == ("capture", "model.layers.1.self_attn")
    assert result.op == "pagebinder.attention.default" and f"{WINDOW} tokens" in result.how
    code, _ = exit_code(result.script, capsys)
    assert code == 1 and 'data["module"]' in result.script.read_text()


def test_the_script_runs_alone(tmp_path, monkeypatch):
    break_pass(monkeypatch, "recognise_rope", swapped_tables)
    script = bisect(tmp_path).script
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "of the spread" in done.stdout, done.stderr


def test_reduced_precision_is_judged_in_float32(monkeypatch, tmp_path, capsys):
    break_pass(monkeypatch, "recognise_rms_norm", with_option(ops.rms_norm.default, 2, eps=1e-5))
    result = bisect(tmp_path, dtype=torch.bfloat16)
    assert (result.pass_name, result.module_path) == ("recognise_rms_norm", "model.layers.1.input_layernorm")
    assert exit_code(result.script, capsys)[0] == 1


def test_options(monkeypatch):
    break_pass(monkeypatch, "page_attention", with_option(ops.paged_attention.default, 1, window=WINDOW - 1))
    assert not bisect(num_tokens=WINDOW - 1).diverged
    found = bisect(num_tokens=WINDOW + 4)
    assert found.diverged and found.how.startswith(f"{WINDOW + 4} tokens") and found.script is None
    assert not bisect(num_tokens=WINDOW, tolerance=100.0).diverged
    for options in ({"num_tokens": 0}, {"tolerance": -1.0}):
        with pytest.raises(ConfigError):
            bisect(**options)


def test_the_command(tmp_path, monkeypatch):
    model().save_pretrained(tmp_path / "model")
    arguments = ["bisect", str(tmp_path / "model"), "--tokens", "20", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "nothing diverges" in done.output, done.output
    break_pass(monkeypatch, "page_attention", with_option(ops.paged_attention.default, 1, window=WINDOW - 1))
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1 and "diverges in page_attention" in done.output
    assert (tmp_path / "out" / "reproduce.py").exists()
