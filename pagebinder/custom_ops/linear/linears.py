"""Linear layers that read the same x, in one call: q, k and v, or gate and up.

    x [.., K] --+-- W0 [N0, K] (+ b0) --> y0 [.., N0]
                +-- W1 [N1, K] (+ b1) --> y1 [.., N1]           weights stay where they are: nothing is concatenated
                +-- ...

The `cpu` kernel packs x once and walks the rows of all weights in one parallel region.
"""

from __future__ import annotations

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.linear.linear import LINEAR, linear_reference
from pagebinder.custom_ops.linear.packed_weights import plain_shape


def linears_reference(x, weights, biases):
    """Every layer by itself.

    Args:
        x: [..., K]. weights: of [N_i, K] or packed. biases: of [N_i], one for each weight, or empty.
    Returns:
        A list of [..., N_i], one for each weight, in x's dtype.
    Raises:
        ValueError: some weights have a bias and others not.
    """
    return [linear_reference(x, w, b) for w, b in zip(weights, bias_of_each(weights, biases))]


def bias_of_each(weights, biases):
    """A bias or None for each weight. Raises ValueError where some have one and others not."""
    if biases and len(biases) != len(weights):
        raise ValueError(f"linears needs a bias for each of its {len(weights)} weights, or none at all")
    return biases or [None] * len(weights)


def _linears_fake(x, weights, biases):
    return [
        x.new_empty((*x.shape[:-1], plain_shape(w)[0]))
        for w, _ in zip(weights, bias_of_each(weights, biases))
    ]


LINEARS = define_op(
    "linears",
    "(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]",
    reference=linears_reference,
    fake=_linears_fake,
    capture="always",
    fast_by=LINEAR.fast_by,
)
