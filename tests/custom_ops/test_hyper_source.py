"""Hyper-connections: the references against the modules of transformers, with their rounding."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.hyper.hyper import (
    hyper_connection_reference,
    hyper_head_reference,
    hyper_mix_reference,
)
from tests.custom_ops.test_hyper import HEAD_OPTIONS, OPTIONS, operands


@pytest.fixture
def source():
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers.models.deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=48, hc_mult=4, hc_sinkhorn_iters=20)
    connection, head = modeling.DeepseekV4HyperConnection(config), modeling.DeepseekV4HyperHead(config)
    _, fn, base, scale = operands(1, 4, 48)
    with torch.no_grad():
        for name, value in (("fn", fn), ("base", base), ("scale", scale)):
            getattr(connection, name).copy_(value)
        for name, value in (("hc_fn", fn[:4]), ("hc_base", base[:4]), ("hc_scale", scale[:1])):
            getattr(head, name).copy_(value)
    return connection, head, (fn, base, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_source_model_computes_the_same(source, dtype):
    connection, head, (fn, base, scale) = source
    streams = operands(7, 4, 48, dtype)[0]
    with torch.no_grad():
        expected = connection(streams[None])
        post, comb, _ = got = hyper_connection_reference(streams, fn, base, scale, **OPTIONS)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b[0], rtol=1e-6, atol=1e-6)
        update = streams[:, 1]
        # DeepseekV4DecoderLayer.forward
        mixed = post.to(dtype).unsqueeze(-1) * update.unsqueeze(-2) + torch.matmul(
            comb.to(dtype).transpose(-1, -2), streams
        )
        assert torch.equal(hyper_mix_reference(streams, post, comb, update), mixed)
        collapsed = hyper_head_reference(streams, fn[:4], base[:4], scale[:1], **HEAD_OPTIONS)
        torch.testing.assert_close(collapsed, head(streams[None])[0], rtol=1e-6, atol=1e-6)
