"""Capturing one bucket: as a whole where nothing in the graph breaks it, else piece by piece.

replay of a step in pieces      graph 0 | attention | graph 1 | attention | graph 2 -> static logits
                                  v  q ^   v  out ^
                               carried: values between a graph and what is called between graphs, at fixed
                               addresses; a buffer serves again as soon as its value was read for the last time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

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
        with torch.inference_mode():
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
    owned: dict[str, int] = {}  # bytes of values that lie in the graphs' pool
    parts, num_graphs = [], 0
    carried.begin()
    with torch.inference_mode():
        for index, piece in enumerate(pieces):
            args = [values[name] for name in piece.inputs]
            call = _PieceCall(piece, args, crossings, carried, logits)
            call()  # its values find their homes, outside the capture
            if piece.is_captured:
                graph, _ = backend.capture(call, is_opaque=False, held_bytes=sum(owned.values()))
                parts.append(_replay(graph))
                owned |= {n: v.nbytes for n, v in call.owned().items()}
                num_graphs += 1
            else:
                parts.append(call)
            results = call.results
            values |= results
            for name in crossings.done_after[index]:
                carried.give_back(values.pop(name))
                owned.pop(name, None)
    return BucketGraph(parts, logits, num_graphs)


class _PieceCall:
    """Runs a piece; what others read at a fixed address is copied there, and logits to theirs."""

    def __init__(self, piece: Piece, args, crossings: _Crossings, carried: CarriedValues, logits) -> None:
        self._run, self._args, self._names = piece.run, args, piece.outputs
        self._crossings, self._carried, self._logits = crossings, carried, logits
        self._homes: dict[str, torch.Tensor] = {}
        self.results: dict = {}

    def __call__(self) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
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
        """Results that lie where the piece's ops put them."""
        tensors = {n: v for n, v in self.results.items() if isinstance(v, torch.Tensor)}
        return {n: v for n, v in tensors.items() if n not in self._homes}


class _Crossings:
    """Values that pass from piece to piece.

    carried: names of those at addresses of their own. done_after: names that nobody reads after each piece.
    """

    def __init__(self, gm: GraphModule, pieces: Sequence[Piece]) -> None:
        makers = {name: piece for piece in pieces for name in piece.outputs}
        # Made by a plain call, its address is another every time; read by one, it must not be the pool's any more.
        self.carried = {name for name, piece in makers.items() if not piece.is_captured}
        self.carried |= {
            name for piece in pieces if not piece.is_captured for name in piece.inputs if name in makers
        }
        last = {name: i for i, piece in enumerate(pieces) for name in piece.inputs if name in makers}
        self.done_after = [[n for n, at in last.items() if at == i] for i in range(len(pieces))]
        self.logits = logits_node(gm).name


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
        self._homes: dict[int, tuple[int, torch.Tensor]] = {}  # by id: a tensor in use, and its buffer
        self.num_bytes = 0

    def begin(self) -> None:
        """The next bucket: everything is free."""
        self._free, self._homes = list(range(len(self._buffers))), {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A contiguous static tensor of this shape and dtype."""
        fits = [i for i in self._free if self._buffers[i].numel() >= like.nbytes]
        if fits:
            index = min(fits, key=lambda i: self._buffers[i].numel())
            self._free.remove(index)
        else:
            index = len(self._buffers)
            self._buffers.append(self._backend.static(like.nbytes))
            self.num_bytes += like.nbytes
        home = self._buffers[index][: like.nbytes].view(like.dtype).view(like.shape)
        self._homes[id(home)] = index, home
        return home

    def give_back(self, value) -> None:
        index, _ = self._homes.pop(id(value), (None, None))
        if index is not None:
            self._free.append(index)


def _replay(graph) -> Callable[[], None]:
    return (lambda: None) if graph is None else graph.replay
