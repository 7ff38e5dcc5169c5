"""The `tensorrt` executable: partition, engine keys, cache and fallback with stand-ins; TensorRT where it is."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.compile import explain_model
from pagebinder.runtime.executables import EagerExecutable, tensorrt_builder
from pagebinder.runtime.executables.partition import partition, reason_against
from pagebinder.runtime.executables.tensorrt import (
    LARGEST_SIZE,
    EngineCache,
    TensorRTExecutable,
    engine_key,
)
from pagebinder.runtime.executables.tensorrt_builder import _exported
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.helpers import tiny_llama, tiny_mamba2

HERE = {"tensorrt": "11.0", "gpu": "none"}


class StandIn:
    """Its engines are the partitions' modules; `lowered`: in torch's ops alone."""

    def __init__(self, environment=HERE, *, lowered: bool = False, fails: tuple[int, ...] = ()) -> None:
        self.environment = environment
        self.lowered, self.fails = lowered, fails
        self.num_built = self.num_loaded = self.num_calls = 0

    def build(self, part) -> bytes:
        self.num_built += 1
        if self.num_built in self.fails:
            raise NotImplementedError("no converter for aten.sin\nand more lines")
        return part.name.encode()

    def load(self, engine, part):
        assert engine == part.name.encode()
        self.num_loaded += 1
        module = part.lowered() if self.lowered else part.module

        def call(*inputs):
            self.num_calls += 1
            return module(*inputs)

        return call


@pytest.fixture(scope="module")
def llama():
    return pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager"))


@pytest.fixture(scope="module")
def graph(llama):
    return llama.graphs["fused"]


def inputs(compiled, num_tokens: int = 9) -> dict[str, torch.Tensor]:
    return single_sequence_inputs(compiled.kv_spec, compiled.states, torch.arange(1, 1 + num_tokens))


def assert_same_bits(compiled, executable, num_tokens: int = 9) -> None:
    ours, expected = inputs(compiled, num_tokens), inputs(compiled, num_tokens)
    result = executable.run(ours)
    assert torch.equal(result, EagerExecutable(compiled.graphs["fused"]).run(expected))
    assert all(torch.equal(ours[name], expected[name]) for name in ours), "caches, too"


def test_dense_calls_go_together_and_paged_ones_stay(graph):
    parts = partition(graph).partitions
    assert [p.is_candidate for p in parts] == [True, False, True, False, True]
    names = [[n.target._opname for n in p.calls] for p in parts]
    assert names[1] == names[3] == ["qk_norm_rope_write", "paged_attention"]
    assert names[2] == ["linear", "add_rms_norm", "gated_linear", "linear", "add_rms_norm", "linears"]
    assert set(parts[1].in_torch.values()) == {"writes to its arguments", "reads a cache"}
    for part in parts:
        assert all(isinstance(n.meta["val"], torch.Tensor) for n in part.inputs), "tensors only"
        weights = [n for n in part.module.graph.nodes if n.op == "get_attr"]
        assert bool(weights) == part.is_candidate, "weights are the engines' own"
    assert "3 partitions for engines" in partition(graph).describe()


def test_weights_are_shared_with_the_graph(graph):
    weight = partition(graph).partitions[2].module.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert weight is graph.get_parameter("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("op", "arguments", "reason"),
    [
        (torch.ops.aten.sin.default, (torch.zeros(3, dtype=torch.float64),), "float64"),
        (torch.ops.aten.nonzero.default, (torch.zeros(3),), "depends on values"),
        (torch.ops.aten.add_.Tensor, (torch.zeros(3), torch.zeros(3)), "writes to its arguments"),
        (torch.ops.aten.rand_like.default, (torch.zeros(3),), "random"),
        (torch.ops.aten.add.Tensor, (torch.zeros(3), torch.zeros(3)), None),
    ],
)
def test_what_an_op_is_decides(op, arguments, reason):
    nodes = torch.fx.Graph()
    made = [nodes.placeholder(f"x{i}") for i in range(len(arguments))]
    for node, value in zip(made, arguments):
        node.meta["val"] = value
    call = nodes.call_function(op, tuple(made))
    call.meta["val"] = arguments[0]
    why = reason_against(call, set())
    assert why is None if reason is None else reason in why
    assert reason_against(call, {made[0]}) is not None, "what reads a cache stays in any case"


def test_engines_have_the_bits_of_the_graph(llama, graph, tmp_path):
    builder = StandIn()
    executable = TensorRTExecutable(graph, builder, folder=tmp_path)
    assert (executable.name, builder.num_built, builder.num_calls) == ("tensorrt", 3, 0)
    assert_same_bits(llama, executable)
    assert_same_bits(llama, executable, num_tokens=70)
    assert builder.num_calls == 6
    assert any("3 of 3 engines run (0 from the cache)" in line for line in executable.describe())


def test_recurrent_layers_stay_in_torch_between_engines(tmp_path):
    compiled = pagebinder.compile_model(tiny_mamba2(), CompileConfig(executable="eager"))
    executable = TensorRTExecutable(compiled.graphs["fused"], StandIn(), folder=tmp_path)
    outside = {name for p in executable.partitioned.partitions for name in p.in_torch}
    assert outside == {"paged_short_conv", "paged_ssd"}
    assert_same_bits(compiled, executable)


def test_engines_of_references_are_the_lowered_partitions(tmp_path):
    """With every op as its reference, a partition in torch's ops alone computes the same bits, exported too."""
    ops = ("linear", "linears", "gated_linear", "rms_norm", "add_rms_norm")
    config = CompileConfig(executable="eager", providers=dict.fromkeys(ops, "reference"))
    compiled = pagebinder.compile_model(tiny_llama(), config)
    executable = TensorRTExecutable(compiled.graphs["fused"], StandIn(lowered=True), folder=tmp_path)
    assert_same_bits(compiled, executable)
    part = executable.partitioned.candidates[1]
    exported = _exported(part, torch.device("cpu"))
    namespaces = {n.target.namespace for n in exported.graph.nodes if hasattr(n.target, "namespace")}
    assert namespaces == {"aten"}
    example = [
        torch.randn([7 if isinstance(s, torch.SymInt) else s for s in n.meta["val"].shape])
        for n in part.inputs
    ]
    for ours, expected in zip(exported.module()(*example), part.module(*example), strict=True):
        assert torch.equal(ours, expected)


def test_keys_are_stable_and_change_with_what_an_engine_is_made_from(graph):
    def keys(gm, environment=HERE):
        return [engine_key(p, environment) for p in partition(gm).candidates]

    first = keys(graph)
    assert len(set(first)) == 3
    assert keys(graph) == first
    other = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="eager")).graphs["fused"]
    assert keys(other) == first, "another capture of the same model"
    assert not set(keys(graph, {**HERE, "gpu": "another"})) & set(first)
    weight = other.get_parameter("model.layers.0.mlp.up_proj.weight")
    with torch.no_grad():
        weight[0, 0] += 1.0
    changed = keys(other)
    assert [a == b for a, b in zip(changed, first)] == [True, False, True]
    norms = [n for n in other.graph.nodes if "eps" in n.kwargs]
    norms[-1].kwargs = {**norms[-1].kwargs, "eps": 1e-5}
    assert [a == b for a, b in zip(keys(other), changed)] == [True, True, False]


def test_engines_are_kept_and_damaged_ones_built_again(llama, graph, tmp_path, caplog):
    TensorRTExecutable(graph, StandIn(), folder=tmp_path)
    again = StandIn()
    executable = TensorRTExecutable(graph, again, folder=tmp_path)
    assert (again.num_built, again.num_loaded) == (0, 3)
    assert any("3 from the cache" in line for line in executable.describe())
    path = EngineCache(tmp_path).path(executable.engines[0].key)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    third = StandIn()
    assert_same_bits(llama, TensorRTExecutable(graph, third, folder=tmp_path))
    assert third.num_built == 1
    assert "is damaged" in caplog.text


def test_what_cannot_be_built_runs_in_torch_and_is_told(llama, graph, tmp_path):
    executable = TensorRTExecutable(graph, StandIn(fails=(2,)), folder=tmp_path)
    assert_same_bits(llama, executable)
    text = "\n".join(executable.describe())
    assert "2 of 3 engines run" in text
    assert "submod_2 (6 calls) runs in torch: NotImplementedError: no converter for aten.sin" in text
    assert len(list(tmp_path.glob("*.engine"))) == 2
    with pytest.raises(ConfigError, match="submod_2 .*no converter for aten.sin.*tensorrt_fallback=True"):
        TensorRTExecutable(graph, StandIn(fails=(2,)), folder=tmp_path / "strict", fallback=False)


def test_larger_steps_than_engines_allow_run_in_torch(llama, graph, tmp_path, monkeypatch):
    monkeypatch.setattr("pagebinder.runtime.executables.tensorrt.LARGEST_SIZE", 8)
    builder = StandIn()
    executable = TensorRTExecutable(graph, builder, folder=tmp_path)
    assert_same_bits(llama, executable, num_tokens=9)
    assert (executable.num_oversized_calls, builder.num_calls) == (3, 0)
    assert_same_bits(llama, executable, num_tokens=8)
    assert builder.num_calls == 3


def test_compile_model_and_explain(llama, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="torch_tensorrt is not installed: pip install 'pagebinder"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        pagebinder.compile_model(tiny_llama(), CompileConfig(executable="tensorrt"))
    with pytest.raises(ConfigError, match="tensorrt_fallback='no': use True or False"):
        CompileConfig(executable="tensorrt", tensorrt_fallback="no")
    explained = explain_model(llama.source.module.config, CompileConfig(executable="tensorrt"))
    assert "3 partitions for engines" in explained.explain()

    monkeypatch.setenv("PAGEBINDER_CACHE", str(tmp_path))
    monkeypatch.setattr(tensorrt_builder, "problem", lambda device: None)
    monkeypatch.setattr(tensorrt_builder, "TensorRTBuilder", lambda device: StandIn(fails=(1,)))
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="tensorrt"))
    assert compiled.report.executable == compiled.executable.name == "tensorrt"
    assert "2 of 3 engines run" in compiled.explain()
    assert "submod_0" in compiled.explain()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    outputs = [
        c.engine(EngineConfig(kv_cache_bytes=1 << 20)).generate([[5, 6, 7], [9] * 40], params)
        for c in (compiled, llama)
    ]
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]


@pytest.mark.skipif(
    tensorrt_builder.problem(torch.device("cuda")) is not None or not torch.cuda.is_available(),
    reason="torch_tensorrt or a GPU is not here",
)
def test_tensorrt_itself(tmp_path):
    config = CompileConfig(executable="tensorrt", tensorrt_fallback=False)
    compiled = pagebinder.compile_model(tiny_llama().cuda(), config)
    ids = torch.arange(1, 20, device="cuda")
    ours = single_sequence_inputs(compiled.kv_spec, compiled.states, ids)
    expected = single_sequence_inputs(compiled.kv_spec, compiled.states, ids)
    result, reference = compiled.executable.run(ours), EagerExecutable(compiled.graphs["fused"]).run(expected)
    assert len(ids) <= LARGEST_SIZE
    torch.testing.assert_close(result, reference, atol=2e-2, rtol=2e-2)
    assert compiled.executable.num_oversized_calls == 0
