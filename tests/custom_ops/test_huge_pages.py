"""Huge pages are advice: asking for them changes no contents and never fails."""

import sys
import threading

import pytest
import torch

from pagebinder.custom_ops.cpu import huge_pages
from pagebinder.custom_ops.cpu.huge_pages import (
    HUGE_PAGE_BYTES,
    MemoryAhead,
    advise_huge_pages,
    make_pages,
    move_to_huge_pages,
    read_whole,
    untouched_zeros,
)

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


@linux_only
def test_pages_are_made_and_keep_what_is_written_meanwhile():
    memory = untouched_zeros(9 * HUGE_PAGE_BYTES + 5)
    memory[::4096] = 3
    thread = make_pages(memory)
    memory[1::4096] = 4
    if thread is not None:  # an old kernel
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert memory[::4096].eq(3).all() and memory[1::4096].eq(4).all() and not memory[2::4096].any()


@linux_only
def test_no_pages_are_made_while_somebody_computes(monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *advice: asked.append(advice) or True)
    memory, idle = untouched_zeros(4 * HUGE_PAGE_BYTES), threading.Event()
    thread = make_pages(memory, idle)
    thread.join(timeout=0.05)
    assert thread.is_alive() and len(asked) == 1  # the first, before the thread
    idle.set()
    thread.join(timeout=60)
    assert len(asked) == 4


@linux_only
def test_a_thread_that_waits_ends_with_the_memory(monkeypatch):
    monkeypatch.setattr(huge_pages, "LOOK_AGAIN_SECONDS", 0.01)
    memory = untouched_zeros(4 * HUGE_PAGE_BYTES)
    thread = make_pages(memory, threading.Event())
    if thread is None:
        pytest.skip("pages are made when they are touched here")
    del memory
    thread.join(timeout=60)
    assert not thread.is_alive()


@linux_only
def test_no_pages_are_made_for_memory_that_nobody_has(monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *advice: asked.append(advice) or True)
    monkeypatch.setattr(huge_pages.threading.Thread, "start", lambda thread: None)
    thread = make_pages(untouched_zeros(4 * HUGE_PAGE_BYTES))
    thread.run()
    assert len(asked) == 1  # the first, before the thread


@linux_only
def test_memory_ahead_is_given_in_pieces_that_do_not_overlap():
    ahead = MemoryAhead(4 * HUGE_PAGE_BYTES)
    (first, second), is_huge = ahead.memory_for([HUGE_PAGE_BYTES + 1, 100])
    if not is_huge:
        pytest.skip("no huge pages here")
    weight = torch.full((HUGE_PAGE_BYTES,), 7, dtype=torch.uint8)
    values = weight.data_ptr()
    assert move_to_huge_pages([weight], ahead.memory_for) == HUGE_PAGE_BYTES and weight.data_ptr() != values
    too_much, _ = ahead.memory_for([4 * HUGE_PAGE_BYTES])  # from elsewhere
    for value, piece in enumerate((first, second, too_much[0])):
        piece.fill_(value)
    ahead.close()
    assert weight.eq(7).all() and all(p.eq(v).all() for v, p in enumerate((first, second, too_much[0])))
    begin = first.data_ptr()
    assert begin <= second.data_ptr() < weight.data_ptr() < begin + 4 * HUGE_PAGE_BYTES
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == weight.data_ptr() % 64 == 0
    assert ahead.memory_for([HUGE_PAGE_BYTES])[0][0].numel() == HUGE_PAGE_BYTES


def test_no_memory_ahead_where_there_is_none(monkeypatch):
    monkeypatch.setattr(huge_pages, "_available_bytes", lambda: 8 * 2**20)
    for ahead in (MemoryAhead(2**22 + 1), MemoryAhead(0)):
        assert ahead.memory_for([2**22 + 1]) == ([], False)
        ahead.close()


def test_what_all_graphs_take_rows_of_is_not_read_whole():
    table, shared, weight = (torch.ones(2) for _ in range(3))
    encoder = {"table": shared, "weight": weight}, ["table"]
    decoder = {"embed": table, "head": shared, "norm": weight}, ["embed"]
    assert [id(w) for w in read_whole([encoder, decoder])] == [id(weight), id(shared)]
