"""Op schemas, fake kernels, references and providers. Importing this package registers the ops."""

from pagebinder.custom_ops.activation import gated_activation
from pagebinder.custom_ops.attention import (
    cross,
    indexed,
    lookahead,
    merge_states,
    packed,
    paged,
    qk_norm_rope_quantized_write,
    qk_norm_rope_write,
    quantized_paged,
    relative,
    semantic,
    unified,
)
from pagebinder.custom_ops.compress import compress, paged_compress
from pagebinder.custom_ops.fp8 import attention as fp8_attention
from pagebinder.custom_ops.fp8 import fused as fp8_fused
from pagebinder.custom_ops.fp8 import linear as fp8_linear
from pagebinder.custom_ops.fp8 import quant as fp8_quant
from pagebinder.custom_ops.hyper import hyper
from pagebinder.custom_ops.latent import write
from pagebinder.custom_ops.linear import (
    gated_linear,
    inverse_rope_grouped,
    linear,
    linears,
    norm_linears,
    quantized,
)
from pagebinder.custom_ops.mla import mla, paged_mla
from pagebinder.custom_ops.moe import experts, quantized_experts, routed_experts
from pagebinder.custom_ops.norm import layer_norm, q_norm_rope, rms_norm
from pagebinder.custom_ops.pointwise import pointwise
from pagebinder.custom_ops.recurrent import diagonal, gated_delta_rule, mlstm, short_conv, ssd, wkv
from pagebinder.custom_ops.rope import rope
from pagebinder.custom_ops.sampling import sample_tokens
from pagebinder.custom_ops.sparse import indexer, sparse_mla
from pagebinder.custom_ops.sparse import semantic as sparse_semantic

__all__ = [
    "compress",
    "cross",
    "diagonal",
    "experts",
    "fp8_attention",
    "fp8_fused",
    "fp8_linear",
    "fp8_quant",
    "gated_activation",
    "gated_delta_rule",
    "gated_linear",
    "hyper",
    "indexed",
    "indexer",
    "inverse_rope_grouped",
    "layer_norm",
    "linear",
    "linears",
    "lookahead",
    "merge_states",
    "mla",
    "mlstm",
    "norm_linears",
    "packed",
    "paged",
    "paged_compress",
    "paged_mla",
    "pointwise",
    "q_norm_rope",
    "qk_norm_rope_quantized_write",
    "qk_norm_rope_write",
    "quantized",
    "quantized_experts",
    "quantized_paged",
    "relative",
    "rms_norm",
    "rope",
    "routed_experts",
    "sample_tokens",
    "semantic",
    "short_conv",
    "sparse_mla",
    "sparse_semantic",
    "ssd",
    "unified",
    "wkv",
    "write",
]
