"""Ctrl-C in the middle of a step: books stay whole, no output is lost."""

import signal
import threading
import time
import weakref

import pytest

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.collector import collector_paused
from pagebinder.interrupts import deferred_interrupts
from pagebinder.runtime.turns import Turns
from tests.helpers import tiny_llama


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_comes_at_the_end_of_the_outermost_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupts() as outer:
            with deferred_interrupts():
                interrupt()
                done.append("inner")
            assert outer.pending
            done.append("outer")
        done.append("behind")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with deferred_interrupts() as later:
        assert not later.pending


def test_an_interrupt_inside_the_collection_that_was_held_back_is_not_lost():
    """What is raised inside a weak reference's callback is: Python prints it and goes on."""

    class Cycle:
        def __init__(self):
            self.itself = self

    with pytest.raises(KeyboardInterrupt), collector_paused():
        garbage = Cycle()
        watch = weakref.ref(garbage, lambda _: interrupt())
        del garbage
    assert watch() is None


def test_handlers_of_all_signals_that_arrived_run_at_the_end_in_order():
    calls = []

    def fails(number, frame):
        calls.append(number)
        raise TimeoutError

    numbers = (signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM)
    handlers = (lambda number, _: calls.append(number), fails, lambda number, _: calls.append(number))
    before = [signal.signal(n, h) for n, h in zip(numbers, handlers)]
    try:
        for _ in range(2):  # handlers are what they were
            calls.clear()
            with pytest.raises(TimeoutError), deferred_interrupts():
                for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
                    signal.raise_signal(number)
                assert calls == []
            assert calls == [signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM]
            assert tuple(map(signal.getsignal, numbers)) == handlers
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def test_timers_of_profilers_are_not_deferred():
    calls = []
    before = signal.signal(signal.SIGPROF, lambda *_: calls.append(1))
    try:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGPROF)
            assert calls == [1]
    finally:
        signal.signal(signal.SIGPROF, before)


def test_blocks_of_another_thread_defer_nothing():
    with pytest.raises(KeyboardInterrupt):
        entered, over = threading.Event(), threading.Event()

        def other():
            with deferred_interrupts():
                entered.set()
                over.wait()

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        try:
            interrupt()
        finally:
            over.set()
            thread.join()
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_interrupt_of_the_main_thread_is_not_another_one_s():
    pending = []

    def other():
        with deferred_interrupts() as block:
            pending.append(block.pending)

    with pytest.raises(KeyboardInterrupt), deferred_interrupts() as mine:
        interrupt()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert mine.pending
    assert pending == [False]


def test_a_handler_that_is_not_python_s_stays():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupts() as block:
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            interrupt()
            assert not block.pending
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_inside_takes_the_handler_back():
    with pytest.raises(ZeroDivisionError), deferred_interrupts():
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_method_may_be_one_block():
    @deferred_interrupts()
    def work(n):
        interrupt()
        done.append(n)
        if n:
            work(n - 1)

    done = []
    with pytest.raises(KeyboardInterrupt):
        work(2)
    assert done == [2, 1, 0]


def test_a_turn_that_was_interrupted_is_free_again():
    turns = Turns()
    with pytest.raises(KeyboardInterrupt), turns.taken():
        with turns.taken():
            assert turns.is_mine()
        assert turns.is_mine()
        interrupt()
    taken = []

    def other():
        with turns.taken():
            taken.append(turns.is_mine())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(10)
    assert taken == [True] and not turns.is_mine()


def test_an_interrupt_while_one_waits_for_the_turn():
    """It comes as the turn does; who was interrupted gives it back."""
    turns, held, main = Turns(), threading.Event(), threading.get_ident()

    def other():
        with turns.taken():
            held.set()
            time.sleep(0.2)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)

    thread = threading.Thread(target=other)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        held.wait()
        with turns.taken():
            pytest.fail("the interrupt is older than the turn")
    thread.join(10)
    assert not thread.is_alive() and turns._owner is None


def test_outputs_of_an_interrupted_step_come_with_the_next_one(monkeypatch):
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager"))
    engine = compiled.engine(EngineConfig(num_kv_blocks=24, max_num_seqs=3, check_integrity=True))
    for i in range(2):
        engine.add_request(
            f"{i}", [3 + i, 5, 7], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        )
    real, seen, interrupts = engine.loop.advance, [], 0

    def advance():
        interrupt()
        return real()

    monkeypatch.setattr(engine.loop, "advance", advance)
    while engine.has_unfinished:
        try:
            seen += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts == 4:
                monkeypatch.undo()
    assert interrupts == 4
    finished = {output.request_id: output.token_ids for output in seen if output.finished}
    again = compiled.engine(EngineConfig(num_kv_blocks=24, max_num_seqs=3))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    whole = again.generate([[3, 5, 7], [4, 5, 7]], params)
    assert finished == {f"{i}": output.token_ids for i, output in enumerate(whole)}
    assert len(seen) == 8
