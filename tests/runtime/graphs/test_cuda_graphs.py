"""The CUDA backend, on a machine with a GPU: `make gpu` runs these, elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import GraphCaptureError
from pagebinder.runtime.graphs import StepSequence
from pagebinder.runtime.graphs.backend import graph_backend
from pagebinder.runtime.graphs.predict import predict_graphs
from tests.helpers import tiny_llama
from tests.runtime.graphs.steps import prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
PROMPTS = prompts(3, 17, 40, 1, 33)
SEGMENT_BYTES = 32 << 20  # torch reserves memory in segments of 2 or 20 MiB


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def model():
    return pagebinder.compile_model(tiny_llama().cuda(), CompileConfig(executable="eager", block_size=16))


def test_a_replay_reads_present_values_and_writes_where_the_capture_did():
    backend, x = graph_backend(cuda()), torch.ones(1024, device="cuda")
    out = torch.zeros(1024, device="cuda")

    def call():
        kept = (x * 2).relu() + 1
        out.copy_(kept)
        return (kept,)

    graph, (kept,) = backend.capture(call, is_opaque=True)
    assert (kept == 3).all(), "what the next piece of a step warms up on"
    x.fill_(3.0)
    graph.replay()
    assert (out == 7).all() and (kept == 7).all()


def test_graphs_of_one_backend_share_their_pool():
    backend = graph_backend(cuda())
    sizes = [1 << 22, 1 << 21, 1 << 20]
    inputs = {n: torch.ones(n, device="cuda") for n in sizes}

    def call(n):
        (inputs[n] * 2 + 1).sum()
        return ()

    graphs = [backend.capture(lambda n=n: call(n), is_opaque=True) for n in sizes]
    backend.finish()
    assert graphs and 0 < backend.measured_bytes() <= 2 * 4 * sizes[0] + SEGMENT_BYTES


def test_an_op_that_waits_for_the_device_is_refused():
    backend, x = graph_backend(cuda()), torch.ones(4, device="cuda")
    with pytest.raises(GraphCaptureError, match='capture="never"'):
        backend.capture(lambda: (x * x.sum().item(),), is_opaque=True)
    torch.cuda.synchronize()
    # The device is still usable, and the allocator knows that nothing is captured any more.
    assert (x + 1).sum().item() == 8
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    graph, (doubled,) = backend.capture(lambda: (x * 2,), is_opaque=True)
    x.fill_(4.0)
    graph.replay()
    assert (doubled == 8).all()


def test_random_numbers_can_be_drawn_after_a_refused_capture():
    """torch's generator knows of captures, and may take one that failed for one that goes on."""
    backend, x = graph_backend(cuda()), torch.ones(4, device="cuda")
    with pytest.raises(GraphCaptureError):
        backend.capture(lambda: (x * x.sum().item(),), is_opaque=True)
    assert torch.rand(8, device="cuda").max().item() < 1


def test_staging_is_pinned_and_uploaded_in_order():
    backend = graph_backend(cuda())
    staging, static = backend.staging(256), backend.static(256)
    assert staging.memory.is_pinned()
    for value in range(1, 6):
        staging.wait()
        staging.array[:] = value
        backend.upload(staging, static, 256)
        assert (static == value).all()


def replays_equal(graphs) -> None:
    """Steps of two sequences, each once without its graph and once with it."""
    caches = list(graphs.caches.values())
    first = [
        StepSequence(tokens=[5, 6, 7, 8], start=0, blocks=[[1]]),
        StepSequence(tokens=[9], start=0, blocks=[[2]]),
    ]
    then = [
        StepSequence(tokens=[3], start=4, blocks=[[1]]),
        StepSequence(tokens=[4], start=1, blocks=[[2]]),
    ]
    for step in (first, then):
        inputs, before = graphs.pack(step), [c.clone() for c in caches]
        expected = graphs.replay(inputs, captured=False).clone()
        after = [c.clone() for c in caches]
        for cache, old in zip(caches, before):
            cache.copy_(old)
        assert torch.equal(graphs.replay(inputs), expected)
        assert all(torch.equal(c, a) for c, a in zip(caches, after))


def test_replay_equals_the_step_without_its_graph(model):
    graphs = model.capture(
        num_kv_blocks=40, max_model_len=64, max_num_seqs=4, decode_sizes=[1, 2, 4], token_sizes=[16, 32]
    )
    replays_equal(graphs)


@pytest.mark.parametrize("executable", ["eager", "cuda_graph"])
def test_replay_equals_the_step_without_its_graph_in_pieces(executable):
    config = CompileConfig(executable=executable, block_size=16, providers={"paged_attention": "reference"})
    graphs = pagebinder.compile_model(tiny_llama().cuda(), config).capture(
        num_kv_blocks=40, max_model_len=64, max_num_seqs=4, decode_sizes=[4], token_sizes=[16, 32]
    )
    assert {graph.num_graphs for graph in graphs._graphs.values()} == {3}
    compiled = {piece.is_compiled for piece in graphs.pieces["mixed"] if piece.is_captured}
    assert compiled == {executable == "cuda_graph"}
    replays_equal(graphs)


def test_reserved_memory_is_near_what_was_predicted(model):
    graphs = model.capture(num_kv_blocks=8, max_model_len=64, max_num_seqs=4, token_sizes=[32])
    predicted = predict_graphs(
        model.graphs["fused"],
        model.kv_spec,
        model.states,
        graphs.buckets,
        device=graphs.device,
        max_model_len=64,
    ).memory
    assert predicted.static_inputs == graphs.memory.static_inputs and predicted.logits == graphs.memory.logits
    assert graphs.memory.intermediate <= predicted.intermediate + SEGMENT_BYTES


@pytest.mark.parametrize("executable", ["eager", "cuda_graph"])
def test_an_engine_gives_the_same_tokens(executable):
    model = pagebinder.compile_model(tiny_llama().cuda(), CompileConfig(executable=executable, block_size=16))
    params, tokens = SamplingParams(max_tokens=12, temperature=0.0), []
    for capture in ("off", "auto"):
        engine = model.engine(
            EngineConfig(num_kv_blocks=40, max_num_seqs=4, max_num_batched_tokens=48, capture=capture)
        )
        tokens.append([output.token_ids for output in engine.generate(PROMPTS, params)])
    assert tokens[0] == tokens[1]
    assert engine.stats().captured.startswith("cuda") and not engine.stats().uncaptured_steps
