"""Texts that must look like something, and logits that requests change: against plain loops over the model itself."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import sys

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import pagebinder
from pagebinder import (
    Choice,
    CompileConfig,
    ConfigError,
    EngineConfig,
    Grammar,
    JsonSchema,
    Regex,
    RequestError,
    SamplingParams,
)
from pagebinder.models import tiny_path
from tests.helpers import VOCAB_SIZE, tiny_llama
from tests.test_engine_async import with_common_ends
from tests.test_speculation import Foretold

pytestmark = pytest.mark.usefixtures("captured_once")

PROMPT = [5, 6, 7, 8, 9, 5, 6]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "maximum": 999}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def compiled(model):
    return pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=16))


@pytest.fixture(scope="module")
def tiny():
    return pagebinder.compile_model(tiny_path(), CompileConfig(executable="eager", dtype="float32"))


def engine_of(compiled, **options):
    return compiled.engine(EngineConfig(**{"num_kv_blocks": 100, "check_integrity": True} | options))


def greedy(**options):
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, **options})


@torch.no_grad()
def one_by_one(model, prompt, params, eos=()):
    """Greedy tokens of the model on its own, with all that `params` changes written out once more."""
    tokens, p = list(prompt), params
    while len(tokens) - len(prompt) < p.max_tokens:
        output = tokens[len(prompt) :]
        x = model(torch.tensor([tokens])).logits[0, -1].float()
        if p.guide is not None:
            allowed = p.guide(output)
            dropped = [t for t in range(VOCAB_SIZE) if allowed is not None and t not in allowed]
            x[dropped] = float("-inf")
        for token, bias in p.logit_bias.items():
            x[token] += bias
        if len(output) < p.min_tokens:
            x[list({*eos, *p.stop_token_ids})] = float("-inf")
        for token in set(tokens):
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        for token in set(output):
            x[token] -= output.count(token) * p.frequency_penalty + p.presence_penalty
        tokens.append(int(x.argmax()))
        if tokens[-1] in {*eos, *p.stop_token_ids}:
            break
        if p.guide is not None and p.guide(tokens[len(prompt) :]) == []:
            break
    return tokens[len(prompt) :]


def odd_then_even(output):
    """Odd and even tokens in turns, sixteen of them."""
    return [t for t in range(VOCAB_SIZE) if t % 2 != len(output) % 2] if len(output) < 16 else []


CHANGES = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "both, negative": {"frequency_penalty": -0.2, "presence_penalty": -0.4},
    "all penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {3: 4.0, 17: -100.0, 40: 2.5}},
    "bias and repetition": {"logit_bias": {3: 6.0, 17: 5.0}, "repetition_penalty": 1.4},
    "minimum": {"min_tokens": 9},
    "minimum and stop": {"min_tokens": 12, "stop_token_ids": tuple(range(2, VOCAB_SIZE, 5))},
    "guide": {"guide": odd_then_even},
    "guide and all": {
        "guide": odd_then_even,
        "frequency_penalty": 0.5,
        "logit_bias": {4: 3.0},
        "min_tokens": 4,
    },
    "guide without end": {"guide": lambda output: None},
}
ENGINES = {
    "plain": {}, "chunks": {"max_num_batched_tokens": 5}, "no room": {"num_kv_blocks": 8},
    "captured": {"capture": "on"}, "asynchronous": {"async_stepping": "on"},
}  # fmt: skip


@pytest.mark.parametrize("options", ENGINES)
def test_changes_of_logits_are_what_they_say(model, compiled, options):
    ends = range(0, VOCAB_SIZE, 17)
    engine = with_common_ends(engine_of(compiled, **ENGINES[options]), ends)
    params = [greedy(**change) for change in CHANGES.values()] + [greedy()]
    prompts = [[(3 * i + k) % VOCAB_SIZE for i in range(4 + 3 * k)] for k in range(len(params))]
    expected = [one_by_one(model, prompt, p, ends) for prompt, p in zip(prompts, params)]
    assert [o.token_ids for o in engine.generate(prompts, params)] == expected


def test_every_change_changes_something(model):
    texts = [
        tuple(one_by_one(model, PROMPT, greedy(**change), range(0, VOCAB_SIZE, 5)))
        for change in CHANGES.values()
    ]
    plain = one_by_one(model, PROMPT, greedy(), range(0, VOCAB_SIZE, 5))
    endless = {tuple(one_by_one(model, PROMPT, greedy(**change))) for change in CHANGES.values()}
    assert (
        len(set(texts)) >= 6 and len(endless) >= 8 and len(plain) < len(texts[list(CHANGES).index("minimum")])
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("change", CHANGES)
def test_guessed_tokens_change_nothing(compiled, change, temperature):
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, logprobs=0, **CHANGES[change])
    ends = range(0, VOCAB_SIZE, 29)
    (expected,) = with_common_ends(engine_of(compiled), ends).generate([PROMPT], params)
    drafter = Foretold([PROMPT + expected.token_ids])
    engine = with_common_ends(engine_of(compiled, drafter=drafter, draft_budget=40), ends)
    (output,) = engine.generate([PROMPT], params)
    assert (output.token_ids, output.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert len(output.logprobs) == len(output.token_ids)
    if len(expected.token_ids) > 10:
        assert engine.stats().accepted_tokens > 3


def test_changes_do_not_touch_who_shares_the_batch(compiled):
    engine = engine_of(compiled)
    alone = engine.generate([PROMPT], greedy())[0].token_ids
    params = [greedy(), greedy(guide=odd_then_even), greedy(logit_bias={3: 50.0}), greedy()]
    outputs = engine.generate([PROMPT] * 4, params)
    assert outputs[0].token_ids == outputs[3].token_ids == alone
    assert set(outputs[2].token_ids) == {3}
    assert [t % 2 for t in outputs[1].token_ids] == [1, 0] * 8 and outputs[1].finish_reason == "stop"


def test_samples_of_one_prompt_are_guided_each_on_its_own(compiled):
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=2, n=4, guide=odd_then_even)
    outputs = engine_of(compiled).generate([PROMPT], params)
    assert len({tuple(o.token_ids) for o in outputs}) == 4
    assert all([t % 2 for t in o.token_ids] == [1, 0] * 8 for o in outputs)
    single = SamplingParams(max_tokens=20, temperature=1.5, seed=4, guide=odd_then_even)
    assert engine_of(compiled).generate([PROMPT], single)[0].token_ids == outputs[2].token_ids


def test_a_fork_goes_on_with_the_guide_or_with_another(compiled):
    def later(output):
        return None if len(output) < 5 else [50] if len(output) < 7 else [1, 2]

    engine = engine_of(compiled)
    engine.add_request("a", PROMPT, greedy(guide=odd_then_even))
    for _ in range(5):
        engine.step()
    engine.fork("a", "b")
    engine.fork("a", "c", greedy(guide=later))
    with pytest.raises(RequestError, match="does not admit the tokens that the request has already"):
        engine.fork("a", "d", greedy(guide=lambda output: [99]))
    done = {}
    while engine.has_unfinished:
        done |= {o.request_id: o.token_ids for o in engine.step()}
    assert done["a"] == done["b"] and len(done["a"]) == 16
    assert done["c"][5:7] == [50, 50] and set(done["c"][7:]) <= {1, 2}


ANSWERS = {
    "ids": lambda output: (7, 9), "a set": lambda output: {7, 9}, "numpy ids": lambda output: np.array([7, 9]),
    "a mask": lambda output: np.isin(np.arange(VOCAB_SIZE), (7, 9)),
    "a mask of torch": lambda output: torch.isin(torch.arange(VOCAB_SIZE), torch.tensor([7, 9])),
    "a list of bools": lambda output: [t in (7, 9) for t in range(VOCAB_SIZE)],
    "a range": lambda output: range(7, 10, 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_function_may_answer_in_many_forms(compiled, kind):
    tokens = engine_of(compiled).generate([PROMPT], greedy(max_tokens=9, guide=ANSWERS[kind]))[0].token_ids
    assert set(tokens) <= {7, 9} and len(tokens) == 9


ZEROS_AND_ONES = [int(t == 9) for t in range(VOCAB_SIZE)]


@pytest.mark.parametrize(
    "answer", [[VOCAB_SIZE], [-1], [1.5], "abc", 7, [[1]], np.zeros(5, bool), ZEROS_AND_ONES]
)
def test_an_answer_that_is_none_is_named(compiled, answer):
    engine = engine_of(compiled)
    with pytest.raises(RequestError, match=r"A guide answered .*: token ids from 0 to \d+ are wanted"):
        engine.generate([PROMPT], greedy(guide=lambda output: answer))
    assert not engine.has_unfinished
    engine.check_integrity()


def test_a_function_must_not_step_its_own_engine(compiled):
    """It would step for ever. Another engine is free to be asked."""
    expected = engine_of(compiled).generate([PROMPT], greedy(guide=odd_then_even))[0]
    engine, other, own = engine_of(compiled), engine_of(compiled), []

    def asks(output):
        if output and len(own) < 2:
            own.append(len(output))
            with pytest.raises(RequestError, match="in the middle of one"):
                engine.step()
            with pytest.raises(RequestError, match="in the middle of one"):
                engine.generate([PROMPT], greedy())
            assert other.generate([PROMPT], greedy())
        return odd_then_even(output)

    assert engine.generate([PROMPT], greedy(guide=asks))[0].token_ids == expected.token_ids and own
    engine.check_integrity()


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_function_that_raises_loses_nothing(compiled, drafter):
    expected = engine_of(compiled).generate([PROMPT], greedy(guide=odd_then_even, logprobs=1))[0]
    calls = []

    def sometimes(output):
        calls.append(len(output))
        if len(calls) % 3 == 0:
            raise KeyError("not now")
        return odd_then_even(output)

    engine = engine_of(compiled, drafter=drafter)
    engine.add_request("a", PROMPT, greedy(guide=sometimes, logprobs=1))
    failed, output = 0, None
    while engine.has_unfinished:
        try:
            output = next(iter(engine.step()), output)
        except KeyError:
            failed += 1
    assert failed > 3 and output.token_ids == expected.token_ids and output.finish_reason == "stop"
    assert [sorted(one) for one in output.logprobs] == [sorted(one) for one in expected.logprobs]


def test_a_guide_that_admits_nothing_is_refused(compiled):
    engine = engine_of(compiled)
    with pytest.raises(RequestError, match="admits no further token"):
        engine.add_request("a", PROMPT, greedy(guide=lambda output: []))
    assert not engine.has_unfinished


def test_log_probabilities_are_the_models_own(compiled):
    engine = engine_of(compiled)
    plain = engine.generate([PROMPT], greedy(max_tokens=1, logprobs=VOCAB_SIZE))[0].logprobs[0]
    biased = engine.generate([PROMPT], greedy(max_tokens=1, logprobs=VOCAB_SIZE, logit_bias={3: 50.0}))[0]
    assert biased.token_ids == [3] and biased.logprobs[0] == plain


# Texts


def tiny_with_bytes(add_prefix_space: bool, eos: str | None):
    """A random Llama with a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [] if eos is None else [eos]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["keys of a cache, name and number " * 3], trainer)
    model = tiny_llama(vocab_size=400, eos_token_id=None, bos_token_id=None)
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def deep_schema(depth: int) -> JsonSchema:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return JsonSchema(schema)


def texts(tiny, guide, **options):
    engine = engine_of(tiny)
    params = [
        SamplingParams(max_tokens=80, temperature=t, seed=s, guide=guide, **options)
        for t, s in ((0.0, 0), (0.7, 1), (1.0, 2), (1.3, 3))
    ]
    return engine.generate(["The open function"] * 4, params)


def test_regular_expressions_match_all_of_the_text(tiny):
    for output in texts(tiny, Regex("[0-9]{3}-[a-z]{2,9}(, é|!)")):
        assert output.finish_reason == "stop"
        assert re.fullmatch("[0-9]{3}-[a-z]{2,9}(, é|!)", output.text)


def test_json_is_of_its_schema(tiny):
    for output in texts(tiny, JsonSchema(SCHEMA)):
        if output.finish_reason == "stop":
            value = json.loads(output.text)
            assert list(value) == ["name", "n"] and isinstance(value["n"], int) and len(value["name"]) <= 8
        assert "\n\n" not in output.text  # white space has an end
    assert [o.finish_reason for o in texts(tiny, JsonSchema(SCHEMA))].count("stop") >= 2


def test_choices_are_made(tiny):
    options = ["yes", "no", "perhaps not, é"]
    params = SamplingParams(temperature=3.0, seed=1, n=16, guide=Choice(options))
    found = {output.text for output in engine_of(tiny).generate(["The open function"], params)}
    assert found <= set(options) and len(found) > 1


@pytest.mark.parametrize("grammar", ['start: "a" ("b" | "c")~2..5 "d"', 'root ::= "a" ("b" | "c"){2,5} "d"'])
def test_grammars_of_both_notations(tiny, grammar):
    assert all(re.fullmatch("a[bc]{2,5}d", output.text) for output in texts(tiny, Grammar(grammar)))


def test_guides_hold_whatever_the_engine_does(tiny):
    prompts = ["The open function", 'json: {"name": "x", "n": 1}\njson: ', "A file is a file is a"] * 2
    guides = [JsonSchema(SCHEMA), Regex("(abc, ){2,9}[0-9]+"), Choice(["a file", "no file"])] * 2
    params = [
        SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i, guide=g, presence_penalty=0.2)
        for i, g in enumerate(guides)
    ]
    expected = [(o.text, o.finish_reason) for o in engine_of(tiny).generate(prompts, params)]
    for options in (
        {"drafter": "ngram"},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 12},
        {"max_num_seqs": 2},
    ):
        engine = engine_of(tiny, **options)
        assert [(o.text, o.finish_reason) for o in engine.generate(prompts, params)] == expected
        if "drafter" in options:
            assert engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("drafter", ["guide", "ngram"])
def test_what_a_guide_forces_is_guessed(tiny, drafter):
    keys = {f"a long name {i}": {"type": "boolean"} for i in range(6)}
    schema = {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}
    guide = JsonSchema(schema, compact=True)
    params = greedy(max_tokens=150, guide=guide)
    (expected,) = engine_of(tiny).generate(["The open function"], params)
    assert list(json.loads(expected.text)) == list(keys) and ": " not in expected.text
    engine = engine_of(tiny, drafter=drafter)
    (output,) = engine.generate(["The open function"], params)
    assert (output.token_ids, output.finish_reason) == (expected.token_ids, "stop")
    assert engine.stats().accepted_tokens > len(output.token_ids) // 3
    assert engine.stats().steps < len(output.token_ids) * 0.7


def test_a_function_that_allows_one_token_forces_it(compiled):
    def thrice(output):
        """Each token of the model's choice is there three times."""
        return None if len(output) % 3 == 0 else [output[-1]]

    (expected,) = engine_of(compiled).generate([PROMPT], greedy(guide=thrice))
    engine = engine_of(compiled, drafter="guide")
    (output,) = engine.generate([PROMPT, PROMPT], [greedy(guide=thrice), greedy()])[:1]
    assert output.token_ids == expected.token_ids == [t for t in output.token_ids[::3] for _ in range(3)]
    assert engine.stats().accepted_tokens == engine.stats().drafted_tokens > 10


def test_json_from_a_class_of_pydantic(tiny):
    from pydantic import BaseModel

    class Answer(BaseModel):
        yes: bool

    outputs = [o for o in texts(tiny, JsonSchema(Answer)) if o.finish_reason == "stop"]
    assert outputs and all(isinstance(Answer.model_validate_json(o.text), Answer) for o in outputs)


def test_a_text_may_end_where_more_could_follow(tiny):
    """By the model's own end-of-sequence, which only a complete text allows."""
    params = greedy(guide=Regex("[0-9]+ [a-z]+"), logit_bias=dict.fromkeys(tiny.source.eos_token_ids, 100.0))
    (output,) = engine_of(tiny).generate(["The open function"], params)
    assert output.finish_reason == "stop" and re.fullmatch("[0-9]+ [a-z]+", output.text)
    (longer,) = engine_of(tiny).generate(["The open function"], SamplingParams(
        temperature=0.0, max_tokens=24, min_tokens=12, guide=params.guide, logit_bias=params.logit_bias
    ))  # fmt: skip
    assert len(longer.token_ids) >= 12


@pytest.mark.parametrize("drafter", [None, "guide"])
@pytest.mark.parametrize("told", ["tokenizer", "nobody"])
def test_without_an_end_of_sequence_a_text_ends_where_it_is_complete(tmp_path, told, drafter):
    model, tokenizer = tiny_with_bytes(
        add_prefix_space=told == "tokenizer", eos="<end>" if told == "tokenizer" else None
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = CompileConfig(executable="eager", device="cpu")
    engine = engine_of(pagebinder.compile_model(tmp_path, config), drafter=drafter)
    guides = [Choice(["yes", "no way", "A1"]), Regex("[0-9]{3}x"), JsonSchema(SCHEMA, compact=True)]
    for guide in guides:
        for output in engine.generate(["keys"], SamplingParams(max_tokens=300, seed=2, n=3, guide=guide)):
            if output.finish_reason == "length":
                continue
            assert output.finish_reason == "stop"
            if isinstance(guide, Choice):
                assert output.text in guide.options
            elif isinstance(guide, Regex):
                assert re.fullmatch(guide.pattern, output.text)
            else:
                assert list(json.loads(output.text)) == ["name", "n"]


def test_choices_may_be_many_and_of_any_characters(tiny):
    odd = ["a|b", "(c)*", "x/y", "\x7f", "é\n", "\U0001f600!", "[d]{2}", "^$", "#\"'\\\\", "a b"]
    for option in odd:
        (output,) = engine_of(tiny).generate(
            ["The"], greedy(max_tokens=40, guide=Choice([option, option + "?"]))
        )
        assert output.text in (option, option + "?") and output.finish_reason == "stop"
    many = Choice([f"option {i}" for i in range(10_000)])
    (output,) = engine_of(tiny).generate(["The"], greedy(max_tokens=40, guide=many))
    assert output.text in many.options


def test_a_function_is_named_by_its_request(compiled):
    engine = engine_of(compiled)
    engine.add_request("good", PROMPT, greedy())
    calls = []

    def breaks(output):
        calls.append(output)
        if len(output) > 2:
            raise KeyError("boom")

    engine.add_request("bad", PROMPT, greedy(guide=breaks))
    with pytest.raises(KeyError) as caught:
        while engine.has_unfinished:
            engine.step()
    assert (
        "in the guide of request 'bad'; once that is aborted, the others go on" in caught.value.__notes__[0]
    )
    engine.abort("bad")
    output = next(x for x in iter_finished(engine) if x.request_id == "good")
    assert output.finish_reason == "length"


def iter_finished(engine):
    while engine.has_unfinished:
        yield from (x for x in engine.step() if x.finished)


# Functions that abort requests


def aborting(engine, request_id, at, seen):
    """A guide that aborts a request when it is asked what follows `at` tokens, in the step that gives the last of
    them; `seen` gets what that returns."""

    def guide(output):
        if len(output) == at and not seen:
            seen.append(engine.abort(request_id))
            seen.append(engine.abort(request_id))

    return guide


def counts_of(engine):
    """By request what `step` returned: the number of tokens and the reason of the last output."""
    done = {}
    while engine.has_unfinished:
        done |= {o.request_id: (len(o.token_ids), o.finish_reason) for o in engine.step()}
    engine.check_integrity()
    assert engine.stats().free_blocks == engine.stats().num_blocks - 1 and not engine.live_requests
    return done


@pytest.mark.parametrize("drafter", [None, "guide", "foretold"])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("victim", ["other", "own"])
def test_a_function_may_abort_requests(compiled, victim, ends, drafter):
    """In the step in which a third one ends, and the victim, too, if `ends`."""
    (expected,) = engine_of(compiled).generate([PROMPT], greedy())
    told = Foretold([PROMPT + expected.token_ids]) if drafter == "foretold" else drafter
    engine, seen = engine_of(compiled, drafter=told, draft_budget=64), []
    guide = aborting(engine, victim, 2, seen)
    engine.add_request("other", PROMPT, greedy(max_tokens=3 if ends and victim == "other" else 20))
    engine.add_request("own", PROMPT, greedy(max_tokens=3 if ends and victim == "own" else 12, guide=guide))
    engine.add_request("third", PROMPT, greedy(max_tokens=3))
    done, (aborted, again) = counts_of(engine), seen
    assert done["third"] == (3, "length")
    rest = {"other": (20, "length"), "own": (12, "length")}
    assert {i: done[i] for i in rest if i != victim} == {i: rest[i] for i in rest if i != victim}
    assert again is None and (aborted.request_id, aborted.finish_reason) == (victim, "abort")
    assert aborted.token_ids == expected.token_ids[: aborted.num_tokens]
    assert done.get(victim, (0, None)) == (aborted.num_tokens, None)  # and nothing of its last step
    engine.add_request(victim, PROMPT, greedy(max_tokens=2))
    assert counts_of(engine) == {victim: (2, "length")}


@pytest.mark.parametrize("drafter", ["guide", "ngram"])
@pytest.mark.parametrize("victim", ["other", "own"])
def test_a_function_may_abort_requests_when_it_is_asked_for_guesses(compiled, victim, drafter):
    engine, while_choosing, seen = engine_of(compiled, drafter=drafter, draft_budget=64), [], []
    aborts = aborting(engine, victim, 2, seen)

    def forces(output):
        aborts(output)
        if len(output) == 2:
            while_choosing.append(engine.loop.is_choosing)
        return [7]

    engine.add_request("own", PROMPT, greedy(max_tokens=12, guide=forces))
    engine.add_request("other", PROMPT, greedy(max_tokens=20))
    done = counts_of(engine)
    assert while_choosing == [False] and (seen[0].finish_reason, seen[1]) == ("abort", None)
    left = {"other": (20, "length"), "own": (12, "length")}
    assert done == left | {victim: (seen[0].num_tokens, None)} and seen[0].num_tokens > 0


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("victim", ["x-0", "x-1", "x-2"])
def test_a_function_may_abort_samples_of_its_prompt(compiled, victim, at):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3)
    expected = [o.token_ids for o in engine_of(compiled).generate([PROMPT], params)]
    engine, seen, done = engine_of(compiled), [], {}
    aborts = aborting(engine, victim, at, seen)
    params = dataclasses.replace(params, guide=lambda ids: aborts(ids) if engine.live_requests else None)
    engine.add_request("x", PROMPT, params)
    while engine.has_unfinished:
        done |= {o.request_id: o.token_ids for o in engine.step() if o.finished}
    assert done == {f"x-{i}": expected[i] for i in range(3) if f"x-{i}" != victim}
    assert seen[0].token_ids == expected[int(victim[-1])][: max(at - 1, 0)]
    assert engine.stats().free_blocks == engine.stats().num_blocks - 1


def test_a_function_may_abort_samples_that_wait_for_their_prompt(compiled):
    engine, seen = engine_of(compiled, max_num_batched_tokens=8), []
    engine.add_request("a", PROMPT, greedy(guide=aborting(engine, "x-1", 2, seen)))
    engine.step()
    engine.add_request("x", list(range(40)), greedy(max_tokens=3, n=3))
    assert counts_of(engine) == {"a": (24, "length"), "x-0": (3, "length"), "x-2": (3, "length")}
    assert seen[0].token_ids == [] and seen[0].finish_reason == "abort"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [2, 9])
def test_whole_calls_end_whose_requests_a_function_aborts(compiled, max_tokens, n):
    engine = engine_of(compiled)

    def aborts_its_own(output):
        if len(output) == 2:
            for request_id in engine.live_requests:
                engine.abort(request_id)

    engine.add_request("by hand", PROMPT, greedy(max_tokens=9))
    params = greedy(max_tokens=max_tokens, n=n, guide=aborts_its_own)
    outputs = engine.generate([PROMPT], params)
    assert [(o.num_tokens, o.finish_reason) for o in outputs] == [(2, "abort")] * n
    assert [o.num_tokens for o in engine.step()] == [] and not engine.has_unfinished
    streamed = list(engine.stream([PROMPT], params))
    assert [o.num_tokens for o in streamed] == [1] * n and not engine.has_unfinished
    engine.check_integrity()


def test_a_call_that_a_function_closes_ends_with_the_step(compiled):
    """Its samples get their first tokens in this very step."""
    engine = engine_of(compiled)
    stream = engine.stream([PROMPT], greedy(max_tokens=9, n=3))

    def closes(output):
        if output:
            stream.close()

    def generates(output):
        if output:
            engine.generate([PROMPT], greedy(n=2))

    engine.add_request("a", PROMPT, greedy(max_tokens=4, guide=closes))
    assert counts_of(engine) == {"a": (4, "length")}
    engine.add_request("a", PROMPT, greedy(guide=generates))
    with pytest.raises(RequestError, match="must not generate with the engine that asks it"):
        engine.step()
    assert list(engine.live_requests) == ["a"] and engine.abort("a").num_tokens == 0


def test_what_a_function_aborted_is_gone_though_the_step_fails(compiled):
    engine = engine_of(compiled)

    def breaks(output):
        if len(output) == 2 and "x-0" in engine.live_requests:
            engine.abort("x-0")
            engine.abort("x-1")
            raise KeyError("boom")

    engine.add_request("a", PROMPT, greedy(max_tokens=5, guide=breaks))
    engine.step()
    engine.add_request("x", PROMPT, greedy(max_tokens=3, n=3))
    with pytest.raises(KeyError, match="boom"):
        engine.step()
    assert set(engine.live_requests) == {"a", "x-2"}
    assert counts_of(engine) == {"a": (5, "length"), "x-2": (3, "length")}


def test_the_text_of_what_is_aborted_in_a_step_stays_its_own(tiny):
    engine, seen = engine_of(tiny), []

    def reads(output):
        if len(output) == 3:
            seen.append(engine.abort("a"))
            seen.append(seen[0].text)

    params = greedy(max_tokens=8, stop=("nothing like it",), logprobs=1, guide=reads)
    engine.add_request("a", "The open", params)
    live = engine.live_requests["a"]
    assert counts_of(engine) == {"a": (2, None)}
    last, (aborted, text), decode = live.output(), seen, engine.model.tokenizer.decode
    assert (len(aborted.token_ids), len(aborted.logprobs), last.num_tokens) == (2, 2, 3)
    assert aborted.text == text == decode(aborted.token_ids) != last.text
    assert last.text == decode(last.token_ids) and last.finish_reason == "abort"


def test_a_function_may_abort_whom_a_fork_needs(compiled):
    engine = engine_of(compiled)
    engine.add_request("a", PROMPT, greedy())
    engine.step()

    def takes_the_name(output):
        if "b" not in engine.live_requests:
            engine.add_request("b", PROMPT, greedy(max_tokens=2))

    with pytest.raises(RequestError, match="'b' is already in use"):
        engine.fork("a", "b", greedy(guide=takes_the_name))
    with pytest.raises(RequestError, match="'a' is not in the engine"):
        engine.fork("a", "c", greedy(guide=lambda output: engine.abort("a") and None))
    assert counts_of(engine) == {"b": (2, "length")}

    def aborts_and_forks(output):
        if len(output) == 2:
            engine.abort("a")
            with pytest.raises(RequestError, match="'a' is not in the engine"):
                engine.fork("a", "b")

    engine.add_request("a", PROMPT, greedy(guide=aborts_and_forks))
    assert counts_of(engine) == {"a": (1, None)}


@pytest.mark.parametrize("which", [slice(0, 1), slice(None)])
def test_a_search_goes_on_without_beams_that_are_aborted(compiled, which):
    engine = engine_of(compiled)

    def aborts_beams(output):
        if len(output) == 2:
            for request_id in [i for i in engine.live_requests if i != "a"][which]:
                engine.abort(request_id)

    engine.add_request("a", PROMPT, greedy(max_tokens=4, guide=aborts_beams))
    beams = engine.beam_search(PROMPT, beam_width=3, max_tokens=6, ignore_eos=True)
    assert len(beams) == (0 if which == slice(None) else 3)
    assert counts_of(engine) == {"a": (4, "length")}


WRONG = {
    "nothing at all": (Regex(r"[^\s\S]"), "gave up|admits no"),
    "a schema of itself": (JsonSchema({"$ref": "#"}), "is wrong|gave up|admits no"),
    "a schema that is too deep": (deep_schema(300), r"The guide \(JsonSchema\) is wrong|gave up"),
    "a pattern": (Regex("(["), r"The guide \(Regex\) is wrong: .*unclosed"),
    "a schema": (JsonSchema({"type": "objekt"}), r"The guide \(JsonSchema\) is wrong: .*objekt"),
    "a schema that nothing fits": (JsonSchema({"enum": []}), r"The guide \(JsonSchema\) is wrong|admits no"),
    "a grammar": (Grammar("start: nothing"), r"The guide \(Grammar\) is wrong: .*nothing"),
    "a grammar without a beginning": (Grammar('other ::= "a"'), r"The guide \(Grammar\) is wrong: .*root"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_guide_that_is_wrong_is_refused(tiny, case):
    guide, message = WRONG[case]
    engine = engine_of(tiny)
    with pytest.raises(RequestError, match=message):
        engine.add_request("a", "The open function", greedy(guide=guide))
    assert not engine.has_unfinished


BAD = {
    "a huge bias": (lambda: SamplingParams(logit_bias={1: 1e39}), "token 1 is 1e.39: use -100.0 to 100.0"),
    "a dict": (lambda: SamplingParams(guide=SCHEMA), r"goes into JsonSchema\(\.\.\.\)"),
    "a class": (lambda: SamplingParams(guide=Regex), "give one of its objects"),
    "no number": (lambda: SamplingParams(logit_bias={1: "x"}), "logit_bias of token 1 is 'x'"),
    "no token": (lambda: SamplingParams(logit_bias={"a": 1}), "not for 'a'"),
    "a token of many digits": (lambda: SamplingParams(logit_bias={"1" * 5000: 1.0}), r"not for '1+\.\.\.\."),
    "a bias of many digits": (lambda: SamplingParams(logit_bias={1: 10**5000}), "token 1 is int of too many"),
    "infinite": (lambda: SamplingParams(logit_bias={1: float("inf")}), "token 1 is inf"),
    "no dict": (lambda: SamplingParams(logit_bias=[1]), "use a dict"),
    "frequency": (
        lambda: SamplingParams(frequency_penalty=1e9),
        "frequency_penalty=1000000000.0: use -100.0 to",
    ),
    "presence": (lambda: SamplingParams(presence_penalty=float("nan")), "presence_penalty=nan"),
    "minimum": (lambda: SamplingParams(min_tokens=-1), "min_tokens=-1"),
    "minimum above maximum": (lambda: SamplingParams(min_tokens=9, max_tokens=5), "more than max_tokens=5"),
    "no JSON": (lambda: JsonSchema("{"), "schema is no JSON"),
    "no schema": (lambda: JsonSchema([1]), "A JSON schema is an object"),
    "no switch": (lambda: JsonSchema(compact=1), "compact=1: use True or False"),
    "no pattern": (lambda: Regex(5), "regular expression is a text, not 5"),
    "no choices": (lambda: Choice([]), "choices are a list of texts"),
    "a text for choices": (lambda: Choice("abc"), "choices are a list of texts"),
    "an empty choice": (lambda: Choice(["a", ""]), "empty"),
    "half a character": (lambda: Grammar("\ud800"), "half of a surrogate pair"),
    "a huge pattern": (lambda: Regex("a" * (1 << 20) + "b"), "use 1,048,576 at most"),
}


def test_a_bias_cannot_be_changed_behind_a_request(compiled):
    given = {3: 5.0, "17": -100}
    params = greedy(logit_bias=given, seed=1)
    given[3] = given[99] = 1e9
    bias = params.logit_bias
    assert bias == {3: 5.0, 17: -100.0} and repr(bias) == "{3: 5.0, 17: -100.0}"
    for change in (
        lambda: bias.__setitem__(3, 1e9), lambda: bias.__delitem__(3), lambda: bias.update({3: 1e9}), bias.clear,
        lambda: bias.pop(3), bias.popitem, lambda: bias.setdefault(5, 1e9), lambda: bias.__ior__({3: 1e9}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="do not change"):
            change()
    same = (
        copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params)),
        dataclasses.replace(params, seed=1), SamplingParams(**dataclasses.asdict(params)),
    )  # fmt: skip
    for other in same:
        assert other == params and hash(other) == hash(params) and repr(other) == repr(params)
        with pytest.raises(TypeError, match="do not change"):
            other.logit_bias[3] = 1e9
    for other in (copy.copy(bias), copy.deepcopy(bias), pickle.loads(pickle.dumps(bias, protocol=2))):
        assert other == bias and type(other) is type(bias)
    assert json.loads(json.dumps(bias)) == {"3": 5.0, "17": -100.0} and bias | {5: 1.0} == {**bias, 5: 1.0}
    assert greedy(logit_bias={3: 4.0}) != params != dataclasses.replace(params, logit_bias=None)
    assert dataclasses.replace(params, logit_bias=None).logit_bias == SamplingParams().logit_bias == {}


@pytest.mark.parametrize("case", BAD)
def test_options_that_are_none_are_refused(case):
    make, message = BAD[case]
    with pytest.raises(RequestError, match=message):
        make()


def test_a_bias_is_for_tokens_of_the_vocabulary(compiled):
    engine = engine_of(compiled)
    with pytest.raises(RequestError, match=rf"logit_bias \[{VOCAB_SIZE}\] are outside the vocabulary"):
        engine.add_request("a", PROMPT, SamplingParams(logit_bias={VOCAB_SIZE: 1.0}))


def test_texts_are_guided_only_with_a_tokenizer_and_llguidance(compiled, tiny, monkeypatch):
    with pytest.raises(RequestError, match="has none: use a function"):
        engine_of(compiled).add_request("a", PROMPT, SamplingParams(guide=Regex("a+")))
    engine = engine_of(tiny)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'pagebinder\[guide\]'"):
        engine.add_request("a", PROMPT, SamplingParams(guide=Regex("a+")))


def test_a_grammar_is_compiled_once(tiny):
    engine = engine_of(tiny)
    guides = engine.guides
    first = guides.compiled(JsonSchema(SCHEMA))
    assert guides.compiled(JsonSchema(json.dumps(SCHEMA))) is first
    assert guides.compiled(JsonSchema()) is not first
    for i in range(80):
        guides.compiled(Regex(f"a{{{i + 1}}}"))
    assert len(guides._compiled) == 64


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(tiny):
    """What llguidance gives up is an error of that request; the others go on."""
    engine = engine_of(tiny)
    engine.add_request("a", "The open function", greedy(guide=Regex("[a-z ]{40,80}")))
    engine.add_request("b", "The open function", greedy())
    engine.step()
    guide = engine.live_requests["a"].guide
    guide._matcher.consume_token(
        engine.model.tokenizer("%")["input_ids"][-1]
    )  # an error from which it does not come back
    guide._taken = list(engine.live_requests["a"].request.output_token_ids)
    guide._note_error()
    done = {}
    while engine.has_unfinished:
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert done["a"].finish_reason == "error" and done["b"].finish_reason == "length"


@pytest.mark.parametrize("special", [False, True])
def test_texts_with_added_tokens_that_look_like_marks(special, tmp_path):
    """<think> is one token, special or not; a guide's text is spelt, and never in tokens that it refuses."""
    own = PreTrainedTokenizerFast.from_pretrained(str(tiny_path()))
    own.add_tokens(
        [AddedToken(mark, special=special, normalized=False) for mark in ("<think>", "<|the end|>")]
    )
    model = tiny_llama(vocab_size=len(own))
    model.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    engine = engine_of(pagebinder.compile_model(tmp_path, CompileConfig(executable="eager")))
    mark = own.convert_tokens_to_ids("<think>")
    for text in ("<think> a", "x <|the end|>"):
        if special:
            continue  # not spelt in texts: a grammar names them by their ids
        (output,) = engine.generate([PROMPT], greedy(guide=Choice([text])))
        assert (output.text, output.finish_reason) == (text, "stop")
    grammar = Grammar(f'start: <[{mark}]> "a"')
    (output,) = engine.generate([PROMPT], greedy(guide=grammar))
    assert output.token_ids[0] == mark and output.finish_reason == "stop"
