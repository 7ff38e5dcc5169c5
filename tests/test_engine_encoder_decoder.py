"""Serving encoder-decoders: tokens equal transformers' `generate`, and the encoder runs no more often than needed."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, ConfigError, EngineConfig, RequestError, SamplingParams
from tests.encoder_decoders import FAMILIES as ALL_FAMILIES
from tests.encoder_decoders import WITH_RELATIVE_BIAS, tiny, tokens
from tests.helpers import by_day, tiny_llama

pytestmark = pytest.mark.usefixtures("captured_once")

FAMILIES = ("bart", "t5")
NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
ENCODER_LENGTHS = (1, 60, 7, 33, 16, 48, 2, 25)
DECODER_LENGTHS = (1, 2, 20, 9, 40, 1, 17, 5)
START = {family: 0 if family in WITH_RELATIVE_BIAS else 2 for family in ALL_FAMILIES}


@functools.cache
def compiled_pair(family: str, executable: str = "eager"):
    model = tiny(family)
    # Not applied by the engine, as the module docstring of `encoder_prompts` says.
    model.generation_config.forced_bos_token_id = model.generation_config.forced_eos_token_id = None
    return model, pagebinder.compile_model(model, CompileConfig(executable=executable, block_size=8))


@functools.cache
def expected(family: str, encoder_ids: tuple[int, ...], ids: tuple[int, ...]) -> list[int]:
    """What transformers generates greedily."""
    with torch.no_grad():
        out = compiled_pair(family)[0].generate(
            torch.tensor([encoder_ids]), decoder_input_ids=torch.tensor([ids]), do_sample=False, num_beams=1,
            max_new_tokens=NUM_TOKENS, attention_mask=torch.ones(1, len(encoder_ids), dtype=torch.int64),
            use_cache=False,
        )  # fmt: skip
    return out[0, len(ids) :].tolist()


def encoder_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return tokens(num_tokens, seed=10 + seed).tolist()


def prompt(family: str, num_tokens: int, seed: int = 0) -> list[int]:
    return [START[family], *tokens(num_tokens, seed=20 + seed).tolist()[1:]]


def requests(family: str) -> list[tuple[list[int], list[int]]]:
    """(encoder prompt, decoder prompt) of 8 requests."""
    return [
        (encoder_prompt(e), prompt(family, t)) for e, t in zip(ENCODER_LENGTHS, DECODER_LENGTHS, strict=True)
    ]


def assert_exact(family: str, encoder_ids: list[int], ids: list[int], output) -> None:
    want = expected(family, tuple(encoder_ids), tuple(ids))
    if output.finish_reason == "length":
        assert len(output.token_ids) == NUM_TOKENS
    assert list(output.token_ids) == want[: len(output.token_ids)]
    assert len(output.token_ids) == len(want)


def serve_one_by_one(engine, pairs, params=GREEDY) -> dict[str, object]:
    """Add a request every third step, and step to the end; the finished outputs by request id."""
    waiting, done, step = list(enumerate(pairs)), {}, 0
    while waiting or engine.has_unfinished:
        if waiting and step % 3 == 0:
            index, (encoder_ids, ids) = waiting.pop(0)
            engine.add_request(str(index), ids, params, encoder_prompt=encoder_ids)
        done |= {o.request_id: o for o in engine.step() if o.finished}
        step += 1
    return done


CONFIGS = {
    "roomy": {"num_kv_blocks": 200},
    "small": {"num_kv_blocks": 24},
    "small-uncached": {"num_kv_blocks": 24, "prefix_caching": False},
    "small-swap": {"num_kv_blocks": 24, "swap_bytes": 1 << 22, "swap_policy": "always"},
}


@pytest.mark.parametrize(
    ("config", "family"),
    by_day(itertools.product(CONFIGS, FAMILIES), [*((c, "bart") for c in CONFIGS), ("small-swap", "t5")]),
)
def test_requests_that_come_and_go(family, config):
    """Encoder prompts of 1 to 60 tokens at different times, in steps of 12; preempted where memory is short."""
    _, compiled = compiled_pair(family)
    engine = compiled.engine(
        EngineConfig(max_num_seqs=5, max_num_batched_tokens=12, check_integrity=True, **CONFIGS[config])
    )
    pairs = requests(family)
    outputs = serve_one_by_one(engine, pairs)
    for i, (encoder_ids, ids) in enumerate(pairs):
        assert_exact(family, encoder_ids, ids, outputs[str(i)])
    stats = engine.stats()
    assert (stats.preemptions > 0) == config.startswith("small")
    if config in ("roomy", "small-swap"):
        assert (stats.encoder_runs, stats.encoder_tokens) == (len(pairs), sum(ENCODER_LENGTHS))
    elif config == "small-uncached":
        assert stats.encoder_runs > len(pairs)
    assert bool(stats.swaps_in) == (config == "small-swap")
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


@pytest.mark.parametrize("family", by_day([f for f in ALL_FAMILIES if f not in FAMILIES], ()))
def test_every_other_family(family):
    engine = compiled_pair(family)[1].engine(
        EngineConfig(num_kv_blocks=24, max_num_batched_tokens=12, check_integrity=True)
    )
    pairs = requests(family)[:4]
    outputs = engine.generate([p for _, p in pairs], GREEDY, encoder_prompts=[e for e, _ in pairs])
    for (encoder_ids, ids), output in zip(pairs, outputs):
        assert_exact(family, encoder_ids, ids, output)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_encoder_prompts_are_encoded_once(family):
    """Also with other decoder prompts, whose blocks they do not share across encoder prompts."""
    _, compiled = compiled_pair(family)
    engine = compiled.engine(
        EngineConfig(num_kv_blocks=120, max_num_batched_tokens=256, check_integrity=True)
    )
    one, other, ids = encoder_prompt(30), encoder_prompt(30, seed=1), prompt(family, 33)
    pairs = [(one, ids), (one, ids[:9]), (other, ids), (one, ids), (other, prompt(family, 20, seed=1))]
    for number in (1, 2):
        outputs = engine.generate([p for _, p in pairs], GREEDY, encoder_prompts=[e for e, _ in pairs])
        for (encoder_ids, p), output in zip(pairs, outputs):
            assert_exact(family, encoder_ids, p, output)
        assert engine.stats().encoder_runs == 2, (
            "the first time within one step, the second time from the cache"
        )
        hits = [output.num_cached_tokens for output in outputs]
        assert any(hits) == (number == 2)
    [output] = engine.generate([ids], GREEDY, encoder_prompts=[encoder_prompt(30, seed=2)])
    assert output.num_cached_tokens == 0 and engine.stats().encoder_runs == 3
    assert engine.reset_prefix_cache()
    engine.generate([ids], GREEDY, encoder_prompts=[one])
    assert engine.stats().encoder_runs == 4


def test_salts_part_encoder_prompts():
    _, compiled = compiled_pair("bart")
    engine = compiled.engine(EngineConfig(num_kv_blocks=60))
    for i, salt in enumerate(("a", "b", "a", None)):
        engine.add_request(str(i), None, GREEDY, encoder_prompt=encoder_prompt(30), cache_salt=salt)
        while engine.has_unfinished:
            engine.step()
    assert engine.stats().encoder_runs == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_share_the_encoders_blocks(family):
    _, compiled = compiled_pair(family)
    engine = compiled.engine(
        EngineConfig(num_kv_blocks=40, max_num_seqs=6, max_num_batched_tokens=32, check_integrity=True)
    )
    params = dataclasses.replace(GREEDY, n=2)
    pairs = requests(family)[1:5]
    (cross,) = (g for g, group in enumerate(compiled.kv_spec.groups) if group.spec.kind == "cross_attention")
    engine.add_request("x", pairs[0][1], params, encoder_prompt=pairs[0][0])
    engine.step()
    first, second = (engine.kv.block_ids(f"x-{i}")[cross].tolist() for i in range(2))
    assert first == second and len(first) == 8
    engine.abort("x-0")
    engine.abort("x-1")
    outputs = engine.generate([p for _, p in pairs], params, encoder_prompts=[e for e, _ in pairs])
    for i, (encoder_ids, ids) in enumerate(pairs):
        for output in outputs[2 * i : 2 * i + 2]:
            assert_exact(family, encoder_ids, ids, output)
    assert engine.stats().forks >= len(pairs)


def test_an_aborted_sample_leaves_the_encoder_prompt_to_the_next():
    _, compiled = compiled_pair("bart")
    engine = compiled.engine(EngineConfig(num_kv_blocks=40, max_num_batched_tokens=4, check_integrity=True))
    encoder_ids, ids = encoder_prompt(20), prompt("bart", 10)
    engine.add_request("x", ids, dataclasses.replace(GREEDY, n=2), encoder_prompt=encoder_ids)
    engine.step()
    engine.abort("x-0")
    done = {}
    while engine.has_unfinished:
        done |= {o.request_id: o for o in engine.step()}
    assert_exact("bart", encoder_ids, ids, done["x-1"])
    assert engine.stats().encoder_runs == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_starts_by_itself(family):
    _, compiled = compiled_pair(family)
    engine = compiled.engine(EngineConfig(num_kv_blocks=60))
    encoder_ids = encoder_prompt(21)
    [output] = engine.generate(None, GREEDY, encoder_prompts=encoder_ids)
    assert output.prompt_token_ids == [START[family]]
    assert_exact(family, encoder_ids, [START[family]], output)
    both = engine.generate(
        [None, prompt(family, 4)], GREEDY, encoder_prompts=[encoder_ids, encoder_prompt(9)]
    )
    assert_exact(family, encoder_ids, [START[family]], both[0])
    assert_exact(family, encoder_prompt(9), prompt(family, 4), both[1])
    streamed = list(engine.stream(params=GREEDY, encoder_prompts=torch.tensor(encoder_ids)))
    assert [o.num_tokens for o in streamed] == list(range(1, len(output.token_ids) + 1))
    assert streamed[-1].token_ids == output.token_ids


def test_encoder_tokens_count_against_the_budget():
    """Steps of 32 tokens: two prompts of 20 + 1 exceed one, and whoever is admitted last may go beyond it."""
    _, compiled = compiled_pair("bart")
    engine = compiled.engine(EngineConfig(num_kv_blocks=120, max_num_batched_tokens=32))
    for i, length in enumerate((20, 20, 20, 90, 10)):
        engine.add_request(str(i), None, GREEDY, encoder_prompt=encoder_prompt(length, seed=i))
    per_step = []
    while engine.stats().encoder_runs < 5:
        before = engine.stats().encoder_tokens
        engine.step()
        per_step.append(engine.stats().encoder_tokens - before)
    assert per_step == [40, 110, 10]


class Failing:
    """An executable that raises in one of its runs, before or after it did its work."""

    name = "failing"

    def __init__(self, inner, fails_in: int, late: bool) -> None:
        self.inner, self.runs_left, self.late = inner, fails_in, late

    def run(self, inputs):
        self.runs_left -= 1
        if self.runs_left == 0 and not self.late:
            raise RuntimeError("lost")
        result = self.inner.run(inputs)
        if self.runs_left == 0:
            raise RuntimeError("lost")
        return result


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("part", ["executable", "encoder_executable"])
def test_a_failed_step_is_repeated_with_its_encoder(part, late):
    _, compiled = compiled_pair("bart")
    broken = dataclasses.replace(compiled, **{part: Failing(getattr(compiled, part), 2, late)})
    engine = broken.engine(EngineConfig(num_kv_blocks=60, max_num_batched_tokens=16, check_integrity=True))
    first, second = (encoder_prompt(20), prompt("bart", 3)), (encoder_prompt(35), prompt("bart", 30))
    engine.add_request("0", first[1], GREEDY, encoder_prompt=first[0])
    engine.step()
    engine.add_request("1", second[1], GREEDY, encoder_prompt=second[0])
    with pytest.raises(RuntimeError, match="lost"):
        engine.step()
    engine.check_integrity()
    assert engine.kv.needs_encoder("1") and not engine.kv.needs_encoder("0")
    done = {}
    while engine.has_unfinished:
        done |= {o.request_id: o for o in engine.step()}
    assert_exact("bart", *first, done["0"])
    assert_exact("bart", *second, done["1"])
    assert engine.stats().encoder_runs == 3


def test_a_fork_before_the_encoder_has_run():
    """Its decoder's prefix was hit, but the encoder's blocks are not written yet: the fork must not share them."""
    _, compiled = compiled_pair("bart")
    failing = Failing(compiled.executable, 0, late=False)
    broken = dataclasses.replace(compiled, executable=failing)
    engine = broken.engine(EngineConfig(num_kv_blocks=60, max_num_batched_tokens=64, check_integrity=True))
    encoder_ids, ids = encoder_prompt(20), prompt("bart", 30)
    engine.generate([ids], GREEDY, encoder_prompts=[encoder_ids])
    for manager in engine.kv.search.cross:  # as if other requests had taken the encoder's blocks
        pool = engine.kv.pool
        keys = manager.encoder_keys(_request_like(encoder_ids))
        found = [pool.get_cached_block(key, (manager.group_id,))[0].block_id for key in keys]
        pool.evict_blocks(found)
    engine.add_request("0", ids, GREEDY, encoder_prompt=encoder_ids)
    failing.runs_left = 1
    with pytest.raises(RuntimeError, match="lost"):
        engine.step()
    assert engine.kv.needs_encoder("0") and engine.scheduler.requests["0"].num_computed_tokens
    engine.fork("0", "1")
    done = {}
    while engine.has_unfinished:
        done |= {o.request_id: o for o in engine.step()}
    for output in done.values():
        assert_exact("bart", encoder_ids, ids, output)
    assert len(done) == 2


def _request_like(encoder_ids):
    from pagebinder.runtime.encoder_prompts import encoder_hash
    from pagebinder.runtime.request import Request

    return Request(
        "like", [1], max_tokens=1, encoder_hash=encoder_hash(encoder_ids, None), num_encoder_tokens=len(encoder_ids)
    )  # fmt: skip


def test_beam_search_of_an_encoder_decoder():
    """The beams of transformers, with and without a decoder prompt."""
    model, compiled = compiled_pair("bart")
    engine = compiled.engine(EngineConfig(num_kv_blocks=120, check_integrity=True))
    for ids in (None, prompt("bart", 9)):
        encoder_ids, start = encoder_prompt(26), ids or [START["bart"]]
        beams = engine.beam_search(
            ids, beam_width=3, max_tokens=12, ignore_eos=True, encoder_prompt=encoder_ids
        )
        with torch.no_grad():
            out = model.generate(
                torch.tensor([encoder_ids]), decoder_input_ids=torch.tensor([start]), do_sample=False,
                num_beams=3, num_return_sequences=3, max_new_tokens=12, min_new_tokens=12, use_cache=False,
                attention_mask=torch.ones(1, 26, dtype=torch.int64), eos_token_id=None,
            )  # fmt: skip
        assert [beam.token_ids for beam in beams] == out[:, len(start) :].tolist()
    assert engine.stats().encoder_runs == 1
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


def test_bad_encoder_prompts_are_told():
    _, compiled = compiled_pair("bart")
    engine = compiled.engine(EngineConfig(num_kv_blocks=60, max_encoder_tokens=50))
    bad = [
        (None, "give encoder_prompt"),
        ([], "The encoder prompt is empty"),
        ([5, 128], "Token id 128 is out of range"),
        ([5, "x"], "the encoder prompt holds 'x'"),
        ("text", "The encoder prompt is text, but the model has no tokenizer"),
        (b"abc", "The encoder prompt is bytes"),
        (encoder_prompt(51), "has 51 tokens, but at most 50 are allowed.*max_encoder_tokens.*limit is 128"),
    ]
    for value, message in bad:
        with pytest.raises(RequestError, match=message):
            engine.add_request("x", [2], GREEDY, encoder_prompt=value)
    with pytest.raises(RequestError, match="give encoder_prompt"):
        engine.generate([[2]], GREEDY)
    with pytest.raises(RequestError, match="2 encoder prompts but 1 decoder prompts"):
        engine.generate([[2]], GREEDY, encoder_prompts=[[5], [6]])
    with pytest.raises(RequestError, match="give encoder_prompt"):
        engine.beam_search([2], beam_width=2, max_tokens=3)
    assert not engine.has_unfinished
    engine.generate(params=GREEDY, encoder_prompts=encoder_prompt(50))
    with pytest.raises(ConfigError, match="more than the 128 tokens"):
        compiled.engine(EngineConfig(max_encoder_tokens=129))
    with pytest.raises(ConfigError, match="max_encoder_tokens=0"):
        EngineConfig(max_encoder_tokens=0)


def test_a_config_limits_encoder_prompts_of_relative_positions():
    """The remedy of the message: T5's config says no length, and 2,048 tokens are taken for it."""
    model, prompt_ids = tiny("t5"), encoder_prompt(100) * 21
    for limit, message in ((None, "set a larger max_source_positions there"), (2100, None)):
        if limit is not None:
            model.config.max_source_positions = limit
        compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
        engine = compiled.engine(EngineConfig(num_kv_blocks=300))
        if message is not None:
            with pytest.raises(RequestError, match=message):
                engine.add_request("x", encoder_prompt=prompt_ids)
    [output] = engine.generate(params=GREEDY, encoder_prompts=[prompt_ids])
    assert output.num_encoder_tokens == 2100 and output.finished


def test_a_model_without_a_start_token_needs_a_decoder_prompt():
    _, compiled = compiled_pair("bart")
    facts = dataclasses.replace(compiled.source.encoder, decoder_start_token_id=None)
    changed = dataclasses.replace(compiled, source=dataclasses.replace(compiled.source, encoder=facts))
    engine = changed.engine(EngineConfig(num_kv_blocks=60))
    with pytest.raises(RequestError, match="no decoder_start_token_id"):
        engine.add_request("x", encoder_prompt=[5, 6])
    [output] = engine.generate([[2]], GREEDY, encoder_prompts=[[5, 6]])
    assert_exact("bart", [5, 6], [2], output)


def test_a_decoder_alone_takes_no_encoder_prompt():
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager"))
    engine = compiled.engine(EngineConfig(num_kv_blocks=20))
    with pytest.raises(RequestError, match="has no encoder"):
        engine.add_request("x", [5], encoder_prompt=[5])
    with pytest.raises(RequestError, match="has no encoder"):
        engine.generate(encoder_prompts=[[5]])
    with pytest.raises(RequestError, match="not NoneType"):
        engine.add_request("x")
    with pytest.raises(RequestError, match="not NoneType"):
        engine.generate()
    with pytest.raises(ConfigError, match="this model has no encoder"):
        compiled.engine(EngineConfig(max_encoder_tokens=50))


def test_a_cache_too_small_for_the_encoder_prompt_is_told():
    _, compiled = compiled_pair("bart")
    engine = compiled.engine(EngineConfig(num_kv_blocks=10))
    with pytest.raises(pagebinder.CacheCapacityError, match="KV blocks"):
        engine.add_request("x", encoder_prompt=encoder_prompt(60), params=GREEDY)
    engine.add_request("y", encoder_prompt=encoder_prompt(40), params=GREEDY)


def test_the_default_plan_and_cache_know_the_encoders_limit():
    _, compiled = compiled_pair("bart")
    assert max(tokens for tokens, _ in compiled.kv_spec.workload.encoders) <= 128
    with pytest.raises(ConfigError, match="encoder prompt of 400 tokens is longer than the 128"):
        workload = {"encoders": [[400, 1.0]]}
        pagebinder.compile_model(tiny("bart"), CompileConfig(executable="eager", workload=workload))
    engine = compiled.engine(EngineConfig(max_num_seqs=2))
    longest = (encoder_prompt(128), prompt("bart", 100))
    outputs = engine.generate([longest[1]] * 2, GREEDY, encoder_prompts=[longest[0]] * 2)
    for output in outputs:
        assert_exact("bart", *longest, output)
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("family", by_day(FAMILIES, ["bart"]))
def test_the_compiled_executable_generates_the_same(family):
    compiled = compiled_pair(family, "inductor")[1]
    assert compiled.encoder_executable.name == "inductor"
    engine = compiled.engine(
        EngineConfig(num_kv_blocks=24, max_num_seqs=5, max_num_batched_tokens=12, check_integrity=True)
    )
    pairs = requests(family)
    outputs = serve_one_by_one(engine, pairs)
    for i, (encoder_ids, ids) in enumerate(pairs):
        assert_exact(family, encoder_ids, ids, outputs[str(i)])
