"""Random operations on a whole engine, over mixes of all kinds of state, against the hash model's oracle.

Each mix gets a hypothesis state machine, which shrinks what it finds to a few operations, and runs under overload
from fixed seeds, where all mechanisms are at work at once and must have been seen at work. PAGEBINDER_NIGHTLY=1
makes both ten times as long.
"""

import itertools
import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagebinder.config import SamplingParams
from tests.helpers import by_day
from tests.runtime.engine_harness import EngineHarness, OracleDrafter
from tests.runtime.hash_model import group, hash_plan
from tests.runtime.hash_oracle import VOCAB_SIZE, chunk, full, latent, recurrent, ring, short_conv, window

MAX_MODEL_LEN = 48
# A prefix can never be resumed where a ring holds rows that every token overwrites.
NEVER_RESUMED = "full + ring that is never resumed"
# The last layer's output matters only where a token is sampled, so it is one that reads far back if there is one.
MIXES = {
    "full": [group(4, full(), full())],
    "window": [group(4, window(6), window(6))],
    "full + window": [group(4, window(6)), group(4, window(6)), group(4, full())],
    "full + windows, several block sizes": [
        group(8, window(3)), group(4, window(9), window(9)), group(2, window(1)), group(2, full()),
    ],
    "full + chunk": [group(4, chunk(8)), group(4, full())],
    "full + chunks across blocks": [group(4, chunk(6)), group(2, chunk(5)), group(2, full())],
    "full + recurrent": [group(8, recurrent(), short_conv(4)), group(4, full())],
    "recurrent": [group(4, recurrent(), recurrent())],
    "full + ring": [group(4, ring(8, 8)), group(4, full())],
    NEVER_RESUMED: [group(4, ring(5)), group(4, full())],
    "latent + window latent": [group(2, latent(6)), group(4, latent(), full())],
    "everything": [
        group(2, latent(5)), group(4, window(7)), group(4, chunk(8)), group(4, short_conv(3), recurrent()),
        group(4, ring(4, 4)), group(8, latent()), group(2, full()),
    ],
}  # fmt: skip

NIGHTLY = os.environ.get("PAGEBINDER_NIGHTLY") == "1"
EXAMPLES, RULES_PER_EXAMPLE = (60 if NIGHTLY else 3), 60
OVERLOAD_SEEDS, OVERLOAD_ROUNDS = range(30 if NIGHTLY else 3), 75
# Of test_overload alone, over all mixes; a failed step, a whole call or a beam search counts as one operation or two.
LEAST_OPERATIONS = 100_000 if NIGHTLY else 10_000

# Beginnings of one text with a few tokens of their own: most prompts share a prefix with others.
TEXT = [1 + i * i % 7 for i in range(40)]
TOKENS = st.integers(1, VOCAB_SIZE - 1)
PROMPTS = st.tuples(st.integers(0, 34), st.lists(TOKENS, min_size=1, max_size=6)).map(
    lambda parts: TEXT[: parts[0]] + parts[1]
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30) | st.none(),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    ignore_eos=st.booleans(),
)


def smallest_pool(groups, budget, stepping):
    in_flight = (2 if stepping == "on" else 1) * budget
    return hash_plan(groups, MAX_MODEL_LEN)[0].min_blocks(MAX_MODEL_LEN, in_flight)


def options(draw, groups):
    """Options of an engine that is as small as it can be, or a little larger. `draw(a strategy)` chooses."""
    budget = draw(st.sampled_from([1, 3, 7, 16, 40]))
    stepping, drafter = draw(st.sampled_from([("off", None), ("on", None), ("off", OracleDrafter(0))]))
    one_request = smallest_pool(groups, budget, stepping)
    num_host_blocks = draw(st.sampled_from([0, one_request, 4 * one_request]))
    swap_policies = ["auto", "never", "always"] if num_host_blocks else ["auto", "never"]
    return {
        "max_model_len": MAX_MODEL_LEN,
        "num_kv_blocks": one_request + draw(st.integers(0, one_request)),
        "max_num_batched_tokens": budget,
        "async_stepping": stepping,
        "drafter": drafter,
        "max_draft_tokens": draw(st.sampled_from([1, 3, 8])),
        "draft_budget": draw(st.sampled_from([2, 8, 40])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 3])),
        "mixed_prefill_tokens": draw(st.sampled_from([None, 0, 2, 5])),
        "prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "prefix_retention": draw(st.sampled_from(["dense", "sparse", 4, 16])),
        "num_host_blocks": num_host_blocks,
        "swap_policy": draw(st.sampled_from(swap_policies)),
    }


class EngineMachine(RuleBasedStateMachine):
    def __init__(self, groups):
        super().__init__()
        self.groups = groups
        self.harness = None

    @initialize(data=st.data())
    def start(self, data):
        self.harness = EngineHarness(self.groups, **options(data.draw, self.groups))

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=3), params=PARAMS, priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a", "b"]),
    )  # fmt: skip
    def add(self, prompts, params, priority, salt):
        for prompt in prompts:
            self.harness.add(prompt, params, priority=priority, salt=salt)

    @precondition(lambda self: self.harness.finished)
    @rule(data=st.data(), params=PARAMS, more=st.lists(TOKENS, min_size=1, max_size=3))
    def next_turn(self, data, params, more):
        self.harness.next_turn(data.draw(st.sampled_from(self.harness.finished)), more, params)

    @rule()
    def step(self):
        self.harness.step()

    @rule(repeat=st.integers(2, 12))
    def steps(self, repeat):
        for _ in range(repeat):
            self.harness.step()

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def abort(self, data):
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.live))))

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data(), params=PARAMS)
    def fork(self, data, params):
        self.harness.fork(data.draw(st.sampled_from(sorted(self.harness.live))), params)

    @rule(prompt=PROMPTS, width=st.integers(1, 3), max_tokens=st.integers(1, 6))
    def beam_search(self, prompt, width, max_tokens):
        self.harness.beam_search(prompt, width, max_tokens)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=2), params=PARAMS)
    def generate(self, prompts, params):
        self.harness.generate(prompts, params)

    @rule(when=st.sampled_from(["early", "before", "after"]))
    def failing_step(self, when):
        self.harness.failing_step(when)

    @precondition(lambda self: self.harness.engine.stats().running == 0)
    @rule()
    def reset_prefix_cache(self):
        self.harness.reset_prefix_cache()

    def teardown(self):
        if self.harness is not None:
            self.harness.drain()


@pytest.mark.parametrize("mix", by_day(MIXES, ("full + recurrent", NEVER_RESUMED, "everything")))
def test_random_operations(mix):
    run_state_machine_as_test(
        lambda: EngineMachine(MIXES[mix]),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=RULES_PER_EXAMPLE,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# The others' kinds of state are in these, too.
OVERLOADED_BY_DAY = (
    "full", "full + windows, several block sizes", "full + chunks across blocks", "full + recurrent",
    NEVER_RESUMED, "latent + window latent", "everything",
)  # fmt: skip


@pytest.mark.parametrize("mix", by_day(MIXES, OVERLOADED_BY_DAY))
def test_overload(mix):
    """More requests than the pool holds, for long enough that every mechanism is at work at once. Of three seeds one
    prepares steps ahead and one guesses tokens."""
    counts = Counter()
    for seed in OVERLOAD_SEEDS:
        counts += overload(MIXES[mix], seed)
    wanted = {
        "aborts", "failed steps", "resets", "preemptions", "prefix_hit_tokens", "forks", "copies", "swaps_out",
        "swaps_in", "beam searches", "calls", "ahead_steps", "overshot_tokens", "waited_steps", "drafted_tokens",
        "accepted_tokens",
    }  # fmt: skip
    if mix == NEVER_RESUMED:
        wanted.remove("prefix_hit_tokens")
        assert counts["prefix_hit_tokens"] == 0
    assert wanted <= counts.keys(), f"never happened: {wanted - counts.keys()}"
    assert counts["operations"] >= LEAST_OPERATIONS / len(MIXES)


@pytest.mark.parametrize("mix", ["full", "full + chunks across blocks", "latent + window latent"])
@pytest.mark.parametrize("survivors", itertools.product([False, True], repeat=3))
def test_copies_that_a_failed_step_did_not_make(mix, survivors):
    """A chain of forks whose copies all wait for the next step, which some of them do not see any more. (Requests
    whose state a step overwrites do not wait: they start over.)"""
    params = SamplingParams(max_tokens=12, temperature=0.0, seed=0, ignore_eos=True)
    harness = EngineHarness(
        MIXES[mix], max_model_len=MAX_MODEL_LEN, num_kv_blocks=200, max_num_batched_tokens=40, max_num_seqs=6
    )
    (name,) = harness.add(TEXT[:9], params)
    for _ in range(2):
        harness.step()
    chain = [name]
    for _ in range(2):
        harness.fork(chain[-1], params)
        chain.append(next(name for name in harness.live if name not in chain))
        harness.failing_step("early")
    assert harness.counts["delayed copies"] > 0
    for name, survives in zip(chain, survivors):
        if not survives:
            harness.abort(name)
    harness.add(TEXT[20:30], params)
    harness.drain()


def overload(groups, seed) -> Counter:
    """Random operations from a seed, with caching on in three of four seeds."""
    rng = random.Random(seed)
    budget = rng.choice([4, 16, 40])
    stepping, drafter = [("off", None), ("on", None), ("off", OracleDrafter(seed))][seed % 3]
    one_request = smallest_pool(groups, budget, stepping)
    harness = EngineHarness(
        groups,
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=one_request + rng.randint(0, one_request),
        num_host_blocks=rng.choice([one_request, 4 * one_request]),
        swap_policy=["always", "auto", "never"][seed % 3],
        max_num_batched_tokens=budget,
        async_stepping=stepping,
        drafter=drafter,
        draft_budget=rng.choice([4, 16, 40]),
        max_num_seqs=6,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=rng.choice([0, 3]),
        mixed_prefill_tokens=rng.choice([None, 0, 2, 5]),
        prefix_caching=seed % 4 < 3,
        prefix_retention=rng.choice(["dense", "sparse", 8]),
    )
    for _ in range(OVERLOAD_ROUNDS):
        random_round(harness, rng)
    harness.drain()
    harness.reset_prefix_cache()
    return harness.counts


def random_round(harness, rng):
    """One or two new prompts, a few steps, and now and then something that disturbs."""
    salt = rng.choice([None, None, "a", "b"])
    params = SamplingParams(
        max_tokens=rng.randint(4, 24), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(99),
        n=rng.choice([1, 1, 2, 3]), ignore_eos=rng.random() < 0.5,
    )  # fmt: skip
    if len(harness.live) < 16:
        prompt = TEXT[: rng.randint(0, 24)] + rng.choices(range(1, VOCAB_SIZE), k=rng.randint(1, 5))
        harness.add(prompt, params, priority=rng.randint(0, 2), salt=salt)
    if harness.finished and rng.random() < 0.3:
        harness.next_turn(rng.choice(harness.finished[-8:]), [rng.randrange(1, VOCAB_SIZE)], params)
    for _ in range(rng.randint(1, 5)):
        harness.step()
    if harness.live and rng.random() < 0.1:
        harness.abort(rng.choice(sorted(harness.live)))
    if harness.live and rng.random() < 0.2:
        harness.fork(rng.choice(sorted(harness.live)), params)
    if rng.random() < 0.03:
        harness.beam_search(TEXT[: rng.randint(1, 24)], rng.randint(1, 3), rng.randint(1, 6))
    if rng.random() < 0.03:
        harness.generate([TEXT[: rng.randint(1, 24)]], params)
    if rng.random() < 0.3:
        harness.failing_step(rng.choice(["early", "before", "after", "after"]))
    if rng.random() < 0.02:
        harness.reset_prefix_cache()


def test_a_held_beam_gives_its_blocks_to_one_that_came_back():
    """Three beams on two seats: one came back from host memory without room for its next token, one was held beside
    it, nobody waited, and so nobody went on."""
    groups = MIXES["full + recurrent"]
    harness = EngineHarness(
        groups, max_model_len=MAX_MODEL_LEN, num_kv_blocks=smallest_pool(groups, 16, "off") + 3,
        max_num_batched_tokens=16, max_num_seqs=2, long_prefill_token_threshold=3, prefix_caching=False,
        num_host_blocks=16,
    )  # fmt: skip
    harness.beam_search([*TEXT[:25], 8, 40, 1], 3, 3)
    assert harness.counts["beam searches"] == 1
