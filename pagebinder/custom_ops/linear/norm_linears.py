"""RMSNorm and the linear layers that alone read its result, in one call: q, k and v, or gate and up with their gate.

    x [.., K] --(+ residual)--+-- norm --+-- W0 [N0, K] (+ b0) --> y0 [.., N0]        or  act(gate) * up
                              |          +-- W1 [N1, K] (+ b1) --> y1 [.., N1]
                              +--> x + residual

A decode's norm is a launch over one row, and takes as long as reading some megabytes of weights.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.linear.gated_linear import check_alike, gated_linear_reference
from pagebinder.custom_ops.linear.linear import LINEAR
from pagebinder.custom_ops.linear.linears import bias_of_each, linears_reference
from pagebinder.custom_ops.linear.packed_weights import plain_shape
from pagebinder.custom_ops.norm.rms_norm import add_rms_norm_reference, rms_norm_reference


def norm_linears_reference(x, residual, norm_weight, weights, biases, *, eps, tail, activation=""):
    """The norm, then the layers.

    Args:
        x: [..., K]. residual: of x's shape and dtype, or None. norm_weight: [K] or None; eps, tail: see `rms_norm`.
        weights: of [N_i, K]. biases: of [N_i], one for each weight, or empty.
        activation: of `gated_linear`, where the weights are a gate [N, K] and the other half; "": of no gate.
    Returns:
        A list of [..., N_i] in x's dtype, one for each weight or of the gate alone; behind them x + residual, if
        there is one.
    Raises:
        ValueError: some weights have a bias and others not, or there are not two for a gate, or they differ in shape.
    """
    total = None
    if residual is None:
        y = rms_norm_reference(x, norm_weight, eps=eps, tail=tail)
    else:
        y, total = add_rms_norm_reference(x, residual, norm_weight, eps=eps, tail=tail)
    return [*layers_of(y, weights, biases, activation), *([] if total is None else [total])]


def layers_of(
    x, weights, biases, activation, *, linears=linears_reference, gated_linear=gated_linear_reference
):
    """What follows the norm, by ops that stand for it."""
    if not activation:
        return linears(x, weights, biases)
    check_gate(weights)
    return [gated_linear(x, *weights, *bias_of_each(weights, biases), activation=activation)]


def check_gate(weights) -> None:
    """Raises ValueError where weights are not those of a gate."""
    if len(weights) != 2:
        raise ValueError(f"a gate has two weights, not {len(weights)}")
    check_alike(*weights)


def _norm_linears_fake(x, residual, norm_weight, weights, biases, *, eps, tail, activation=""):
    bias_of_each(weights, biases)
    if activation:
        check_gate(weights)
    outs = [x.new_empty((*x.shape[:-1], plain_shape(w)[0])) for w in (weights[:1] if activation else weights)]
    if residual is not None:
        outs.append(torch.empty_like(x, memory_format=torch.contiguous_format))
    return outs


NORM_LINEARS = define_op(
    "norm_linears",
    "(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor[] weights, Tensor[] biases, *, float eps, str tail, "
    'str activation="") -> Tensor[]',
    reference=norm_linears_reference,
    fake=_norm_linears_fake,
    capture="always",
    fast_by=LINEAR.fast_by,
)
