"""Guessed tokens change how many steps there are and nothing else, whatever the model keeps and whoever guesses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

import pagebinder
from pagebinder import CompileConfig, DraftRequest, EngineConfig, ModelDrafter, NgramDrafter, SamplingParams
from pagebinder.errors import ConfigError
from pagebinder.models import tiny_path
from tests import encoder_decoders
from tests.helpers import VOCAB_SIZE, tiny_gpt_oss, tiny_llama, tiny_mistral, tiny_qwen3_next
from tests.moe_models import tiny_deepseek_v3
from tests.recurrent_models import bamba
from tests.test_engine_async import with_common_ends
from tests.v4_models import v4_model

pytestmark = pytest.mark.usefixtures("captured_once")

# Of attention, of latents, of windows with sinks; recurrent state besides; what V4 compresses.
MODELS = {
    "llama": tiny_llama, "window": lambda: tiny_mistral(20), "gpt-oss": tiny_gpt_oss, "mla": tiny_deepseek_v3,
    "mamba": bamba, "delta net": tiny_qwen3_next, "v4": v4_model,
}  # fmt: skip
RECURRENT = {"mamba", "delta net", "v4"}
CPU_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
OPTIONS = {
    "plain": {}, "captured": {"capture": "on"}, "chunks": {"max_num_batched_tokens": 12},
    "two seats": {"max_num_seqs": 2}, "no room": {"num_kv_blocks": 40},
}  # fmt: skip


class Foretold:
    """Guesses what it was told will come, with errors."""

    def __init__(self, texts: Sequence[Sequence[int]], errors: float = 0.2) -> None:
        self.texts, self.errors, self.rng = [list(text) for text in texts], errors, random.Random(0)
        self.forgotten: list[str] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._one(list(request.token_ids), request.most) for request in requests]

    def forget(self, key: str) -> None:
        self.forgotten.append(key.split("/", 1)[1])

    def _one(self, tokens: list[int], most: int) -> list[int]:
        text = next((text for text in self.texts if text[: len(tokens)] == tokens), tokens)
        guesses = text[len(tokens) : len(tokens) + most]
        return [self.rng.randrange(VOCAB_SIZE) if self.rng.random() < self.errors else g for g in guesses]


@pytest.fixture(scope="module", params=MODELS)
def compiled(request):
    config = CompileConfig(executable="eager", max_model_len=256)
    compiled = pagebinder.compile_model(MODELS[request.param](), config)
    compiled.name = request.param
    return compiled


@pytest.fixture(scope="module")
def llama():
    config = CompileConfig(executable="eager", block_size=16, max_model_len=256)
    return pagebinder.compile_model(tiny_llama(), config)


@pytest.fixture(scope="module")
def tiny():
    return pagebinder.compile_model(tiny_path(), CompileConfig(dtype="float32"))


def engine_of(compiled, **options):
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "check_integrity": True, "draft_budget": 40}
    if "num_kv_blocks" not in options:
        defaults["kv_cache_bytes"] = 1 << 24
    return compiled.engine(EngineConfig(**defaults | options))


def requests():
    prompts = [[(7 * i + k) % (VOCAB_SIZE - 1) + 1 for i in range(3 + 9 * (k % 5))] for k in range(10)]
    kinds = [
        {"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "top_p": 0.9, "seed": 1},
        {"temperature": 0.0, "ignore_eos": True}, {"temperature": 0.0, "repetition_penalty": 1.3, "ignore_eos": True},
        {"temperature": 0.0, "logprobs": 2, "ignore_eos": True}, {"temperature": 0.8, "n": 2, "seed": 4},
        {"temperature": 0.0, "stop_token_ids": (3, 14, 25, 36), "ignore_eos": True},
    ]  # fmt: skip
    return prompts, [SamplingParams(max_tokens=6 + 5 * (k % 6), **kinds[k % 8]) for k in range(10)]


def read(outputs):
    return [(o.token_ids, o.finish_reason, o.logprobs and [p.keys() for p in o.logprobs]) for o in outputs]


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_those_of_steps_one_by_one(compiled, options):
    if options == "captured" and compiled.name not in ("llama", "mamba"):
        pytest.skip("two kinds of state are enough")
    if options == "no room" and compiled.name in RECURRENT | {"gpt-oss", "window"}:
        pytest.skip("their blocks are of another size; tests/runtime runs out of them")
    ends = range(0, VOCAB_SIZE, 17)
    expected = with_common_ends(engine_of(compiled), ends).generate(*requests())
    drafter = Foretold([o.prompt_token_ids + o.token_ids for o in expected])
    engine = with_common_ends(engine_of(compiled, drafter=drafter, **OPTIONS[options]), ends)
    outputs = engine.generate(*requests())
    assert read(outputs) == read(expected)
    assert {o.finish_reason for o in outputs} == {"stop", "length"}
    stats = engine.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > 15
    assert stats.free_blocks == stats.num_blocks - 1 and not stats.deferred_blocks
    assert {o.request_id for o in outputs} <= set(drafter.forgotten)
    if options == "captured":
        assert any(name.startswith("mixed") for name in stats.graph_replays)


def test_right_guesses_save_steps(compiled):
    prompt, params = [5, 6, 7, 8, 9], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    (expected,) = engine_of(compiled).generate([prompt], params)
    engine = engine_of(compiled, drafter=Foretold([prompt + expected.token_ids], errors=0.0))
    (output,) = engine.generate([prompt], params)
    assert output.token_ids == expected.token_ids
    # A token with the prompt, then 1 + 2, 1 + 4 and 1 + 7 until there are 40.
    assert engine.stats().steps == 1 + 1 + 1 + 4
    assert engine.stats().accepted_tokens == engine.stats().drafted_tokens


def test_wrong_guesses_cost_no_tokens(compiled):
    prompt, params = [5, 6, 7, 8, 9], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    (expected,) = engine_of(compiled).generate([prompt], params)
    wrong = [(token + 1) % VOCAB_SIZE for token in expected.token_ids]
    engine = engine_of(compiled, drafter=Foretold([prompt + wrong], errors=1.0))
    engine.loop.speculator.drafter._one = lambda tokens, most: wrong[len(tokens) - len(prompt) :][:most]
    (output,) = engine.generate([prompt], params)
    assert output.token_ids == expected.token_ids
    assert engine.stats().steps == 30 and engine.stats().accepted_tokens == 0


def test_requests_fork_and_end_between_guesses(compiled):
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    (expected,) = engine_of(compiled).generate([[1, 2, 3]], params)
    beams = engine_of(compiled).beam_search([4, 5, 6], beam_width=3, max_tokens=5)
    engine = engine_of(compiled, drafter=Foretold([[1, 2, 3, *expected.token_ids]], errors=0.3))
    engine.add_request("a", [1, 2, 3], params)
    engine.add_request("gone", [9, 8, 7], params)
    for _ in range(4):
        engine.step()
    assert engine.abort("gone").finish_reason == "abort"
    engine.fork("a", "b")
    found = engine.beam_search([4, 5, 6], beam_width=3, max_tokens=5)
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in beams]
    done = {}
    while engine.has_unfinished:
        done.update({o.request_id: o.token_ids for o in engine.step() if o.finished})
    assert done == {"a": expected.token_ids, "b": expected.token_ids}


def test_encoder_decoders():
    config = CompileConfig(executable="eager", max_model_len=100)
    compiled = pagebinder.compile_model(encoder_decoders.tiny("bart"), config)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    encoder_prompts = [[5, 9, 17, 33, 2], list(range(4, 40))]
    expected = engine_of(compiled).generate(encoder_prompts=encoder_prompts, params=params)
    engine = engine_of(compiled, drafter=Foretold([o.prompt_token_ids + o.token_ids for o in expected]))
    outputs = engine.generate(encoder_prompts=encoder_prompts, params=params)
    assert read(outputs) == read(expected)
    assert engine.stats().accepted_tokens > 10


@pytest.mark.skipif(
    "avx512_bf16" not in CPU_FLAGS, reason="other kernels sum few rows in another order than one"
)
@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int4_g32"}, {"kv_dtype": "fp8_e4m3"}, {"dtype": "float16"}]
)
def test_narrow_types_have_the_same_bits(options):
    """With the default budget: few rows are computed as each would be alone."""
    compiled = pagebinder.compile_model(tiny_path(), CompileConfig(**options))
    rng = random.Random(0)
    prompts = [[rng.randrange(3_000) for _ in range(length)] for length in (5, 100, 300, 40)]
    params = [
        SamplingParams(max_tokens=40, temperature=t, seed=i, ignore_eos=True)
        for i, t in enumerate((0.0, 0.9) * 2)
    ]
    limits = {"num_kv_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 512, "draft_budget": None}
    expected = engine_of(compiled, **limits).generate(prompts, params)
    drafter = Foretold([o.prompt_token_ids + o.token_ids for o in expected])
    engine = engine_of(compiled, drafter=drafter, **limits)
    assert read(engine.generate(prompts, params)) == read(expected)
    assert engine.stats().accepted_tokens > 40


# Texts of the shipped model


def test_prompt_lookup_and_stop_strings(tiny):
    """Text that repeats itself, ended inside guesses; streamed in pieces."""
    prompt = "The open function returns a file object. The open function returns a file"
    for params in (
        SamplingParams(max_tokens=40, temperature=0.0),
        SamplingParams(max_tokens=40, temperature=0.0, stop=(" the", "ile ob"), logprobs=0),
        SamplingParams(max_tokens=40, temperature=0.6, seed=2, stop=("s a",), n=2),
    ):
        expected = engine_of(tiny).generate([prompt], params)
        engine = engine_of(tiny, drafter="ngram")
        seen: dict[str, str] = {}
        for output in engine.stream([prompt], params):
            before = seen.get(output.request_id, "")
            assert output.text.startswith(before)
            assert len(output.text_offsets) == len(output.token_ids)
            seen[output.request_id] = output.text
            if output.finished:
                assert output.token_ids in [o.token_ids for o in expected]
        assert sorted(seen.values()) == sorted(o.text for o in expected)
        assert engine.stats().drafted_tokens > 0


def test_the_same_model_in_4_bits_guesses(tiny):
    """Requests come and go, some are longer than the drafter's cache holds, and its pool is small."""
    cheap = pagebinder.compile_model(tiny_path(), CompileConfig(quantization="int4_g32"))
    prompts = [f"The {word} function" for word in ("open", "print", "map", "len", "zip")] + ["A module " * 60]
    params = [SamplingParams(max_tokens=20 + 5 * i, temperature=0.0) for i in range(6)]
    expected = engine_of(tiny, max_num_batched_tokens=512).generate(prompts, params)
    small = EngineConfig(prefix_caching=False, num_kv_blocks=12, max_num_seqs=3, check_integrity=True)
    for config in (None, small):
        drafter = ModelDrafter(cheap, config)
        engine = engine_of(tiny, drafter=drafter, max_num_batched_tokens=512)
        assert read(engine.generate(prompts, params)) == read(expected)
        stats = engine.stats()
        assert stats.accepted_tokens > 0.6 * stats.drafted_tokens > 50
        assert stats.steps < 30 and not drafter.engine.has_unfinished
        assert drafter.engine.stats().free_blocks == drafter.engine.stats().num_blocks - 1
    assert drafter.engine.stats().preemptions > 0


def test_a_request_that_the_drafter_cannot_hold_has_no_guesses(tiny):
    cheap = pagebinder.compile_model(tiny_path(), CompileConfig(max_model_len=64))
    params = SamplingParams(max_tokens=30, temperature=0.0)
    prompts = ["The open function", "A module " * 60, "The print function is used in the way " * 3]
    expected = engine_of(tiny, max_num_batched_tokens=512).generate(prompts, params)
    drafter = ModelDrafter(cheap, EngineConfig(prefix_caching=False))
    engine = engine_of(tiny, drafter=drafter, max_num_batched_tokens=512)
    assert read(engine.generate(prompts, params)) == read(expected)
    assert engine.stats().accepted_tokens > 0


# Guessing


def guess(drafter, tokens, most=4):
    return drafter.propose([DraftRequest("0/a", "a", tokens, most, 100)])[0]


def test_the_longest_n_gram_at_its_last_place():
    drafter = NgramDrafter(longest=3, shortest=2)
    assert guess(drafter, [1, 2, 3]) == []
    assert guess(drafter, [1, 2, 3, 9, 2, 3, 7, 1, 2, 3]) == [9, 2, 3, 7], "three tokens rather than two"
    assert guess(NgramDrafter(longest=2), [5, 6, 1, 5, 6, 2, 5, 6]) == [2, 5, 6, 2], (
        "the last place, again and again"
    )
    assert guess(NgramDrafter(longest=2), [4, 4, 4]) == [4, 4, 4, 4]


def test_an_index_grows_with_its_request_and_goes_with_it():
    drafter, tokens = NgramDrafter(shortest=2), [1, 2, 3]
    assert guess(drafter, tokens) == []
    tokens += [8, 1, 2]
    assert guess(drafter, tokens, most=2) == [3, 8]
    assert guess(drafter, [1, 2]) == [], "the key is another request's now"
    drafter.forget("0/a")
    drafter.forget("never seen")
    assert not drafter._indices


def test_guesses_fit_the_budget_and_the_limit(llama):
    """Three requests, of which one may take one more token: it is given no guess. Others share what is left."""
    asked: list[list[DraftRequest]] = []

    class Asked(Foretold):
        def propose(self, requests):
            asked.append(list(requests))
            return [[1] * request.most for request in requests]

    engine = engine_of(llama, drafter=Asked([]), draft_budget=6, prefix_caching=False)
    for name, max_tokens in (("a", 9), ("b", 9), ("short", 2)):
        engine.add_request(
            name, [1, 2, 3], SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        )
    engine.step()
    assert not asked, "prompts are computed alone"
    engine.step()
    assert [(ask.request_id, ask.most) for ask in asked[0]] == [("a", 1), ("b", 1)]


def test_what_a_drafter_may_not_do(llama):
    class Wrong:
        def __init__(self, answer):
            self.answer = answer

        def propose(self, requests):
            return self.answer

        def forget(self, key):
            pass

    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    (expected,) = engine_of(llama).generate([[1, 2, 3]], params)
    for answer, message in (
        ([], "answered"), (None, "answered None"), ([[VOCAB_SIZE]], "guessed"), ([[-1]], "whole numbers"),
        ([[1.5]], "whole numbers"), ([None], "guessed None"), (["ab"], "guessed 'ab'"),
    ):  # fmt: skip
        engine = engine_of(llama, drafter=Wrong(answer))
        with pytest.raises(ValueError, match=message):
            engine.generate([[1, 2, 3]], params)
        engine.loop.speculator.drafter = Wrong([[]])
        assert engine.generate([[1, 2, 3]], params)[0].token_ids == expected.token_ids


@pytest.mark.parametrize("kept", [False, True])
def test_a_drafter_may_abort_requests(llama, kept):
    class Aborting(Foretold):
        def propose(self, requests):
            for request in requests:
                if request.token_ids[0] == 1:
                    engine.abort(request.request_id)
            return [[5] for _ in requests]

    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6]] if kept else [[1, 2, 3]]
    expected = [o.token_ids for o in engine_of(llama).generate(prompts, params)]
    engine = engine_of(llama, drafter=Aborting([]))
    first, *others = engine.generate(prompts, params)
    assert (first.finish_reason, first.token_ids) == ("abort", expected[0][: first.num_tokens])
    assert [o.token_ids for o in others] == expected[1:] and 0 < first.num_tokens < 6
    engine.add_request("x", [1, 2], params)
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    assert engine.stats().free_blocks == engine.stats().num_blocks - 1


def test_a_drafter_that_fails_loses_nothing(llama):
    """In `propose` the step is repeated; in `forget` the books are done before it is told."""

    class Failing(Foretold):
        fails = True

        def propose(self, requests):
            if self.rng.random() < 0.5:
                raise KeyError("propose broke")
            return super().propose(requests)

        def forget(self, key):
            if self.fails:
                raise KeyError("forget broke")

    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    expected = engine_of(llama).generate(prompts, params)
    drafter = Failing([o.prompt_token_ids + o.token_ids for o in expected])
    engine = engine_of(llama, drafter=drafter)
    for name, prompt in zip("ab", prompts):
        engine.add_request(name, prompt, params)
    engine.add_request("gone", [9, 9, 9], params)
    with pytest.raises(KeyError, match="forget broke"):
        engine.abort("gone")
    assert engine.abort("gone") is None
    done, errors = {}, 0
    while engine.has_unfinished:
        try:
            done.update({o.request_id: o.token_ids for o in engine.step() if o.finished})
        except KeyError:
            errors += 1
    assert list(done.values()) == [o.token_ids for o in expected] and errors > 2
    assert engine.stats().free_blocks == engine.stats().num_blocks - 1


def test_a_failed_choice_leaves_texts_as_they_were(tiny, monkeypatch):
    """NaN behind a guess is of no interest yet; else the step is repeated, and nothing is decoded twice."""
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=("zzzz",), logprobs=0, ignore_eos=True)
    prompt = "The open function returns a file object. The open function returns a file"
    (expected,) = engine_of(tiny).generate([prompt], params)
    from pagebinder.runtime import step_tokens
    from pagebinder.runtime.speculation import verification

    calls = {"all": 0}

    def now_and_then(function):
        def inner(*args):
            calls["all"] += 1
            if calls["all"] % 3 == 0:
                raise FloatingPointError("the model returned NaN logits")
            return function(*args)

        return inner

    monkeypatch.setattr(step_tokens, "draw", now_and_then(step_tokens.draw))
    monkeypatch.setattr(verification, "draw", now_and_then(verification.draw))
    monkeypatch.setattr(verification, "greedy", now_and_then(verification.greedy))
    engine = engine_of(tiny, drafter="ngram")
    engine.add_request("a", prompt, params)
    last, errors = None, 0
    while engine.has_unfinished:
        try:
            last = (engine.step() or [last])[-1]
        except FloatingPointError:
            errors += 1
    assert errors > 0 and (last.token_ids, last.text) == (expected.token_ids, expected.text)
    assert len(last.logprobs) == len(expected.logprobs)


def test_engines_may_share_a_drafter(llama):
    """Both call their first request request-0."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(1, 60))]
    expected = engine_of(llama).generate(prompts, params)
    for drafter in (ModelDrafter(llama), NgramDrafter(shortest=1)):
        engines = [engine_of(llama, drafter=drafter) for _ in prompts]
        streams = [engine.stream([prompt], params) for engine, prompt in zip(engines, prompts)]
        last = [None, None]
        while True:
            outputs = [next(stream, None) for stream in streams]
            last = [output or before for output, before in zip(outputs, last)]
            if not any(outputs):
                break
        assert [o.token_ids for o in last] == [o.token_ids for o in expected]


def test_beams_keep_their_logits_while_graphs_are_replayed(llama):
    """More beams than seats: some are held while steps of others write over the captured graph's logits."""
    options = {"max_num_seqs": 1, "prefix_caching": False}
    expected = engine_of(llama, **options).beam_search([1, 2, 3, 4, 5, 6], beam_width=3, max_tokens=5)
    found = engine_of(llama, capture="on", **options).beam_search(
        [1, 2, 3, 4, 5, 6], beam_width=3, max_tokens=5
    )
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in expected]


def test_bad_options(llama, tiny):
    for options, message in (
        ({"drafter": "ngrams"}, 'use "ngram"'), ({"drafter": 3}, "propose and forget"),
        ({"drafter": "ngram", "max_draft_tokens": 0}, "max_draft_tokens"),
        ({"drafter": "ngram", "draft_budget": 1}, "draft_budget"),
        ({"drafter": "ngram", "async_stepping": "on"}, "async_stepping"),
        ({"drafter": ModelDrafter(tiny)}, "the same"), ({"drafter": tiny}, r"ModelDrafter\(compiled\)"),
        ({"drafter": NgramDrafter}, "propose and forget"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            llama.engine(EngineConfig(**options))
    for sizes in ({"longest": 1}, {"shortest": 0}, {"longest": 2.5}):
        with pytest.raises(ConfigError, match="n-grams"):
            NgramDrafter(**sizes)
    with pytest.raises(ConfigError, match="prefix_caching=False"):
        ModelDrafter(llama, EngineConfig())
    with pytest.raises(ConfigError, match="swap_bytes"):
        ModelDrafter(llama, EngineConfig(prefix_caching=False, swap_bytes=1 << 20))
    with pytest.raises(ConfigError, match="an EngineConfig"):
        ModelDrafter(llama, "small")
    with pytest.raises(ConfigError, match="compile_model"):
        ModelDrafter("a model")
    mamba = pagebinder.compile_model(bamba(), CompileConfig(executable="eager", max_model_len=64))
    with pytest.raises(ConfigError, match="attention alone"):
        ModelDrafter(mamba)
