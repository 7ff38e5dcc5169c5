"""Requests that start as copies of others: n samples, `fork`, beam search. Token for token what they are alone."""

from __future__ import annotations

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import CacheCapacityError, RequestError
from tests.helpers import VOCAB_SIZE, tiny_llama, tiny_mistral

pytestmark = pytest.mark.usefixtures("captured_once")

MODELS = {"llama": tiny_llama, "mistral-window": lambda: tiny_mistral(20)}


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    model = MODELS[request.param]()
    return model, pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=16))


def make_engine(pair, **options):
    return pair[1].engine(EngineConfig(**{"num_kv_blocks": 100, "check_integrity": True, **options}))


def greedy(**options):
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, **options})


def drain(engine) -> dict[str, list[int]]:
    done = {}
    while engine.has_unfinished:
        done.update({o.request_id: o.token_ids for o in engine.step() if o.finished})
    return done


def oracle(model, tokens: list[int], count: int) -> list[int]:
    with torch.no_grad():
        return model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)[
            0, len(tokens) :
        ].tolist()


PROMPT = [(7 * i) % VOCAB_SIZE for i in range(37)]


# n samples of one prompt


def test_n_samples_compute_the_prompt_once_and_are_those_of_single_requests(pair):
    engine = make_engine(pair, prefix_caching=False)
    outputs = engine.generate([PROMPT], SamplingParams(max_tokens=20, n=4, seed=11))
    stats = engine.stats()
    assert stats.scheduled_tokens == len(PROMPT) + 4 * 19
    assert stats.forks == 3 and stats.copies == 3  # the block that the prompt ends in, for all but one
    singles = [
        make_engine(pair).generate([PROMPT], SamplingParams(max_tokens=20, seed=11 + i))[0] for i in range(4)
    ]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in singles]
    assert stats.free_blocks == stats.num_blocks - 1 and stats.finished_requests == 4


@pytest.mark.parametrize(
    "options", [{"num_kv_blocks": 9}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 5}]
)
def test_n_samples_are_the_same_under_pressure(pair, options):
    params = SamplingParams(max_tokens=20, n=4, seed=3, logprobs=2)
    free = make_engine(pair).generate([PROMPT[:30]], params)
    tight = make_engine(pair, **options).generate([PROMPT[:30]], params)
    assert [o.token_ids for o in tight] == [o.token_ids for o in free]
    assert [[list(p) for p in o.logprobs] for o in tight] == [[list(p) for p in o.logprobs] for o in free]


def test_n_samples_of_one_token_end_at_once(pair):
    engine = make_engine(pair)
    outputs = engine.generate([PROMPT], SamplingParams(max_tokens=1, n=3, seed=1))
    assert [(len(o.token_ids), o.finish_reason) for o in outputs] == [(1, "length")] * 3
    assert not engine.has_unfinished


def test_streaming_n_samples_keeps_their_order(pair):
    seen: dict[str, list[int]] = {}
    for output in make_engine(pair).stream([PROMPT], SamplingParams(max_tokens=3, n=3, seed=1)):
        seen.setdefault(output.request_id, []).append(len(output.token_ids))
    assert [i.rsplit("-", 1)[1] for i in seen] == ["0", "1", "2"]
    assert list(seen.values()) == [[1, 2, 3]] * 3


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_sample_can_be_aborted_before_and_after_the_fork(pair, victim, steps):
    engine = make_engine(pair, max_num_batched_tokens=20)  # the prompt takes two steps
    expected = make_engine(pair).generate([PROMPT], SamplingParams(max_tokens=9, n=3, seed=5))
    engine.add_request("x", PROMPT, SamplingParams(max_tokens=9, n=3, seed=5))
    for _ in range(steps):
        engine.step()
    aborted = engine.abort(f"x-{victim}")
    assert aborted.finish_reason == "abort" and (steps < 2) == (aborted.token_ids == [])
    done = drain(engine)
    assert done == {f"x-{i}": expected[i].token_ids for i in range(3) if i != victim}
    assert engine.stats().free_blocks == engine.stats().num_blocks - 1


def test_all_samples_can_be_aborted_before_the_fork(pair):
    engine = make_engine(pair)
    for name in engine.add_request("x", PROMPT, SamplingParams(n=3)):
        engine.abort(name)
    assert not engine.has_unfinished


# Forks


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 12])
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 8, "max_num_seqs": 2}])
def test_a_fork_continues_like_its_parent(pair, steps, options):
    engine = make_engine(pair, max_num_batched_tokens=20, **options)
    engine.add_request("a", PROMPT, greedy())
    for _ in range(steps):
        engine.step()
    engine.fork("a", "b")
    engine.fork("a", "c", greedy(max_tokens=30))
    done = drain(engine)
    expected = oracle(pair[0], PROMPT, 30)
    assert done == {"a": expected[:24], "b": expected[:24], "c": expected}


def test_a_fork_of_a_sampled_request_goes_its_own_way(pair):
    engine = make_engine(pair)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=20, seed=1))
    for _ in range(6):
        engine.step()
    engine.fork("a", "b", SamplingParams(max_tokens=20, seed=2))
    done = drain(engine)
    alone = make_engine(pair).generate([PROMPT], SamplingParams(max_tokens=20, seed=1))[0].token_ids
    assert done["a"] == alone and done["b"][:6] == alone[:6] and done["b"] != alone


def test_what_cannot_be_forked(pair):
    engine = make_engine(pair)
    engine.add_request("a", PROMPT, greedy())
    for _ in range(3):
        engine.step()
    with pytest.raises(RequestError, match="not in the engine"):
        engine.fork("nobody", "b")
    with pytest.raises(RequestError, match="already in use"):
        engine.fork("a", "a")
    with pytest.raises(RequestError, match="larger max_tokens"):
        engine.fork("a", "b", greedy(max_tokens=3))
    with pytest.raises(RequestError, match="log-probabilities"):
        engine.fork("a", "b", greedy(logprobs=1))
    assert set(drain(engine)) == {"a"}


@pytest.mark.parametrize("pair", ["llama"], indirect=True)  # a window of 20 tokens would fit
@pytest.mark.parametrize("max_tokens", [400, None])
def test_a_fork_that_could_never_end_is_refused(pair, max_tokens):
    engine = make_engine(pair, num_kv_blocks=6, max_num_batched_tokens=40)
    engine.add_request("a", PROMPT, greedy(ignore_eos=True))
    engine.step()
    with pytest.raises(CacheCapacityError, match="max_tokens"):
        engine.fork("a", "b", greedy(max_tokens=max_tokens, ignore_eos=True))
    assert len(drain(engine)["a"]) == 24


# Beam search


def brute_force(model, prompt, width, max_tokens, penalty, eos):
    """Beam search that computes every beam from its first token at every step."""
    score = lambda logprob, length: logprob / length**penalty  # noqa: E731
    beams, ended = [([], 0.0)], []
    for length in range(1, max_tokens + 1):
        with torch.no_grad():
            rows = [
                model(torch.tensor([prompt + t])).logits[0, -1].log_softmax(-1).tolist() for t, _ in beams
            ]
        best = sorted(
            ((p + q, i, t) for i, ((_, p), row) in enumerate(zip(beams, rows)) for t, q in enumerate(row)),
            key=lambda c: -c[0],
        )
        following = []
        for logprob, i, token in best:
            tokens = [*beams[i][0], token]
            if token in eos:
                ended.append((score(logprob, length), logprob, tokens, True))
            else:
                following.append((tokens, logprob))
            if len(following) == width:
                break
        beams = following
        ended = sorted(ended, key=lambda e: -e[0])[:width]
        top = max(p for _, p in beams)
        if len(ended) == width and max(score(top, length), score(top, max_tokens)) <= ended[-1][0]:
            return ended
    ended += [(score(p, max_tokens), p, tokens, False) for tokens, p in beams]
    return sorted(ended, key=lambda e: -e[0])[:width]


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_blocks": 8}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 6}]
)
@pytest.mark.parametrize(
    ("width", "penalty", "num_eos"), [(1, 1.0, 0), (4, 1.0, 0), (4, 1.0, 12), (3, 0.0, 12), (3, 2.0, 30)]
)
def test_beam_search_is_exact(pair, options, width, penalty, num_eos):
    model = pair[0]
    eos = frozenset(range(0, 4 * num_eos, 4))
    engine = make_engine(pair, **options)
    object.__setattr__(engine.model, "eos_token_ids", eos)
    found = engine.beam_search(PROMPT[:30], beam_width=width, max_tokens=12, length_penalty=penalty)
    expected = brute_force(model, PROMPT[:30], width, 12, penalty, eos)
    assert [(b.token_ids, b.finished) for b in found] == [(tokens, end) for _, _, tokens, end in expected]
    for beam, (score, logprob, *_) in zip(found, expected):
        assert beam.score == pytest.approx(score, abs=1e-4) and beam.logprob == pytest.approx(
            logprob, abs=1e-4
        )
    stats = engine.stats()
    assert not engine.has_unfinished and stats.free_blocks == stats.num_blocks - 1


def test_beams_share_what_they_have_in_common(pair):
    engine = make_engine(pair, prefix_caching=False)
    engine.beam_search(PROMPT, beam_width=4, max_tokens=10, ignore_eos=True)
    assert engine.stats().scheduled_tokens == len(PROMPT) + 4 * 9


@pytest.mark.parametrize("penalty", [-16, 16])
def test_the_largest_length_penalties_are_numbers(pair, penalty):
    engine = make_engine(pair)
    beams = engine.beam_search(
        PROMPT[:9], beam_width=2, max_tokens=8, length_penalty=penalty, ignore_eos=True
    )
    assert [beam.score for beam in beams] == [beam.logprob / 8.0**penalty for beam in beams]


def test_others_go_on_beside_a_beam_search(pair):
    engine = make_engine(pair)
    engine.add_request("a", PROMPT, greedy())
    engine.beam_search(PROMPT[:9], beam_width=3, max_tokens=8)
    assert drain(engine)["a"] == oracle(pair[0], PROMPT, 24)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(
            ("beam_width", 0),
            ("beam_width", 1025),
            ("beam_width", True),
            ("max_tokens", 0),
            ("max_tokens", 1.5),
        ),
        *(("length_penalty", bad) for bad in (float("nan"), 1e300, -1e300, 10**400, 16.5, True, "1")),
    ],
)
def test_beam_search_refuses_bad_options(pair, name, bad):
    engine = make_engine(pair)
    with pytest.raises(RequestError, match=f"{name}={bad!r}: use ".replace("+", r"\+")):
        engine.beam_search(PROMPT, **{"beam_width": 2, "max_tokens": 4, name: bad})
    assert not engine.has_unfinished
