"""`pagebinder::short_conv` and `paged_short_conv`: the causal depthwise convolution in front of a recurrence.

    y[t, c] = activation(bias[c] + sum_j weight[c, j] * x[t - (K - 1) + j, c])       x before the first token is 0

T tokens, C channels, K taps, N blocks. The state is the last K - 1 inputs, [C, K - 1], oldest first:

    x      . . . t-3 t-2 t-1 | t          weight  [ w0  w1  w2  w3 ]      K = 4
    state        [ t-3 t-2 t-1 ]          y[t] =  w0 x[t-3] + w1 x[t-2] + w2 x[t-1] + w3 x[t]
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import silu

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.recurrent.checkpoints import scan_requests

ACTIVATIONS = (None, "silu")


def short_conv_reference(x_TC, weight_CK, bias_C, *, activation):
    """Convolve one sequence from its first token, in float32.

    Args:
        x_TC: [T, C]. weight_CK: [C, K], the last tap meets the token itself. bias_C: [C] or None.
        activation: "silu" or None.
    Returns:
        [T, C] in x's dtype.
    """
    _check(x_TC, weight_CK, activation)
    state = x_TC.new_zeros((1, weight_CK.shape[0], weight_CK.shape[1] - 1))
    out, _ = conv_scan(state, x_TC[None], weight=weight_CK, bias=bias_C, activation=activation)
    return out[0].to(x_TC.dtype).contiguous()


def paged_short_conv_reference(
    x_TC,
    weight_CK,
    bias_C,
    cache_NCS,
    block_table,
    seq_lens,
    query_start_loc,
    *,
    block_size,
    activation,
):
    """`short_conv` of a mixed batch; states are read from and written to cache [N, C, K - 1] of x's dtype.

    Other arguments as in `short_conv_reference` and `checkpoints.scan_requests`. Returns [T, C], zeros for padding.
    """
    check_paged_short_conv(x_TC, weight_CK, cache_NCS, activation)
    scan = functools.partial(conv_scan, weight=weight_CK, bias=bias_C, activation=activation)
    out = torch.zeros_like(x_TC, memory_format=torch.contiguous_format)
    return scan_requests(scan, [x_TC], out, cache_NCS, block_table, seq_lens, query_start_loc, block_size)


def conv_scan(state_RCS, x_RLC, *, weight, bias, activation):
    """state [R, C, K - 1], x [R, L, C] -> (y [R, L, C] float32, new state).

    Taps are added in a fixed order, so how the tokens are cut changes no bit before the activation.
    """
    num_tokens, taps = x_RLC.shape[1], weight.shape[1]
    inputs_RCL = torch.cat([state_RCS, x_RLC.transpose(1, 2)], dim=-1)
    wide, weight = inputs_RCL.float(), weight.float()
    y_RCL = sum(weight[:, j, None] * wide[..., j : j + num_tokens] for j in range(taps))
    if bias is not None:
        y_RCL = y_RCL + bias.float()[:, None]
    if activation == "silu":
        y_RCL = silu(y_RCL)
    return y_RCL.transpose(1, 2), inputs_RCL[..., num_tokens:]


def _check(x, weight, activation) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or weight.shape[1] < 2:
        raise ValueError("short_conv takes x [T, C] and weight [C, K] with at least 2 taps")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: use one of {ACTIVATIONS}")


def check_paged_short_conv(x, weight, cache, activation) -> None:
    _check(x, weight, activation)
    if cache.shape[1:] != (weight.shape[0], weight.shape[1] - 1) or cache.dtype != x.dtype:
        raise ValueError("the cache of a short convolution is [N, C, K - 1] in x's dtype")


def _fake(x, weight, bias, *operands, **options):
    torch._check(x.dim() == 2 and weight.dim() == 2, lambda: "short_conv takes x [T, C], weight [C, K]")
    torch._check(x.shape[1] == weight.shape[0], lambda: "x and weight differ in channels")
    return x.new_empty(x.shape)


SHORT_CONV = define_op(
    "short_conv",
    "(Tensor x, Tensor weight, Tensor? bias, *, str? activation) -> Tensor",
    reference=short_conv_reference,
    fake=_fake,
)

PAGED_SHORT_CONV = define_op(
    "paged_short_conv",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start_loc, *, int block_size, str? activation) -> Tensor",
    reference=paged_short_conv_reference,
    fake=_fake,
)
