"""Where graphs are cut follows from how ops are registered; and what is registered is true."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule, Interpreter

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.custom_ops import library, providers
from pagebinder.custom_ops.library import op_info
from pagebinder.custom_ops.providers import Provider, register_provider
from pagebinder.runtime.graphs.buckets import DECODE, MIXED
from pagebinder.runtime.graphs.cpu_backend import Recorder
from pagebinder.runtime.graphs.pieces import capture_level, find_breaks, split_at_breaks
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.helpers import tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")


class HostPlanned(Provider):
    """Stands for a library that plans its launches on the host: it can be captured for uniform decodes alone."""

    name = "host_planned"
    graph_capture = "uniform_decode"

    def overload(self, op: str):
        return library.overload(self.namespace, op)


@pytest.fixture(scope="module")
def host_planned():
    provider = HostPlanned()
    info = op_info("paged_attention")
    library.define_schema(provider.namespace, info)
    library.library(provider.namespace).impl(info.name, info.reference, "CPU")
    register_provider(provider)
    yield provider
    del providers._providers[provider.name]


def test_a_host_planned_provider_cuts_mixed_steps_alone(host_planned):
    config = CompileConfig(
        executable="eager", block_size=16, providers={"paged_attention": host_planned.name}
    )
    model = pagebinder.compile_model(tiny_llama(), config)
    options = {"num_kv_blocks": 30, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    engine = model.engine(EngineConfig(capture="on", **options))
    graphs = engine.loop.captured.graphs
    assert graphs.breaks["decode"] == [] and len(graphs.breaks["mixed"]) == 2
    assert "host_planned serves paged_attention with graph_capture='uniform_decode'" in graphs.explain()
    by_kind = {b.kind: g.num_graphs for b, g in graphs._graphs.items()}
    assert by_kind == {DECODE: 1, MIXED: 3}
    prompts, params = [[5, 9, 2], [7] * 30, [1, 2]], SamplingParams(max_tokens=6, temperature=0.0)
    plain = model.engine(EngineConfig(**options)).generate(prompts, params)
    assert [o.token_ids for o in engine.generate(prompts, params)] == [o.token_ids for o in plain]


def test_levels_come_from_the_registration(host_planned):
    ops, aten = torch.ops.pagebinder, torch.ops.aten
    levels = {
        ops.linear.default: "always",
        ops.rms_norm.default: "always",  # transparent: its parts speak for themselves
        ops.paged_attention.default: "never",
        ops.kv_cache_write.default: "never",
        host_planned.overload("paged_attention"): "uniform_decode",
        aten.mm.default: "always",
        aten._local_scalar_dense.default: "never",
    }
    assert {op: capture_level(op)[0] for op in levels} == levels
    assert "data_dependent_output" in capture_level(aten._local_scalar_dense.default)[1]


def test_an_op_of_ones_own_is_cut_out_by_its_tag(waits):
    graph = Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    waited = graph.call_function(waits, (doubled,))
    shape = graph.call_function(torch.ops.aten.unsqueeze.default, (waited, 0))
    graph.output((graph.call_function(torch.ops.aten.relu.default, (shape,)),))
    gm = GraphModule(torch.nn.Module(), graph)
    found = find_breaks(gm, DECODE)
    assert [b.node for b in found] == ["waits_default"] and "cudagraph_unsafe" in found[0].reason
    pieces = split_at_breaks(gm, found)
    assert [p.is_captured for p in pieces] == [True, False, True]
    values = {"x": torch.tensor([1.0, -2.0])}
    for piece in pieces:
        values |= zip(piece.outputs, piece.gm(*(values[name] for name in piece.inputs)))
    assert torch.equal(values["relu_default"], gm(values["x"])[0])


def test_a_piece_that_launches_nothing_is_not_captured():
    """A view between two breaks, and one before the first."""
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.view.default, (x, [-1]))
    for _ in range(2):
        node = graph.call_function(torch.ops.aten._local_scalar_dense.default, (node,))
        node = graph.call_function(torch.ops.aten.scalar_tensor.default, (node,))
        node = graph.call_function(torch.ops.aten.unsqueeze.default, (node, 0))
    graph.output((node,))
    gm = GraphModule(torch.nn.Module(), graph)
    pieces = split_at_breaks(gm, find_breaks(gm, MIXED))
    assert [p.is_captured for p in pieces] == [False, True, False, True]


class _RunsReferences(Interpreter):
    """Runs the reference of each of our ops that is registered as capturable under a recorder, which refuses reads
    of values."""

    def __init__(self, gm):
        super().__init__(gm)
        self.seen = set()

    def call_function(self, target, args, kwargs):
        info = library.all_ops().get(getattr(target, "_opname", ""))
        if info is not None and info.capture == "always":
            self.seen.add(info.name)
            with Recorder():
                info.reference(*args, **kwargs)
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "fp8", "activation_quantization": "fp8_per_token"}, {"quantization": "int4_g32"}],
    ids=["plain", "fp8", "int4"],
)
def test_references_that_are_registered_as_capturable_read_no_values(options):
    model = pagebinder.compile_model(
        tiny_llama(), CompileConfig(executable="eager", block_size=16, **options)
    )
    inputs = single_sequence_inputs(model.kv_spec, model.states, torch.arange(1, 7))
    gm = model.graphs["fused"]
    runner = _RunsReferences(gm)
    with torch.inference_mode():
        runner.run(*(inputs[n.target] for n in gm.graph.nodes if n.op == "placeholder"))
    assert {"add_rms_norm"} <= runner.seen or options
    assert len(runner.seen) >= 3
