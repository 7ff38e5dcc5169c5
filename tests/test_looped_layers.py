"""Decoders that run some of their layers several times in a step: each pass has keys and values of its own."""

from __future__ import annotations

import operator

import pytest
import torch
from transformers import LlamaForCausalLM

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams, compile_model
from tests.helpers import (
    assert_serves_as_source,
    assert_source_chooses,
    tiny_gemma2,
    tiny_gemma3,
    tiny_lfm2,
    tiny_llama,
    tiny_llama4,
)
from tests.moe_models import tiny_deepseek_v3, tiny_qwen3_moe
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import tiny_model

PASSES = 3
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class Looped(torch.nn.ModuleList):
    """Layers that whoever goes through them meets `PASSES` times."""

    def __getitem__(self, index):
        return list(self) * PASSES if isinstance(index, slice) else super().__getitem__(index)


def looped(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.model.layers = Looped(model.model.layers)
    return model


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(6, 120, (length,), generator=torch.Generator().manual_seed(length))


def assert_served(model: torch.nn.Module) -> None:
    prompts = [ids_of(n).tolist() for n in (40, 9)]
    engine = compile_model(model, CompileConfig(executable="eager")).engine(EngineConfig(num_kv_blocks=64))
    assert_source_chooses(model, prompts, engine.generate(prompts, GREEDY))


def bytes_of(gm: torch.fx.GraphModule) -> int:
    """Of the tensors that a graph reads, each counted once."""
    names = {node.target for node in gm.graph.nodes if node.op == "get_attr"}
    tensors = {id(t): t for t in (operator.attrgetter(name)(gm) for name in names)}
    return sum(t.nbytes for t in tensors.values())


@pytest.fixture(scope="module")
def model():
    return looped(tiny_llama())


@pytest.fixture(scope="module")
def compiled(model):
    return compile_model(model, CompileConfig(executable="eager"))


@pytest.mark.parametrize("executable", ["eager", "inductor"])
def test_served_tokens_are_the_source_models(model, executable):
    assert_serves_as_source(model, ids_of, executable)


def test_every_pass_has_a_cache_of_its_own(compiled):
    assert len(compiled.states) == 2 * PASSES
    names = [page.layer for page in compiled.kv_spec.layers]
    assert len(set(names)) == 2 * PASSES and all("self_attn" in name for name in names)
    assert f"{2 * PASSES} layers" in compiled.explain()


@pytest.mark.parametrize(
    "options",
    [{"quantization": "int8"}, {"pack_weights": True, "dtype": "bfloat16"}, {"kv_dtype": "fp8_e4m3"}],
    ids=["int8", "packed", "fp8"],
)
def test_weights_that_several_passes_read_are_rewritten_once(model, options):
    """Every rewrite is run beside the graph before it."""
    compiled = compile_model(model, CompileConfig(executable="eager", verify="sample", **options))
    prompts = [ids_of(40).tolist()]
    for step in (24, 64):
        engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_batched_tokens=step))
        assert len(engine.generate(prompts, GREEDY)[0].token_ids) == 12
    assert 0 < bytes_of(compiled.graphs["fused"]) <= 1.1 * bytes_of(compiled.graphs["captured"])


def test_an_artefact_and_a_lock(compiled, tmp_path):
    prompt = [ids_of(40).tolist()]
    compiled.save(tmp_path / "artefact")
    loaded = pagebinder.load(tmp_path / "artefact")
    got, expected = (
        c.engine(EngineConfig(num_kv_blocks=64)).generate(prompt, GREEDY) for c in (loaded, compiled)
    )
    assert got[0].token_ids == expected[0].token_ids
    compiled.write_lock(tmp_path / "plan.toml")


def test_experts_of_a_loop():
    model = looped(tiny_qwen3_moe())
    assert_served(model)


def test_dory():
    found = next((a for a in architectures("causal") if a.name == "dory"), None)
    if found is None:
        pytest.skip("this release of transformers has no Dory")
    assert_serves_as_source(tiny_model(found), ids_of, "eager")


def test_a_layer_too_many_is_still_an_error():
    class All(torch.nn.ModuleList):
        def __getitem__(self, index):
            return list(self) if isinstance(index, slice) else super().__getitem__(index)

    model = tiny_llama(num_hidden_layers=3)
    model.model.layers, model.config.num_hidden_layers = All(model.model.layers), 2
    with pytest.raises(CaptureError, match="3 attention layers were found, but the config says 2"):
        compile_model(model, CompileConfig(executable="eager"))


def test_a_config_may_count_every_pass():
    """As ALBERT's does."""
    model = looped(tiny_llama())
    model.config.num_hidden_layers = 2 * PASSES
    assert len(compile_model(model, CompileConfig(executable="eager")).states) == 2 * PASSES


@pytest.mark.parametrize(
    "build", [tiny_llama, tiny_qwen3_moe, tiny_deepseek_v3, tiny_lfm2], ids=lambda build: build.__name__
)
def test_a_list_may_hold_a_layer_twice(build):
    model = build()
    config, layers = model.config, list(model.model.layers)
    model.model.layers = torch.nn.ModuleList(layers * 2)
    config.num_hidden_layers = 2 * len(layers)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == len(layers):
            setattr(config, name, value * 2)
    assert_served(model)


def test_recurrent_layers_of_a_loop():
    model = tiny_lfm2()
    layers = model.model.layers
    model.model.layers = Looped(layers)
    model.config.layer_types, model.config.num_hidden_layers = model.config.layer_types * PASSES, 4 * PASSES
    assert_served(model)


PRUNED = {"dropped": [0, 2, 3], "in another order": [1, 0, 3, 2], "twice": [0, 1, 1, 0]}


@pytest.mark.parametrize("build", [tiny_gemma3, tiny_llama4, tiny_gemma2])
@pytest.mark.parametrize("how", PRUNED)
def test_layers_in_places_of_other_kinds_are_refused(build, how):
    """transformers masks them by their place, and our attention by what the module was made as."""
    model = build()
    kept = [model.model.layers[i] for i in PRUNED[how]]
    model.model.layers, model.config.num_hidden_layers = torch.nn.ModuleList(kept), len(kept)
    with pytest.raises(CaptureError, match=r"was made as layer \d \(layer_idx\).*the mask of its place"):
        compile_model(model, CompileConfig(executable="eager"))


def test_layers_that_were_dropped_with_their_kinds_are_served():
    model = tiny_gemma3()
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in (0, 2, 3)])
    model.config.num_hidden_layers = 3
    model.config.layer_types = [model.config.layer_types[i] for i in (0, 2, 3)]
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    assert_served(model)


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_types": ["full_attention"] * 4},
        {"sliding_window": 8},
        {"layer_types": ["sliding_attention"] * 4},
    ],
)
def test_a_config_that_was_changed_behind_its_modules_is_refused(changed):
    model = tiny_gemma3()
    for name, value in changed.items():
        setattr(model.config, name, value)
    with pytest.raises(CaptureError, match="sliding window"):
        compile_model(model, CompileConfig(executable="eager"))
