"""`paged_attention_fp8_quant` of the `cpu` provider: the attention kernel, then the quantisation of its rows.

The rows in between are those of this step's tokens, which are in cache.
"""

from __future__ import annotations

from pagebinder.custom_ops.fp8.attention import FP8_QUANT_FORMS, then_quantised
from pagebinder.custom_ops.fp8.quant import SCALED_FP8_QUANT
from pagebinder.custom_ops.library import define_schema, library, overload

NAMESPACE = "pagebinder_cpu"


def register() -> None:
    """Define the ops of FP8_QUANT_FORMS by the kernels that each of them is made of."""
    for attention, fused in FP8_QUANT_FORMS.items():
        define_schema(NAMESPACE, fused)
        kernels = (overload(NAMESPACE, info.name) for info in (attention, SCALED_FP8_QUANT))
        library(NAMESPACE).impl(fused.name, then_quantised(*kernels), "CPU")
