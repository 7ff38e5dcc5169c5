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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
PROMPTS = [[(7 * i + 3 * j) % 127 + 1 for j in range(n)] for i, n in enumerate((3, 17, 40, 1, 33))]
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

    for n in sizes:
        backend.capture(lambda n=n: call(n), is_opaque=True)
    backend.finish()
    assert 0 < backend.measured_bytes() <= 2 * 4 * sizes[0] + SEGMENT_BYTES


def test_an_op_that_waits_for_the_device_is_refused():
    backend, x = graph_backend(cuda()), torch.ones(4, device="cuda")
    with pytest.raises(GraphCaptureError, match='capture="never"'):
        backend.capture(lambda: (x * x.sum().item(),), is_opaque=True)
    torch.cuda.synchronize()
    assert (x + 1).sum().item() == 8  # the device is still usable


def test_staging_is_pinned_and_uploaded_in_order():
    backend = graph_backend(cuda())
    staging, static = backend.staging(256), backend.static(256)
    assert staging.memory.is_pinned()
    for value in range(1, 6):
        staging.wait()
        staging.array[:] = value
        backend.upload(staging, static, 256)
        assert (static == value).all()


def test_replay_equals_the_step_without_its_graph(model):
    graphs = model.capture(
        num_kv_blocks=40, max_model_len=64, max_num_seqs=4, decode_sizes=[1, 2, 4], token_sizes=[16, 32]
    )
    caches = list(graphs.caches.values())
    steps = [
        [
            StepSequence(tokens=[5, 6, 7, 8], start=0, blocks=[[1]]),
            StepSequence(tokens=[9], start=0, blocks=[[2]]),
        ],
        [StepSequence(tokens=[3], start=4, blocks=[[1]]), StepSequence(tokens=[4], start=1, blocks=[[2]])],
    ]
    for step in steps:
        inputs, before = graphs.pack(step), [c.clone() for c in caches]
        expected = graphs.replay(inputs, captured=False).clone()
        after = [c.clone() for c in caches]
        for cache, old in zip(caches, before):
            cache.copy_(old)
        assert torch.equal(graphs.replay(inputs), expected)
        assert all(torch.equal(c, a) for c, a in zip(caches, after))


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
