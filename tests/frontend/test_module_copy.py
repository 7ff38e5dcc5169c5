"""Copies of modules that hold what has none: locks are shared, hooks that lead to them are not."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from pagebinder.errors import CaptureError
from pagebinder.frontend.module_copy import copied


class Counter(nn.Linear):
    """Counts its calls in a hook that is bound to itself; `lock` cannot be copied."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls = 0
        self.register_forward_pre_hook(self._count)
        self.lock = threading.Lock()

    def _count(self, module, args) -> None:
        with self.lock:
            self.calls += 1


def test_only_what_has_no_copy_is_shared():
    module = nn.Sequential(Counter(), Counter())
    copy = copied(module)
    copy(torch.zeros(1, 3))
    assert [part.calls for part in module] == [0, 0] and [part.calls for part in copy] == [1, 1]
    for part, other in zip(module, copy, strict=True):
        assert other.lock is part.lock
        assert torch.equal(other.weight, part.weight) and other.weight.data_ptr() != part.weight.data_ptr()


def test_weights_are_not_copied_to_find_out(monkeypatch):
    module = Counter()
    made = []
    monkeypatch.setattr(
        nn.Parameter, "__deepcopy__", lambda self, memo: made.append(self) or nn.Parameter(self.data.clone())
    )
    copied(module)
    assert len(made) == 4  # the attempt on the whole module, and what came of it: two weights each


def test_what_cannot_be_copied_even_so_is_an_error():
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("no copies of this")

    with pytest.raises(CaptureError, match="Stubborn cannot be copied .no copies of this"):
        copied(Stubborn(2, 2))
