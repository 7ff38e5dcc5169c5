"""The first half of a gated MLP in one op: act(x Wg^T + bg) * (x Wu^T + bu) (Shazeer, 2020).

    x [.., K] --+-- gate [N, K] --> act --+
                |                         * --> [.., N]
                +-- up   [N, K] ----------+

Both products are rounded to x's dtype, and so is act: the bits are those of the three ops that it stands for.
Activations: `activation/gated_activation.py`.
"""

from __future__ import annotations

from pagebinder.custom_ops.activation.gated_activation import gated_activation_reference
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.linear.linear import LINEAR, linear_reference
from pagebinder.custom_ops.linear.packed_weights import plain_shape


def gated_linear_reference(x, gate, up, gate_bias=None, up_bias=None, *, activation):
    """Two linear layers, then the gate.

    Args:
        x: [..., K]. gate, up: [N, K], or both packed, or both coded. gate_bias, up_bias: [N] or None.
    Returns:
        [..., N] in x's dtype.
    Raises:
        ValueError: weights of different shapes, or an unknown activation.
    """
    check_alike(gate, up)
    return gated_activation_reference(
        linear_reference(x, gate, gate_bias), linear_reference(x, up, up_bias), activation=activation
    )


def check_alike(gate, up):
    """Raises ValueError where the shapes of two weights, packed or not, differ."""
    if gate.dim() != up.dim() or plain_shape(gate) != plain_shape(up):  # blocks of codes may differ in bytes
        raise ValueError(f"gate is {plain_shape(gate)} and up {plain_shape(up)}: they must be alike")


def _gated_linear_fake(x, gate, up, gate_bias=None, up_bias=None, *, activation):
    check_alike(gate, up)
    return x.new_empty((*x.shape[:-1], plain_shape(gate)[0]))


GATED_LINEAR = define_op(
    "gated_linear",
    "(Tensor x, Tensor gate, Tensor up, Tensor? gate_bias=None, Tensor? up_bias=None, *, str activation) -> Tensor",
    reference=gated_linear_reference,
    fake=_gated_linear_fake,
    capture="always",
    fast_by=LINEAR.fast_by,
)
