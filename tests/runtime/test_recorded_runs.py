"""Runs of native programs that are replayed: the bits of those that are not, in memory that nobody else sees."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given, settings

import pagebinder
from pagebinder import EngineConfig, SamplingParams
from pagebinder.graph_tools import attribute
from pagebinder.models import tiny_path
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.executables import EagerExecutable, NativeExecutable
from pagebinder.runtime.executables.native import record_runs
from tests.helpers import by_day, tiny_llama
from tests.runtime.test_native_executable import (
    MODELS,
    Builder,
    chain,
    compiled,
    compiled_module,
    inputs_of,
    memory,
    random_graphs,
    uses,
)

pytestmark = pytest.mark.usefixtures("captured_once")

aten = torch.ops.aten
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    "name",
    by_day(MODELS, ["shipped, bf16", "llama", "llama, fp8 cache", "llama, int4", "qwen3_next", "mamba2"]),
)
@pytest.mark.parametrize("length", [1, 21])
def test_the_bits_of_eager(name, length):
    model = compiled(name)
    eager = EagerExecutable(model.graphs["fused"])
    inputs = inputs_of(model, length)
    native = NativeExecutable(model.graphs["fused"])
    generator = torch.Generator().manual_seed(1)
    with record_runs("always"):
        for _ in range(5):
            theirs = inputs_of(model, length)
            theirs["input_ids"].random_(4, model.source.vocab_size, generator=generator)
            inputs["input_ids"].copy_(theirs["input_ids"])
            memory(inputs).zero_()
            assert torch.equal(native.run(inputs), eager.run(theirs))
            assert torch.equal(memory(inputs), memory(theirs)) and memory(inputs).any()
    runs, replayed, recordings, _ = native.run_counts()
    assert runs == 5 * native.num_programs and 1 <= recordings <= native.num_programs
    # What a program takes of the one before it lies anywhere.
    assert replayed == 3 if native.num_programs == 1 else replayed >= 3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(random_graphs())
def test_random_graphs(module):
    """With inputs that change where they lie; results of all runs are looked at behind the last one."""
    native = NativeExecutable(module)
    a, b = torch.empty(4, 6), torch.empty(4, 6)
    ours, theirs = [], []
    with torch.inference_mode(), record_runs("always"):
        for run in range(5):
            values = [torch.linspace(-3, 3 + run, 24).view(4, 6), torch.linspace(1 - run, 2, 24).view(4, 6)]
            a.copy_(values[0]), b.copy_(values[1])
            ours.append([*native._with_programs(a, b), a.clone(), b.clone()])
            given = [value.clone() for value in values]
            theirs.append([*module(*given), *given])
    # What a graph returns of its inputs' memory is written anew by later runs, as it would be without recordings.
    of_inputs = [x.untyped_storage().data_ptr() for x in (a, b)]
    for got, expected in zip(ours, theirs, strict=True):
        for x, y in zip(got, expected, strict=True):
            assert x.dtype == y.dtype and x.stride() == y.stride()
            assert x.untyped_storage().data_ptr() in of_inputs or torch.equal(x, y)


def test_steps_of_an_engine_are_replayed_and_say_the_same():
    model = compiled("shipped, bf16")
    prompts = [[5, 6, 7], list(range(4, 60)), [9] * 20]

    def tokens(when: str, **options) -> list[list[int]]:
        with record_runs(when):
            engine = model.engine(EngineConfig(max_num_seqs=3, **options))
            return [output.token_ids for output in engine.generate(prompts, GREEDY)]

    plain = tokens("never")
    before = model.executable.run_counts()
    assert tokens("auto") == tokens("auto", max_num_batched_tokens=16) == plain
    after = model.executable.run_counts()
    assert after.replayed - before.replayed >= 8  # of 12 steps each
    assert tokens("auto", drafter="ngram") == plain and tokens("auto", capture="on") == plain


def test_inputs_that_lie_elsewhere_or_in_another_form_are_others():
    model = compiled("llama")
    native = NativeExecutable(model.graphs["fused"])
    expected = {n: native.run(inputs_of(model, n)) for n in (1, 7)}
    for _ in range(3):
        for n in (7, 1):
            inputs = inputs_of(model, n)  # other memory, mostly
            assert torch.equal(native.run(inputs), expected[n])
            inputs["input_ids"] = inputs["input_ids"].repeat_interleave(2)[::2]
            assert torch.equal(native.run(inputs), expected[n])


def test_results_belong_to_the_caller():
    model = compiled("llama")
    native = NativeExecutable(model.graphs["fused"])
    inputs = inputs_of(model, 5)
    kept = []
    for token in range(5, 11):
        inputs["input_ids"].fill_(token)
        result = native.run(inputs)
        kept.append((result, result.clone()))
    assert native.run_counts().replayed == 4
    assert len({result.data_ptr() for result, _ in kept}) == len(kept)
    assert all(torch.equal(result, as_it_was) for result, as_it_was in kept)


def test_weights_changed_in_place_are_followed():
    model = compiled_module(tiny_llama())
    native, inputs = model.executable, inputs_of(model, 1)
    for _ in range(4):
        before = native.run(inputs)
    fused = model.graphs["fused"]
    for node in fused.graph.nodes:
        if node.op == "get_attr" and "layernorm" in str(node.target):
            attribute(fused, node.target).data.mul_(1.5)
    after = native.run(inputs)
    assert native.run_counts().replayed >= 3
    assert not torch.equal(after, before)
    assert torch.equal(after, EagerExecutable(fused).run(inputs))


def test_weights_that_move_are_followed():
    """share_memory() takes a weight's memory elsewhere in place, as torch.multiprocessing does."""
    model = tiny_llama()
    native = compiled_module(model).executable
    inputs = inputs_of(compiled("llama"), 1)
    expected = [native.run(inputs) for _ in range(4)][-1]
    model.share_memory()
    junk = [torch.full_like(weight, 7.0) for weight in model.parameters() for _ in range(4)]
    assert torch.equal(native.run(inputs), expected) and junk
    assert native.run_counts().replayed == 2


OPERANDS_THEMSELVES = {
    "view": lambda b, x: b.call(aten._unsafe_view.default, x, [6, 4]),
    "dropout": lambda b, x: b.call(aten.dropout.default, x, 0.5, False),
    "type": lambda b, x: b.call(aten.type_as.default, x, b.values[1]),
}


@pytest.mark.parametrize("name", OPERANDS_THEMSELVES)
def test_a_result_that_is_an_operand_though_its_schema_does_not_say_so(name):
    builder = Builder()
    result = OPERANDS_THEMSELVES[name](builder, chain(builder, builder.values[0]))
    native = NativeExecutable(builder.module(result))
    a, b = torch.ones(4, 6), torch.ones(4, 6)
    with torch.inference_mode(), record_runs("always"):
        results = [native._with_programs(a.fill_(i), b)[0] for i in range(5)]
    assert all((result == i).all() for i, result in enumerate(results))
    assert native.run_counts() == (5, 0, 0, 0)


def test_memory_of_called_ops_counts():
    builder = Builder()
    x = chain(builder, builder.values[0])
    native = NativeExecutable(builder.module(builder.call(aten.mul.Tensor, x, builder.values[1])))
    a, b = torch.ones(4, 6), torch.ones(4, 6)
    with torch.inference_mode(), record_runs("always"):
        for _ in range(3):
            native._with_programs(a, b)
    assert native.run_counts() == (3, 1, 1, 5 * 24 * 4)


def test_an_error_in_a_replay_names_the_op_and_loses_nothing():
    model = compiled("llama")
    native, inputs = NativeExecutable(model.graphs["fused"]), inputs_of(model, 5)
    for _ in range(3):
        expected = native.run(inputs)
    slots = next(name for name in inputs if name.startswith("slot_mapping"))
    right, before = inputs[slots].clone(), uses(inputs)
    inputs[slots].add_(10**6)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="pagebinder_cpu::qk_norm_rope_write.*slot_mapping lies outside"
        ):
            native.run(inputs)
    assert uses(inputs) == before
    inputs[slots].copy_(right)
    assert torch.equal(native.run(inputs), expected)
    assert native.run_counts() == (6, 4, 1, native.run_counts().recorded_bytes)


def test_an_engine_that_is_gone_leaves_its_memory():
    model = compiled("shipped, bf16")
    engine = model.engine(EngineConfig(max_num_seqs=2))
    engine.generate([[5, 6, 7]], GREEDY)
    arena = next(x for x in gc.get_objects() if type(x) is KVArena)
    storage = arena.memory.untyped_storage()
    del engine, arena
    gc.collect()
    assert torch._C._storage_Use_Count(storage._cdata) <= 2  # the name here, and what it is made of


def test_the_oldest_recordings_go():
    builder = Builder()
    x = chain(builder, builder.values[0])
    native = NativeExecutable(builder.module(builder.call(aten.mul.Tensor, x, builder.values[1])))
    b = torch.ones(4, 6)
    inputs = [torch.full((4, 6), -float(i)) for i in range(40)]
    with torch.inference_mode(), record_runs("always"):
        for i, a in enumerate(inputs):
            for _ in range(3):
                assert (native._with_programs(a, b)[0] == i).all()
    assert native.run_counts() == (120, 40, 32, 32 * 5 * 24 * 4)


def test_many_keys_in_turns_are_left_alone():
    """More than there may be recordings of: each would push out one that is wanted next."""
    builder = Builder()
    x = chain(builder, builder.values[0])
    native = NativeExecutable(builder.module(builder.call(aten.mul.Tensor, x, builder.values[1])))
    inputs = [torch.ones(4, 6) for _ in range(50)]
    with torch.inference_mode(), record_runs("always"):
        for _ in range(4):
            for a in inputs:
                native._with_programs(a, inputs[0])
    assert native.run_counts() == (200, 0, 0, 0)


def test_what_is_hardly_launched_is_not_kept():
    builder = Builder()
    native = NativeExecutable(builder.module(chain(builder, builder.values[0], 20)))
    a, b = torch.ones(4, 6), torch.ones(4, 6)
    with torch.inference_mode():
        for _ in range(5):
            native._with_programs(a, b)
    assert native.run_counts() == (5, 0, 0, 0)


def test_threads_that_meet_compute_the_same():
    model = compiled("shipped, bf16")
    expected = [
        o.token_ids for o in model.engine(EngineConfig(max_num_seqs=1)).generate([[5, 6, 7]] * 3, GREEDY)
    ]
    found: dict[int, list] = {}

    def work(number: int) -> None:
        engine = model.engine(EngineConfig(max_num_seqs=1))
        found[number] = [o.token_ids for o in engine.generate([[5, 6, 7]] * 3, GREEDY)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [found[i] for i in range(3)] == [expected] * 3


def test_threads_of_another_number_are_others():
    model = pagebinder.compile_model(tiny_path())
    native, inputs = model.executable, inputs_of(model, 1)
    if not isinstance(native, NativeExecutable):
        pytest.skip("inductor runs it here")
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 1, 2, 1, 2):
            torch.set_num_threads(threads)
            results.append(native.run(inputs))
    finally:
        torch.set_num_threads(before)
    assert native.run_counts().recordings == 2
    assert all(torch.equal(result, results[0]) for result in results)


def test_words_for_when_are_checked():
    with pytest.raises(ValueError, match='not "sometimes"'), record_runs("sometimes"):
        pass
