"""Models with other attention than a Llama's, served by kernels in Triton: encoders, T5, heads of 512 channels."""

from __future__ import annotations

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig
from tests.custom_ops.triton.on_device import DEVICE
from tests.encoder_decoders import eager_logits, eager_states, tiny, tokens
from tests.helpers import tiny_qwen3
from tests.test_encoder_only import bert, mpnet

pytestmark = pytest.mark.usefixtures("captured_once", "provider")


def compiled_with(model, *ops, **options):
    providers = dict.fromkeys(ops, "triton")
    config = CompileConfig(executable="eager", device=DEVICE, providers=providers, **options)
    compiled = pagebinder.compile_model(model.to(DEVICE), config)
    assert {choice.op: choice.provider for choice in compiled.report.providers}.items() >= providers.items()
    return compiled


@pytest.mark.parametrize(("family", "op"), [(bert, "packed_attention"), (mpnet, "packed_relative_attention")])
def test_an_encoder(family, op):
    model = family()
    sequences = [[5, 9, 3, 7, 40, 2], [11], [8] * 20]
    states = compiled_with(model, op).encode_batch(sequences)
    for ids, got in zip(sequences, states):
        expected = model(torch.tensor([ids], device=DEVICE)).last_hidden_state[0]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_encoder_decoder_with_a_bias_by_distance():
    model = tiny("t5")
    compiled = compiled_with(model, "paged_relative_attention", block_size=16)
    encoder_ids, ids = tokens(7).to(DEVICE), tokens(9, seed=1).to(DEVICE)
    got = compiled.run_level("fused", ids, encoder_ids)
    torch.testing.assert_close(got, eager_logits(model, encoder_ids, ids), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        compiled.encode(encoder_ids), eager_states(model, encoder_ids), atol=1e-5, rtol=1e-5
    )


def test_heads_of_512_channels():
    model = tiny_qwen3(num_hidden_layers=1, head_dim=512, num_attention_heads=2, num_key_value_heads=1)
    compiled = compiled_with(model, "paged_attention", block_size=16)
    ids = tokens(9).to(DEVICE)
    got = compiled.run_level("fused", ids)
    torch.testing.assert_close(got, model(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
