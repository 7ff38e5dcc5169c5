"""Op schemas, fake kernels, references and providers. Importing this package registers the ops."""

from pagebinder.custom_ops.attention import cross, paged, relative, semantic
from pagebinder.custom_ops.norm import rms_norm
from pagebinder.custom_ops.recurrent import gated_delta_rule, short_conv, ssd
from pagebinder.custom_ops.rope import rope

__all__ = [
    "cross",
    "gated_delta_rule",
    "paged",
    "relative",
    "rms_norm",
    "rope",
    "semantic",
    "short_conv",
    "ssd",
]
