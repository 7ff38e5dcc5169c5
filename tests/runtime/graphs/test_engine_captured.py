"""Engines over captured steps: the same tokens as without, counted steps, and why steps are not captured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pagebinder import EngineConfig, SamplingParams
from pagebinder.errors import ConfigError, GraphCaptureError
from pagebinder.report import PassResult
from tests.runtime.graphs.conftest import MODELS
from tests.runtime.graphs.steps import prompts

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_loop.py"
PROMPTS = prompts(3, 17, 40, 1, 33, 50, 16, 64)
SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 48}


def tokens(engine, params=None) -> list[list[int]]:
    params = params or SamplingParams(max_tokens=12, temperature=0.0)
    return [output.token_ids for output in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_uncaptured_steps_under_preemption(name, compiled):
    model = compiled(name)
    blocks = {"llama": 8, "qwen3 next": 60}.get(name, 12)
    plain = model.engine(EngineConfig(num_kv_blocks=blocks, **SMALL))
    captured = model.engine(EngineConfig(num_kv_blocks=blocks, capture="on", check_integrity=True, **SMALL))
    assert tokens(captured) == tokens(plain)
    stats = captured.stats()
    assert stats.captured == "cpu: 7 sizes" and not stats.uncaptured_steps
    assert sum(stats.graph_replays.values()) == stats.steps
    assert {"decode 1", "mixed 48"} <= set(stats.graph_replays) and stats.padding_tokens > 0
    assert name != "llama" or stats.preemptions > 0
    assert plain.stats().captured == "off" and plain.stats().graph_replays == {}


def test_sampled_tokens_forks_and_beams(compiled):
    model, params = compiled("llama"), SamplingParams(max_tokens=8, seed=3, n=2, top_k=20)
    engines = [model.engine(EngineConfig(num_kv_blocks=64, capture=c, **SMALL)) for c in ("off", "on")]
    assert tokens(engines[0], params) == tokens(engines[1], params)
    beams = [e.beam_search(PROMPTS[1], beam_width=3, max_tokens=6) for e in engines]
    assert [b.token_ids for b in beams[0]] == [b.token_ids for b in beams[1]]


def test_steps_outside_the_sizes_are_counted(compiled):
    model = compiled("llama")
    config = EngineConfig(
        num_kv_blocks=64, capture="on", capture_decode_sizes=[2], capture_token_sizes=(), **SMALL
    )
    engine = model.engine(config)
    assert tokens(engine) == tokens(model.engine(EngineConfig(num_kv_blocks=64, **SMALL)))
    stats = engine.stats()
    assert set(stats.graph_replays) == {"decode 2"}
    assert set(stats.uncaptured_steps) == {
        "mixed step larger than every bucket",
        "decode step larger than every bucket",
    }
    assert sum(stats.graph_replays.values()) + sum(stats.uncaptured_steps.values()) == stats.steps


def test_what_cannot_be_captured_is_said(compiled, monkeypatch):
    mixing = PassResult(name="quantize_activations", mixes_tokens=True)
    model = compiled("llama")
    report = dataclasses.replace(model.report, passes=[*model.report.passes, mixing])
    other = dataclasses.replace(model, report=report)
    message = "quantize_activations finds scales over all tokens"
    with pytest.raises(ConfigError, match=message):
        other.engine(EngineConfig(num_kv_blocks=8, capture="on"))
    with pytest.raises(ConfigError, match=message):
        other.capture(num_kv_blocks=8)
    assert other.engine(EngineConfig(num_kv_blocks=8)).stats().captured == "off"

    def fail(*args, **options):
        raise GraphCaptureError("an op waits for the device")

    monkeypatch.setattr("pagebinder.runtime.engine_graphs.StepGraphs", fail)
    with pytest.raises(GraphCaptureError, match="waits for the device"):
        model.engine(EngineConfig(num_kv_blocks=8, capture="on"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capture": "yes"}, 'use "auto", "on" or "off"'),
        ({"capture_decode_sizes": [65]}, "max_num_seqs=64"),
        ({"capture_token_sizes": [1.5]}, "max_num_batched_tokens=2048"),
        ({"capture_decode_sizes": 4}, "capture_decode_sizes=4"),
        ({"captures": "on"}, "did you mean 'capture'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)
