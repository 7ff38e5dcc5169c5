"""Capturing one bucket: as a whole where nothing in the graph breaks it, else piece by piece.

replay of a step in pieces      graph 0 | attention | graph 1 | attention | graph 2 -> static logits
                                  v  q ^   v  out ^
                               carried: values between a graph and what is called between graphs, at fixed
                               addresses; a buffer serves again as soon as its value was read for the last time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.ambient import inference
from pagebinder.graph_tools import attributes, storage_of
from pagebinder.runtime.executables.base import Executable
from pagebinder.runtime.graphs.backend import GraphBackend
from pagebinder.runtime.graphs.pieces import Piece


@dataclass
class BucketGraph:
    """What replays a bucket: parts in order, and where its logits are then."""

    parts: list[Callable[[], None]]
    logits: torch.Tensor
    num_graphs: int

    def replay(self) -> None:
        with inference():
            for part in self.parts:
                part()


def capture_whole(
    backend: GraphBackend, executable: Executable, inputs: Mapping[str, torch.Tensor], logits: torch.Tensor
) -> BucketGraph:
    """One graph. `logits`: the static rows that the step's logits are copied to, as its last act."""

    def call():
        logits.copy_(executable.run(inputs))
        return ()

    graph, _ = backend.capture(call, is_opaque=getattr(executable, "is_opaque", True))
    return BucketGraph([_replay(graph)], logits, 1)


def capture_pieces(
    backend: GraphBackend, gm: GraphModule, pieces: Sequence[Piece], inputs: Mapping[str, torch.Tensor],
    logits: torch.Tensor, carried: CarriedValues,
) -> BucketGraph:  # fmt: skip
    """A graph for each captured piece, and plain calls between them."""
    crossings = _Crossings(gm, pieces)
    values = {n.name: inputs[n.target] for n in gm.graph.nodes if n.op == "placeholder"}
    owned: dict[str, torch.Tensor] = {}  # values in the graphs' pool
    given = {storage_of(t) for t in (*inputs.values(), *attributes(gm).values())}
    parts, num_graphs = [], 0
    carried.begin()
    with inference():
        for index, piece in enumerate(pieces):
            call = _PieceCall(piece, [values[name] for name in piece.inputs], crossings, carried, logits)
            call()  # its values find their homes, outside the capture
            if piece.is_captured:
                held = _bytes_behind(owned.values())
                graph, _ = backend.capture(call, is_opaque=piece.is_compiled, held_bytes=held)
                parts.append(_replay(graph))
                num_graphs += 1
                not_made = given | carried.storages
                owned |= {n: v for n, v in call.owned().items() if storage_of(v) not in not_made}
            else:
                parts.append(call)
            values |= call.results
            for name in crossings.done_after[index]:
                values.pop(name)
                owned.pop(name, None)
            carried.give_back_unless(values.values())
    return BucketGraph(parts, logits, num_graphs)


def run_pieces(gm: GraphModule, pieces: Sequence[Piece], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The logits of a step in the same pieces without capture: what a replay equals where pieces are compiled."""
    crossings = _Crossings(gm, pieces)
    values = {n.name: inputs[n.target] for n in gm.graph.nodes if n.op == "placeholder"}
    with inference():
        for index, piece in enumerate(pieces):
            results = zip(piece.outputs, piece.run(*(values[name] for name in piece.inputs)), strict=True)
            for name, value in results:
                is_home = name in crossings.carried and isinstance(value, torch.Tensor)
                values[name] = value.contiguous() if is_home else value
            for name in crossings.done_after[index]:
                values.pop(name)
    return values[crossings.logits]


def _bytes_behind(values: Iterable[torch.Tensor]) -> int:
    """Of the memory that values lie in, each once."""
    return sum({storage_of(v): v.untyped_storage().nbytes() for v in values}.values())


class _PieceCall:
    """Runs a piece; what others read at a fixed address is copied there, and logits to theirs."""

    def __init__(self, piece: Piece, args, crossings: _Crossings, carried: CarriedValues, logits) -> None:
        self._run, self._args, self._names = piece.run, args, piece.outputs
        self._crossings, self._carried, self._logits = crossings, carried, logits
        self._homes: dict[str, torch.Tensor] = {}
        self.results: dict = {}

    def __call__(self) -> tuple[torch.Tensor, ...]:
        with inference():
            self.results = dict(zip(self._names, self._run(*self._args)))
            for name, value in list(self.results.items()):
                if name == self._crossings.logits:
                    self._logits.copy_(value)
                if name in self._crossings.carried and isinstance(value, torch.Tensor):
                    if name not in self._homes:
                        self._homes[name] = self._carried.take(value)
                    self._homes[name].copy_(value)
                    self.results[name] = self._homes[name]
        return tuple(self.owned().values())

    def owned(self) -> dict[str, torch.Tensor]:
        """Results that lie where the piece's ops put them, or that are views of what they were given."""
        tensors = {n: v for n, v in self.results.items() if isinstance(v, torch.Tensor)}
        return {n: v for n, v in tensors.items() if n not in self._homes}


class _Crossings:
    """Values that pass from piece to piece.

    carried: names of those at addresses of their own. done_after: names that nobody reads after each piece.
    """

    def __init__(self, gm: GraphModule, pieces: Sequence[Piece]) -> None:
        made = {name for piece in pieces for name in piece.outputs}
        self.carried = carried_values(pieces)
        last = {name: i for i, piece in enumerate(pieces) for name in piece.inputs if name in made}
        self.done_after = [[n for n, at in last.items() if at == i] for i in range(len(pieces))]
        self.logits = logits_node(gm).name


def carried_values(pieces: Sequence[Piece]) -> set[str]:
    """Names of values that are carried at addresses of their own, where they lie row by row."""
    made = {name: piece for piece in pieces for name in piece.outputs}
    # Made by a plain call, its address is another every time; read by one, it must not be the pool's any more.
    by_calls = {name for name, piece in made.items() if not piece.is_captured}
    return by_calls | {n for piece in pieces if not piece.is_captured for n in piece.inputs if n in made}


def logits_node(gm: GraphModule) -> Node:
    """The node that a graph returns."""
    result = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    return result[0] if isinstance(result, (tuple, list)) else result


class CarriedValues:
    """Buffers at fixed addresses for values between pieces, shared by all buckets, as these never run at once."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._buffers: list[torch.Tensor] = []
        self._free: list[int] = []
        self._taken: set[int] = set()
        self.num_bytes = 0

    def begin(self) -> None:
        """The next bucket: everything is free."""
        self._free, self._taken = list(range(len(self._buffers))), set()

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A contiguous static tensor of this shape and dtype, on this tensor's device."""
        if like.device != self._backend.device:  # between two calls: no graph reads it
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        fits = [i for i in self._free if self._buffers[i].numel() >= like.nbytes]
        if fits:
            index = min(fits, key=lambda i: self._buffers[i].numel())
            self._free.remove(index)
        else:
            index = len(self._buffers)
            self._buffers.append(self._backend.static(like.nbytes))
            self.num_bytes += like.nbytes
        self._taken.add(index)
        return self._buffers[index][: like.nbytes].view(like.dtype).view(like.shape)

    @property
    def storages(self) -> set[int]:
        return {storage_of(buffer) for buffer in self._buffers}

    def give_back_unless(self, values: Iterable) -> None:
        """Buffers that none of these values lies in are free: a value that crosses may be a view of another."""
        used = {storage_of(value) for value in values if isinstance(value, torch.Tensor)}
        done = {index for index in self._taken if storage_of(self._buffers[index]) not in used}
        self._free += sorted(done)
        self._taken -= done


def _replay(graph) -> Callable[[], None]:
    return (lambda: None) if graph is None else graph.replay
