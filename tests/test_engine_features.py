"""What requests may ask for: sampling, stops, log-probabilities, streaming, n, abort, priority, statistics."""

from __future__ import annotations

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from tests.helpers import tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")


@pytest.fixture(scope="module")
def pair():
    model = tiny_llama()
    return model, pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=16))


@pytest.fixture
def engine(pair):
    return pair[1].engine(EngineConfig(num_kv_blocks=100, check_integrity=True))


def greedy(**options):
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **options})


def test_a_seed_gives_the_same_tokens_whatever_else_runs(pair, engine):
    params = SamplingParams(max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=5)
    alone = engine.generate([[1, 2, 3]], params)[0].token_ids
    others = SamplingParams(max_tokens=12, temperature=1.3, seed=9)
    crowd = engine.generate([[9] * 20, [1, 2, 3], [4, 5]], [others, params, others])[1].token_ids
    chunked = pair[1].engine(EngineConfig(num_kv_blocks=100, max_num_batched_tokens=2))
    assert alone == crowd == chunked.generate([[1, 2, 3]], params)[0].token_ids


def test_a_long_prompt_leaves_room_for_others_tokens(pair, engine):
    long = [7] * 40
    alone = [engine.generate([prompt], greedy())[0].token_ids for prompt in ([1, 2, 3], long)]
    mixed = pair[1].engine(EngineConfig(num_kv_blocks=100, mixed_prefill_tokens=8, prefix_caching=False))
    mixed.add_request("a", [1, 2, 3], greedy())
    mixed.step()
    mixed.add_request("b", long, greedy())
    lengths = {"a": [], "b": []}
    tokens = {}
    while mixed.has_unfinished:
        for output in mixed.step():
            tokens[output.request_id] = output.token_ids
            lengths[output.request_id].append(len(output.token_ids))
    assert [tokens["a"], tokens["b"]] == alone
    assert lengths["a"] == [2, 3, 4, 5, 6, 7, 8]  # five of these steps compute b's prompt
    assert (mixed.scheduler.mixed_prefill_tokens, engine.scheduler.mixed_prefill_tokens) == (8, 1024)


def test_memory_is_made_ready_only_while_nobody_computes(engine):
    assert engine.arena.idle.is_set()
    engine.add_request("a", [1, 2, 3], greedy())
    engine.add_request("b", [1, 2, 3], greedy())
    engine.step()
    assert not engine.arena.idle.is_set()
    engine.abort("a")
    assert not engine.arena.idle.is_set()
    while engine.has_unfinished:
        engine.step()
    assert engine.arena.idle.is_set()
    engine.add_request("c", [1, 2, 3], greedy())
    engine.step()
    engine.abort("c")
    assert engine.arena.idle.is_set()
    engine.beam_search([1, 2, 3], beam_width=2, max_tokens=3)
    assert engine.arena.idle.is_set()


def test_different_seeds_give_different_tokens(engine):
    outputs = [
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12, temperature=1.0, seed=s))[0].token_ids
        for s in range(4)
    ]
    assert len({tuple(o) for o in outputs}) == 4


def test_n_samples_are_different_and_each_is_reproducible(engine):
    params = SamplingParams(max_tokens=10, n=3, seed=1)
    first, second = engine.generate([[1, 2, 3]], params), engine.generate([[1, 2, 3]], params)
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    assert len({tuple(o.token_ids) for o in first}) == 3


def test_length_limits(pair, engine):
    assert len(engine.generate([[1]], greedy(max_tokens=3))[0].token_ids) == 3
    long = engine.generate([[1] * 500], greedy(max_tokens=None))[0]
    assert (len(long.token_ids), long.finish_reason) == (12, "length")  # the model's length is 512


def test_a_stop_token_ends_the_request_and_is_reported(engine):
    tokens = engine.generate([[1, 2, 3]], greedy())[0].token_ids
    out = engine.generate([[1, 2, 3]], greedy(stop_token_ids=(tokens[3],)))[0]
    assert out.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert out.finish_reason == "stop"


def test_the_end_of_sequence_token_stops_unless_ignored(engine):
    tokens = engine.generate([[1, 2, 3]], greedy())[0].token_ids
    model = tiny_llama(eos_token_id=tokens[2])
    engine = pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=16)).engine()
    out = engine.generate([[1, 2, 3]], greedy())[0]
    assert (out.token_ids, out.finish_reason) == (tokens[: tokens.index(tokens[2]) + 1], "stop")
    assert engine.generate([[1, 2, 3]], greedy(ignore_eos=True))[0].token_ids == tokens


def test_logprobs_are_those_of_the_model(pair, engine):
    model, _ = pair
    out = engine.generate([[1, 2, 3]], greedy(logprobs=4, max_tokens=3))[0]
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, *out.token_ids]])).logits[0].log_softmax(-1)
    for i, (token, found) in enumerate(zip(out.token_ids, out.logprobs)):
        expected = logits[2 + i]
        assert list(found) == expected.topk(4).indices.tolist()
        assert found[token] == pytest.approx(float(expected[token]), abs=1e-4)


def test_a_sampled_token_outside_the_top_has_its_logprob_too(engine):
    out = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=3.0, seed=0, logprobs=0))[0]
    assert [list(found) for found in out.logprobs] == [[t] for t in out.token_ids]


def test_repetition_penalty_follows_transformers(pair, engine):
    model, _ = pair
    prompt = [1, 2, 3]
    out = engine.generate([prompt], greedy(repetition_penalty=1.7, max_tokens=16))[0].token_ids
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=16, do_sample=False, repetition_penalty=1.7
    )
    assert out == expected[0, 3:].tolist()


def test_streaming_yields_every_token_as_it_comes(engine):
    prompts = [[1, 2, 3], [4, 5]]
    whole = engine.generate(prompts, greedy())
    seen: dict[str, list[list[int]]] = {}
    for output in engine.stream(prompts, greedy()):
        seen.setdefault(output.request_id, []).append(output.token_ids)
    assert [s[-1] for s in seen.values()] == [o.token_ids for o in whole]
    assert all([len(t) for t in s] == list(range(1, 9)) for s in seen.values())


def test_closing_a_stream_aborts_its_requests(engine):
    stream = engine.stream([[1, 2, 3], [4, 5]], greedy())
    next(stream)
    stream.close()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks - 1)


def test_a_stream_that_is_never_read_leaves_nothing_behind(engine):
    engine.stream([[1, 2, 3], [4, 5]], greedy())
    assert not engine.has_unfinished


def test_requests_added_by_hand_get_their_outputs_from_step(engine):
    expected = engine.generate([[1, 2, 3]], greedy())[0].token_ids
    engine.add_request("mine", [1, 2, 3], greedy())
    engine.generate([[4, 5]], greedy(max_tokens=20))  # runs "mine" to its end as well
    outputs = [o for o in drain(engine) if o.request_id == "mine"]
    assert [len(o.token_ids) for o in outputs] == list(range(1, 9))
    assert outputs[-1].token_ids == expected


def test_two_streams_can_be_read_in_turns(engine):
    a, b = engine.stream([[1, 2, 3]], greedy()), engine.stream([[4, 5]], greedy())
    whole = engine.generate([[1, 2, 3]], greedy())[0], engine.generate([[4, 5]], greedy())[0]
    last = {"a": None, "b": None}
    for _ in range(8):
        last = {"a": next(a, last["a"]), "b": next(b, last["b"])}
    assert last["a"].token_ids == whole[0].token_ids
    assert last["b"].token_ids == whole[1].token_ids


def test_abort_returns_what_was_generated_and_frees_the_blocks(engine):
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=50))
    engine.add_request("b", [1, 2, 3], greedy())
    for _ in range(3):
        engine.step()
    aborted = engine.abort("a")
    assert (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 3)
    done = [o for o in drain(engine) if o.finished]
    assert [o.request_id for o in done] == ["b"]
    assert engine.stats().free_blocks == engine.stats().num_blocks - 1


@pytest.mark.parametrize("max_tokens", [2, 30], ids=["it has ended", "it goes on"])
def test_an_aborted_request_is_owed_nothing(engine, max_tokens):
    """`generate` steps requests of others, too: their outputs wait for `step`."""
    (fresh,) = engine.generate([[4, 5]], greedy(max_tokens=1, ignore_eos=True))
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=max_tokens, ignore_eos=True))
    engine.generate([[9, 9]], greedy(max_tokens=4, ignore_eos=True))
    with pytest.raises(pagebinder.RequestError, match="'a' is already in use"):
        engine.add_request("a", [4, 5], greedy())
    assert len(engine.abort("a").token_ids) == min(max_tokens, 4)
    assert not engine.has_unfinished and engine.abort("a") is None
    engine.add_request("a", [4, 5], greedy(ignore_eos=True))
    (output,) = engine.step()
    assert output.token_ids == fresh.token_ids and not output.finished


def test_calls_take_ids_that_nobody_has(engine):
    """Neither those of samples and beams, nor of requests that have ended and whose outputs `step` still owes."""
    params, ids = greedy(max_tokens=12, ignore_eos=True), []
    expected = engine.generate([[4, 5]], greedy(max_tokens=3))[0].token_ids
    for number in range(1, 9):
        name = f"request-{number}"
        ids += engine.add_request(name, [1, 2, 3], greedy(max_tokens=2, n=number % 3 + 1))
        ids += engine.add_request(f"{name}/1", [1, 2, 3], params)
    for n in (1, 2, 3, 2):
        outputs = engine.generate([[4, 5]], greedy(max_tokens=3, n=n))
        assert [o.token_ids for o in outputs] == [expected] * n
        assert len(engine.beam_search([4, 5], beam_width=3, max_tokens=3)) == 3
        with pytest.raises(pagebinder.RequestError, match="must be SamplingParams, not int"):
            engine.generate([[4, 5]], 3)
    lengths = {o.request_id: len(o.token_ids) for o in drain(engine)}
    assert lengths == {i: 12 if "/" in i else 2 for i in ids}


def test_a_call_of_many_samples_ends_at_once(engine):
    stream = engine.stream([[1, 2, 3]], SamplingParams(n=3000, max_tokens=4))
    engine.add_request("a", [4, 5], greedy())
    started = engine.scheduler.next_arrival()
    stream.close()
    assert set(engine.live_requests) == {"a"}
    assert engine.scheduler.next_arrival() == started + 1  # nobody was queued again


def test_all_requests_of_a_call_end_whatever_one_of_them_raises(pair):
    class Forgetful:
        calls = 0

        def propose(self, requests):
            return [[] for _ in requests]

        def forget(self, request_id):
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("forget failed")

    engine = pair[1].engine(EngineConfig(num_kv_blocks=100, drafter=Forgetful()))
    stream = engine.stream([[1, 2], [3, 4], [5, 6]], greedy(max_tokens=20))
    next(stream)
    with pytest.raises(RuntimeError, match="forget failed"):
        stream.close()
    assert not engine.has_unfinished and not engine._mailboxes


def test_who_has_nan_logits_is_named_and_can_be_taken_out():
    model = tiny_llama()
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = float("nan")
    engine = pagebinder.compile_model(model, CompileConfig(executable="eager")).engine(
        EngineConfig(num_kv_blocks=100)
    )
    engine.add_request("good", [5, 6, 7], greedy(ignore_eos=True))
    engine.add_request("poison", [50, 6, 7], greedy())
    with pytest.raises(FloatingPointError, match="NaN logits.*request 'poison'; once that is aborted"):
        engine.step()
    engine.abort("poison")
    (output,) = engine.step()
    assert output.request_id == "good"


def test_priority_goes_first(pair):
    engine = pair[1].engine(EngineConfig(num_kv_blocks=40, max_num_seqs=1, scheduling_policy="priority"))
    for name, priority in (("low", 5), ("high", 0), ("middle", 3)):
        engine.add_request(name, [1, 2], greedy(max_tokens=2), priority=priority)
    assert [o.request_id for o in drain(engine) if o.finished] == ["high", "middle", "low"]


def test_stats_count_what_happened(engine):
    engine.generate([list(range(40)), list(range(40))], greedy(max_tokens=4))
    engine.generate([list(range(40))], greedy(max_tokens=4))
    stats = engine.stats()
    assert stats.generated_tokens == 12
    assert stats.finished_requests == 3
    assert stats.prefix_hit_tokens >= 32
    assert stats.tokens_per_second > 0
    assert set(stats.step_seconds) == {"schedule", "plan", "run", "sample", "publish"}


def test_stats_show_the_cache(engine):
    engine.generate([list(range(40))], greedy(max_tokens=4))
    engine.add_request("a", list(range(40)), greedy(max_tokens=4))
    engine.step()
    stats = engine.stats()
    assert stats.blocks_in_use == (3,) and stats.cached_prefixes >= 2
    assert stats.prefix_hit_rate == stats.prefix_hit_tokens / 80 > 0
    assert (stats.forks, stats.copies, stats.swaps_out, stats.deferred_blocks) == (0, 0, 0, 0)


def test_an_output_does_not_change_later(engine):
    outputs = list(engine.stream([[1, 2, 3]], greedy(logprobs=1)))
    whole = outputs[-1].token_ids
    for count, output in enumerate(outputs, start=1):  # read only now
        assert (output.token_ids, output.num_tokens) == (whole[:count], count)
        assert len(output.logprobs) == count
        assert (output.finished, output.finish_reason) == (count == 8, "length" if count == 8 else None)


def test_an_idle_engine_steps_for_free(engine):
    assert engine.step() == []


def test_many_requests_at_once_all_finish(pair):
    engine = pair[1].engine(EngineConfig(num_kv_blocks=60, max_num_seqs=32, max_num_batched_tokens=64))
    prompts = [[i % 100, (7 * i) % 100] * (1 + i % 9) for i in range(150)]
    outputs = engine.generate(prompts, greedy(max_tokens=6))
    assert [len(o.token_ids) for o in outputs] == [6] * 150
    assert [o.prompt_token_ids for o in outputs] == prompts
    engine.check_integrity()


def drain(engine):
    while engine.has_unfinished:
        yield from engine.step()
