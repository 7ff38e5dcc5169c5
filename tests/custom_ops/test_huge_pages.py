"""Huge pages are advice: asking for them changes no contents and never fails."""

import sys

import pytest
import torch

from pagebinder.custom_ops.cpu import huge_pages
from pagebinder.custom_ops.cpu.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages, move_to_huge_pages

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux's")


@linux_only
def test_large_memory_keeps_its_contents():
    memory = torch.arange(2 * HUGE_PAGE_BYTES)
    advise_huge_pages(memory)
    assert torch.equal(memory, torch.arange(2 * HUGE_PAGE_BYTES))


def test_small_and_meta_tensors_are_refused():
    assert advise_huge_pages(torch.zeros(100)) is False
    assert advise_huge_pages(torch.zeros(2**24, device="meta")) is False


@linux_only
def test_moved_tensors_keep_values_ties_and_types():
    big = torch.nn.Parameter(torch.randn(1024, 2049).bfloat16())
    tied, codes, small = big.detach(), torch.randint(0, 9, (3, 2**20), dtype=torch.uint8), torch.randn(10)
    before, place = [t.clone() for t in (big, tied, codes, small)], small.data_ptr()
    assert move_to_huge_pages([big, tied, codes, small]) >= big.numel() * 2 + codes.numel()
    assert all(torch.equal(a, b) for a, b in zip(before, (big, tied, codes, small)))
    assert tied.data_ptr() == big.data_ptr() and isinstance(big, torch.nn.Parameter)
    assert small.data_ptr() == place


def test_weights_stay_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(huge_pages, "_available_bytes", lambda: 8 * 2**20)
    weight = torch.zeros(2**22 + 1, dtype=torch.uint8)
    place = weight.data_ptr()
    assert move_to_huge_pages([weight]) == 0 and weight.data_ptr() == place
