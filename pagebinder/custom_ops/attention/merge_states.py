"""`pagebinder::merge_attention_states`: softmax over parts of the keys -> softmax over all of them.

    part i   out_i, lse_i        lse = log sum_i e^lse_i        out = sum_i e^(lse_i - lse) out_i

Exact in real arithmetic (Milakov and Gimelshein, 2018; cascade inference). A sink joins here, once.
T tokens, H query heads, Dv width of values, P parts.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op


def merge_attention_states_reference(outs_PTHD, lses_PHT, sinks=None):
    """Merge what attention to P disjoint sets of keys gave.

    Args:
        outs_PTHD: P tensors [T, H, Dv] of one float dtype, each normalised by itself.
        lses_PHT: P tensors [H, T] float32, log-sum-exp of the scores of each part. -inf: the part has no key; what
            its `out` holds is not read. +inf, which some kernels give for that, counts as -inf.
        sinks: [H] float32, logits that join the softmax without a value; parts must come without them.
    Returns:
        out [T, H, Dv] in the dtype of the parts, zeros where no part has a key; lse [H, T] float32 without the sink.
    Raises:
        ValueError: no parts, or shapes and dtypes that do not fit.
    """
    check_states(outs_PTHD, lses_PHT, sinks)
    lses = torch.stack(list(lses_PHT))
    lses = lses.masked_fill(lses == float("inf"), float("-inf"))
    lse = torch.logsumexp(lses, dim=0)
    total = lse if sinks is None else torch.logaddexp(lse, sinks[:, None])
    weights = torch.exp(lses - total.masked_fill(total == float("-inf"), 0.0))
    out = torch.zeros(outs_PTHD[0].shape, dtype=torch.float32, device=outs_PTHD[0].device)
    for part, weight, has_keys in zip(outs_PTHD, weights, lses != float("-inf")):
        out += torch.where(has_keys.T[..., None], weight.T[..., None] * part.float(), 0.0)
    return out.to(outs_PTHD[0].dtype), lse


def check_states(outs, lses, sinks) -> None:
    _require(
        len(outs) > 0 and len(outs) == len(lses),
        "outs and lses: give one of each for every part, at least one",
    )
    (num_tokens, num_heads, _), dtype = outs[0].shape, outs[0].dtype
    for out, lse in zip(outs, lses):
        fits = out.shape == outs[0].shape and out.dtype == dtype and out.is_floating_point()
        _require(fits, "outs must be [T, H, Dv], of one shape and float dtype")
        fits = lse.shape == (num_heads, num_tokens) and lse.dtype == torch.float32
        _require(fits, "lses must be float32 [H, T]")
    fits = sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_heads,))
    _require(fits, "sinks must be float32 [H]")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _fake(outs, lses, sinks=None):
    torch._check(len(outs) > 0 and len(outs) == len(lses), lambda: "one LSE a part, and at least one part")
    num_tokens, num_heads, _ = outs[0].shape
    out = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
    return out, outs[0].new_empty((num_heads, num_tokens), dtype=torch.float32)


MERGE_ATTENTION_STATES = define_op(
    "merge_attention_states",
    "(Tensor[] outs, Tensor[] lses, Tensor? sinks=None) -> (Tensor, Tensor)",
    reference=merge_attention_states_reference,
    fake=_fake,
)
