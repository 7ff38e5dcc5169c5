"""What captured steps will take, before anything is allocated: the same captures over tensors without memory.

`StepGraphs` is made on the meta device, for the largest bucket of each kind: the smaller ones use its memory
again. So on a CPU, where graphs run op by op, the prediction is exact, on one stream and on two; of compiled code it
is an upper bound, as fused ops keep less. On a GPU it counts the segments that torch's allocator takes
(cuda_memory.py), for what ops of a provider allocate while they run, too, where it can tell (`Provider.rehearse`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule
from torch.fx.node import map_aggregate

from pagebinder.custom_ops.layer_state import LayerState
from pagebinder.graph_tools import attributes
from pagebinder.runtime.executables.eager import EagerExecutable
from pagebinder.runtime.graphs.backend import Staging, Tensors
from pagebinder.runtime.graphs.buckets import Bucket, BucketTable
from pagebinder.runtime.graphs.cpu_backend import CpuGraphBackend, Recorder
from pagebinder.runtime.graphs.cuda_memory import SegmentPool
from pagebinder.runtime.graphs.pieces import Break, find_breaks, providers_by_namespace
from pagebinder.runtime.graphs.step_graphs import GraphMemory, StepGraphs
from pagebinder.runtime.kv import KVPlan
from pagebinder.runtime.streams import Overlap
from pagebinder.runtime.streams.branches import MAIN

META = torch.device("meta")
NUM_BLOCKS = 2  # of the caches that are planned with: their size changes nothing


class PredictedGraphs(NamedTuple):
    memory: GraphMemory
    breaks: dict[str, list[Break]]


def predict_graphs(
    graph: GraphModule, plan: KVPlan, states: Sequence[LayerState], buckets: BucketTable, *, device: torch.device,
    max_model_len: int, widths: Sequence[int] | None = None, overlap: Overlap | None = None,
) -> PredictedGraphs:  # fmt: skip
    """Memory of the captured steps of a paged graph, and where they would be cut. Allocates nothing.

    `overlap`: of the executable; values that the other stream reads are kept until the join, and memory of one stream
    is not the other's.

    Raises:
        GraphCaptureError: an op cannot be captured though it is registered so. CaptureError: steps of this model
        are not captured.
    """
    without_memory = _without_memory(graph)
    kinds = dict.fromkeys(bucket.kind for bucket in buckets.buckets)
    breaks = {kind: find_breaks(graph, kind) for kind in kinds}
    executable = EagerExecutable(without_memory, overlap and overlap.simulated())
    graphs = StepGraphs(
        executable, without_memory, plan, _caches(plan, states), _largest(buckets, breaks),
        device=META, max_model_len=max_model_len, widths=widths,
        backend=PredictingBackend(device),
    )  # fmt: skip
    return PredictedGraphs(graphs.memory, breaks)


class PredictingBackend(CpuGraphBackend):
    """Captures over tensors without memory; what goes to the device goes nowhere."""

    name = "prediction"

    def __init__(self, device: torch.device) -> None:
        super().__init__(META)
        self._planned = device
        self._pools: dict[int, SegmentPool] | None = {} if device.type == "cuda" else None  # by stream

    def upload(self, staging: Staging, static: torch.Tensor, num_bytes: int) -> None:
        pass

    def capture(self, call: Callable[[], Tensors], *, is_opaque: bool, held_bytes: int = 0):
        recorder = Recorder(META, self._inside if self._planned.type == "cuda" else None)
        with recorder:
            outputs = tuple(call())
        if self._pools is None:
            self._count(recorder, outputs, held_bytes)
        else:
            self._allocate(recorder, outputs, held_bytes)
        return None, outputs

    def _inside(self, op, operands, options):
        provider = providers_by_namespace().get(op.namespace)
        return None if provider is None else provider.rehearse(op._opname, self._planned, operands, options)

    def measured_bytes(self) -> int | None:
        if self._pools is None:
            return super().measured_bytes()
        return sum(pool.num_bytes for pool in self._pools.values())

    def _allocate(self, recorder: Recorder, outputs: Tensors, held_bytes: int) -> None:
        """A capture takes blocks of a pool that all captures share, and gives them back."""
        for stream, lives in recorder.lives(outputs).items():
            pool = self._pools.setdefault(stream, SegmentPool())
            held = pool.take(held_bytes if stream == MAIN else 0)
            events = [(first, 1, i) for i, (_, first, _) in enumerate(lives)]
            # What a call was the last to need goes back before the next one takes anything.
            events += [(last + 1, 0, i) for i, (_, _, last) in enumerate(lives)]
            blocks = {}
            for _, takes, i in sorted(events):
                if takes:
                    blocks[i] = pool.take(lives[i][0])
                else:
                    pool.give_back(blocks.pop(i))
            pool.give_back(held)


def _largest(buckets: BucketTable, breaks: dict[str, list[Break]]) -> BucketTable:
    """The largest bucket; of each kind, where kinds are cut at different places or neither is larger in all."""
    first: dict[str, Bucket] = {}
    for bucket in buckets.buckets:  # largest first
        first.setdefault(bucket.kind, bucket)
    wanted = list(first.values())
    if all(found == breaks[wanted[0].kind] for found in breaks.values()):
        wanted = [b for b in wanted if not any(o != b and _holds(o, b) for o in wanted)]
    return BucketTable(tuple(wanted), (), ())


def _holds(large: Bucket, small: Bucket) -> bool:
    return all(a >= b for a, b in zip(large[1:], small[1:]))


def _without_memory(graph: GraphModule) -> GraphModule:
    """The graph over tensors without memory, and with no other device in its calls."""
    weights = {
        name: torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=META)
        for name, w in attributes(graph).items()
    }
    without_device, copies = Graph(), {}
    for node in graph.graph.nodes:
        copies[node] = copy = without_device.node_copy(node, copies.__getitem__)
        copy.args, copy.kwargs = map_aggregate((copy.args, copy.kwargs), _on_meta)
    return GraphModule(weights, without_device)


def _on_meta(value):
    return META if isinstance(value, torch.device) else value


def _caches(plan: KVPlan, states: Sequence[LayerState]) -> Mapping[str, torch.Tensor]:
    caches = {}
    for state, page in zip(states, plan.layers, strict=True):
        for tensor in state.tensors(plan.groups[page.group].block_size):
            shape = (NUM_BLOCKS, *tensor.shape)
            caches[f"kv_cache_{state.index}{tensor.suffix}"] = torch.empty(
                shape, dtype=getattr(torch, tensor.dtype), device=META
            )
    return caches
