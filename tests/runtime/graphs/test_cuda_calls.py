"""What the CUDA backend asks of CUDA, told to a stand-in: `test_cuda_graphs.py` asks a GPU."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pagebinder.errors import CacheCapacityError, GraphCaptureError
from pagebinder.runtime.graphs.buckets import MIXED
from pagebinder.runtime.graphs.capture import CarriedValues, capture_pieces
from pagebinder.runtime.graphs.cuda_backend import CudaGraphBackend
from pagebinder.runtime.graphs.pieces import find_breaks, split_at_breaks

aten = torch.ops.aten
POISON = 99
WORKSPACE, POOL_GROWTH, STATIC = 32 << 20, 2 << 20, 1 << 10


class Launched(TorchDispatchMode):
    """Ops of a capture, which are launched when it is replayed: until then their results are anything."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_flatten(result)[0]))
        return result

    def poison(self) -> None:
        for func, _, _, results in self.calls:
            for result in [] if func in (aten.view.default, aten.detach.default) else results:
                result.fill_(POISON)

    def run(self) -> None:
        for func, args, kwargs, results in self.calls:
            for old, new in zip(results, tree_flatten(func(*args, **kwargs))[0], strict=True):
                old.copy_(new)


class Cuda:
    """Stands for torch.cuda; `log`: what was asked of it."""

    def __init__(self, monkeypatch) -> None:
        self.log, self.current, self.reserved, self.fails = [], "caller", 0, False
        cuda = self

        class Stream:
            def __init__(self, name="side"):
                self.name = name if isinstance(name, str) else "side"

            def wait_stream(self, other):
                cuda.log.append(f"{self.name} waits for {other.name}")

        class CUDAGraph:
            def register_generator_state(self, generator):
                assert not torch.is_inference_mode_enabled() and generator is torch.cuda.default_generators[0]
                self.has_random_numbers = True

            def replay(self):
                cuda.log.append(f"replay on {cuda.current}")
                self.launched.run()

        @contextlib.contextmanager
        def stream(which):
            before, cuda.current = cuda.current, which.name
            yield
            cuda.current = before

        class Capture:
            """As torch.cuda.graph: what its end raises leaves the stream as it is."""

            def __init__(self, graph, *, pool, stream, capture_error_mode):
                self.graph, self.stream = graph, stream
                cuda.log.append(f"capture on {stream.name} into {pool}, {capture_error_mode}")

            def __enter__(self):
                assert not gc.isenabled() and self.graph.has_random_numbers
                self.before, cuda.current = cuda.current, self.stream.name
                self.graph.launched = Launched()
                self.graph.launched.__enter__()

            def __exit__(self, *error):
                self.graph.launched.__exit__(*error)
                if cuda.fails:
                    raise RuntimeError("the capture was invalidated by an earlier error")
                cuda.current = self.before
                cuda.reserved += POOL_GROWTH
                self.graph.launched.poison()

        fakes = {
            "Stream": Stream, "CUDAGraph": CUDAGraph, "stream": stream, "graph": Capture,
            "device": lambda device: contextlib.nullcontext(), "current_device": lambda: 0,
            "graph_pool_handle": lambda: (0, 7), "current_stream": lambda device=None: Stream(self.current),
            "set_stream": lambda which: setattr(self, "current", which.name), "synchronize": lambda device=None: None,
            "empty_cache": lambda: None, "memory_reserved": lambda device=None: self.reserved,
            "mem_get_info": lambda device=None: (0, 0),
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator(),))
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, self._asked(name), raising=False)

    def generator(self):
        def set_state(state: str) -> None:
            self.log.append(f"generator goes on with {state}")

        return SimpleNamespace(clone_state=lambda: "a copy", graphsafe_set_state=set_state)

    def _asked(self, name: str):
        return lambda device, pool: self.log.append(f"{name.removeprefix('_cuda_')} {device} {pool}")


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def backend() -> CudaGraphBackend:
    made = CudaGraphBackend(torch.device("cuda"))
    made.static = lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8)
    return made


def test_a_capture_warms_up_on_its_stream_and_leaves_values(cuda):
    x, streams = torch.ones(4), []

    def call():
        streams.append(cuda.current)
        return (x * 2 + 1,)

    _, (result,) = backend().capture(call, is_opaque=True)
    assert streams == ["side"] * 3 and result.tolist() == [3.0] * 4
    assert cuda.log == [
        "side waits for caller", "caller waits for side",
        "capture on side into (0, 7), thread_local", "replay on caller",
    ]  # fmt: skip
    assert gc.isenabled() and cuda.current == "caller"


def test_the_next_piece_warms_up_on_the_values_of_the_one_before(cuda):
    """Rows that a captured piece chooses are read by the next one: without values they would be anywhere."""
    graph = Graph()
    x = graph.placeholder("x")
    chosen = graph.call_function(aten.argmax.default, (x, 1))
    waited = graph.call_function(
        aten._local_scalar_dense.default, (graph.call_function(aten.sum.default, (x,)),)
    )
    rows = graph.call_function(aten.index_select.default, (x, 0, chosen))
    graph.output((graph.call_function(aten.mul.Tensor, (rows, waited)),))
    gm = GraphModule(torch.nn.Module(), graph)
    pieces = split_at_breaks(gm, find_breaks(gm, MIXED))
    assert [p.is_captured for p in pieces] == [True, False, True]
    values, logits, made = torch.eye(4), torch.zeros(4, 4), backend()
    bucket = capture_pieces(made, gm, pieces, {"x": values}, logits, CarriedValues(made))
    bucket.replay()
    assert torch.equal(logits, gm(values)[0]) and cuda.log.count("replay on caller") == 4


def test_work_spaces_of_libraries_are_not_memory_of_captured_steps(cuda):
    made, x = CudaGraphBackend(torch.device("cuda")), torch.ones(2)

    def call():
        cuda.reserved = max(cuda.reserved, WORKSPACE)  # made once, by the first product
        return (x + 1,)

    made.capture(call, is_opaque=True)
    made.capture(call, is_opaque=True)
    made.finish()
    assert made.measured_bytes() == 2 * POOL_GROWTH


def test_a_capture_that_fails_says_why_and_leaves_the_device_usable(cuda):
    made, cuda.fails = backend(), True

    def waits():
        if cuda.current == "side" and not gc.isenabled():
            raise RuntimeError("operation not permitted when stream is capturing")
        return ()

    with pytest.raises(GraphCaptureError, match='operation not permitted.*\n.*capture="never"'):
        made.capture(waits, is_opaque=True)
    assert cuda.current == "caller" and gc.isenabled()
    assert cuda.log[-3:] == [
        "generator goes on with a copy", "endAllocateToPool 0 (0, 7)", "releasePool 0 (0, 7)",
    ]  # fmt: skip
    cuda.fails = False
    _, (result,) = made.capture(lambda: (torch.ones(2) + 1,), is_opaque=True)
    assert result.tolist() == [2.0, 2.0]


def test_a_capture_that_runs_out_of_memory_says_so(cuda):
    made, cuda.fails = backend(), True

    def large():
        if not gc.isenabled():
            raise torch.OutOfMemoryError("no")
        return ()

    with pytest.raises(CacheCapacityError, match="capture smaller sizes"):
        made.capture(large, is_opaque=True)
    assert cuda.current == "caller" and cuda.log[-1].startswith("releasePool")
