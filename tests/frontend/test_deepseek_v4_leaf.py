"""DeepSeek-V4: transformers' class and our own become one and the same graph, which computes what they do."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as source_file
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

from pagebinder.compiler.pipeline import RECOGNISERS
from pagebinder.frontend.audit import audit
from pagebinder.frontend.capture import capture
from pagebinder.frontend.experts_interface import hooked_experts
from pagebinder.frontend.leaves import LEAVES, captured_leaves, patched
from pagebinder.frontend.leaves.deepseek_v4 import DEEPSEEK_V4
from pagebinder.frontend.leaves.deepseek_v4_own import OWN_ATTENTION, OWN_PARTS
from pagebinder.frontend.source import source_from_config, source_from_module
from pagebinder.graph_tools import calls, module_path
from pagebinder.models import deepseek_v4 as own_file
from pagebinder.models import deepseek_v4_experts as own_experts
from pagebinder.models import deepseek_v4_mixing as own_functions
from pagebinder.models import tiny_path
from pagebinder.models.llama import LlamaConfig, LlamaForCausalLM
from pagebinder.passes.manager import run_passes
from tests.graphs import clone, count

OPS, aten = torch.ops.pagebinder, torch.ops.aten
LENGTHS = (1, 3, 4, 5, 40, 127, 128, 129, 300)
SLIDING, SPARSE, HEAVY = (
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
# Ops of each kind in the model below: one sliding layer, two sparse, one heavy.
COUNTS = {
    "compress": 5, "index_topk": 2, "compressed_attention": 4, "hyper_connection": 8, "hyper_mix": 8,
    "hyper_head": 1, "moe_experts": 4, "rope": 14, "rms_norm": 21, "gated_activation": 4, "attention": 0,
}  # fmt: skip
# What only changes how a value is laid out.
LAYOUT = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default,
    aten.select.int, aten.expand.default, aten.contiguous.default, aten.view_as.default, aten.transpose.int,
}  # fmt: skip


def tiny_config(**options) -> DeepseekV4Config:
    """Every kind of layer; as many index heads as it takes for scores not to tie at zero."""
    return DeepseekV4Config(**{
        "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 4,
        "num_attention_heads": 4, "head_dim": 24, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2,
        "o_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512,
        "layer_types": [SLIDING, SPARSE, HEAVY, SPARSE], "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
        "sliding_window": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 4, "rope_scaling": YARN,
        **options,
    })  # fmt: skip


def tiny(**options) -> DeepseekV4ForCausalLM:
    """Weights at which nothing hides: matrices scaled by fan-in, sinks and biases of size one."""
    torch.manual_seed(0)
    model, generator = DeepseekV4ForCausalLM(tiny_config(**options)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_matrix = parameter.dim() > 1 and "position_bias" not in name
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if is_matrix else 0.5 + 0.5 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(buffer.shape[0], 4, generator=generator).argsort(dim=1)[:, :2])
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return model.eval()


def own_like(model: DeepseekV4ForCausalLM) -> nn.Module:
    """Our own class with the same config and weights."""
    config = own_file.DeepseekV4Config.from_dict(json.loads(model.config.to_json_string(use_diff=False)))
    own = own_file.DeepseekV4ForCausalLM(config)
    own.load_state_dict(model.state_dict())
    return own.eval()


def semantic_of(model: nn.Module):
    captured, _ = capture(source_from_module(model))
    captured_leaves(LEAVES, model, captured)
    semantic = clone(captured)
    results = run_passes(semantic, RECOGNISERS)
    assert [refusal for result in results for refusal in result.refusals] == []
    return captured, semantic


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def graphs(model):
    """The captured and the semantic graph of transformers' class, and those of our own."""
    return semantic_of(model), semantic_of(own_like(model))


@torch.no_grad()
def logits(run, num_tokens: int) -> torch.Tensor:
    ids = torch.randint(64, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    if isinstance(run, DeepseekV4ForCausalLM):
        return run(ids[None], use_cache=False).logits[0]
    return run(ids, torch.arange(num_tokens))


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_level_of_both_computes_what_the_source_does(model, graphs, num_tokens):
    expected = logits(model, num_tokens)
    assert expected.std() > 0.3
    for captured, semantic in graphs:
        for level in (captured, semantic):
            torch.testing.assert_close(logits(level, num_tokens), expected, atol=2e-5, rtol=2e-5)


def test_all_ops_are_there_and_nothing_else_relates_tokens(graphs):
    for _, semantic in graphs:
        assert {name: count(semantic, getattr(OPS, name).default) for name in COUNTS} == COUNTS
        assert audit(semantic) == []


def test_ops_lie_in_the_modules_that_they_are_of(model, graphs):
    """Layer 1 is sparse: two compressors, and the indexer's projections."""
    (captured, _), _ = graphs
    attention = "model.layers.1.self_attn"
    paths = {
        name: [module_path(n) for n in calls(captured.graph, getattr(OPS, name).default)] for name in COUNTS
    }
    assert paths["compressed_attention"][1] == attention
    assert paths["compress"][:2] == [f"{attention}.compressor", f"{attention}.compressor.indexer"]
    assert paths["hyper_mix"][2:4] == ["model.layers.1"] * 2
    linears = {module_path(n) for n in calls(captured.graph, aten.linear.default)}
    for name in ("q_a_proj", "kv_proj", "compressor.gate_proj", "compressor.indexer.scorer.weights_proj"):
        assert f"{attention}.{name}" in linears
    assert len(captured_leaves(LEAVES, model, captured).matches) == 5 + 2 + 4 + 8 + 8 + 1
    assert len(hooked_experts(model, captured).matches) == 4


def value_of(gm) -> str:
    """What the output of a graph is computed from and how: weights by content, layout and common values left out."""
    known: dict[torch.fx.Node, str] = {}

    def of(value):
        if isinstance(value, torch.fx.Node):
            return known[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(of, value))
        return str(float(value)) if type(value) in (int, float) else str(value)

    for node in gm.graph.nodes:
        if node.op == "get_attr":
            tensor = gm.get_parameter(node.target) if node.target in dict(gm.named_parameters()) else None
            tensor = gm.get_buffer(node.target) if tensor is None else tensor.detach()
            known[node] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        elif node.op == "placeholder":
            known[node] = node.target
        elif node.op == "output" or node.target in LAYOUT:
            known[node] = of(node.args[0])
        else:
            text = repr((str(node.target), of(node.args), sorted((k, of(v)) for k, v in node.kwargs.items())))
            known[node] = hashlib.sha256(text.encode()).hexdigest()
    return known[next(n for n in gm.graph.nodes if n.op == "output")]


def test_both_models_are_the_same_graph(graphs):
    (_, theirs), (_, ours) = graphs
    if not list(
        calls(theirs.graph, aten.matmul.default)
    ):  # angles of transformers 5.17: a product of matrices
        assert value_of(theirs) == value_of(ours)
    assert torch.equal(logits(theirs, 40), logits(ours, 40))


def test_ours_with_prediction_layers_is_captured_without_them():
    one_layer = tiny(num_hidden_layers=1, layer_types=[SPARSE], mlp_layer_types=["moe"])
    own = own_file.DeepseekV4ForCausalLM(own_like(one_layer).config, with_mtp=True)
    captured, semantic = semantic_of(own.eval())
    assert audit(semantic) == [] and count(captured, OPS.hyper_mix.default) == 2


def test_in_bfloat16_it_stays_near_the_source():
    model = tiny().to(torch.bfloat16)
    _, semantic = semantic_of(model)
    assert audit(semantic) == []
    reference = tiny()
    reference.load_state_dict({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()})
    exact, theirs, ours = (logits(m, 40).float() for m in (reference, model, semantic))
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_a_config_alone_is_captured_on_the_meta_device():
    layers = {
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, SPARSE],
        "mlp_layer_types": ["hash_moe", "moe"],
    }
    source = source_from_config(tiny_config(**layers))
    captured, _ = capture(source)
    assert source.device.type == "meta" and count(captured, OPS.compressed_attention.default) == 2
    assert source.num_attention_layers == 2


def functions_now(model):
    return (
        [getattr(source_file, n.split(".")[0]).forward for n in DEEPSEEK_V4.functions]
        + [vars(own_functions)[name] for name in ("compress", "rotate", "hyper_mix")]
        + [own_experts.weighted_experts]
    )


@pytest.mark.parametrize("make", [tiny, lambda: own_like(tiny())], ids=["transformers", "own"])
def test_everything_is_put_back_after_an_error(make):
    model = make()
    before = functions_now(model)
    with pytest.raises(ZeroDivisionError), patched(LEAVES, model):
        assert functions_now(model) != before
        raise ZeroDivisionError
    assert functions_now(model) == before


def test_leaves_of_our_own_model_are_for_no_other(model):
    """Its classes are called Attention and MLP, as those of our Llama are."""
    llama = LlamaForCausalLM(LlamaConfig.from_dict(json.loads((tiny_path() / "config.json").read_text())))
    own = own_like(model)
    for leaf in (OWN_ATTENTION, OWN_PARTS):
        assert leaf.applies(own) and not leaf.applies(llama) and not leaf.applies(model)
    assert not DEEPSEEK_V4.applies(own)
