"""Streams of compiled models: DeepSeek-V4's compressors and indexer beside its queries, V3.2, a Llama."""

from __future__ import annotations

import dataclasses
import functools
import html

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.compile import executable_of
from pagebinder.compiler.streams import RATES, describe_streams, node_costs
from pagebinder.errors import ConfigError
from pagebinder.explain_html import explain_html
from pagebinder.explain_rates import Rates
from pagebinder.models import tiny_v4_path
from pagebinder.passes.layer_view import scenarios
from pagebinder.report import CompileReport
from pagebinder.runtime.executables import EagerExecutable
from pagebinder.runtime.graphs import StepSequence, predict, step_graphs
from pagebinder.runtime.graphs.pieces import Break
from pagebinder.runtime.graphs.predict import predict_graphs
from pagebinder.runtime.single_sequence import single_sequence_inputs
from pagebinder.runtime.streams import StreamedGraph
from pagebinder.runtime.streams.branches import op_name
from pagebinder.runtime.streams.overlap import plan_streams
from pagebinder.runtime.streams.schedule import problems
from pagebinder.runtime.streams.simulated import SimulatedStreams
from tests.helpers import by_day, tiny_llama
from tests.test_engine_mla import source

pytestmark = pytest.mark.usefixtures("captured_once")

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


@pytest.mark.parametrize("cut", by_day([False, True], [False]))
def test_memory_with_two_streams_is_what_was_predicted(cut, monkeypatch):
    """Every capture runs in an order of its own: what counts is the host's."""
    if cut:
        for module in (step_graphs, predict):
            monkeypatch.setattr(module, "find_breaks", cut_at_attention)
    model = compiled("v4")
    sizes = {"max_num_seqs": 2, "decode_sizes": [2], "token_sizes": [16]}
    found = []
    for one in (model, model, on_one_stream(model)):
        graphs = one.capture(num_kv_blocks=40, max_model_len=64, **sizes)
        predicted = predict_graphs(
            model.graphs["fused"], model.kv_spec, model.states, graphs.buckets, device=model.device,
            max_model_len=64, overlap=getattr(one.executable, "overlap", None),
        )  # fmt: skip
        assert predicted.memory == graphs.memory
        found.append(graphs.memory.intermediate)
    assert found[0] == found[1] > found[2] > 0, "values are held, and streams share no memory"


def test_a_llama_is_a_chain_but_for_the_rows_of_logits():
    """They are selected of the last layer's input, too, which could be done beside its attention."""
    plan, schedule = planned("llama")
    assert not plan.regions and "1 place(s)" in plan.refused and "index_select" in plan.refused
    assert not schedule.waits
    model = compiled("llama")
    assert model.executable._run is model.executable.gm, "no streams where nothing overlaps"
    assert any("one stream: 1 place(s)" in line and "none pays" in line for line in model.report.streams)


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
    runs = {type(piece.run) for piece in graphs.pieces["mixed"] if piece.is_captured}
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
    assert all(piece.run is piece.gm for piece in plain.pieces["mixed"])


def test_the_report_says_what_overlaps_and_whether_it_does():
    text = compiled("v3.2").explain()
    assert 'not used: streams="auto" is for a GPU' in text and "estimated, not measured: " in text
    assert "indexer_score_topk" in "\n".join(compiled("v3.2").report.streams)
    assert "used, simulated on the CPU:" in compiled("v4").explain()
    assert any("compress_norm_rope_store" in line for line in compiled("v4").report.to_dict()["streams"])
    assert (
        "one stream: 1 place(s) where branches could run side by side, and none pays"
        in compiled("llama").explain()
    )
    off, model = CompileConfig(streams="off"), compiled("v3.2")
    lines, _ = describe_streams(model.graphs["fused"], off, model.report)
    assert lines[0] == 'not used (streams="off"); it would be:'


def test_the_report_has_forks_as_numbers_and_the_page_as_a_table():
    report = compiled("v4").report
    plan, schedule = planned("v4")
    assert sum(fork["count"] for fork in report.stream_forks) == len(plan.regions)
    assert sum(fork["count"] * fork["waits"] for fork in report.stream_forks) == len(schedule.waits)
    saved = sum(f["count"] * (f["serial_us"] - f["parallel_us"]) for f in report.stream_forks)
    assert saved == pytest.approx(1e6 * sum(region.gain_seconds for region in plan.regions))
    sparse = next(f for f in report.stream_forks if "indexer_score_topk" in f["side"] + f["beside"])
    assert "compress_norm_rope_store" in sparse["side"] + sparse["beside"] and "layers." in sparse["where"]
    compiled("v4").explain()  # which also predicts captured steps
    page = html.unescape(explain_html(report, Rates(1e12, 1e10, "rates of a test")))
    for fork in report.stream_forks:
        assert fork["where"] in page and fork["side"] in page and fork["beside"] in page
        assert f"{fork['serial_us']:.1f} us" in page
        assert fork["text"] in report.streams and fork["text"] not in page, "it is in the table"
        assert f"{fork['side']} on the second stream, beside {fork['beside']}" in fork["text"]
    assert "used, simulated on the CPU:" in page and f"waits for {len(schedule.recorded)} events" in page
    assert "decode steps of up to 1, 2, 4" in page


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
