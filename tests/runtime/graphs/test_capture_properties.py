"""Where graphs are cut follows from how ops are registered; and what is registered is true."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.custom_ops import library, providers
from pagebinder.custom_ops.library import op_info
from pagebinder.custom_ops.providers import Provider, register_provider
from pagebinder.graph_tools import devices, set_val
from pagebinder.runtime.engine_graphs import bucket_table
from pagebinder.runtime.graphs.buckets import DECODE, MIXED
from pagebinder.runtime.graphs.capture import CarriedValues
from pagebinder.runtime.graphs.cpu_backend import CpuGraphBackend, Recorder
from pagebinder.runtime.graphs.pieces import Break, capture_level, find_breaks, split_at_breaks
from pagebinder.runtime.graphs.predict import predict_graphs
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


def test_results_are_picked_where_they_were_made():
    """Wherever the graph picks them: a tuple has no address that a capture could keep."""
    graph, ops = Graph(), torch.ops.aten
    x = graph.placeholder("x")
    both = graph.call_function(ops.aminmax.default, (x,))
    first = graph.call_function(operator.getitem, (both, 0))
    doubled = graph.call_function(ops.mul.Tensor, (first, 2.0))
    second = graph.call_function(operator.getitem, (both, 1))
    graph.output((graph.call_function(ops.add.Tensor, (doubled, second)),))
    gm = GraphModule(torch.nn.Module(), graph)
    pieces = split_at_breaks(gm, [Break(both.name, "aminmax", "it waits")])
    assert [p.is_captured for p in pieces] == [False, True]
    assert pieces[1].inputs == (first.name, second.name)


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


aten = torch.ops.aten
GPU, CPU = "cuda:0", "cpu"


def traced(calls, *, device: str) -> GraphModule:
    """A graph of x [T=6, C=4], its ids [6], places in it [3] and a mask of its rows on a device; `calls` adds calls
    with `call` and returns the last. Its tensors have no values, so no GPU is needed."""
    graph, mode = Graph(), FakeTensorMode()

    def given(name: str, shape: tuple[int, ...], dtype: torch.dtype, where: str = device):
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=where)
        return node

    def call(target, *args, **kwargs):
        node = graph.call_function(target, args, kwargs)
        set_val(node)
        return node

    x = given("x", (6, 4), torch.float32)
    inputs = SimpleNamespace(
        x=x, ids=given("ids", (6,), torch.int64), places=given("places", (3,), torch.int64),
        mask=given("mask", (6,), torch.bool), number=given("number", (), torch.float32, CPU),
    )  # fmt: skip
    graph.output((calls(call, inputs),))
    return GraphModule(torch.nn.Module(), graph)


def table_of_the_host(call, given):
    table = call(aten.arange.start_step, 0, 16, 4, dtype=torch.float32, device=torch.device(CPU))
    there = call(aten.to.device, call(aten.div.Tensor, table, 16), given.x.meta["val"].device, torch.float32)
    return call(aten.mul.Tensor, call(aten.relu.default, given.x), there)


BREAKS = {
    "made on the CPU and copied": (table_of_the_host, ["arange", "div", "to"]),
    "copied to the CPU and back": (
        lambda call, g: call(
            aten._to_copy.default,
            call(aten.sin.default, call(aten._to_copy.default, call(aten.exp.default, g.x), device=CPU)),
            device=GPU,
        ),
        ["_to_copy", "sin", "_to_copy"],
    ),
    "a number of the CPU's": (lambda call, g: call(aten.mul.Tensor, g.x, g.number), ["mul"]),
    "all on the device": (lambda call, g: call(aten.mul.Tensor, g.x, call(aten.exp.default, g.x)), []),
    "made on the device": (
        lambda call, g: call(aten.add.Tensor, g.x, call(aten.arange.default, 4, device=GPU)), []
    ),
    "rows of a mask are written": (
        lambda call, g: call(aten.index_put.default, g.x, [g.mask], call(aten.sum.default, g.x)), ["index_put"]
    ),
    "rows of places are written": (
        lambda call, g: call(aten.index_put.default, g.x, [g.places], call(aten.sum.default, g.x)), []
    ),
    "rows of places are read": (lambda call, g: call(aten.index.Tensor, g.x, [None, g.places]), []),
    "entries of a mask are filled": (
        lambda call, g: call(aten.masked_fill.Scalar, g.x, call(aten.gt.Scalar, g.x, 0), 0.0), []
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_what_a_gpu_does_not_do_alone_is_cut_out(name):
    calls, expected = BREAKS[name]
    gm = traced(calls, device=GPU)
    found = find_breaks(gm, DECODE)
    names = {n.name: n.target._opname for n in gm.graph.nodes if n.op == "call_function"}
    assert [names[one.node] for one in found] == expected
    assert all(b.reason == "it has data on cpu, where the model is not" or "mask" in b.reason for b in found)
    pieces = split_at_breaks(gm, found)
    where = {n.name: devices(n) for n in gm.graph.nodes}
    for piece in pieces:
        captured = (
            [n.name for n in piece.gm.graph.nodes if n.op == "call_function"] if piece.is_captured else []
        )
        assert all(where[node] == {torch.device(GPU)} for node in captured)


MASKS = {
    "one number of the CPU's is put": ({}, []),
    "and added": ({"accumulate": True}, ["index_put"]),
    "at the places of a mask and a list": ({"places": True}, ["index_put"]),
    "several numbers are put": ({"values": "x"}, ["index_put"]),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_counted_unless_torch_makes_a_fill_of_it(name):
    """On a CPU graphs are cut where a GPU's are."""
    options, expected = MASKS[name]

    def calls(call, g):
        mask = call(aten.gt.Scalar, call(aten.slice.Tensor, g.x, 0, 0, 3), 0) if "places" in options else None
        indices = [g.mask] if mask is None else [g.places, call(aten.select.int, mask, 0, 0)]
        values = g.x if options.get("values") else g.number
        return call(aten.index_put.default, g.x, indices, values, options.get("accumulate", False))

    found = find_breaks(traced(calls, device=CPU), MIXED)
    assert [b.op for b in found] == [f"aten.{name}.default" for name in expected]
    assert all("number of entries that its mask has" in b.reason for b in found)


class ByTheHost(torch.nn.Module):
    """A norm of values to which the CPU adds something."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x + x[..., :1].cpu().sin().to(x.device))


def test_memory_is_predicted_for_steps_that_the_host_takes_part_in():
    source = tiny_llama().to("meta")
    source.model.norm = ByTheHost(source.model.norm)
    model = pagebinder.compile_model(source, CompileConfig(executable="eager"))
    predicted = predict_graphs(
        model.graphs["fused"], model.kv_spec, model.states, bucket_table(EngineConfig()),
        device=torch.device("cpu"), max_model_len=64,
    )  # fmt: skip
    for kind in (DECODE, MIXED):
        assert [b.reason for b in predicted.breaks[kind]] == [
            "it has data on cpu, where the model is not"
        ] * 3
    assert predicted.memory.intermediate > 0 and predicted.memory.carried > 0


def test_values_of_the_host_are_carried_where_they_are():
    backend = CpuGraphBackend(torch.device("meta"))
    carried = CarriedValues(backend)
    kept = carried.take(torch.ones(3, 2).t())
    assert kept.device.type == "cpu" and kept.is_contiguous() and carried.num_bytes == 0
    assert carried.take(torch.ones(4, device="meta")).is_meta and carried.num_bytes == 16


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
