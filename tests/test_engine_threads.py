"""One engine used from several threads: they take turns, and each gets the tokens that it would get alone."""

from __future__ import annotations

import threading

import pytest

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.runtime.turns import Turns
from tests.helpers import tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")

CONFIG = EngineConfig(num_kv_blocks=24, max_num_seqs=3, check_integrity=True)
PROMPTS = [[(7 * i + j) % 128 for j in range(1 + 9 * i)] for i in range(6)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def compiled():
    return pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager"))


def in_threads(*works) -> None:
    """Run them at the same time; what one raises is raised here."""
    errors: list[BaseException] = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


def test_threads_generate_stream_and_search_on_one_engine(compiled):
    alone = [compiled.engine(CONFIG).generate([p], greedy(12))[0].token_ids for p in PROMPTS]
    best = compiled.engine(CONFIG).beam_search(PROMPTS[1], beam_width=2, max_tokens=5, ignore_eos=True)
    engine = compiled.engine(CONFIG)

    def generates():
        for _ in range(3):
            assert [o.token_ids for o in engine.generate(PROMPTS[:3], greedy(12))] == alone[:3]

    def streams():
        for _ in range(3):
            last = {o.request_id: o.token_ids for o in engine.stream(PROMPTS[3:], greedy(12))}
            assert sorted(last.values()) == sorted(alone[3:])
            for _ in engine.stream(PROMPTS[3:], greedy(12)):
                break  # left half-way

    def searches():
        for _ in range(3):
            found = engine.beam_search(PROMPTS[1], beam_width=2, max_tokens=5, ignore_eos=True)
            assert [beam.token_ids for beam in found] == [beam.token_ids for beam in best]

    in_threads(generates, streams, searches)
    assert not engine.has_unfinished
    assert engine.reset_prefix_cache()
    assert engine.stats().free_blocks == engine.stats().num_blocks - 1


def test_who_waits_comes_before_who_comes_again():
    turns, order, waiting = Turns(), [], threading.Event()

    def comes_again():
        with turns.taken():
            waiting.wait(60)
            while turns._next.acquire(blocking=False):
                turns._next.release()  # the other does not wait yet
            order.append("first")
        with turns.taken():
            order.append("again")

    def waits():
        waiting.set()
        with turns.taken():
            order.append("other")

    first = threading.Thread(target=comes_again, daemon=True)
    first.start()
    while turns._owner is None:
        pass
    in_threads(waits)
    first.join(60)
    assert order == ["first", "other", "again"]


def test_turns_nest_and_end_with_an_exception():
    turns = Turns()
    with pytest.raises(ValueError, match="inside"), turns.taken(), turns.taken():
        raise ValueError("inside")

    def takes():
        with turns.taken():
            pass

    in_threads(takes)
