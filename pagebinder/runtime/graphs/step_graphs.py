"""Captured steps: one graph (or a few) for each bucket, one arena for all, one lookup to find the right one.

    graphs = compiled.capture(max_num_seqs=8, num_kv_blocks=64)
    logits = graphs.replay(graphs.pack([StepSequence(tokens=[5, 9], start=0, blocks=[[1]])]))

    step --pad to bucket--> staging --one copy--> static inputs --graph.replay()--> static logits[:L]

Caches, metadata, values between pieces and logits lie at fixed addresses; everything else in one pool of memory that
the graphs share. A replay's logits are overwritten by the next step. A shape outside every bucket runs as it is and
is counted: `stats`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.fx import GraphModule

from pagebinder.ambient import inference
from pagebinder.custom_ops.prompt_rows import PromptTables
from pagebinder.errors import GraphCaptureError
from pagebinder.runtime.executables.base import Executable
from pagebinder.runtime.graphs.backend import GraphBackend, graph_backend
from pagebinder.runtime.graphs.buckets import Bucket, BucketTable
from pagebinder.runtime.graphs.capture import (
    BucketGraph,
    CarriedValues,
    capture_pieces,
    capture_whole,
    logits_node,
    run_pieces,
)
from pagebinder.runtime.graphs.compiled_pieces import compile_pieces
from pagebinder.runtime.graphs.pieces import Break, Piece, find_breaks, split_at_breaks
from pagebinder.runtime.graphs.static_inputs import StaticInputs, pad, real_part
from pagebinder.runtime.graphs.step_sequences import StepSequence, check_inputs, pack_sequences, table_widths
from pagebinder.runtime.kv import KVPlan


@dataclass
class GraphStats:
    """Counters since the start. `replays`: by bucket. `uncaptured`: steps that ran as they were, by reason."""

    replays: Counter[str] = field(default_factory=Counter)
    uncaptured: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    padding_tokens: int = 0


@dataclass(frozen=True)
class GraphMemory:
    """Bytes that captured steps take on the device.

    static_inputs: metadata of the largest bucket. logits: rows of the largest bucket. carried: values between
    pieces. intermediate: the most that is in use inside a graph; None where it cannot be known (compiled code on a
    CPU).
    """

    static_inputs: int
    logits: int
    carried: int
    intermediate: int | None

    @property
    def total(self) -> int:
        return self.static_inputs + self.logits + self.carried + (self.intermediate or 0)


class StepGraphs:
    """Captures every bucket when it is made, and replays them. Not thread safe.

    Args:
        executable, graph: what runs, and the graph that it was made of (None: nothing can be cut, so nothing in it
            may need to be).
        plan, caches: the KV plan, and caches by name of the graph's input; they must stay where they are.
        max_model_len: longest context; `widths`: columns of the block tables, by default for that.
    Raises:
        GraphCaptureError: an op cannot be captured though it is registered so.
        CacheCapacityError: the memory is not there.
    """

    def __init__(
        self, executable: Executable, graph: GraphModule | None, plan: KVPlan, caches: Mapping[str, torch.Tensor],
        buckets: BucketTable, *, device: torch.device, max_model_len: int, vocab_size: int | None = None,
        prompt_tables: PromptTables | None = None,
        widths: Sequence[int] | None = None, backend: GraphBackend | None = None,
    ) -> None:  # fmt: skip
        self.executable, self.graph, self.plan, self.caches = executable, graph, plan, caches
        self.buckets, self.device, self.vocab_size = buckets, device, vocab_size
        self.prompt_tables = prompt_tables
        self.backend = backend or graph_backend(device)
        self.widths = tuple(widths or table_widths(plan.groups, max_model_len))
        self.stats = GraphStats()
        self.breaks: dict[str, list[Break]] = {}  # by kind of bucket
        self.pieces: dict[str, list[Piece]] = {}  # the same, where there are breaks
        self._inputs = StaticInputs(self.backend, plan.groups, self.widths, buckets.buckets)
        self._carried = CarriedValues(self.backend)
        self._graphs: dict[Bucket, BucketGraph] = {}
        start = time.perf_counter()
        self._logits = self._static_logits(buckets.buckets)
        for bucket in buckets.buckets:
            self._graphs[bucket] = self._capture(bucket)
        self.backend.finish()
        self.capture_seconds = time.perf_counter() - start

    # Capture

    def _static_logits(self, buckets: Sequence[Bucket]) -> torch.Tensor:
        """Rows of the widest bucket, of the width and dtype that the graph says; without one a step is run to see."""
        if self.graph is None:
            self._inputs.reset(buckets[0])
            logits = self.executable.run(self._inputs_of(buckets[0]))
        else:
            logits = logits_node(self.graph).meta["val"]
        most, width = max(bucket.num_logits for bucket in buckets), int(logits.shape[1])
        memory = self.backend.static(most * width * logits.dtype.itemsize)
        return memory.view(logits.dtype).view(most, width)

    def _inputs_of(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        return {**self._inputs.tensors(bucket), **self.caches}

    def _capture(self, bucket: Bucket) -> BucketGraph:
        self._inputs.reset(bucket)
        inputs, logits = self._inputs_of(bucket), self._logits[: bucket.num_logits]
        if bucket.kind not in self.breaks:
            self.breaks[bucket.kind] = [] if self.graph is None else find_breaks(self.graph, bucket.kind)
        breaks = self.breaks[bucket.kind]
        try:
            if not breaks:
                return capture_whole(self.backend, self.executable, inputs, logits)
            if bucket.kind not in self.pieces:
                self.pieces[bucket.kind] = self._runs_of(split_at_breaks(self.graph, breaks))
            pieces = self.pieces[bucket.kind]
            return capture_pieces(self.backend, self.graph, pieces, inputs, logits, self._carried)
        except GraphCaptureError as error:
            raise GraphCaptureError(f"Bucket {bucket}: {error}") from error

    def _runs_of(self, pieces: list[Piece]) -> list[Piece]:
        """Let captured pieces run as the executable does: compiled, or branches of them side by side."""
        compiler, overlap = (getattr(self.executable, name, None) for name in ("pieces", "overlap"))
        if compiler is not None:
            compile_pieces(self.graph, pieces, compiler, self.device)
        elif overlap is not None:
            for piece in pieces:
                if piece.is_captured and (run := overlap.run_by(piece.gm)) is not piece.gm:
                    piece.run, piece.runs_as = run, "op by op on two streams"
        return pieces

    @property
    def memory(self) -> GraphMemory:
        """What was really reserved."""
        return GraphMemory(
            static_inputs=self._inputs.memory.nbytes,
            logits=self._logits.nbytes,
            carried=self._carried.num_bytes,
            intermediate=self.backend.measured_bytes(),
        )

    # One step

    def find(self, num_tokens: int, num_reqs: int, num_logits: int, *, is_decode: bool) -> Bucket | None:
        """The bucket of a step; None is counted: the caller runs it uncaptured."""
        bucket = self.buckets.find(num_tokens, num_reqs, is_decode=is_decode)
        if bucket is not None and num_logits > bucket.num_logits:
            self.stats.uncaptured["more rows of logits than the bucket has"] += 1
            return None
        if bucket is None:
            kind = "decode" if is_decode else "mixed"
            self.stats.uncaptured[f"{kind} step larger than every bucket"] += 1
        return bucket

    def fill(
        self, bucket: Bucket, num_tokens: int, num_reqs: int, num_logits: int,
        write: Callable[[dict[str, np.ndarray]], None],
    ) -> None:  # fmt: skip
        """`write` gets the host arrays of the step's real part; padding and the copy to the device follow."""
        staging, arrays = self._inputs.begin(bucket)
        write(real_part(arrays, num_tokens, num_reqs, num_logits))
        pad(arrays, num_tokens, num_reqs, num_logits)
        self._inputs.upload(bucket, staging)
        self.stats.tokens += num_tokens
        self.stats.padding_tokens += bucket.num_tokens - num_tokens

    def static_tensors(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The bucket's metadata on the device, by name: what a replay reads."""
        return self._inputs.tensors(bucket)

    def replay_bucket(self, bucket: Bucket, num_logits: int) -> torch.Tensor:
        """Replay what was filled in; returns logits [L, V], to be read before the next step."""
        graph = self._graphs[bucket]
        graph.replay()
        self.stats.replays[str(bucket)] += 1
        return graph.logits[:num_logits]

    def run_bucket(self, bucket: Bucket, num_logits: int) -> torch.Tensor:
        """Run what was filled in without the captured graph: what a replay must equal, bit for bit."""
        return self._eager(bucket)[:num_logits]

    def _eager(self, bucket: Bucket) -> torch.Tensor:
        inputs = self._inputs_of(bucket)
        pieces = self.pieces.get(bucket.kind)
        if pieces is None:
            return self.executable.run(inputs)
        if any(piece.is_compiled for piece in pieces):
            return run_pieces(self.graph, pieces, inputs)
        with inference():
            return self.graph(*(inputs[n.target] for n in self.graph.graph.nodes if n.op == "placeholder"))

    # A loop of the user's own

    def pack(self, sequences: Sequence[StepSequence]) -> dict[str, np.ndarray]:
        """The inputs of a step that computes `sequences`, with the logits of each one's last token."""
        return pack_sequences(self.plan.groups, self.widths, sequences)

    def replay(
        self, inputs: Mapping[str, np.ndarray | torch.Tensor], *, captured: bool = True
    ) -> torch.Tensor:
        """Run one step: metadata by name (see `step_plan.py`), on the host -> logits [L, V] on the device.

        The logits are overwritten by the next step. `captured`: False runs the same padded step without the graph.
        Raises:
            RequestError: inputs are missing, of other shapes, or point outside the caches.
        """
        arrays, is_decode = check_inputs(self, inputs)
        num_tokens, num_reqs = len(arrays["input_ids"]), len(arrays["seq_lens"])
        num_logits = len(arrays["logits_rows"])
        bucket = self.find(num_tokens, num_reqs, num_logits, is_decode=is_decode)
        if bucket is None:
            tensors = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
            return self.executable.run({**tensors, **self.caches})

        def write(parts: dict[str, np.ndarray]) -> None:
            for name, part in parts.items():
                value = arrays[name]
                part[(slice(None),) * (value.ndim - 1) + (slice(value.shape[-1]),)] = value[: len(part)]
                if value.ndim == 2:
                    part[:, value.shape[1] :] = 0

        self.fill(bucket, num_tokens, num_reqs, num_logits, write)
        run = self.replay_bucket if captured else self.run_bucket
        return run(bucket, num_logits)

    def explain(self) -> str:
        """Buckets, where graphs are cut and why, memory, as text."""
        from pagebinder.runtime.graphs.describe import describe_graphs

        return describe_graphs(self)
