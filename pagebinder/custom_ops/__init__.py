"""Op schemas, fake kernels, references and providers. Importing this package registers the ops."""

from pagebinder.custom_ops.activation import gated_activation
from pagebinder.custom_ops.attention import cross, packed, paged, relative, semantic
from pagebinder.custom_ops.linear import linear
from pagebinder.custom_ops.moe import experts
from pagebinder.custom_ops.norm import rms_norm
from pagebinder.custom_ops.recurrent import diagonal, gated_delta_rule, mlstm, short_conv, ssd, wkv
from pagebinder.custom_ops.rope import rope

__all__ = [
    "cross",
    "diagonal",
    "experts",
    "gated_activation",
    "gated_delta_rule",
    "linear",
    "mlstm",
    "packed",
    "paged",
    "relative",
    "rms_norm",
    "rope",
    "semantic",
    "short_conv",
    "ssd",
    "wkv",
]
