"""Op schemas, fake kernels, references and providers. Importing this package registers the ops."""

from pagebinder.custom_ops.attention import paged, semantic
from pagebinder.custom_ops.norm import rms_norm
from pagebinder.custom_ops.rope import rope

__all__ = ["paged", "rms_norm", "rope", "semantic"]
