"""Small wrong changes to graphs, and where in a compilation to make them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from torch.fx import GraphModule, Node

import pagebinder.compile as compiler
from pagebinder.compiler import pipeline
from pagebinder.graph_tools import insert_call
from pagebinder.report import PassResult
from tests.broken_passes import break_pass
from tests.captures import capture_once
from tests.mutation.bases import _capture

Change = Callable[[GraphModule], None]


def called(gm: GraphModule, name: str, index: int) -> Node:
    """The index-th call of an op, whoever provides it."""
    found = [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target).split(".")[1:2] == [name]]
    return found[index]


def option(name: str, index: int, **options) -> Change:
    """Other keyword arguments."""

    def change(gm):
        node = called(gm, name, index)
        node.kwargs = {**node.kwargs, **options}

    return change


def argument(name: str, index: int, position: int, value) -> Change:
    def change(gm):
        node = called(gm, name, index)
        node.args = (*node.args[:position], value, *node.args[position + 1 :])

    return change


def through(name: str, index: int, position: int, op, *args) -> Change:
    """An operand goes through another op first."""

    def change(gm):
        node = called(gm, name, index)
        changed = insert_call(gm.graph, node, op, (node.args[position], *args))
        node.args = (*node.args[:position], changed, *node.args[position + 1 :])

    return change


def swapped(name: str, index: int, i: int, j: int) -> Change:
    """Two operands change places."""

    def change(gm):
        node = called(gm, name, index)
        args = list(node.args)
        args[i], args[j] = args[j], args[i]
        node.args = tuple(args)

    return change


def bypassed(name: str, index: int) -> Change:
    """The op's first operand is taken for its result."""

    def change(gm):
        node = called(gm, name, index)
        node.replace_all_uses_with(node.args[0])

    return change


def operand_of_another(name: str, index: int, other: int, position: int) -> Change:
    """The operand of one call is given to another call of the same op, weights and caches for example."""

    def change(gm):
        node, wrong = called(gm, name, index), called(gm, name, other).args[position]
        if wrong.op == "get_attr":  # it may come later in the graph
            with gm.graph.inserting_before(node):
                copied = gm.graph.get_attr(wrong.target)
            copied.meta, wrong = dict(wrong.meta), copied
        node.args = (*node.args[:position], wrong, *node.args[position + 1 :])

    return change


def placeholder(gm: GraphModule, name: str) -> Node:
    return next(n for n in gm.graph.nodes if n.op == "placeholder" and n.target == name)


def replaced_input(name: str, index: int, old: str, new: str) -> Change:
    """One call reads another input of the step."""

    def change(gm):
        node = called(gm, name, index)
        node.replace_input_with(placeholder(gm, old), placeholder(gm, new))

    return change


def result_of(name: str, index: int, number: int) -> Callable[[GraphModule], Node]:
    """The getitem that takes the number-th result of a call."""

    def find(gm):
        users = called(gm, name, index).users
        return next(u for u in users if u.target is operator.getitem and u.args[1] == number)

    return find


def in_captured(change: Change) -> Callable[[pytest.MonkeyPatch], None]:
    """As if the capture had gone wrong: every later level agrees with it."""

    def inject(patch):
        def capture(source, report):
            captured, encoder = capture_once(source, report)
            change(captured)
            captured.graph.lint()
            captured.recompile()
            return captured, encoder

        patch.setattr(compiler, "_capture", capture)

    return inject


def while_captured(change: Callable[[pytest.MonkeyPatch, object], None]) -> Callable:
    """The model is another one for as long as it is captured: as if the compiler misread what it holds."""

    def inject(patch):
        def capture(source, report):
            with pytest.MonkeyPatch.context() as meanwhile:
                change(meanwhile, source.module)
                return _capture(source, report)

        patch.setattr(compiler, "_capture", capture)

    return inject


def after(name: str, change: Change) -> Callable[[pytest.MonkeyPatch], None]:
    """On the graph that a pass leaves."""
    return lambda patch: break_pass(patch, name, change)


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The pass finds nothing, and says nothing."""

    def nothing(gm, **options):
        return PassResult(name=name)

    nothing.__name__ = name

    def inject(patch):
        passes = tuple(nothing if p.__name__ == name else p for p in pipeline.RECOGNISERS)
        patch.setattr(pipeline, "RECOGNISERS", passes)
        patch.setattr(pipeline, name, nothing)

    return inject
