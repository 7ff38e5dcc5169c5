"""Loops of one's own over captured steps: what they are told of blocks, bad steps refused before anything runs."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from pagebinder import EngineConfig, SamplingParams, StepSequence
from pagebinder.errors import RequestError
from pagebinder.runtime.graphs import StepGraphs
from pagebinder.runtime.graphs.block_rules import uses
from tests.runtime.graphs.steps import memory, prompts

pytestmark = pytest.mark.usefixtures("captured_once")

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_loop.py"
BLOCKS, LEN, BLOCK = 40, 128, 16
LOOPS = ["llama", "windows", "mamba2", "qwen3 next"]


@pytest.fixture(scope="module")
def capture(compiled):
    made = {}

    def get(name: str) -> StepGraphs:
        if name not in made:
            made[name] = compiled(name).capture(
                num_kv_blocks=BLOCKS, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=LEN
            )
        return made[name]

    return get


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_loop"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def expected_tokens(model, given, count: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, temperature=0.0)
    return [o.token_ids for o in model.engine(EngineConfig(num_kv_blocks=64)).generate(given, params)]


def tables_for(graphs: StepGraphs, num_tokens: int, first: int = 1) -> list[list[int]]:
    """Blocks for all tokens of one sequence, from block `first` on."""
    free = iter(range(first, BLOCKS))
    return [[next(free) for _ in range(-(-num_tokens // g.block_size))] for g in graphs.plan.groups]


@pytest.mark.parametrize("name", LOOPS)
def test_the_example_gives_the_engines_tokens(name, compiled, capture, example):
    """More prompts than places, chunks, and blocks that are given back as soon as nothing needs them."""
    given = prompts(50, 3, 19, 33, 1)
    graphs = capture(name)
    memory(graphs).fill_(0)
    assert example.generate(graphs, BLOCKS, given, 12) == expected_tokens(compiled(name), given, 12)
    assert set(graphs.stats.replays) >= {"mixed 16", "decode 2"}


@pytest.mark.parametrize("name", LOOPS)
def test_entries_that_are_not_needed_are_not_looked_at(name, capture):
    """Their blocks may hold anything; of the others none may be missing."""
    graphs = capture(name)
    ids, tables = prompts(60)[0], tables_for(graphs, 60)
    for cut in (31, 32, 33, 47):
        memory(graphs).zero_()
        graphs.replay(graphs.pack([StepSequence(tokens=ids[:cut], start=0, blocks=tables)]))
        rest = StepSequence(tokens=ids[cut:], start=cut, blocks=tables)
        before = memory(graphs).clone()
        expected = graphs.replay(graphs.pack([rest])).clone()
        memory(graphs).copy_(before)
        needed = graphs.needed_entries(cut, 60)
        kept = [[b if i in entries else 0 for i, b in enumerate(t)] for t, entries in zip(tables, needed)]
        for freed in {b for t in tables for b in t} - {b for t in kept for b in t}:
            for cache in graphs.caches.values():
                cache[freed] = 100
        few = StepSequence(tokens=ids[cut:], start=cut, blocks=kept)
        torch.testing.assert_close(graphs.replay(graphs.pack([few])), expected)
        for g, entries in enumerate(needed):
            span = (np.array([cut]), np.array([60]))
            _, used, is_written = uses(graphs.plan.groups[g].spec, np.zeros((1, 0), np.int64), *span)
            assert is_written.any() and set(used[is_written].tolist()) <= set(entries)
            for entry in entries:
                missing = [list(table) for table in kept]
                missing[g][entry] = 0
                with pytest.raises(RequestError, match=rf"sequence 0: entry {entry} .* of group {g} is 0"):
                    graphs.replay(graphs.pack([StepSequence(tokens=ids[cut:], start=cut, blocks=missing)]))


@pytest.mark.parametrize("name", ["windows", "qwen3 next"])
def test_a_bad_sequence_takes_no_other_along(name, compiled, capture):
    """A step that is refused has changed nothing, recurrent states above all."""
    graphs = capture(name)
    ids, tables = prompts(20)[0], tables_for(graphs, 40)
    (expected,) = expected_tokens(compiled(name), [ids], 6)
    other = tables_for(graphs, 16, first=20)
    other[-1] = [0]
    tokens, done = list(ids), 0
    while len(tokens) < len(ids) + 6:
        one = StepSequence(tokens=tokens[done:], start=done, blocks=tables)
        bad = StepSequence(tokens=[5], start=1, blocks=other)
        for step in ([one, bad], [bad, one]):
            with pytest.raises(RequestError, match="is 0, the null block"):
                graphs.replay(graphs.pack(step))
        logits = graphs.replay(graphs.pack([one]))
        done = len(tokens)
        tokens.append(int(logits[0].argmax()))
    assert tokens[len(ids) :] == expected


@pytest.mark.parametrize("name", ["windows", "qwen3 next"])
def test_one_block_in_two_places_is_refused(name, capture):
    graphs = capture(name)
    ids, one, two = prompts(20)[0], tables_for(graphs, 20), tables_for(graphs, 20, first=20)

    def refused(first, second, message):
        step = [StepSequence(tokens=ids, start=0, blocks=blocks) for blocks in (first, second)]
        with pytest.raises(RequestError, match=message):
            graphs.replay(graphs.pack(step))

    for g in range(len(one)):
        shared = [list(table) for table in two]
        shared[g][-1] = one[g][-1]
        refused(one, shared, f"sequence 0's of group {g} and sequence 1's of group {g}")
    refused([one[0], one[0], *one[2:]], two, "sequence 0's of group 0 and sequence 0's of group 1")
    attention = next(g for g, group in enumerate(graphs.plan.groups) if "attention" in group.spec.kind)
    twice = [list(table) for table in one]
    twice[attention][1] = twice[attention][0]
    refused(twice, two, f"sequence 0's of group {attention} and sequence 0's of group {attention}")


def test_a_prefix_may_be_shared_and_a_fork_copies(compiled, capture):
    graphs = capture("llama")
    ids = prompts(20)[0]
    graphs.replay(graphs.pack([StepSequence(tokens=ids, start=0, blocks=[[1, 2]])]))
    graphs.copy_blocks([(2, 3)])
    sequences = [
        StepSequence(tokens=[token], start=20, blocks=[[1, last]]) for token, last in ((7, 2), (9, 3))
    ]
    logits = graphs.replay(graphs.pack(sequences)).clone()
    for row, token in enumerate((7, 9)):
        alone = StepSequence(tokens=[*ids, token], start=0, blocks=[[5, 6]])
        torch.testing.assert_close(graphs.replay(graphs.pack([alone]))[0], logits[row])
    for pairs in ([(1, 0)], [(1, BLOCKS)], [(-1, 2)], [(1, 3), (2, 3)], [1, 2], [("a", 2)], [(1.7, 2.2)], 5):
        with pytest.raises(RequestError, match="copy_blocks"):
            graphs.copy_blocks(pairs)
    graphs.copy_blocks([])


def test_logits_of_as_many_tokens_as_wanted(capture):
    graphs = capture("llama")
    ids = prompts(9, 5)
    one, two = ([[1]], [[2]])
    all_of_one = graphs.replay(
        graphs.pack([StepSequence(tokens=ids[0], start=0, blocks=one, num_logits=9)])
    ).clone()
    step = [
        StepSequence(tokens=ids[0], start=0, blocks=one, num_logits=2),
        StepSequence(tokens=ids[1], start=0, blocks=two, num_logits=0),
    ]
    torch.testing.assert_close(graphs.replay(graphs.pack(step)), all_of_one[-2:])
    nothing = StepSequence(tokens=ids[1], start=0, blocks=two, num_logits=0)
    for captured in (True, False):
        assert graphs.replay(graphs.pack([nothing]), captured=captured).shape == (0, 128)
    longer = StepSequence(
        tokens=prompts(40)[0], start=0, blocks=[[1, 2, 3]], num_logits=0
    )  # no bucket holds it
    assert graphs.replay(graphs.pack([longer])).shape == (0, 128)
    for wrong in (-1, 10, 1.5, True):
        with pytest.raises(RequestError, match=f"num_logits={wrong}: use 0 to 9"):
            graphs.pack([StepSequence(tokens=ids[0], start=0, blocks=one, num_logits=wrong)])


GOOD = {"tokens": [3, 4], "start": 0, "blocks": [[1]]}
BAD = {
    "not a list": (None, "pack takes a list of StepSequences, not None"),
    "one sequence": (StepSequence(**GOOD), "pack takes a list of StepSequences"),
    "no tokens": ([{"tokens": None}], "tokens are None: give a list of whole numbers"),
    "one token": ([{"tokens": 5}], "tokens are 5"),
    "rows of tokens": ([{"tokens": [[3, 4]]}], "tokens are"),
    "tokens on meta": ([{"tokens": torch.zeros(2, dtype=torch.int64, device="meta")}], "meta device"),
    "no blocks": ([{"blocks": None}], "blocks=None: give a list of block ids for each KV group"),
    "a flat table": ([{"blocks": [1]}], r"blocks\[0\] are 1: give a list"),
    "a wide block": ([{"blocks": [[2**40]]}], r"blocks\[0\] hold 1099511627776"),
    "a block of numpy": ([{"blocks": [np.array([2**32 + 3])]}], r"blocks\[0\] hold 4294967299"),
    "a negative start": ([{"start": -1}], "start=-1: use a whole number, at least 0"),
    "half a shift": ([{"shift": 0.9}], "shift=0.9: use a whole number"),
    "a shift of text": ([{"shift": "3"}], "shift='3'"),
    "a huge shift": ([{"shift": 2**63}], "shift=9223372036854775808"),
    "a shift too far": ([{"shift": 600}], "sequence 0: positions holds 600: use 0 to 511"),
    "a shift below 0": ([{"shift": -1}], "sequence 0: positions holds -1"),
    "the second token": ([{}, {"tokens": [3, 128], "blocks": [[2]]}], "sequence 1: input_ids holds 128"),
    "the second block": ([{}, {"blocks": [[BLOCKS]]}], "sequence 1: block_table_0 holds 40: use 0 to 39"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sequences(case, capture):
    graphs, (given, message) = capture("llama"), BAD[case]
    if isinstance(given, list):
        given = [StepSequence(**GOOD | change) for change in given]
    with pytest.raises(RequestError, match=message):
        graphs.replay(graphs.pack(given))
    assert graphs.replay(graphs.pack(StepSequence(**GOOD) for _ in range(1))).shape == (1, 128)


def test_bad_metadata(capture):
    graphs = capture("llama")
    good = graphs.pack([StepSequence(tokens=list(range(1, 21)), start=0, blocks=[[1, 2, 3]])])
    for change, message in (
        (
            {"seq_lens": np.array([33])},
            "slot_mapping_0 writes its token 13 to slot 16; by block_table_0 it is 29",
        ),
        ({"seq_lens": np.array([60])}, "more than the blocks of block_table_0 hold"),
        ({"block_table_0": np.array([[1, 0, 3]])}, "entry 1 .* is 0, the null block"),
        ({"seq_lens": np.array([2**32 + 20])}, "more than the blocks"),
        ({"positions": good["positions"][::-1]}, "positions go from 19 to 18"),
        ({"positions": good["positions"] + 1}, "positions are shifted behind images alone"),
        ({"positions": good["positions"] + 10**6}, "positions holds 1000000: use 0 to 511"),
        ({"positions": good["positions"] - 1}, "positions holds -1"),
        ({"slot_mapping_0": np.full(20, 7 * BLOCK)}, "token 0 to slot 112; by block_table_0 it is 16"),
        ({"slot_mapping_0": np.full(20, -1)}, "to slot -1"),
        ({"block_table_0": good["block_table_0"].astype(np.int64) + 2**32}, "block_table_0 holds 4294967297"),
        ({"query_start_loc": np.array([0, 20, 20])}, "has 3 entries and seq_lens 1"),
        ({"logits_rows": np.array([20])}, "logits_rows holds 20: use 0 to 19"),
        (
            {"input_ids": torch.zeros(20, dtype=torch.int64, device="meta")},
            "input_ids is a tensor on the meta",
        ),
        ({"input_ids": good["input_ids"][:19]}, "differ.*'input_ids': 19"),
        ({"input_ids": [object()]}, "input_ids must be 1-D"),
    ):
        with pytest.raises(RequestError, match=message):
            graphs.replay(good | change)
    for inputs in (None, [StepSequence(**GOOD)], 5):
        with pytest.raises(RequestError, match="metadata by name, as `pack` makes them"):
            graphs.replay(inputs)
    for option in ("captured", "check"):
        with pytest.raises(RequestError, match=f"{option}='no': use True or False"):
            graphs.replay(good, **{option: "no"})
    for span in ((0, 0), (5, 4), (-1, 4), (0.5, 4)):
        with pytest.raises(RequestError, match="needed_entries"):
            graphs.needed_entries(*span)
    checked = graphs.replay(good).clone()
    assert torch.equal(graphs.replay(good, check=False), checked)
    on_device = {name: torch.from_numpy(array) for name, array in good.items()}
    assert torch.equal(graphs.replay(on_device, check=False), checked)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals")
@pytest.mark.parametrize("captured", [True, False])
def test_a_step_whose_caller_was_interrupted_is_not_run_twice(captured, compiled, capture, monkeypatch):
    """A handler that raises takes the logits away; asked again, the step gives them and runs nothing."""
    graphs = capture("qwen3 next")
    ids, tables = prompts(20)[0], tables_for(graphs, 40)
    (expected,) = expected_tokens(compiled("qwen3 next"), [ids], 6)

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    run = graphs._run

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGUSR1)
        return run(*args)

    before = signal.signal(signal.SIGUSR1, stop)
    monkeypatch.setattr(graphs, "_run", interrupted)
    tokens, done = list(ids), 0
    try:
        while len(tokens) < len(ids) + 6:
            inputs = graphs.pack([StepSequence(tokens=tokens[done:], start=done, blocks=tables)])
            with pytest.raises(Stop):
                graphs.replay(inputs, captured=captured)
            logits = graphs.replay(inputs, captured=captured)
            done = len(tokens)
            tokens.append(int(logits[0].argmax()))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert tokens[len(ids) :] == expected


def test_two_threads_in_one_step_are_refused(capture, monkeypatch):
    graphs = capture("llama")
    inputs = graphs.pack([StepSequence(**GOOD)])
    entered, leave = threading.Event(), threading.Event()
    run = graphs._run

    def slow(*args):
        entered.set()
        assert leave.wait(30)
        return run(*args)

    monkeypatch.setattr(graphs, "_run", slow)
    thread = threading.Thread(target=graphs.replay, args=(inputs,))
    thread.start()
    assert entered.wait(30)
    for other in (lambda: graphs.replay(inputs), lambda: graphs.copy_blocks([(1, 2)])):
        with pytest.raises(RequestError, match="Another thread is in a step of these graphs"):
            other()
    leave.set()
    thread.join()
    assert graphs.replay(inputs).shape == (1, 128)
