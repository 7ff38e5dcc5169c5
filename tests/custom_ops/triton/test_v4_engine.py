"""DeepSeek-V4 served by the triton provider's kernels, from window rows to streams: the tokens of the source."""

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from tests.custom_ops.triton.on_device import DEVICE
from tests.helpers import VOCAB_SIZE, nightly
from tests.v4_models import CSA, HCA, v4_model

OPS = (
    "sparse_mla_attention", "indexer_score_topk", "compress_norm_rope_store", "kv_rope_quant_store", "q_norm_rope",
    "inverse_rope_grouped_linear", "hyper_connection", "hyper_mix", "hyper_head",
)  # fmt: skip
PROMPT = [(5 * i + 2) % VOCAB_SIZE for i in range(33)]  # two entries of 16 tokens, more of 4 than are chosen
NEW_TOKENS = 2


@nightly
@pytest.mark.usefixtures("provider")
def test_the_tokens_of_the_source():
    options = {"num_hidden_layers": 2, "layer_types": [CSA, HCA], "mlp_layer_types": ["moe", "moe"]}
    config = CompileConfig(
        executable="eager", device=DEVICE, max_model_len=64, providers=dict.fromkeys(OPS, "triton")
    )
    compiled = pagebinder.compile_model(v4_model(**options).to(DEVICE), config)
    targets = {str(node.target).split(".")[1] for node in compiled.graphs["fused"].graph.nodes
               if str(node.target).startswith("pagebinder_triton")}  # fmt: skip
    assert set(OPS) <= targets
    engine = compiled.engine(EngineConfig(num_kv_blocks=80, max_num_batched_tokens=24))
    (output,) = engine.generate([PROMPT], SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    source, expected = v4_model(**options).to(DEVICE), list(PROMPT)
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            logits = source(torch.tensor([expected], device=DEVICE)).logits
        expected.append(int(logits[0, -1].argmax()))
    assert output.token_ids == expected[len(PROMPT) :]


def test_each_op_is_served(provider):
    """On a GPU nothing is requested: `triton` comes first there."""
    triton = registered_providers()["triton"]
    for op in OPS:
        assert triton.reasons_against(OpNeed(op=op, device=DEVICE, dtype="bfloat16")) == []
