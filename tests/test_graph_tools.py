"""A graph of ours writes its Python code when it is called, and is what the graph says then."""

from __future__ import annotations

import torch
from torch.fx import Graph

from pagebinder.graph_tools import aten, finish, graph_module


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
