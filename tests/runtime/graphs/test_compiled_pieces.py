"""Pieces of cut graphs as compiled code: equal ones once, weights shared, captured equal to uncaptured to the bit."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import GraphCaptureError
from pagebinder.runtime.executables import inductor, piece_compiler
from pagebinder.runtime.executables.piece_compiler import PieceCompiler
from pagebinder.runtime.graphs import step_graphs
from pagebinder.runtime.graphs.buckets import MIXED
from pagebinder.runtime.graphs.capture import CarriedValues, capture_pieces, run_pieces
from pagebinder.runtime.graphs.compiled_pieces import compile_pieces
from pagebinder.runtime.graphs.cpu_backend import CpuGraphBackend
from pagebinder.runtime.graphs.pieces import Break, find_breaks, split_at_breaks
from tests.helpers import by_day, tiny_gemma3, tiny_llama, tiny_mamba2, tiny_qwen3_next
from tests.runtime.graphs.steps import memory, prompts, steps
from tests.test_engine_mla import source

pytestmark = pytest.mark.usefixtures("captured_once")

aten, CPU = torch.ops.aten, torch.device("cpu")
MODELS = {
    "llama": lambda: tiny_llama(num_hidden_layers=1),
    "deep llama": lambda: tiny_llama(num_hidden_layers=3),
    "windows": tiny_gemma3,
    "mla": lambda: source("deepseek_v3"),
    "mamba2": tiny_mamba2,
    "qwen3 next": tiny_qwen3_next,
}


def graph_of(build, **weights: torch.Tensor) -> GraphModule:
    """`build(call, x, weight)` over x [4, 4] -> the graph, with values without memory at its nodes."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((build(graph.call_function, x, graph.get_attr),))
    gm = GraphModule(weights, graph)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(gm, mode).propagate(torch.zeros(4, 4))
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(weights[node.target])
    return gm


class Checked(PieceCompiler):
    """Programs run op by op; they only take inputs of the strides that they were made for."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        monkeypatch.setattr(inductor, "compile_lifted", self._checked)
        self.num_programs = 0

    def _checked(self, lifted: GraphModule, examples):
        self.num_programs += 1

        def run(*args):
            strides = [(a.stride(), e.stride()) for a, e in zip(args, examples, strict=True)]
            assert all(given == made_for for given, made_for in strides), strides
            return lifted(*args)

        return run


def captured(gm: GraphModule, compiler: PieceCompiler):
    pieces = split_at_breaks(gm, find_breaks(gm, MIXED))
    compile_pieces(gm, pieces, compiler, CPU)
    x, backend = torch.arange(16.0).view(4, 4), CpuGraphBackend(CPU)
    logits = torch.zeros(4, 4)
    bucket = capture_pieces(backend, gm, pieces, {"x": x}, logits, CarriedValues(backend))
    return pieces, bucket, x, logits


def check(gm: GraphModule, compiler: PieceCompiler):
    """A replay on other values equals the pieces one after the other and the graph."""
    pieces, bucket, x, logits = captured(gm, compiler)
    x.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    logits.zero_()
    bucket.replay()
    assert torch.equal(logits, run_pieces(gm, pieces, {"x": x})) and torch.equal(logits, gm(x)[0])
    return pieces


def test_equal_pieces_are_one_program_over_the_weights_of_each(waits, monkeypatch):
    names = [f"layers.{i}.weight" for i in range(4)]
    weights = {name.replace(".", "_"): torch.randn(4, 4) for name in names}

    def build(call, x, weight):
        for name in weights:
            x = call(waits, (call(aten.mm.default, (x, weight(name))),))
        return call(aten.add.Tensor, (x, 1.0))

    compiler = Checked(monkeypatch)
    pieces = check(graph_of(build, **weights), compiler)
    assert [p.is_captured for p in pieces] == [True, False] * 4 + [True]
    assert compiler.num_programs == 2 and {p.runs_as for p in pieces[::2]} == {"compiled by inductor"}
    assert {p.runs_as for p in pieces[1::2]} == {"op by op"}
    kept = [w.data_ptr() for piece in pieces[:-1:2] for w in piece.run.weights]
    assert kept == [w.data_ptr() for w in weights.values()], "weights are not copied"
    # What differs in a number is another program, and what was compiled before is not compiled again.
    check(graph_of(build, **weights), compiler)
    assert compiler.num_programs == 2
    check(graph_of(lambda call, x, weight: call(aten.add.Tensor, (call(waits, (x,)), 2.0))), compiler)
    assert compiler.num_programs == 3


def test_programs_are_for_the_strides_that_values_have_when_they_are_carried(waits, monkeypatch):
    """`turned` lies by columns in the graph, and by rows where it is carried; `sum`, made of it, as that makes it."""

    def build(call, x, weight):
        turned = call(aten.transpose.int, (call(aten.relu.default, (x,)), 0, 1))
        waited = call(waits, (turned,))
        total = call(aten.mul.Tensor, (turned, 3.0))
        again = call(waits, (call(aten.add.Tensor, (waited, 1.0)),))
        return call(aten.add.Tensor, (again, total))

    check(graph_of(build), Checked(monkeypatch))


def test_a_buffer_is_not_lent_while_a_view_of_its_value_is_read(waits, monkeypatch):
    """`row` is a view of what the first call made, and read after the second has made another."""

    def build(call, x, weight):
        first = call(waits, (call(aten.relu.default, (x,)),))
        row = call(aten.view.default, (first, [16]))
        second = call(waits, (call(aten.add.Tensor, (first, 1.0)),))
        total = call(aten.add.Tensor, (second, 1.0))
        return call(aten.add.Tensor, (total, call(aten.view.default, (row, [4, 4]))))

    gm = graph_of(build)
    check(gm, Checked(monkeypatch))
    pieces = split_at_breaks(gm, find_breaks(gm, MIXED))
    x, logits, backend = torch.randn(4, 4), torch.zeros(4, 4), CpuGraphBackend(CPU)
    capture_pieces(backend, gm, pieces, {"x": x}, logits, CarriedValues(backend)).replay()
    assert torch.equal(logits, gm(x)[0])


def test_why_pieces_are_not_compiled(waits, monkeypatch):
    gm = graph_of(lambda call, x, weight: call(aten.relu.default, (call(waits, (x,)),)))
    monkeypatch.setattr(piece_compiler.compiler, "problem", lambda: "no compiler")
    pieces = split_at_breaks(gm, find_breaks(gm, MIXED))
    compile_pieces(gm, pieces, PieceCompiler(), CPU)
    runs = [(p.run is p.gm, p.runs_as) for p in pieces]
    assert runs == [(True, "op by op"), (True, "op by op (inductor needs a C++ compiler: no compiler)")]
    monkeypatch.undo()

    def fail(*args, **options):
        raise RuntimeError("no such op")

    monkeypatch.setattr(inductor, "compile_lifted", fail)
    with pytest.raises(GraphCaptureError, match="inductor fails on piece 1 of a step.*no such op"):
        compile_pieces(gm, pieces, PieceCompiler(), CPU)


def cut_at_writes(gm: GraphModule, kind: str) -> list[Break]:
    """As if no op that changes a cache could be captured, nor any that reads one."""
    caches = {n for n in gm.graph.nodes if n.op == "placeholder" and n.target.startswith("kv_cache")}
    reads = [n for n in gm.graph.nodes if n.op == "call_function" and caches & set(n.all_input_nodes)]
    return [Break(n.name, str(n.target), "a test") for n in reads]


@pytest.mark.parametrize("name", by_day(MODELS, ["llama"]))
def test_models_in_compiled_pieces(name, monkeypatch):
    """Captured equals uncaptured, bit for bit; both are near the graph op by op."""
    model = pagebinder.compile_model(MODELS[name](), CompileConfig(executable="eager", block_size=16))
    monkeypatch.setattr(step_graphs, "find_breaks", cut_at_writes)
    sizes = {
        "num_kv_blocks": 60,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "decode_sizes": [1, 2, 4],
        "token_sizes": [16],
    }
    plain = model.capture(**sizes)
    assert all(piece.run is piece.gm for piece in plain.pieces["mixed"]), "eager stays op by op"
    compiler = PieceCompiler()
    executable = SimpleNamespace(run=model.executable.run, pieces=compiler)
    graphs = dataclasses.replace(model, executable=executable).capture(**sizes)
    assert {p.runs_as for p in graphs.pieces["mixed"] if p.is_captured} == {"compiled by inductor"}
    if name == "deep llama":
        assert len(compiler._programs) == 3, "before, between and after layers"
        assert "mixed: 4 captured, compiled by inductor (3 programs); 3 called between them, op by op" in (
            graphs.explain()
        )
    for step in steps(graphs):
        inputs, before = graphs.pack(step), memory(graphs).clone()
        expected = graphs.replay(inputs, captured=False).clone()
        after = memory(graphs).clone()
        memory(graphs).copy_(before)
        assert torch.equal(graphs.replay(inputs), expected) and torch.equal(memory(graphs), after)
        torch.testing.assert_close(plain.replay(inputs), expected, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("name", by_day(MODELS, []))
def test_engines_and_saved_models_in_compiled_pieces(name, monkeypatch, tmp_path):
    """The same tokens as of the whole program, also of a model that was loaded."""
    model = pagebinder.compile_model(MODELS[name](), CompileConfig(executable="inductor", block_size=16))
    model.save(tmp_path / "saved")
    monkeypatch.setattr(step_graphs, "find_breaks", cut_at_writes)
    tokens = []
    for one, capture in ((model, "off"), (model, "on"), (pagebinder.load(tmp_path / "saved"), "on")):
        config = EngineConfig(num_kv_blocks=60, max_num_seqs=4, max_num_batched_tokens=32, capture=capture)
        engine = one.engine(config)
        outputs = engine.generate(prompts(3, 17, 40), SamplingParams(max_tokens=8, temperature=0.0))
        tokens.append([output.token_ids for output in outputs])
        if capture == "on":
            text = engine.loop.captured.graphs.explain()
            assert "compiled by inductor" in text
    assert tokens[0] == tokens[1] == tokens[2]
