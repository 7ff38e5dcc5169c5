"""Models whose own outputs move far with a rounding: what their graphs may differ by, and what they may not."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, VerificationError
from pagebinder.compiler import verify_noise
from pagebinder.compiler.verify_constants import as_captured
from pagebinder.compiler.verify_noise import own_tolerance
from pagebinder.compiler.verify_runs import World
from pagebinder.passes.verifier import ALONE, TOLERANCES, Conditions, verify_steps
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
        return [module(X.bfloat16().to(module.inner.weight.dtype))]


def tolerance_of(module: torch.nn.Module, dtype=torch.float32, notes=None):
    world = World("model", module, dtype)
    return own_tolerance(world, rows(module), rows, [] if notes is None else notes)


def test_a_few_times_what_a_rounding_of_weights_does():
    module, notes = Steep(1e4), []
    before, tolerance = copy.deepcopy(module.state_dict()), tolerance_of(module, notes=notes)
    assert not notes
    assert 1e-3 < tolerance() == tolerance() < 5e-2
    assert tolerance_of(Steep(1.0))() < 4e-6
    assert len(notes) == 1 and f"moves by {tolerance() / 4:.2g} of the spread" in notes[0]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_in_reduced_precision_the_sources_own_error():
    module, notes = Steep(30.0).bfloat16(), []
    exact = Steep(30.0).bfloat16().float()(X.bfloat16().float()).detach()
    error = (rows(module)[0].float() - exact).abs().max() / exact.std()
    assert tolerance_of(module, torch.bfloat16, notes)() == pytest.approx(float(error), rel=0.02)
    assert "from what it computes in float32" in notes[0] and module.inner.weight.dtype is torch.bfloat16


def test_without_memory_there_is_none(monkeypatch):
    monkeypatch.setattr(verify_noise, "room_for_copy", lambda *_: False)
    assert tolerance_of(Steep(1e4))() == 0


def judged(error: float, own, dtype=torch.float32):
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
    return verify_steps(steps, expected, lambda g: {ALONE: outputs[id(g)]}, conditions, [64], own)


def test_steps_may_differ_by_it(monkeypatch):
    monkeypatch.setattr("pagebinder.passes.verifier.same_graph", lambda a, b: a is b)
    monkeypatch.setattr("pagebinder.passes.verifier._error", lambda *a: VerificationError(f"{a[-1]:g}"))
    asked = []

    def own() -> float:
        asked.append(1)
        return 4e-3

    least = TOLERANCES[torch.float32]
    assert judged(least / 2, own)[-1].tolerance == least and not asked
    line = judged(3.6e-3, own)[-1]
    assert line.tolerance == 4e-3 > line.max_rel_error > least and asked
    with pytest.raises(VerificationError, match="0.004"):
        judged(4.8e-3, own)
    with pytest.raises(VerificationError, match="0.0002"):
        judged(3.6e-3, lambda: 1e-6)


def test_rounded_tables_of_decays_are_no_fault():
    """MiniMax in bfloat16: the source computes prompts with powers that it has rounded one by one."""
    architecture = next(a for a in architectures("causal") if a.name == "minimax")
    model = tiny_model(architecture).bfloat16()
    tables = copy.deepcopy(dict(model.named_buffers()))
    config = CompileConfig(executable="eager", verify="full", max_model_len=120)
    report = pagebinder.compile_model(model, config).report
    assert max(s.max_rel_error for s in report.verified if s.dtype == "float32" and s.judged) < 1e-4
    assert all(torch.equal(table, tables[name]) for name, table in model.named_buffers())


def test_constants_are_those_of_the_graph():
    """What a source makes a tensor of as it runs: rounded in its graph in bfloat16, anew in a copy in float32."""
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    graph.register_buffer("lifted", torch.tensor(48**0.5, dtype=torch.bfloat16))
    with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        graph.graph.get_attr("lifted")
    wide = World("model", torch.nn.Identity(), torch.float32, widen=True)
    with as_captured(wide, graph):
        found = [float(torch.tensor(x, dtype=torch.float32)) for x in (48**0.5, 49**0.5)]
    assert found == [6.9375, 7.0] and float(torch.tensor(48**0.5)) != 6.9375
    with as_captured(World("model", torch.nn.Identity(), torch.float32), graph):
        assert float(torch.tensor(48**0.5)) != 6.9375
