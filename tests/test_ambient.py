"""What a caller is in the middle of: autocast changes nothing, compilations of several threads take turns."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import LlamaForCausalLM

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.ambient import alone, is_compiled_elsewhere
from pagebinder.frontend.attention_interface import attention_forward
from pagebinder.graph_tools import num_ops
from tests.helpers import tiny_llama, tiny_qwen3

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def tokens_of(compiled, **options):
    engine = compiled.engine(EngineConfig(num_kv_blocks=32, **options))
    return [output.token_ids for output in engine.generate([[3, 1, 4, 1, 5], [9, 2, 6]], GREEDY)]


def compiled(model, executable="eager"):
    return pagebinder.compile_model(model, CompileConfig(executable=executable))


@pytest.mark.parametrize("executable", ["eager", "native", "inductor"])
def test_autocast_around_everything_changes_nothing(executable):
    model = tiny_qwen3()
    plain = compiled(model, executable)
    expected = tokens_of(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = compiled(model, executable)
        assert tokens_of(within) == tokens_of(plain) == expected
        assert tokens_of(plain, capture="on") == expected
        assert plain.run_level("fused", torch.arange(1, 8)).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
    assert {k: num_ops(g) for k, g in within.graphs.items()} == {
        k: num_ops(g) for k, g in plain.graphs.items()
    }
    assert tokens_of(within) == expected


def test_threads_compile_one_after_the_other():
    models = [tiny_llama(), tiny_qwen3()]
    expected = [tokens_of(compiled(model)) for model in models]
    found, errors = [None, None], []

    def compile_one(i):
        try:
            found[i] = tokens_of(compiled(models[i]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=compile_one, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and found == expected


def test_a_model_that_is_being_compiled_says_so_to_other_threads():
    begun, done = threading.Event(), threading.Event()

    @alone
    def hold():
        begun.set()
        done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert begun.wait(60) and is_compiled_elsewhere()
        q = torch.zeros(1, 4, 3, 8)
        with pytest.raises(CaptureError, match="is being compiled by another thread"):
            attention_forward(tiny_llama().model.layers[0].self_attn, q, q, q, None)
    finally:
        done.set()
        thread.join()
    assert not is_compiled_elsewhere()


def test_autocast_of_the_models_own_is_refused_by_name():
    class Inside(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(*args, **kwargs)

    model = tiny_llama()
    model.__class__ = Inside
    with pytest.raises(
        CaptureError, match=r"is called under torch.autocast\(bfloat16\) by the model's own code"
    ):
        compiled(model)


def test_an_engine_runs_as_it_is_in_a_caller_that_torch_compiles():
    compiled = pagebinder.compile_model(tiny_llama(), CompileConfig(executable="native"))
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    params = SamplingParams(max_tokens=5, temperature=0.0)
    expected = engine.generate([[5, 6, 7]], params)[0].token_ids

    @torch.compile(backend="eager")
    def score(x):
        return x * 2, engine.generate([[5, 6, 7]], params)[0].token_ids

    assert score(torch.ones(3))[1] == expected
