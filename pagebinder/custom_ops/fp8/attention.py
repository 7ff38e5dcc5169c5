"""Paged attention whose output is codes, over a cache of the activations' dtype or of codes.

    paged_attention_fp8_quant             q [T, H, D], cache -- attention --> [T, H, Dv] -- quantised --> codes, scale
    quantized_paged_attention_fp8_quant   a row of a token is all its heads: codes [T, H * Dv]

Operands and options are those of `paged_attention` and `quantized_paged_attention`, and two more: `granularity`, and
`out_scale` [1] float32, the static scale of the output (None: dynamic). The output is rounded to q's dtype before it
is quantised: a reference has the bits of the two ops.
"""

from __future__ import annotations

from collections.abc import Callable

from pagebinder.custom_ops.attention.paged import PAGED_ATTENTION
from pagebinder.custom_ops.attention.quantized_paged import QUANTIZED_PAGED_ATTENTION
from pagebinder.custom_ops.fp8.quant import check_quant, empty_quantised, scaled_fp8_quant_reference
from pagebinder.custom_ops.library import OpInfo, define_op


def then_quantised(attend: Callable, quantise: Callable) -> Callable:
    """A function that attends, then quantises the rows of all heads."""

    def attend_and_quantise(*operands, granularity, out_scale=None, **options):
        out = attend(*operands, **options)
        return quantise(out.flatten(1), out_scale, granularity=granularity)

    return attend_and_quantise


def _define(attention: OpInfo) -> OpInfo:
    def fake(q, *operands, granularity, out_scale=None, **options):
        check_quant(out_scale, granularity)
        out = attention.fake(q, *operands, **options)
        return empty_quantised(out, granularity, (out.shape[0], out.shape[1] * out.shape[2]))

    operands = attention.signature.removesuffix(") -> Tensor")
    return define_op(
        f"{attention.name}_fp8_quant",
        f"{operands}, str granularity, Tensor? out_scale=None) -> (Tensor, Tensor)",
        reference=then_quantised(attention.reference, scaled_fp8_quant_reference),
        fake=fake,
    )


PAGED_ATTENTION_FP8_QUANT = _define(PAGED_ATTENTION)
QUANTIZED_PAGED_ATTENTION_FP8_QUANT = _define(QUANTIZED_PAGED_ATTENTION)
# attention op -> the same with its output quantised
FP8_QUANT_FORMS = {
    PAGED_ATTENTION: PAGED_ATTENTION_FP8_QUANT,
    QUANTIZED_PAGED_ATTENTION: QUANTIZED_PAGED_ATTENTION_FP8_QUANT,
}
