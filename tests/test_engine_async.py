"""Steps prepared while one runs take the same tokens as steps one by one, whatever ends or waits in between."""

from __future__ import annotations

import dataclasses

import pytest

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import ConfigError
from pagebinder.runtime.engine import Engine
from tests import encoder_decoders
from tests.helpers import VOCAB_SIZE, tiny_llama, tiny_mistral
from tests.recurrent_models import bamba

pytestmark = pytest.mark.usefixtures("captured_once")

MODELS = {"llama": tiny_llama, "window": lambda: tiny_mistral(20), "recurrent": bamba}
OPTIONS = {
    "plain": {},
    "captured": {"capture": "on"},
    "chunks": {"max_num_batched_tokens": 8},
    "no room": {"num_kv_blocks": 14},
    "two seats": {"max_num_seqs": 2},
}


@pytest.fixture(scope="module", params=MODELS)
def compiled(request):
    config = CompileConfig(executable="eager", block_size=16, max_model_len=128)
    return pagebinder.compile_model(MODELS[request.param](), config)


@pytest.fixture(scope="module")
def llama():
    config = CompileConfig(executable="eager", block_size=16, max_model_len=128)
    return pagebinder.compile_model(tiny_llama(), config)


def engine_of(compiled, stepping, **options):
    defaults = {"num_kv_blocks": 80, "max_num_seqs": 8, "max_num_batched_tokens": 64, "check_integrity": True}
    return compiled.engine(EngineConfig(**defaults | options, async_stepping=stepping))


def with_common_ends(engine, tokens) -> Engine:
    """The same engine, but so many tokens end a text that most requests end early."""
    engine.model = engine.loop.model = dataclasses.replace(engine.model, eos_token_ids=frozenset(tokens))
    return engine


def requests():
    """Greedy and sampled ones, of several lengths; some of them make the host wait."""
    prompts = [[(7 * i + k) % (VOCAB_SIZE - 1) + 1 for i in range(3 + 9 * (k % 5))] for k in range(12)]
    kinds = [
        {"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "top_p": 0.9, "seed": 1},
        {"temperature": 0.0, "ignore_eos": True},
    ]  # fmt: skip
    return prompts, [SamplingParams(max_tokens=5 + 3 * (k % 6), **kinds[k % 4]) for k in range(12)]


def read(outputs):
    return [(o.token_ids, o.finish_reason, o.logprobs) for o in outputs]


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_those_of_steps_one_by_one(compiled, options):
    answers = {}
    for stepping in ("off", "on"):
        engine = with_common_ends(engine_of(compiled, stepping, **OPTIONS[options]), range(0, VOCAB_SIZE, 7))
        answers[stepping] = read(engine.generate(*requests()))
        stats = engine.stats()
        assert stats.free_blocks == stats.num_blocks - 1 and not stats.deferred_blocks
        assert (stats.ahead_steps > 10) == (stats.overshot_tokens > 0) == (stepping == "on")
    assert answers["on"] == answers["off"]
    assert {reason for _, reason, _ in answers["on"]} == {"stop", "length"}


def test_requests_that_need_their_token_first_make_steps_wait(llama):
    """Each of them beside a plain request, and all are what they are alone."""
    prompts, _ = requests()
    first = engine_of(llama, "off").generate(prompts[:1], SamplingParams(max_tokens=6, temperature=0.0))[0]
    kinds = [
        {"repetition_penalty": 1.4}, {"logprobs": 2}, {"stop_token_ids": (first.token_ids[2],)}, {"n": 3, "seed": 2},
    ]  # fmt: skip
    for kind in kinds:
        params = [
            SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **kind}),
            SamplingParams(max_tokens=30, seed=5),
        ]
        outputs = {}
        for stepping in ("off", "on"):
            engine = engine_of(llama, stepping)
            outputs[stepping] = read(engine.generate(prompts[:2], params))
        assert outputs["on"] == outputs["off"]
        stats = engine.stats()
        assert stats.waited_steps["a request needs its token first"] > 0
        assert stats.ahead_steps > 10, "alone, the plain request does not wait"


def test_samples_of_one_prompt_wait_for_their_first_token_only(llama):
    engine = engine_of(llama, "on")
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, n=3, seed=0))
    stats = engine.stats()
    assert stats.waited_steps == {"a request needs its token first": 1, "nothing can be computed yet": 1}
    assert stats.ahead_steps == 18


def test_every_step_hands_over_what_it_made(llama):
    engine = engine_of(llama, "on")
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0))
    lengths = []
    while engine.has_unfinished:
        lengths += [len(output.token_ids) for output in engine.step()]
    assert lengths == [1, 2, 3, 4]


def test_abort_fork_and_beams_while_a_step_is_in_flight(llama):
    params = SamplingParams(max_tokens=20, temperature=0.0)
    expected = {
        tuple(p): o.token_ids
        for p, o in zip(
            [[1, 2, 3], [9, 8, 7]], engine_of(llama, "off").generate([[1, 2, 3], [9, 8, 7]], params)
        )
    }
    beams = engine_of(llama, "off").beam_search([4, 5, 6], beam_width=3, max_tokens=6)
    engine = engine_of(llama, "on")
    engine.add_request("a", [1, 2, 3], params)
    engine.add_request("gone", [9, 8, 7], params)
    for _ in range(4):
        engine.step()
    gone = engine.abort("gone")
    assert gone.token_ids == expected[9, 8, 7][: len(gone.token_ids)] and len(gone.token_ids) == 4
    engine.fork("a", "b")
    found = engine.beam_search([4, 5, 6], beam_width=3, max_tokens=6)
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in beams]
    done = {}
    while engine.has_unfinished:
        done.update({o.request_id: o.token_ids for o in engine.step() if o.finished})
    assert done == {"a": expected[1, 2, 3], "b": expected[1, 2, 3]}
    engine.add_request("last", [9, 8, 7], params)
    engine.step()
    engine.abort("last")
    assert not engine.has_unfinished and engine.stats().kv_usage == 0.0 and engine.reset_prefix_cache()


def test_nan_of_one_request_is_told_by_its_name(llama):
    """Also of a step behind which the next one was launched."""
    engine, params = engine_of(llama, "on"), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for request_id in ("good", "poison"):
        engine.add_request(request_id, [1, 2, 3], params)
    for _ in range(3):
        engine.step()
    right, rows = engine.loop.model.executable, []

    class Broken:
        def run(self, inputs):
            logits = right.run(inputs).clone()
            logits[1] = float("nan") if len(logits) == 2 else logits[1:].squeeze(0)
            rows.append(len(logits))
            return logits

    engine.loop.model = dataclasses.replace(engine.loop.model, executable=Broken())
    with pytest.raises(FloatingPointError, match=r"\(request 'poison'; once that is aborted"):
        for _ in range(3):
            engine.step()
    assert rows[0] == 2


def test_nan_is_told_and_loses_nothing(llama):
    engine = engine_of(llama, "on")
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0))
    engine.step()
    right, calls = engine.loop.model.executable, []

    class Broken:
        def run(self, inputs):
            calls.append(1)
            return right.run(inputs) * float("nan")

    engine.loop.model = dataclasses.replace(engine.loop.model, executable=Broken())
    engine.step()  # the results of a step that ran before
    with pytest.raises(FloatingPointError, match="NaN"):
        engine.step()
    engine.loop.model = dataclasses.replace(engine.loop.model, executable=right)
    done = [output for _ in range(8) for output in engine.step()][-1]
    assert calls and done.token_ids == engine_of(llama, "off").generate(
        [[1, 2, 3]], SamplingParams(max_tokens=6, temperature=0.0)
    )[0].token_ids  # fmt: skip


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="async_stepping='maybe'"):
        EngineConfig(async_stepping="maybe")
    compiled = pagebinder.compile_model(
        encoder_decoders.tiny("bart", encoder_layers=1, decoder_layers=1), CompileConfig(executable="eager")
    )
    with pytest.raises(ConfigError, match="encoder"):
        compiled.engine(EngineConfig(async_stepping="on"))
