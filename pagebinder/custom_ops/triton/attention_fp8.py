"""`pagebinder_triton::paged_attention_fp8_quant`, `quantized_paged_attention_fp8_quant`: attention, then its codes.

A row that shares a scale is of all heads, which are of several programs: so it is launches one after the other.
"""

from __future__ import annotations

from pagebinder.custom_ops.fp8.attention import then_quantised
from pagebinder.custom_ops.triton.fp8_quant import scaled_fp8_quant
from pagebinder.custom_ops.triton.paged_attention import paged_attention, quantized_paged_attention

paged_attention_fp8_quant = then_quantised(paged_attention, scaled_fp8_quant)
quantized_paged_attention_fp8_quant = then_quantised(quantized_paged_attention, scaled_fp8_quant)
