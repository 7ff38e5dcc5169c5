"""Models whose own outputs move far with a rounding: what their graphs may differ by, and what they may not."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, VerificationError
from pagebinder.compiler import verify_noise
from pagebinder.compiler.verify_noise import own_noise
from pagebinder.compiler.verify_runs import World
from pagebinder.passes.verifier import ALONE, NOISE_FACTOR, TOLERANCES, Conditions, verify_steps
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import tiny_model

X = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))


class Steep(torch.nn.Module):
    """Each unit of the last place of a weight comes out `gain` times as large."""

    def __init__(self, gain: float):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.gain = torch.nn.Linear(32, 32, bias=False), gain

    def forward(self, x):
        return torch.sin(self.gain * self.inner(x))


def rows(module: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [module(X)]


def noise_of(module: torch.nn.Module, dtype=torch.float32, notes=None):
    return own_noise(World("model", module, dtype), rows(module), rows, [] if notes is None else notes)


def test_noise_is_what_a_rounding_of_weights_does():
    module, notes = Steep(1e4), []
    before, noise = copy.deepcopy(module.state_dict()), noise_of(module, notes=notes)
    assert not notes
    assert 2e-4 < noise() == noise() < 2e-2
    assert noise_of(Steep(1.0))() < 1e-6
    assert len(notes) == 1 and f"{noise():.2g} of their spread" in notes[0]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_there_is_none_in_reduced_precision_and_without_memory(monkeypatch):
    assert noise_of(Steep(1e4).bfloat16().float(), torch.bfloat16)() == 0
    monkeypatch.setattr(verify_noise, "room_for_copy", lambda *_: False)
    assert noise_of(Steep(1e4))() == 0


def judged(error: float, noise, dtype=torch.float32):
    """A step after the capture that is off by `error` of the spread."""
    expected = [torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]
    off = [expected[0] + error * expected[0].std(correction=0) * torch.eye(64, 32)]
    graphs = [SimpleNamespace(graph=SimpleNamespace(nodes=[n])) for n in range(2)]
    steps = [
        SimpleNamespace(graph=g, name=name, level="captured", chain="decoder", result=None)
        for g, name in zip(graphs, ("capture", "a pass"))
    ]
    outputs = {id(graphs[0]): expected, id(graphs[1]): off}
    conditions = Conditions("model", dtype, TOLERANCES[dtype])
    return verify_steps(steps, expected, lambda g: {ALONE: outputs[id(g)]}, conditions, [64], noise)


def test_steps_may_differ_by_a_few_times_the_noise(monkeypatch):
    monkeypatch.setattr("pagebinder.passes.verifier.same_graph", lambda a, b: a is b)
    monkeypatch.setattr("pagebinder.passes.verifier._error", lambda *a: VerificationError(f"{a[-1]:g}"))
    asked = []

    def noise() -> float:
        asked.append(1)
        return 1e-3

    small, large = TOLERANCES[torch.float32] / 2, 0.9 * NOISE_FACTOR * 1e-3
    assert judged(small, noise)[-1].tolerance == TOLERANCES[torch.float32] and not asked
    line = judged(large, noise)[-1]
    assert line.tolerance == NOISE_FACTOR * 1e-3 > line.max_rel_error > TOLERANCES[torch.float32] and asked
    with pytest.raises(VerificationError, match="0.004"):
        judged(1.2 * NOISE_FACTOR * 1e-3, noise)
    with pytest.raises(VerificationError, match="0.0002"):
        judged(large, lambda: 1e-6)


def test_rounded_tables_of_decays_are_no_fault():
    """MiniMax in bfloat16: the source computes prompts with powers that it has rounded one by one."""
    architecture = next(a for a in architectures("causal") if a.name == "minimax")
    model = tiny_model(architecture).bfloat16()
    tables = copy.deepcopy(dict(model.named_buffers()))
    config = CompileConfig(executable="eager", verify="full", max_model_len=120)
    report = pagebinder.compile_model(model, config).report
    assert max(s.max_rel_error for s in report.verified if s.dtype == "float32" and s.judged) < 1e-4
    assert all(torch.equal(table, tables[name]) for name, table in model.named_buffers())
