"""Huge pages are advice: asking for them changes no contents and never fails."""

import sys

import pytest
import torch

from pagebinder.custom_ops.cpu.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux's")
def test_large_memory_keeps_its_contents():
    memory = torch.arange(2 * HUGE_PAGE_BYTES)
    advise_huge_pages(memory)
    assert torch.equal(memory, torch.arange(2 * HUGE_PAGE_BYTES))


def test_small_and_meta_tensors_are_refused():
    assert advise_huge_pages(torch.zeros(100)) is False
    assert advise_huge_pages(torch.zeros(2**24, device="meta")) is False
