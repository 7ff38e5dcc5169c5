"""Streams of compiled models: DeepSeek-V4's compressors and indexer beside its queries, V3.2, a Llama."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.compile import executable_of
from pagebinder.compile_streams import RATES, describe_streams, node_costs
from pagebinder.errors import ConfigError
from pagebinder.models import tiny_v4_path
from pagebinder.passes.layer_view import scenarios
from pagebinder.report import CompileReport
from pagebinder.runtime.executables import EagerExecutable
from pagebinder.runtime.graphs import StepSequence, step_graphs
from pagebinder.runtime.graphs.pieces import Break
from pagebinder.runtime.single_sequence import single_sequence_inputs
from pagebinder.runtime.streams import StreamedGraph
from pagebinder.runtime.streams.branches import op_name
from pagebinder.runtime.streams.overlap import plan_streams
from pagebinder.runtime.streams.schedule import problems
from pagebinder.runtime.streams.simulated import SimulatedStreams
from tests.helpers import tiny_llama
from tests.test_engine_mla import source

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
MODELS = {
    "v4": (tiny_v4_path, {"max_model_len": 512, "streams": "on"}),
    "v3.2": (lambda: source("deepseek_v32", num_hidden_layers=1), {"block_size": 16}),
    "llama": (tiny_llama, {"block_size": 16, "streams": "on"}),
}


@functools.cache
def compiled(name: str):
    make, options = MODELS[name]
    return pagebinder.compile_model(make(), CompileConfig(executable="eager", **options))


def on_one_stream(model):
    return dataclasses.replace(model, executable=EagerExecutable(model.graphs["fused"]))


def costs(model):
    return node_costs(model.graphs["fused"], scenarios(model.max_model_len)["decode"]["symbols"])


def planned(name: str):
    model = compiled(name)
    return plan_streams(model.graphs["fused"], costs(model), RATES)


def inputs_of(model, length: int = 37) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(4, model.source.vocab_size, (length,), generator=generator)
    return single_sequence_inputs(model.kv_spec, model.states, ids)


def memory(inputs) -> torch.Tensor:
    """The bytes of the arena that all caches are views of: read as another layer's numbers, some are NaN."""
    cache = next(value for name, value in inputs.items() if name.startswith("kv_cache"))
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).clone()


def ops(nodes) -> set[str]:
    return {op_name(node) for node in nodes}


def test_v4_compresses_and_chooses_entries_beside_the_queries():
    plan, schedule = planned("v4")
    sparse = [r for r in plan.regions if "indexer_score_topk" in ops((*r.side, *r.beside))]
    kinds = compiled("v4").source.config.layer_types
    assert len(sparse) == list(kinds).count("compressed_sparse_attention") > 0
    for region in sparse:
        assert op_name(region.join) == "sparse_mla_attention"
        chooses, other = sorted(
            (ops(region.side), ops(region.beside)), key=lambda o: "indexer_score_topk" not in o
        )
        assert "compress_norm_rope_store" in chooses and "q_norm_rope" in other
        assert region.gain_seconds > 0
    assert not problems(schedule) and 0 < plan.gain_seconds < plan.serial_seconds


def test_v32_chooses_rows_beside_the_queries():
    plan, schedule = planned("v3.2")
    assert any("indexer_score_topk" in ops((*r.side, *r.beside)) for r in plan.regions)
    assert not problems(schedule)


def test_a_llama_is_a_chain():
    plan, schedule = planned("llama")
    assert not plan.regions and "every op needs the result of the one before" in plan.refused
    assert not schedule.waits
    model = compiled("llama")
    assert model.executable._run is model.executable.gm, "no streams where nothing overlaps"
    assert any("one stream: every op needs" in line for line in model.report.streams)


@pytest.mark.parametrize("name", ["v4", "v3.2"])
def test_every_order_gives_the_same_bits(name):
    model = compiled(name)
    gm = model.graphs["fused"]
    _, schedule = planned(name)
    inputs = inputs_of(model)
    expected, after = EagerExecutable(gm).run(inputs), memory(inputs)
    assert after.any()
    streamed = StreamedGraph(gm, schedule, SimulatedStreams(), one_by_one=True)
    names = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
    for _ in range(5):  # each in an order of its own
        fresh = inputs_of(model)
        with torch.inference_mode():
            got = streamed(*(fresh[name] for name in names))
        assert torch.equal(got, expected) and torch.equal(memory(fresh), after)
    whole = StreamedGraph(gm, schedule, SimulatedStreams())
    assert len(whole._parts) < len(streamed._parts) / 3
    fresh = inputs_of(model)
    with torch.inference_mode():
        assert torch.equal(whole(*(fresh[name] for name in names)), expected)
    assert torch.equal(memory(fresh), after)


def test_an_engine_on_two_streams_gives_the_same_tokens():
    prompts = [[(7 * i + 3 * j) % 200 + 4 for j in range(n)] for i, n in enumerate((3, 17, 30))]
    tokens = []
    two = compiled("v4")
    for model, capture in ((on_one_stream(two), "off"), (two, "off"), (two, "on")):
        engine = model.engine(
            EngineConfig(num_kv_blocks=200, max_num_seqs=4, max_num_batched_tokens=32, capture=capture,
                         capture_decode_sizes=(4,), capture_token_sizes=(32,))
        )  # fmt: skip
        tokens.append([output.token_ids for output in engine.generate(prompts, GREEDY)])
    assert tokens[0] == tokens[1] == tokens[2]


def cut_at_attention(gm, kind):
    return [
        Break(n.name, str(n.target), "a test") for n in gm.graph.nodes if op_name(n) == "sparse_mla_attention"
    ]


def test_captured_pieces_of_a_cut_graph_use_streams_too(monkeypatch):
    monkeypatch.setattr(step_graphs, "find_breaks", cut_at_attention)
    sizes = {
        "num_kv_blocks": 40,
        "max_num_seqs": 2,
        "max_model_len": 64,
        "decode_sizes": [],
        "token_sizes": [16],
    }
    graphs = compiled("v4").capture(**sizes)
    runs = {type(piece.run) for piece in graphs._pieces["mixed"] if piece.is_captured}
    assert StreamedGraph in runs and len(graphs.breaks["mixed"]) > 1
    blocks = [[i + 1] for i in range(len(graphs.plan.groups))]
    step = graphs.pack([StepSequence(tokens=[5, 6, 7, 8, 9], start=0, blocks=blocks)])
    before = memory(graphs.caches)
    expected, after = graphs.replay(step, captured=False).clone(), memory(graphs.caches)
    assert not torch.equal(before, after)
    arena = next(iter(graphs.caches.values())).untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(arena).copy_(before)
    assert torch.equal(graphs.replay(step), expected) and torch.equal(memory(graphs.caches), after)
    # What an executable says nothing of runs as it is.
    plain = on_one_stream(compiled("v4")).capture(**sizes)
    assert all(piece.run is piece.gm for piece in plain._pieces["mixed"])


def test_the_report_says_what_overlaps_and_whether_it_does():
    text = compiled("v3.2").explain()
    assert 'not used: streams="auto" is for a GPU' in text and "estimated, not measured: " in text
    assert "indexer_score_topk" in "\n".join(compiled("v3.2").report.streams)
    assert "used, simulated on the CPU:" in compiled("v4").explain()
    assert any("compress_norm_rope_store" in line for line in compiled("v4").report.to_dict()["streams"])
    assert "one stream: every op needs the result of the one before" in compiled("llama").explain()
    off, model = CompileConfig(streams="off"), compiled("v3.2")
    assert (
        describe_streams(model.graphs["fused"], off, model.report)[0]
        == 'not used (streams="off"); it would be:'
    )


def test_saved_models_keep_the_option(tmp_path):
    model = compiled("v3.2")
    config, report = (
        dataclasses.replace(model.config, streams="on"),
        dataclasses.replace(model.report, streams=[]),
    )
    model = dataclasses.replace(model, config=config, report=report)
    model.save(tmp_path / "saved")
    loaded = pagebinder.load(tmp_path / "saved")
    assert isinstance(loaded.executable._run, StreamedGraph)
    assert loaded.report.streams[0] == "used, simulated on the CPU:"
    assert torch.equal(loaded.executable.run(inputs_of(model)), model.executable.run(inputs_of(model)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": "yes"}, 'streams=\'yes\': use "auto", "on" or "off"'),
        ({"streams": True}, "streams=True"),
        ({"streams": "on", "executable": "inductor"}, "ops that run one by one"),
        ({"streams": "on", "executable": "tensorrt"}, "ops that run one by one"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        CompileConfig(**options)


def test_with_streams_on_the_automatic_executable_runs_op_by_op():
    report = CompileReport()
    executable = executable_of(compiled("llama").graphs["fused"], CompileConfig(streams="on"), report)
    assert executable.name == "eager" and "one by one" in report.executable_why
