"""Captured steps on a CPU: a replay equals the same step without its graph, bit for bit, in caches and logits."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig
from pagebinder.errors import CacheCapacityError, ConfigError, RequestError
from pagebinder.runtime.engine_graphs import bucket_table
from pagebinder.runtime.graphs import BucketTable, StepGraphs, StepSequence
from pagebinder.runtime.graphs.predict import predict_graphs
from tests.helpers import tiny_llama
from tests.runtime.graphs.conftest import MODELS
from tests.runtime.graphs.steps import memory, steps

pytestmark = pytest.mark.usefixtures("captured_once")

SIZES = {"max_num_seqs": 4, "decode_sizes": [1, 2, 4], "token_sizes": [16, 32]}
LEN = 64


@pytest.fixture(scope="module")
def capture(compiled):
    made = {}

    def get(name: str) -> StepGraphs:
        if name not in made:
            made[name] = compiled(name).capture(num_kv_blocks=40, max_model_len=LEN, **SIZES)
        return made[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_a_replay_equals_the_step_without_its_graph(name, capture):
    graphs = capture(name)
    memory(graphs).zero_()
    for step in steps(graphs):
        inputs, before = graphs.pack(step), memory(graphs).clone()
        expected = graphs.replay(inputs, captured=False).clone()
        after = memory(graphs).clone()
        memory(graphs).copy_(before)
        got = graphs.replay(inputs)
        assert torch.equal(got, expected) and got.shape == (len(step), graphs.vocab_size)
        assert torch.equal(memory(graphs), after)
        assert after.any()
    assert set(graphs.stats.replays) == {"mixed 16", "decode 2", "decode 4"}
    assert dict(graphs.stats.uncaptured) == {"captured=False": 5}  # as it was asked to


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(name, capture):
    """The same tokens as a step of exactly its own size."""
    graphs = capture(name)
    memory(graphs).zero_()
    for step in steps(graphs):
        inputs, before = graphs.pack(step), memory(graphs).clone()
        tensors = {n: torch.from_numpy(a) for n, a in inputs.items()}
        expected = graphs.executable.run({**tensors, **graphs.caches}).clone()
        memory(graphs).copy_(before)
        torch.testing.assert_close(graphs.replay(inputs), expected, rtol=1e-5, atol=1e-5)


def test_capturing_writes_to_no_cache(compiled):
    graphs = compiled("qwen3 next").capture(
        num_kv_blocks=12, max_model_len=LEN, max_num_seqs=2, token_sizes=[16]
    )
    assert not memory(graphs).any()


def test_graphs_are_cut_where_an_op_is_registered_as_not_capturable(capture, compiled):
    graphs = capture("reference attention")
    for kind in ("decode", "mixed"):
        assert [b.op for b in graphs.breaks[kind]] == ["pagebinder.paged_attention.default"] * 2
        assert "capture='never'" in graphs.breaks[kind][0].reason
    assert {graph.num_graphs for graph in graphs._graphs.values()} == {3}
    assert capture("llama").breaks == {"decode": [], "mixed": []}
    assert "cut at 2 places" in graphs.explain() and "captured as a whole" in capture("llama").explain()
    assert "decode: 3 captured, op by op; 2 called between them, op by op" in graphs.explain()
    assert "what is captured between cuts: op by op" in compiled("reference attention").explain()
    assert "between cuts" not in compiled("llama").explain()


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_what_was_predicted(name, compiled, capture):
    model = compiled(name)
    graphs = capture(name)
    predicted = predict_graphs(
        model.graphs["fused"],
        model.kv_spec,
        model.states,
        graphs.buckets,
        device=model.device,
        max_model_len=LEN,
    )
    assert predicted.memory == graphs.memory and predicted.breaks == graphs.breaks
    assert graphs.memory.intermediate > 0 and graphs.memory.static_inputs > 0
    # Smaller buckets find their place in the memory of the largest.
    few = model.capture(
        num_kv_blocks=9, max_model_len=LEN, max_num_seqs=4, decode_sizes=(), token_sizes=[32]
    ).memory
    assert few == graphs.memory


def test_explain_predicts_the_memory_of_a_default_engine(compiled):
    model = compiled("llama")
    text = model.explain()
    assert "Captured steps" in text and "decode steps of up to 1, 2, 4, 8, 16, 32, 48, 64 requests" in text
    predicted = predict_graphs(
        model.graphs["fused"], model.kv_spec, model.states, bucket_table(EngineConfig()), device=model.device,
        max_model_len=model.max_model_len,
    )  # fmt: skip
    real = model.engine(EngineConfig(num_kv_blocks=8, capture="on")).loop.captured.graphs
    assert real.memory == predicted.memory
    assert f"static inputs {predicted.memory.static_inputs / 2**20:,.3f} MiB" in text


def test_shapes_outside_every_bucket_run_and_are_counted(compiled):
    graphs = compiled("llama").capture(
        num_kv_blocks=8, max_model_len=LEN, max_num_seqs=2, decode_sizes=[1], token_sizes=()
    )
    prompt = StepSequence(tokens=[5, 6, 7], start=0, blocks=[[1]])
    first = graphs.replay(graphs.pack([prompt]))
    other = StepSequence(tokens=[9], start=0, blocks=[[2]])
    graphs.replay(graphs.pack([StepSequence(tokens=[8], start=3, blocks=[[1]]), other]))
    assert first.shape == (1, 128) and not graphs.stats.replays
    assert dict(graphs.stats.uncaptured) == {
        "mixed step larger than every bucket": 1,
        "decode step larger than every bucket": 1,
    }
    graphs.replay(graphs.pack([StepSequence(tokens=[8], start=4, blocks=[[1]])]))
    assert dict(graphs.stats.replays) == {"decode 1": 1}
    # More rows of logits than sequences: of all tokens of a prompt, for example.
    graphs = compiled("llama").capture(num_kv_blocks=8, max_model_len=LEN, max_num_seqs=2, token_sizes=[16])
    inputs = graphs.pack([prompt]) | {"logits_rows": np.arange(3)}
    assert graphs.replay(inputs).shape == (3, 128)
    assert dict(graphs.stats.uncaptured) == {"more rows of logits than the bucket has": 1}


BAD_INPUTS = {
    "no tokens": (lambda g: [], "at least one sequence"),
    "empty": (lambda g: [StepSequence(tokens=[], start=0, blocks=[[1]])], "at least one token"),
    "tables": (lambda g: [StepSequence(tokens=[1], start=0, blocks=[])], "0 block tables, but the model has 1"),
    "too few blocks": (lambda g: [StepSequence(tokens=[1], start=16, blocks=[[1]])], "take 2 blocks of 16"),
    "too long": (lambda g: [StepSequence(tokens=[1], start=LEN, blocks=[[1] * 5])], "than max_model_len allows"),
    "block": (lambda g: [StepSequence(tokens=[1], start=0, blocks=[[40]])], "sequence 0: block_table_0 holds 40"),
    "token": (lambda g: [StepSequence(tokens=[128], start=0, blocks=[[1]])], "0: input_ids holds 128: use 0 to 127"),
    "a fraction": (lambda g: [StepSequence(tokens=[1.5], start=0, blocks=[[1]])], "tokens are .*whole numbers"),
    "half a start": (lambda g: [StepSequence(tokens=[1], start=0.5, blocks=[[1]])], "start=0.5: use a whole number"),
    "half a block": (lambda g: [StepSequence(tokens=[1], start=0, blocks=[[1.5]])], r"blocks\[0\] are .*whole"),
    "a dict": (lambda g: [{"tokens": [1]}], "use a StepSequence"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_steps_are_refused_and_nothing_is_lost(case, capture):
    make, message = BAD_INPUTS[case]
    graphs = capture("llama")
    with pytest.raises(RequestError, match=message):
        graphs.replay(graphs.pack(make(graphs)))
    good = graphs.pack([StepSequence(tokens=[3], start=0, blocks=[[1]])])
    for change, text in (
        ({"seq_lens": np.array([1.0])}, "whole numbers"),
        ({"seq_lens": np.array([0])}, "seq_lens is less than the tokens"),
        ({"seq_lens": np.array([-5])}, "seq_lens is less than the tokens"),
        ({"positions": np.array([0, 1])}, r"one entry for each token, and differ.*'positions': 2"),
        ({"query_start_loc": np.array([0, 2])}, "query_start_loc must rise"),
        (
            {"slot_mapping_0": np.array([640])},
            "slot_mapping_0 writes its token 0 to slot 640; by block_table_0 it is 16",
        ),
        ({"more": np.array([1])}, r"unknown: \['more'\]"),
    ):
        with pytest.raises(RequestError, match=text):
            graphs.replay(good | change)
    assert graphs.replay(good).shape == (1, 128)


def test_bad_captures(compiled):
    model = compiled("llama")
    for options, message in (
        ({"num_kv_blocks": 0}, "num_kv_blocks=0"),
        ({"num_kv_blocks": 1}, "num_kv_blocks=1: use a whole number, at least 2"),
        ({"num_kv_blocks": True}, "num_kv_blocks=True"),
        ({"num_kv_blocks": 8, "max_num_seqs": 0}, "max_num_seqs=0"),
        ({"num_kv_blocks": 8, "max_num_seqs": 2**31}, "65,536 sequences at most"),
        ({"num_kv_blocks": 8, "max_num_seqs": 10**30}, "65,536 sequences at most"),
        ({"num_kv_blocks": 8, "decode_sizes": np.array(2)}, "decode sizes 2: use a list"),
        ({"num_kv_blocks": 8, "token_sizes": {1: 2}}, "token sizes {1: 2}: use a list"),
        ({"num_kv_blocks": 8, "max_num_batched_tokens": "many"}, "max_num_batched_tokens='many'"),
        ({"num_kv_blocks": 8, "max_model_len": 0}, "max_model_len=0: use 1 to 512"),
        ({"num_kv_blocks": 8, "max_model_len": 64.0}, "max_model_len=64.0: use 1 to 512"),
        ({"num_kv_blocks": 8, "decode_sizes": [9]}, "max_num_seqs=8"),
        ({"num_kv_blocks": 8, "max_model_len": 1 << 20}, "use 1 to 512"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.capture(**options)
    with pytest.raises(CacheCapacityError):
        model.capture(num_kv_blocks=1 << 45)
    sizes = {"max_num_seqs": np.int32(2), "max_model_len": np.int64(64), "token_sizes": np.array([4, 8])}
    graphs = model.capture(num_kv_blocks=np.int64(8), decode_sizes=[np.int64(2)], **sizes)
    assert [bucket.num_tokens for bucket in graphs.buckets.buckets] == [8, 4, 2]
    with pytest.raises(ConfigError, match='cuda_graph.*needs a CUDA GPU.*capture="on"'):
        pagebinder.compile_model(tiny_llama(), CompileConfig(executable="cuda_graph"))


def test_compiled_code_is_captured_as_a_whole(compiled):
    """What cannot be seen op by op is called again, over the same static buffers."""
    model = dataclasses.replace(
        compiled("llama"), executable=SimpleNamespace(run=compiled("llama").executable.run)
    )
    graphs = model.capture(num_kv_blocks=9, max_model_len=LEN, max_num_seqs=2, token_sizes=[16])
    step = graphs.pack([StepSequence(tokens=[5, 6, 7], start=0, blocks=[[1]])])
    expected = graphs.replay(step, captured=False).clone()
    assert torch.equal(graphs.replay(step), expected)
    assert graphs.memory.intermediate is None and "unknown" in graphs.explain()


def test_one_lookup_finds_a_bucket():
    """Dispatch does not search: as many steps of the interpreter for 2 sizes as for 200."""
    few = BucketTable.of(max_num_seqs=256, max_num_batched_tokens=256, decode_sizes=[1, 256], token_sizes=())
    many = BucketTable.of(
        max_num_seqs=256, max_num_batched_tokens=256, decode_sizes=range(1, 257), token_sizes=()
    )
    assert few.find(200, 200, is_decode=True).num_reqs == 256
    assert many.find(200, 200, is_decode=True).num_reqs == 200
    assert isinstance(many._decode, tuple) and len(many._decode) == 257
