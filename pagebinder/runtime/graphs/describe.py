"""Captured steps as text: what `StepGraphs.explain` and `explain()` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from pagebinder.runtime.graphs.buckets import DECODE, MIXED, Bucket, BucketTable
from pagebinder.runtime.graphs.pieces import Break, Piece
from pagebinder.runtime.graphs.predict import predict_graphs
from pagebinder.runtime.kv import KVPlan

if TYPE_CHECKING:
    from pagebinder.runtime.graphs.step_graphs import GraphMemory, StepGraphs


def describe_graphs(graphs: StepGraphs) -> str:
    lines = describe_buckets(graphs.buckets.buckets)
    lines += describe_breaks(graphs.breaks)
    lines += describe_pieces(graphs.pieces)
    lines.append(f"reserved: {describe_memory(graphs.memory)}")
    return "\n".join(lines)


def describe_buckets(buckets: Sequence[Bucket]) -> list[str]:
    """One line per kind."""
    lines = []
    for kind, unit in ((DECODE, "requests"), (MIXED, "tokens")):
        sizes = sorted(bucket.num_tokens for bucket in buckets if bucket.kind == kind)
        if sizes:
            lines.append(f"{kind} steps of up to {', '.join(map(str, sizes))} {unit}")
    return lines


def describe_breaks(breaks: dict[str, list[Break]]) -> list[str]:
    """Where steps are cut, one line per kind and reason."""
    lines = []
    for kind, found in breaks.items():
        if not found:
            lines.append(f"{kind}: captured as a whole")
        for reason, group in groupby(sorted(found, key=lambda b: b.reason), key=lambda b: b.reason):
            lines.append(f"{kind}: cut at {len(list(group))} places: {reason}")
    return lines


def describe_pieces(pieces: Mapping[str, Sequence[Piece]]) -> list[str]:
    """What the pieces of cut steps run as, one line per kind."""
    lines = []
    for kind, found in pieces.items():
        counts: dict[str, list[Piece]] = {}
        for piece in found:
            what = "captured" if piece.is_captured else "called between them"
            counts.setdefault(f"{what}, {piece.runs_as}", []).append(piece)
        parts = []
        for what, alike in counts.items():
            programs = len({id(getattr(piece.run, "program", piece)) for piece in alike})
            parts.append(f"{len(alike)} {what}" + (f" ({programs} programs)" * (programs < len(alike))))
        lines.append(f"{kind}: {'; '.join(parts)}")
    return lines


def describe_prediction(
    graph: GraphModule,
    plan: KVPlan,
    states: Sequence,
    buckets: BucketTable,
    *,
    not_captured: str | None,
    compiled_by: str | None = None,
    **options,
) -> list[str]:
    """Sizes, cuts and predicted memory of captured steps, before there are any; or why there will be none.

    `compiled_by`: what compiles captured pieces, if they do not run op by op.
    """
    if not_captured is not None:
        return [f"none: {not_captured}"]
    try:
        memory, breaks = predict_graphs(graph, plan, states, buckets, **options)
    except (
        ValueError,
        RuntimeError,
    ) as error:  # an op without a fake kernel, for example: the rest is still true
        return [f"not predicted: {type(error).__name__}: {str(error).splitlines()[0]}"]
    runs_as = f"compiled by {compiled_by}" if compiled_by else "op by op"
    return [
        *describe_buckets(buckets.buckets),
        *describe_breaks(breaks),
        *([f"what is captured between cuts: {runs_as}"] if any(breaks.values()) else []),
        f"predicted: {describe_memory(memory)}",
    ]


def describe_memory(memory: GraphMemory) -> str:
    parts = [f"static inputs {_mib(memory.static_inputs)}", f"logits {_mib(memory.logits)}"]
    if memory.carried:
        parts.append(f"values between pieces {_mib(memory.carried)}")
    known = memory.intermediate is not None
    parts.append(f"intermediate values {_mib(memory.intermediate) if known else 'unknown (compiled code)'}")
    return f"{_mib(memory.total)}: " + ", ".join(parts)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.3f} MiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:,.1f} MiB"
