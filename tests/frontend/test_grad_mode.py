"""`torch.no_grad()` in a model costs the capture nothing; a real change of the grad mode is traced as ever."""

from __future__ import annotations

import pytest
import torch
from torch._export.passes import replace_set_grad_with_hop_pass as of_torch

from pagebinder import CaptureError
from tests.graphs import captured


class SplitsAtGradModes(Exception):
    pass


@pytest.fixture(autouse=True)
def no_splitting(monkeypatch):
    def fail(*args):
        raise SplitsAtGradModes

    monkeypatch.setattr(of_torch, "sequential_split", fail)


def doubled(x, positions):
    with torch.no_grad():
        y = x * 2
    return y + 1


def test_no_grad_leaves_no_trace():
    targets = [str(n.target) for n in captured(doubled).graph.nodes if n.op == "call_function"]
    assert [name for name in targets if "mul" in name or "add" in name] == [
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]


def test_a_real_change_is_traced():
    def recorded(x, positions):
        with torch.enable_grad():
            return x * 2

    with pytest.raises(CaptureError, match="SplitsAtGradModes"):
        captured(recorded)
