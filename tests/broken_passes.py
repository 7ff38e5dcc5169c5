"""Compilations that go wrong on purpose: passes whose results are changed after they ran."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagebinder.compiler import pipeline
from pagebinder.graph_tools import aten, calls, insert_call

ops = torch.ops.pagebinder


def break_pass(monkeypatch, name: str, change: Callable) -> None:
    """Run `change(gm)` on the graph that the pass `name` leaves."""
    for listed in ("RECOGNISERS", "PAGE_PASSES"):
        passes = tuple(broken(p, change) if p.__name__ == name else p for p in getattr(pipeline, listed))
        monkeypatch.setattr(pipeline, listed, passes)
    monkeypatch.setattr(pipeline, name, broken(getattr(pipeline, name), change))


def broken(run: Callable, change: Callable) -> Callable:
    def changed(gm, **options):
        result = run(gm, **options)
        change(gm)
        gm.graph.lint()
        gm.recompile()
        return result

    changed.__name__ = run.__name__
    return changed


def with_option(op, index: int, **options) -> Callable:
    """Change keyword arguments of the index-th call of an op."""

    def change(gm):
        node = list(calls(gm.graph, op))[index]
        node.kwargs = {**node.kwargs, **options}

    return change


def with_argument(op, index: int, position: int, value) -> Callable:
    def change(gm):
        node = list(calls(gm.graph, op))[index]
        node.args = (*node.args[:position], value, *node.args[position + 1 :])

    return change


def swapped_tables(gm) -> None:
    """The second rotation takes the sine for the cosine."""
    node = list(calls(gm.graph, ops.rope.default))[2]
    x, cos, sin = node.args
    node.args = (x, sin, cos)


def reversed_requests(gm) -> None:
    """The second layer reads the block tables of the requests in reverse: right for one request alone."""
    node = list(calls(gm.graph, ops.paged_attention.default))[1]
    flipped = insert_call(gm.graph, node, aten.flip.default, (node.args[2], [0]))
    node.args = (*node.args[:2], flipped, *node.args[3:])


def capped_kernel(gm) -> None:
    """The second layer's attention, by whatever provider, caps its scores."""
    found = [n for n in gm.graph.nodes if str(n.target).endswith("paged_attention.default")]
    found[1].kwargs = {**found[1].kwargs, "soft_cap": 5.0}
