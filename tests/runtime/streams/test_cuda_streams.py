"""CUDA's streams, on a machine with a GPU: `make gpu` runs these. Elsewhere the calls of CUDA are told apart only."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.models import tiny_v4_path
from pagebinder.runtime.graphs.backend import graph_backend
from pagebinder.runtime.streams import StreamedGraph, launch_order, make_schedule
from pagebinder.runtime.streams.streams import CudaStreams
from tests.runtime.streams.stream_graphs import aten, forked, graph_of, planned, run_plainly, square_inputs

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
LARGE = 2048
PROMPTS = [[(7 * i + 3 * j) % 200 + 4 for j in range(n)] for i, n in enumerate((3, 17, 40, 1, 33))]


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def slow_branches():
    """Two branches of products that take long enough to overlap, and whose values are dropped at once."""

    def build(call, x, cache):
        fork = call(aten.relu.default, x)
        a = b = fork
        for _ in range(6):
            a, b = call(aten.mm.default, a, x), call(aten.mm.default, x, b)
        call(aten.copy_.default, cache, b)
        return call(aten.add.Tensor, a, cache)

    return graph_of(build)


def inputs(size: int = LARGE) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    return [torch.randn(size, size, device="cuda", generator=generator) * size**-0.5 for _ in range(2)]


@needs_gpu
def test_two_streams_give_the_same_bits_again_and_again():
    gm = slow_branches()
    launches = launch_order(gm)
    side = frozenset(launches.nodes[2::2])
    streamed = StreamedGraph(gm, make_schedule(launches, side), CudaStreams(cuda()))
    given = inputs()
    expected, *_ = run_plainly(gm, given)
    with torch.inference_mode():
        for _ in range(20):
            assert torch.equal(streamed(*[t.clone() for t in given]), expected)


@needs_gpu
def test_a_capture_holds_both_streams():
    gm = slow_branches()
    _, schedule = planned(gm)
    streamed = StreamedGraph(gm, schedule, CudaStreams(cuda()))
    backend, given, out = graph_backend(cuda()), inputs(), torch.zeros(LARGE, LARGE, device="cuda")

    def call():
        out.copy_(streamed(*given))
        return ()

    graph, _ = backend.capture(call, is_opaque=True)
    for scale in (1.0, 0.5, 2.0):
        given[0].copy_(inputs()[0] * scale)
        expected, *_ = run_plainly(gm, given)
        graph.replay()
        assert torch.equal(out, expected)


@needs_gpu
def test_a_failed_run_leaves_the_streams_usable():
    gm = graph_of(forked)
    _, schedule = planned(gm)
    streamed = StreamedGraph(gm, schedule, CudaStreams(cuda()))
    good = inputs(4)
    with pytest.raises(RuntimeError):
        streamed(good[0], torch.zeros(3, device="cuda"))
    with torch.inference_mode():
        assert torch.equal(streamed(*[t.clone() for t in good]), run_plainly(gm, good)[0])
    torch.cuda.synchronize()


@needs_gpu
@pytest.mark.parametrize("executable", ["eager", "cuda_graph"])
def test_an_engine_gives_the_same_tokens(executable):
    """With streams ops run one by one whatever is asked for, so the tokens are those of ops one by one: a compiler
    that fuses ops rounds less often."""
    params, tokens = SamplingParams(max_tokens=12, temperature=0.0), []
    for name, streams in (("eager", "off"), (executable, "on")):
        config = CompileConfig(device="cuda", executable=name, streams=streams, max_model_len=512)
        engine = pagebinder.compile_model(tiny_v4_path(), config).engine(
            EngineConfig(num_kv_blocks=400, max_num_seqs=4, max_num_batched_tokens=48)
        )
        tokens.append([output.token_ids for output in engine.generate(PROMPTS, params)])
    assert tokens[0] == tokens[1]


class Calls:
    """Stands for torch.cuda's streams and events, and keeps what is asked of them."""

    def __init__(self, monkeypatch):
        self.log, self.current, self.captures = [], "main", False
        calls = self

        class Stream:
            def __init__(self, name="side"):
                self.name = name if isinstance(name, str) else "side"

            def wait_event(self, event):
                calls.log.append(f"{self.name} waits for {event.name}")

            def wait_stream(self, other):
                calls.log.append(f"{self.name} waits for all of {other.name}")

        class Event:
            def record(self, stream):
                self.name = f"event {sum(entry.startswith('record') for entry in calls.log)}"
                calls.log.append(f"record {self.name} on {stream.name}")

        @contextlib.contextmanager
        def stream(which):
            before, calls.current = calls.current, which.name
            yield
            calls.current = before

        for name, fake in (("Stream", Stream), ("Event", Event), ("stream", stream)):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream("main"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)


class Watched(TorchDispatchMode):
    """Notes on which stream each op is launched."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in (aten.view.default, aten.detach.default):
            self.calls.log.append(f"{func._opname} on {self.calls.current}")
        return func(*args, **(kwargs or {}))


def test_what_is_asked_of_cuda(monkeypatch):
    calls, gm = Calls(monkeypatch), graph_of(forked)
    _, schedule = planned(gm)
    streamed = StreamedGraph(gm, schedule, CudaStreams(torch.device("cuda", 0)))
    given = square_inputs(2)
    expected = run_plainly(gm, given)
    with torch.inference_mode(), Watched(calls):
        result = streamed(*given)
    assert torch.equal(result, expected[0])
    assert calls.log == [
        "relu on main", "record event 0 on main",
        "side waits for event 0", "sub on side", "copy_ on side", "record event 1 on side",
        "mul on main", "add on main",
        "main waits for event 1", "add on main",
    ]  # fmt: skip
    assert calls.current == "main"


@pytest.mark.parametrize("captures", [False, True])
def test_after_an_error_the_main_stream_waits_for_the_side_if_that_runs(captures, monkeypatch):
    """In a capture, which has failed, nothing runs, and to ask it for more would hide why."""
    calls, gm = Calls(monkeypatch), graph_of(forked)
    calls.captures = captures
    _, schedule = planned(gm)
    streamed = StreamedGraph(gm, schedule, CudaStreams(torch.device("cuda", 0)))
    with pytest.raises(RuntimeError):
        streamed(torch.zeros(4, 4), torch.zeros(3))
    assert (calls.log[-1] == "main waits for all of side") != captures
