"""What the 8- and 4-bit layouts cost the shipped DeepSeek-V4, in bits per byte of text it was not trained on."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import pagebinder
from pagebinder import CompileConfig
from pagebinder.models import tiny_v4_path
from tests.models.test_tiny_v4_checkpoint import EXCERPT

pytestmark = pytest.mark.usefixtures("captured_once")

MAX_LOSS = 0.01  # of the bits per byte with caches in float32


@functools.cache
def bits_per_byte(kv_dtype: str, index_dtype: str) -> float:
    config = CompileConfig(
        dtype="float32", executable="eager", kv_dtype=kv_dtype, index_dtype=index_dtype, max_model_len=1024
    )
    compiled = pagebinder.compile_model(tiny_v4_path(), config)
    tokenizer = compiled.source.tokenizer()
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(EXCERPT)["input_ids"]])[:1024]
    text_bytes = len(tokenizer.decode(ids[1:]).encode())
    logits = compiled.run_level("fused", ids).float()
    nats = F.cross_entropy(logits.reshape(-1, logits.shape[-1])[:-1], ids[1:], reduction="sum").item()
    return nats / math.log(2) / text_bytes


@pytest.mark.parametrize("index_dtype", ["fp8", "mxfp4"])
def test_bytes_cost_less_than_a_percent(index_dtype):
    exact = bits_per_byte("auto", "auto")
    assert exact < 2.0
    assert bits_per_byte("fp8_ds_mla", index_dtype) < exact * (1 + MAX_LOSS)
