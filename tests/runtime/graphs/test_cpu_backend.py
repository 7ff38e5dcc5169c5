"""Recorded calls: what is fixed at the capture, what is read at the replay, what is refused, what it takes."""

import pytest
import torch

from pagebinder.errors import GraphCaptureError
from pagebinder.runtime.graphs.cpu_backend import CpuGraphBackend, Recorder

CPU = torch.device("cpu")


def capture(call, **options):
    return CpuGraphBackend(CPU).capture(call, is_opaque=False, **options)


def test_a_replay_reads_present_values_and_writes_where_the_capture_did():
    x, out, weight = torch.ones(4), torch.zeros(4), torch.full((4,), 2.0)
    graph, (kept,) = capture(lambda: (out.copy_((x * weight + 1).relu()) * 2,))
    x.fill_(3.0)
    weight.fill_(5.0)
    graph.replay()
    assert out.tolist() == [16.0] * 4 and kept.tolist() == [32.0] * 4


def test_numbers_and_branches_are_those_of_the_capture():
    """As in a CUDA graph: Python does not run again."""
    x, out, state = torch.ones(3), torch.zeros(3), {"factor": 2.0, "calls": 0}

    def call():
        state["calls"] += 1
        out.copy_(x * state["factor"])
        return ()

    graph, _ = capture(call)
    state["factor"] = 7.0
    graph.replay()
    assert out.tolist() == [2.0] * 3 and state["calls"] == 1


def test_changes_in_place_and_views():
    x, cache = torch.arange(6.0), torch.zeros(2, 3)

    def call():
        rows = (x + 1).view(2, 3)
        rows[0].mul_(10)
        cache.index_copy_(0, torch.tensor([1, 0]), rows)
        return ()

    graph, _ = capture(call)
    cache.zero_()
    x.add_(1)
    graph.replay()
    assert cache.tolist() == [[5.0, 6.0, 7.0], [20.0, 30.0, 40.0]]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda x: x.max().item(), "reads a value on the host.*never"),
        (lambda x: x[x > 0], "depends on values"),
        (torch.nonzero, "depends on values"),
    ],
)
def test_a_read_of_values_on_the_host_is_refused(read, message):
    def call():
        return (torch.ones(2) * len(str(read(torch.ones(3)))),)

    with pytest.raises(GraphCaptureError, match=message):
        capture(call)


def test_opaque_calls_are_made_again():
    x, calls = torch.ones(2), []

    def call():
        calls.append(1)
        return (x * 2,)

    backend = CpuGraphBackend(CPU)
    graph, (out,) = backend.capture(call, is_opaque=True)
    x.fill_(4.0)
    graph.replay()
    assert out.tolist() == [8.0, 8.0] and len(calls) == 2 and backend.measured_bytes() is None


def test_memory_is_counted_from_the_first_to_the_last_use():
    x = torch.zeros(100)  # not made by the call

    def chain():
        a = x + 1  # 400 bytes
        b = a.view(10, 10) * 2  # 400, a is read for the last time
        c = b.sum(0)  # 40, b is read for the last time
        return (c.repeat(5),)  # 200

    with Recorder() as recorder:
        outputs = chain()
    assert recorder.peak_bytes(outputs) == 800
    (lives,) = recorder.lives(outputs).values()
    assert lives == [(400, 0, 2), (400, 2, 3), (40, 3, 4), (200, 4, 5)]  # a view is a call, too
    backend = CpuGraphBackend(CPU)
    backend.capture(chain, is_opaque=False, held_bytes=50)
    assert backend.measured_bytes() == 850
