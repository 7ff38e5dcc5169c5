"""Captured steps: one graph (or a few) for each bucket, one arena for all, one lookup to find the right one.

    graphs = compiled.capture(max_num_seqs=8, num_kv_blocks=64)
    logits = graphs.replay(graphs.pack([StepSequence(tokens=[5, 9], start=0, blocks=[[1]])]))

    step --pad to bucket--> staging --one copy--> static inputs --graph.replay()--> static logits[:L]

Caches, metadata, values between pieces and logits lie at fixed addresses; everything else in one pool of memory that
the graphs share. A replay's logits are overwritten by the next step. A shape outside every bucket runs as it is and
is counted: `stats`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index

import numpy as np
import torch
from torch.fx import GraphModule

from pagebinder.ambient import inference
from pagebinder.config_checks import is_int
from pagebinder.custom_ops.prompt_rows import PromptTables
from pagebinder.errors import GraphCaptureError, RequestError
from pagebinder.interrupts import deferred_interrupts
from pagebinder.runtime.executables.base import Executable
from pagebinder.runtime.graphs.backend import GraphBackend, graph_backend
from pagebinder.runtime.graphs.block_rules import needed_entries
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
from pagebinder.runtime.graphs.step_checks import as_arrays, check_inputs
from pagebinder.runtime.graphs.step_sequences import StepSequence, pack_sequences, table_widths
from pagebinder.runtime.kv import KVPlan


@dataclass
class GraphStats:
    """Counters since the start. `replays`: by bucket. `uncaptured`: steps that ran as they were, by reason. `tokens`:
    of all steps; `padding_tokens`: beside them, up to the buckets' sizes."""

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
    """Captures every bucket when it is made, and replays them.

    `pack`, `replay`, `needed_entries`, `copy_blocks` and `explain` are for a loop of one's own: they check what they
    are given before anything runs. One thread runs steps at a time, and reads the logits before the next one. The
    other methods are an engine's and check nothing.

    Args:
        executable, graph: what runs, and the graph that it was made of (None: nothing can be cut, so nothing in it
            may need to be).
        plan, caches: the KV plan, and caches by name of the graph's input; they must stay where they are.
        max_model_len: longest context; `widths`: columns of the block tables, by default for that. max_position:
            positions of tokens are less; None: any.
    Raises:
        GraphCaptureError: an op cannot be captured though it is registered so.
        CacheCapacityError: the memory is not there.
    """

    def __init__(
        self, executable: Executable, graph: GraphModule | None, plan: KVPlan, caches: Mapping[str, torch.Tensor],
        buckets: BucketTable, *, device: torch.device, max_model_len: int, vocab_size: int | None = None,
        prompt_tables: PromptTables | None = None, max_position: int | None = None,
        widths: Sequence[int] | None = None, backend: GraphBackend | None = None,
    ) -> None:  # fmt: skip
        self.executable, self.graph, self.plan, self.caches = executable, graph, plan, caches
        self.buckets, self.device, self.vocab_size = buckets, device, vocab_size
        self.prompt_tables = prompt_tables
        self.max_position = np.iinfo(np.int64).max if max_position is None else max_position
        self._steps = threading.Lock()
        # Inputs and logits of a step whose caller was interrupted.
        self._undelivered: tuple[dict[str, np.ndarray], torch.Tensor] | None = None
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

    @property
    def num_kv_blocks(self) -> int:
        """Block ids are below it."""
        return min((len(cache) for cache in self.caches.values()), default=1)

    def pack(self, sequences: Iterable[StepSequence]) -> dict[str, np.ndarray]:
        """The inputs of a step that computes `sequences`, and gives the logits of each one's last tokens
        (`num_logits`), in their order. Raises RequestError: a sequence that does not fit."""
        return pack_sequences(self.plan.groups, self.widths, sequences)

    def needed_entries(self, start: int, end: int) -> list[list[int]]:
        """For each KV group, the entries of a sequence's block table that a step which computes its tokens
        [start, end) reads or writes. Blocks of all others may be given back, and the entries be 0: before the step
        those behind windows and chunks, of recurrent state all but the block that is read and the one that is
        written. Raises RequestError for no token."""
        if not (is_int(start) and is_int(end) and 0 <= start < end):
            raise RequestError(
                f"needed_entries({start!r}, {end!r}): give start and end of at least one token."
            )
        return [needed_entries(group.spec, start, end) for group in self.plan.groups]

    @deferred_interrupts()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to) each, in the caches of all layers: for a fork, whose sequences go on writing what
        they shared, and for snapshots of recurrent state. All are read before any is written.

        Raises RequestError: block ids out of range, or the null block as a target.
        """
        most = self.num_kv_blocks
        try:
            array = np.asarray([(index(one), index(other)) for one, other in pairs], np.int64).reshape(-1, 2)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError("copy_blocks takes a list of (from, to) block ids.") from error
        if not array.size:
            return
        if array.min() < 0 or array.max() >= most or array[:, 1].min() < 1:
            raise RequestError(f"copy_blocks: use block ids up to {most - 1}, and none of 0 to copy to.")
        if len(set(array[:, 1].tolist())) < len(array):
            raise RequestError("copy_blocks: a block is copied to twice.")
        one, other = torch.from_numpy(array).T.to(self.device)
        with self._one_step(), inference():
            self._undelivered = None
            for cache in self.caches.values():
                cache[other] = cache[one]

    def replay(
        self, inputs: Mapping[str, np.ndarray | torch.Tensor], *, captured: bool = True, check: bool = True
    ) -> torch.Tensor:
        """Run one step: metadata by name (see `step_plan.py`), on the host -> logits [L, V] on the device.

        The logits are overwritten by the next step. Handlers of signals (Ctrl-C) run when the step is done. If one
        raises, the caller has no logits of a step that has changed recurrent states: the next call with the same
        inputs returns them and runs nothing.

        Args:
            captured: False runs the same padded step without the graph.
            check: False takes the inputs as they are, for those of `pack` in a loop that is known to be right.
                Checking 64 sequences of 8k tokens takes some ms.
        Raises:
            RequestError: inputs are missing, contradict each other, point outside the caches, to the null block or to
                a block that somebody else has, or another thread is in a step. Nothing has run then.
        """
        for name, value in (("captured", captured), ("check", check)):
            if not isinstance(value, bool):
                raise RequestError(f"{name}={value!r}: use True or False.")
        with deferred_interrupts(), self._one_step():
            arrays, is_decode = check_inputs(self, inputs) if check else as_arrays(inputs)
            if self._undelivered is None or not _same(self._undelivered[0], arrays):
                self._undelivered = None
                self._undelivered = arrays, self._run(dict(arrays), is_decode, captured)
        # A handler has not raised, at least not before this line.
        (_, logits), self._undelivered = self._undelivered, None
        return logits

    @contextlib.contextmanager
    def _one_step(self) -> Iterator[None]:
        if not self._steps.acquire(blocking=False):
            raise RequestError(
                "Another thread is in a step of these graphs, which have one set of inputs and logits: let threads "
                "take turns until the logits are read, or capture once for each."
            )
        try:
            yield
        finally:
            self._steps.release()

    def _run(self, arrays: dict[str, np.ndarray], is_decode: bool, captured: bool) -> torch.Tensor:
        num_tokens, num_reqs = len(arrays["input_ids"]), len(arrays["seq_lens"])
        num_logits = len(arrays["logits_rows"])
        bucket = self.find(num_tokens, num_reqs, num_logits, is_decode=is_decode)
        if bucket is None:
            self.stats.tokens += num_tokens
            if not num_logits:  # a graph has at least one row
                arrays["logits_rows"] = np.zeros(1, np.int64)
            tensors = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
            return self.executable.run({**tensors, **self.caches})[:num_logits]

        def write(parts: dict[str, np.ndarray]) -> None:
            for name, part in parts.items():
                value = arrays[name]
                part[(slice(None),) * (value.ndim - 1) + (slice(value.shape[-1]),)] = value[: len(part)]
                if value.ndim == 2:
                    part[:, value.shape[1] :] = 0

        self.fill(bucket, num_tokens, num_reqs, num_logits, write)
        if captured:
            return self.replay_bucket(bucket, num_logits)
        self.stats.uncaptured["captured=False"] += 1
        return self.run_bucket(bucket, num_logits)

    def explain(self) -> str:
        """Buckets, where graphs are cut and why, memory, as text."""
        from pagebinder.runtime.graphs.describe import describe_graphs

        return describe_graphs(self)


def _same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], array) for name, array in other.items())
