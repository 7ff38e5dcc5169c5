"""The synthetic traces of the benchmarks: reproducible, and shaped as they say."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


traces = load("traces")


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    assert traces.generate_trace(3) == traces.generate_trace(3)
    assert traces.generate_trace(3) != traces.generate_trace(4)


@pytest.fixture(scope="module")
def trace():
    return traces.generate_trace(0)


def test_names_are_unique_and_everything_arrives_after_something_that_exists(trace):
    names = [request.name for request in trace]
    assert len(set(names)) == len(names)
    position = {name: i for i, name in enumerate(names)}
    for i, request in enumerate(trace):
        assert request.delay_steps >= 0
        assert request.after is None or position[request.after] < i
    assert {request.kind for request in trace} == {"chat", "document", "samples"}


def test_a_turn_contains_the_turn_before_and_its_answer(trace):
    by_name = {request.name: request for request in trace}
    turns = [request for request in trace if request.after is not None]
    assert len(turns) > 50
    for turn in turns:
        before = by_name[turn.after]
        history = before.prompt + before.answers[0]
        assert turn.prompt[: len(history)] == history
        assert len(turn.prompt) > len(history)


def test_chats_share_few_system_prompts_and_questions_share_documents(trace):
    first_turns = [r for r in trace if r.kind == "chat" and r.after is None]
    assert len({r.prompt[: traces.SYSTEM_PROMPT_TOKENS] for r in first_turns}) == 4
    assert len({r.prompt for r in first_turns}) == len(first_turns)
    documents = [r for r in trace if r.kind == "document"]
    assert len({r.prompt[:2000] for r in documents}) == 8 < len(documents)


def test_samples_are_different_answers_to_one_prompt(trace):
    for request in trace:
        wanted = (2, 6) if request.kind == "samples" else (1, 1)
        assert wanted[0] <= len(set(request.answers)) == len(request.answers) <= wanted[1]


def test_a_scaled_shape_has_more_of_the_same():
    shape = traces.TraceShape().scaled(0.25)
    assert (shape.num_chats, shape.num_documents, shape.num_sampled) == (12, 2, 3)
    assert shape.turns == traces.TraceShape().turns
    small = traces.generate_trace(0, shape)
    assert traces.longest(small) == max(len(r.prompt) + max(map(len, r.answers)) for r in small)
