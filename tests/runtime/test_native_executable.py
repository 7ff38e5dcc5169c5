"""Calls from C++: the bits of eager, nothing lost, errors that name the op, and when "auto" takes it."""

from __future__ import annotations

import functools
import gc
import operator
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.compiler import executable as compile_executable
from pagebinder.compiler.executable import check_executable, loops_of_layers, share_of_light_loops
from pagebinder.errors import ConfigError
from pagebinder.graph_tools import attach
from pagebinder.models import tiny_path, tiny_v4_path
from pagebinder.passes.select_providers import ALWAYS_ON_CPU, LOOPS_ON_CPU
from pagebinder.runtime.executables import EagerExecutable, NativeExecutable
from pagebinder.runtime.executables.native_text import problem_of
from pagebinder.runtime.graphs.cpu_backend import Recorder
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.helpers import (
    by_day,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mamba2,
    tiny_qwen3,
    tiny_qwen3_next,
)
from tests.test_engine_mla import source
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import tiny_model

pytestmark = pytest.mark.usefixtures("captured_once")

aten = torch.ops.aten
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
MODELS = {
    "shipped, bf16": lambda: pagebinder.compile_model(tiny_path(), CompileConfig(executable="native")),
    "llama": lambda: compiled_module(tiny_llama()),
    "qwen3": lambda: compiled_module(tiny_qwen3()),
    "v4": lambda: pagebinder.compile_model(
        tiny_v4_path(), CompileConfig(executable="native", max_model_len=512)
    ),
    "deepseek_v32": lambda: compiled_module(source("deepseek_v32", num_hidden_layers=1)),
    "gpt_oss": lambda: compiled_module(tiny_gpt_oss()),
    "qwen3_next": lambda: compiled_module(tiny_qwen3_next()),
    "mamba2": lambda: compiled_module(tiny_mamba2()),
    "llama, fp8 cache": lambda: compiled_module(tiny_llama(), kv_dtype="fp8_e4m3"),
    "llama, int4": lambda: compiled_module(tiny_llama(), quantization="int4_g32"),
}


def compiled_module(model, **options):
    return pagebinder.compile_model(model, CompileConfig(executable="native", block_size=16, **options))


@functools.cache
def compiled(name: str):
    return MODELS[name]()


def inputs_of(model, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(
        4, model.source.vocab_size, (length,), generator=torch.Generator().manual_seed(length)
    )
    return single_sequence_inputs(model.kv_spec, model.states, ids)


def memory(inputs) -> torch.Tensor:
    cache = next(value for name, value in inputs.items() if name.startswith("kv_cache"))
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())


@pytest.mark.parametrize("name", by_day(MODELS, ["shipped, bf16", "v4"]))
@pytest.mark.parametrize("length", [1, 37])
def test_the_bits_of_eager(name, length):
    model = compiled(name)
    native, eager = model.executable, EagerExecutable(model.graphs["fused"])
    assert native.num_native >= 0.5 * native.num_calls
    ours, theirs = inputs_of(model, length), inputs_of(model, length)
    for _ in range(2):
        assert torch.equal(native.run(ours), eager.run(theirs))
        assert torch.equal(memory(ours), memory(theirs)) and memory(ours).any()


def test_engines_generate_the_tokens_of_eager_captured_or_not():
    prompts = [[5, 6, 7], list(range(4, 60)), [9] * 20]
    model = compiled("shipped, bf16")
    eager = pagebinder.compile_model(tiny_path(), CompileConfig(executable="eager"))

    def tokens(compiled_model, **options) -> list[list[int]]:
        engine = compiled_model.engine(EngineConfig(max_num_seqs=2, **options))
        return [output.token_ids for output in engine.generate(prompts, GREEDY)]

    assert tokens(eager) == tokens(model) == tokens(model, capture="on")
    assert tokens(eager, max_num_batched_tokens=16) == tokens(model, max_num_batched_tokens=16)


def test_auto_is_native_where_layers_are_ops_of_ours():
    plain = pagebinder.compile_model(tiny_llama(), CompileConfig(block_size=16))
    assert plain.report.executable == plain.executable.name == "native"
    assert "nothing is left to fuse" in plain.report.executable_why
    assert (
        f"{plain.executable.num_native} of {plain.executable.num_calls} calls" in plain.report.executable_why
    )
    apart = pagebinder.compile_model(tiny_llama(), CompileConfig(block_size=16, fusions=False))
    assert apart.report.executable == "inductor" and "aten.add.Tensor" in apart.report.executable_why
    assert any(op.startswith("aten.add") for op in loops_of_layers(compiled("llama").graphs["paged"]))


def test_auto_is_native_where_little_and_light_is_left(monkeypatch):
    """Queries of DeepSeek-V3 are put together by torch, of channels with and without positions: their share tells."""
    model = tiny_model(next(a for a in architectures("causal") if a.name == "deepseek_v3"))
    config = CompileConfig(block_size=16)
    ours = (*ALWAYS_ON_CPU, *LOOPS_ON_CPU)
    share = share_of_light_loops(pagebinder.compile_model(model, config).graphs["fused"], ours)
    assert 0 < share < 1
    for most, executable in ((share * 1.01, "native"), (share * 0.99, "inductor")):
        monkeypatch.setattr(compile_executable, "MOST_SHARE", most)
        made = pagebinder.compile_model(model, config)
        loops = loops_of_layers(made.graphs["fused"])
        assert made.report.executable == executable and "aten.cat.default" in made.report.executable_why
        # Inductor fuses with it what our kernels do where it is not there.
        assert ("pagebinder.rope.default" in loops) == (executable == "inductor")
    assert share_of_light_loops(compiled("llama").graphs["paged"]) is None


@pytest.mark.parametrize("name", ["lfm2", "gpt_neox", "mamba2", "cohere2", "qwen3_5_text", "bart"])
def test_loops_of_layers_are_ours(name):
    """LayerNorm, GELU, RoPE in pairs, gates, decays: nothing waits for a compiler."""
    model = tiny_model(next(a for a in architectures("causal") if a.name == name))
    report = pagebinder.compile_model(model, CompileConfig(block_size=16)).report
    assert report.executable == "native", report.executable_why


def test_a_gpu_is_refused():
    gpu = types.SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ConfigError, match='"native" is for a CPU'):
        check_executable(gpu, CompileConfig(executable="native"))


def test_it_is_saved_and_loaded(tmp_path):
    model = compiled("llama")
    model.save(tmp_path / "saved")
    loaded = pagebinder.load(tmp_path / "saved")
    assert isinstance(loaded.executable, NativeExecutable) and loaded.report.executable == "native"
    assert torch.equal(
        loaded.executable.run(inputs_of(model, 21)), model.executable.run(inputs_of(model, 21))
    )


def test_a_mode_sees_the_ops():
    model, recorder = compiled("llama"), Recorder()
    expected, inputs = model.executable.run(inputs_of(model, 9)), inputs_of(model, 9)
    with recorder:
        got = model.executable.run(inputs)
    assert torch.equal(got, expected)
    assert (
        sum("paged_attention" in str(call[0]) for call in recorder.calls) == model.source.num_attention_layers
    )


def test_a_profiler_sees_the_ops_which_are_called_without_the_dispatcher_else(monkeypatch):
    model = compiled("llama")
    expected = model.executable.run(inputs_of(model, 9))

    def names() -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            assert torch.equal(model.executable.run(inputs_of(model, 9)), expected)
        return [event.name for event in profiled.events()]

    ours = "pagebinder_cpu::paged_attention"
    assert names().count(ours) == model.source.num_attention_layers
    monkeypatch.setattr(torch.autograd, "_profiler_enabled", lambda: False)
    unseen = names()
    assert "aten::cos" in unseen and ours not in unseen


def test_an_error_names_the_op_and_loses_nothing():
    model = compiled("llama")
    expected, wrong = model.executable.run(inputs_of(model, 9)), inputs_of(model, 9)
    slots = next(name for name in wrong if name.startswith("slot_mapping"))
    wrong[slots] = wrong[slots] + 10**6
    before = uses(wrong)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="pagebinder_cpu::qk_norm_rope_write.*slot_mapping lies outside"
        ):
            model.executable.run(wrong)
    assert uses(wrong) == before
    assert torch.equal(model.executable.run(inputs_of(model, 9)), expected)


def uses(inputs) -> dict[str, int]:
    """How many tensors share the memory of each input."""
    return {name: torch._C._storage_Use_Count(x.untyped_storage()._cdata) for name, x in inputs.items()}


# ---- single programs -------------------------------------------------------------------------------------------


class Builder:
    """A graph of calls on two inputs and a weight, each 4 x 6, run as it stands and from C++."""

    def __init__(self) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()
        self.root = torch.nn.Module()
        attach(self.root, "weight", torch.linspace(-2, 2, 24).view(4, 6))
        self.values = [self._valued(self.graph.placeholder(name), (4, 6)) for name in "ab"]
        self.values.append(self._valued(self.graph.get_attr("weight"), (4, 6)))

    def _valued(self, node, shape):
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def call(self, op, *args, **kwargs):
        node = self.graph.call_function(op, args, kwargs)
        fake = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = op(*fake[0], **fake[1])
        return node

    def module(self, *results) -> GraphModule:
        self.graph.output(results)
        return GraphModule(self.root, self.graph)


def both(module: GraphModule):
    """Results and inputs after it: of the graph, then from C++."""
    for run in (module, NativeExecutable(module)._with_programs):
        inputs = [torch.linspace(-3, 3, 24).view(4, 6), torch.linspace(1, 2, 24).view(4, 6)]
        with torch.inference_mode():
            yield [*run(*inputs), *inputs]


def assert_alike(module: GraphModule) -> None:
    for ours, theirs in zip(*both(module), strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride() and torch.equal(ours, theirs)


UNARY = {
    "abs": lambda b, x, n: b.call(aten.abs.default, x),
    "transposed twice": lambda b, x, n: b.call(aten.transpose.int, b.call(aten.transpose.int, x, 0, -1), 0, 1),
    "view": lambda b, x, n: b.call(aten.reshape.default, b.call(aten.reshape.default, x, [-1]), [4, 6]),
    "view without the dispatcher": lambda b, x, n: b.call(
        aten.view.default, b.call(aten.view.default, x, [(-1,), (2, -1, 3), (4, 6, 1)][n % 3]), [4, (6, -1)[n % 2]]
    ),
    "in place": lambda b, x, n: b.call(aten.relu_.default, x),
    "cast": lambda b, x, n: b.call(aten.to.dtype, b.call(aten.to.dtype, x, torch.bfloat16), torch.float32),
    "clamp": lambda b, x, n: b.call(aten.clamp.Tensor, x, None, x),
    "norm": lambda b, x, n: b.call(aten.layer_norm.default, x, [6], None, None, 1e-3, False),
    "gelu": lambda b, x, n: b.call(aten.gelu.default, x, approximate=("tanh", "none")[n % 2]),
    "python": lambda b, x, n: b.call(aten.mul.Tensor, x, 0.5),
    "first of a tuple": lambda b, x, n: b.call(operator.getitem, b.call(aten.sort.default, x, n % 2, True), 0),
    "split": lambda b, x, n: b.call(
        aten.cat.default, [b.call(operator.getitem, b.call(aten.split.Tensor, x, 2, 1), i) for i in (n % 3, 2, 0)], 1
    ),
}  # fmt: skip
BINARY = {
    "sub": lambda b, x, y: b.call(aten.sub.Tensor, b.call(aten.abs.default, x), y),
    "mul": lambda b, x, y: b.call(aten.mul.Tensor, x, y),
    "itself": lambda b, x, y: b.call(aten.mul.Tensor, x, x),
    "cat": lambda b, x, y: b.call(aten.narrow.default, b.call(aten.cat.default, [x, y, x]), 0, 2, 4),
}


@st.composite
def random_graphs(draw) -> GraphModule:
    builder = Builder()
    for _ in range(draw(st.integers(1, 14))):
        pick = st.integers(max(0, len(builder.values) - 5), len(builder.values) - 1).map(
            builder.values.__getitem__
        )
        if draw(st.booleans()):
            make = UNARY[draw(st.sampled_from(sorted(UNARY)))]
            x = draw(pick)
            of_weight = make is UNARY["in place"] and x.op == "get_attr"
            builder.values.append(
                make(builder, builder.values[0] if of_weight else x, draw(st.integers(0, 9)))
            )
        else:
            make = BINARY[draw(st.sampled_from(sorted(BINARY)))]
            builder.values.append(make(builder, draw(pick), draw(pick)))
    made = builder.values[3:]
    results = draw(st.lists(st.sampled_from(made), min_size=1, max_size=4))
    return builder.module(*results, made[-1])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(random_graphs())
def test_random_graphs(module):
    assert_alike(module)


def chain(builder, x, count: int = 5):
    for _ in range(count):
        x = builder.call(aten.abs.default, x)
    return x


def test_numbers_texts_and_lists_arrive_as_they_are():
    builder = Builder()
    x = chain(builder, builder.values[0])
    for value in (float("inf"), float("-inf"), 1e-45, -0.0):
        x = builder.call(aten.layer_norm.default, x, [6], None, None, abs(value), False)
    half = builder.call(aten.to.dtype, x, torch.float16)
    empty = builder.call(aten.einsum.default, "ij,kj->ik", [x, builder.values[1]])
    module = builder.module(x, half, empty)
    assert NativeExecutable(module).num_programs == 1
    for ours, theirs in zip(*both(module), strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


VIEWS = {
    "one free": (lambda b, x: x, [3, -1, 2]),
    "none free": (lambda b, x: x, [2, 12]),
    "of a part": (lambda b, x: b.call(aten.narrow.default, x, 0, 1, 2), [-1, 4]),
    "of the weight": (lambda b, x: b.values[2], [24]),
    "columns, which are not contiguous": (lambda b, x: b.call(aten.narrow.default, x, 1, 2, 3), [2, 2, 3]),
    "nothing": (lambda b, x: b.call(aten.narrow.default, x, 0, 1, 0), [0, 6, 3]),
    "a number": (lambda b, x: b.call(aten.view.default, b.call(aten.sum.default, x), []), [1]),
    "more dimensions than a program counts": (lambda b, x: x, [1, 2, 1, 2, 1, 2, 1, 3, 1, 1]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name):
    """They share memory, whether the dispatcher makes them or not: what is written through one is in the other."""
    source, sizes = VIEWS[name]
    builder = Builder()
    x = source(builder, chain(builder, builder.values[0]))
    seen = builder.call(aten.view.default, x, sizes)
    if name != "of the weight":
        builder.call(aten.relu_.default, seen)
    assert_alike(builder.module(x, seen))


@pytest.mark.parametrize("sizes", [[5, -1], [4, 7], [-1, -1], [-2, 12], [0, -1]])
def test_a_view_that_cannot_be_is_named(sizes):
    builder = Builder()
    x = chain(builder, builder.values[0])
    seen = builder.graph.call_function(aten.view.default, (x, sizes))
    seen.meta["val"] = torch.empty(24, device="meta")
    program = NativeExecutable(builder.module(seen))._with_programs
    for _ in range(2):
        with pytest.raises(RuntimeError, match="aten::view"), torch.inference_mode():
            program(torch.ones(4, 6), torch.ones(4, 6))


def test_what_a_program_cannot_call_is_called_from_python():
    builder = Builder()
    x = chain(builder, builder.values[0])
    scaled = builder.call(aten.mul.Tensor, x, 0.5)
    parts = builder.call(aten.split.Tensor, chain(builder, scaled), 2, 1)
    whole = builder.call(operator.getitem, parts, slice(0, 2))
    joined = builder.graph.call_function(aten.cat.default, (whole, 1))
    joined.meta["val"] = torch.empty(4, 4, device="meta")
    assert "0.5" in problem_of(scaled)
    assert "as a whole" in problem_of(parts)
    assert "function of Python" in problem_of(whole)
    module = builder.module(joined)
    assert NativeExecutable(module).num_programs == 2
    assert_alike(module)


def test_memory_is_given_back():
    builder = Builder()
    module = builder.module(chain(builder, builder.values[0]), chain(builder, builder.values[2]))
    weight = torch._C._storage_Use_Count(module.weight.untyped_storage()._cdata)
    native = NativeExecutable(module)
    inputs = {name: torch.ones(4, 6) for name in "ab"}
    before = uses(inputs)
    for _ in range(3):
        native.run(inputs)
    assert uses(inputs) == before
    assert torch._C._storage_Use_Count(module.weight.untyped_storage()._cdata) > weight
    del native
    gc.collect()
    assert torch._C._storage_Use_Count(module.weight.untyped_storage()._cdata) == weight


@pytest.mark.parametrize(
    "text", ["", "1 0 1", "0 0 0 1 1 jump 3", "0 0 1 1 1 op aten::abs - values new 1 0 1 X3 1 0"]
)
def test_damaged_text_is_refused(text):
    compiled("llama")  # loads the library
    with pytest.raises(RuntimeError, match="damaged|stoll"):
        torch.ops.pagebinder_cpu.make_native_program(text, [])
    with pytest.raises(RuntimeError, match="no native program"):
        torch.ops.pagebinder_cpu.run_native_program(10**9, [], [])
