"""Asynchronous stepping on a GPU: `make gpu` runs these, elsewhere they are skipped (tests/test_engine_async.py)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from tests.helpers import VOCAB_SIZE, tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
PROMPTS = [[(7 * i + 3 * j) % (VOCAB_SIZE - 1) + 1 for j in range(3 + 9 * (i % 5))] for i in range(12)]


@pytest.mark.parametrize("capture", ["off", "on"])
def test_tokens_are_those_of_steps_one_by_one(capture):
    model = pagebinder.compile_model(tiny_llama().cuda(), CompileConfig(executable="eager", block_size=16))
    params = [SamplingParams(max_tokens=8 + i, temperature=i % 2 * 0.8, seed=i) for i in range(len(PROMPTS))]
    answers = {}
    for stepping in ("off", "on"):
        engine = model.engine(
            EngineConfig(
                num_kv_blocks=60, max_num_seqs=8, max_num_batched_tokens=64, capture=capture,
                async_stepping=stepping, check_integrity=True,
            )
        )  # fmt: skip
        ends = frozenset(range(0, VOCAB_SIZE, 9))  # most requests end early
        engine.loop.model = dataclasses.replace(engine.loop.model, eos_token_ids=ends)
        answers[stepping] = [(o.token_ids, o.finish_reason) for o in engine.generate(PROMPTS, params)]
        assert (engine.stats().ahead_steps > 5) == (stepping == "on")
    assert answers["on"] == answers["off"]


def test_the_host_does_not_wait_when_it_launches_ahead():
    """While the device is kept busy, a second step is launched without its tokens."""
    model = pagebinder.compile_model(tiny_llama().cuda(), CompileConfig(executable="eager", block_size=16))
    engine = model.engine(EngineConfig(num_kv_blocks=60, capture="off", async_stepping="on"))
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine.add_request("a", PROMPTS[1], params)
    for _ in range(8):
        engine.step()
    loop, done = engine.loop, torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    done.record()
    loop._launch_ahead(_NoClock())
    assert not done.query(), "launching waited for the device"
    torch.cuda.synchronize()


class _NoClock:
    def lap(self, name: str) -> float:
        return 0.0
