"""Models whose linear layers, activations, caches or experts are quantised or mixed: served by kernels in Triton."""

import pytest

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model
from tests.custom_ops.triton.on_device import DEVICE
from tests.helpers import nightly, tiny_qwen3
from tests.moe_models import tiny_qwen3_moe

pytestmark = pytest.mark.usefixtures("captured_once")

FP8 = (
    *("fp8_linear", "rms_norm_fp8_quant", "add_rms_norm_fp8_quant", "gated_activation_fp8_quant"),
    *("qk_norm_rope_quantized_write", "quantized_paged_attention_fp8_quant"),
)
# In each model here, each token that follows is ahead of any other by 0.14 or more in log-probability: some ten
# roundings of a bfloat16 logit.
PROMPTS = [[49, 73, 62, 26], [31, 50, 113, 60, 62, 42, 14, 102, 68]]


def one_layer():
    return tiny_qwen3(num_hidden_layers=1)


def served(model, providers, *, prompts=PROMPTS, **options):
    """(ops that triton runs, tokens)"""
    config = CompileConfig(
        executable="eager", device=DEVICE, providers=providers, block_size=16, fusions=True, **options
    )
    compiled = compile_model(model.to(DEVICE), config)
    targets = (str(node.target) for node in compiled.graphs["fused"].graph.nodes)
    ops = {target.split(".")[1] for target in targets if target.startswith("pagebinder_triton")}
    engine = compiled.engine(EngineConfig(num_kv_blocks=40, max_num_batched_tokens=12))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=3, temperature=0.0))
    return ops, [output.token_ids for output in outputs]


@nightly
@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize(
    ("model", "ops", "options"),
    [
        pytest.param(one_layer, ("quantized_linear",), {"quantization": "int4_g32"}, id="int4 weights"),
        pytest.param(tiny_qwen3_moe, ("moe_experts",), {}, id="experts"),
        pytest.param(
            lambda: tiny_qwen3_moe(moe_intermediate_size=32),
            ("quantized_moe_experts", "quantized_linear"),
            {"quantization": "int4_g32"},
            id="int4 experts",
        ),
        pytest.param(
            lambda: one_layer().bfloat16(),
            FP8,
            {"quantization": "fp8", "activation_quantization": "fp8_per_token", "kv_dtype": "fp8_e4m3"},
            id="fp8 throughout",
        ),
    ],
)
def test_an_engine_gives_the_tokens_of_the_reference(model, ops, options):
    _, expected = served(model(), dict.fromkeys(ops, "reference"), **options)
    found, tokens = served(model(), dict.fromkeys(ops, "triton"), **options)
    assert found >= set(ops) and tokens == expected


@nightly
@pytest.mark.usefixtures("provider")
def test_one_request_whose_norms_are_launched_with_the_layers_behind_them():
    """Its decodes are of one row."""
    ops = ("norm_linears", "linear")
    _, expected = served(one_layer().bfloat16(), dict.fromkeys(ops, "reference"), prompts=PROMPTS[:1])
    found, tokens = served(one_layer().bfloat16(), dict.fromkeys(ops, "triton"), prompts=PROMPTS[:1])
    assert found >= set(ops) and tokens == expected
