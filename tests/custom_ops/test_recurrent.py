"""The recurrences on one sequence: against token-by-token oracles in float64 and against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.custom_ops import defined_recurrence_cases as defined
from tests.custom_ops.recurrent_cases import OPS, gated_delta_rule, short_conv, ssd, zero_state
from tests.tolerances import assert_close

LENGTHS = (1, 2, 40, 63, 64, 65, 200)
VARIANTS = {
    "short_conv": short_conv,
    "short_conv without bias and activation": lambda **o: short_conv(activation=None, bias=False, **o),
    "short_conv of 2 taps": lambda **o: short_conv(taps=2, **o),
    "gated_delta_rule": gated_delta_rule,
    "gated_delta_rule of equal heads": lambda **o: gated_delta_rule(group=1, **o),
    "gated_delta_rule without norm": lambda **o: gated_delta_rule(norm=False, **o),
    "ssd": ssd,
    "ssd of one group": lambda **o: ssd(groups=1, group=4, **o),
    "ssd with limits": lambda **o: ssd(limits=(0.2, 0.5), **o),
    "bare ssd": lambda **o: ssd(bare=True, **o),
    **defined.DEFINED,
    "bare selective_scan": lambda **o: defined.selective_scan(bare=True, **o),
}

# Results in float32 whatever the operands are.
WIDE = ("ssd", "selective_scan")


def random_tokens(recurrence, num_tokens, seed=0):
    return recurrence.tokens(num_tokens, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_recurrence_token_by_token(variant, dtype):
    recurrence = VARIANTS[variant](dtype=dtype)
    for num_tokens in LENGTHS:
        tokens = random_tokens(recurrence, num_tokens)
        expected, _ = recurrence.oracle(zero_state(recurrence), tokens, recurrence.weights)
        got = recurrence.run(tokens)
        wide = any(op in variant for op in WIDE)
        assert got.dtype is (torch.float32 if wide else dtype) and got.is_contiguous()
        assert expected.abs().mean() > 0.02
        assert_close(got, expected)


def test_strong_decay_loses_no_precision():
    """Time steps of a real checkpoint: the running sum of the log decay reaches thousands within a chunk."""
    recurrence = ssd(bare=True)
    x, dt, B, C = random_tokens(recurrence, 128)
    dt = torch.where(torch.arange(128)[:, None] % 4 == 0, 500.0, 1e-3 * dt)
    expected, _ = recurrence.oracle(zero_state(recurrence), (x / 500, dt, B, C), recurrence.weights)
    assert_close(recurrence.run((x / 500, dt, B, C)), expected)


@pytest.mark.parametrize("num_tokens", [1, 40, 77])
def test_gated_delta_rule_equals_transformers(num_tokens):
    q, k, *rest = random_tokens(gated_delta_rule(), num_tokens)
    got = gated_delta_rule().run((q, k, *rest))
    tokens = (q.repeat_interleave(2, 1), k.repeat_interleave(2, 1), *rest)  # 5.17 groups heads elsewhere
    for theirs in ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"):
        function = getattr(modeling_qwen3_next, theirs)
        expected, _ = function(*(x[None] for x in tokens), use_qk_l2norm_in_kernel=True)
        assert_close(got, expected[0])


@pytest.mark.parametrize("num_tokens", [1, 40, 77])
def test_ssd_equals_transformers(num_tokens):
    recurrence = ssd()
    x, dt, B, C = random_tokens(recurrence, num_tokens)
    A, D, bias = recurrence.weights
    expected = modeling_mamba2.mamba2_chunk_scan(
        x[None], dt[None], A, B[None], C[None], chunk_size=16, D=D, dt_bias=bias, dt_softplus=True
    )
    assert_close(recurrence.run((x, dt, B, C)), expected[0])


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_short_conv_equals_transformers(num_tokens):
    recurrence = short_conv()
    (x,) = random_tokens(recurrence, num_tokens)
    expected = modeling_mamba2.causal_conv1d_fn(x.T[None], *recurrence.weights, activation="silu")
    assert_close(recurrence.run((x,)), expected[0].T)


def test_wrong_operands():
    x, w = torch.randn(5, 4), torch.randn(4, 3)
    with pytest.raises(ValueError, match="at least 2 taps"):
        OPS.short_conv(x, torch.randn(4, 1), None, activation=None)
    with pytest.raises(ValueError, match="'gelu'"):
        OPS.short_conv(x, w, None, activation="gelu")
    q, k, v, g, beta = random_tokens(gated_delta_rule(), 3)
    with pytest.raises(ValueError, match="g and beta"):
        OPS.gated_delta_rule(q, k, v, g[:2], beta, scale=1.0)
    with pytest.raises(ValueError, match="multiple of key heads"):
        OPS.gated_delta_rule(q, k, v[:, :3], g[:, :3], beta[:, :3], scale=1.0)
    recurrence = ssd()
    x, dt, B, C = random_tokens(recurrence, 3)
    with pytest.raises(ValueError, match="multiple of the groups"):
        OPS.ssd(x[:, :3], dt[:, :3], recurrence.weights[0][:3], B, C, None, None, dt_softplus=True)
    with pytest.raises(ValueError, match=r"A is \[H\]"):
        OPS.ssd(x, dt, recurrence.weights[0][:3], B, C, None, None, dt_softplus=True)
