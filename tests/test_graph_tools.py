"""Graphs of ours: code that is written when it is called, weights of which only rows are taken."""

from __future__ import annotations

import torch
from torch.fx import Graph

from pagebinder.graph_tools import aten, finish, graph_module, looked_up


def test_code_is_written_when_it_is_called(monkeypatch):
    graph = Graph()
    x = graph.placeholder("x")
    result = graph.call_function(aten.add.Tensor, (x, 1))
    graph.output(result)
    written, write = [], Graph.python_code
    monkeypatch.setattr(Graph, "python_code", lambda *a, **k: written.append(1) or write(*a, **k))
    gm = graph_module(torch.nn.Module(), graph, "Named")
    for amount in (2, 3):
        result.args = (x, amount)
        finish(gm)
    assert type(gm).__name__ == "Named" and not written
    assert gm(torch.ones(2)).tolist() == [4.0, 4.0] and len(written) == 1
    assert "add" in gm.code and gm(torch.zeros(1)).item() == 3.0 and len(written) == 1
    result.args = (x, 5)
    finish(gm)
    assert gm(torch.ones(1)).item() == 6.0 and len(written) == 2


def test_tables_of_which_rows_are_taken():
    graph, root = Graph(), torch.nn.Module()
    ids = graph.placeholder("ids")
    for name in ("table", "tied", "lookup"):
        root.register_buffer(name, torch.ones(4, 4))
    rows = graph.call_function(aten.embedding.default, (graph.get_attr("table"), ids))
    again = graph.call_function(aten.embedding.default, (graph.get_attr("tied"), ids))
    indirect = graph.call_function(
        aten.embedding.default, (graph.get_attr("table"), graph.get_attr("lookup"))
    )
    product = graph.call_function(aten.linear.default, (rows, graph.get_attr("tied")))
    graph.output((again, indirect, product))
    assert looked_up(graph_module(root, graph, "Tables")) == ["table"]
