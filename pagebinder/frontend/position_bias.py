"""What the `position_bias` that reaches the attention hook means: a bias by distance, made by a leaf.

    T5's, of weights            `leaves/relative_bias.py`: [H, N], carries `num_behind`, its column of distance 0
    Inkling's, of each query    `leaves/query_bias.py`: [1, H, T, N], of the modules in BY_QUERY
    cross attention             zeros: these modules have no relative bias

Anything else is an error, since a bias that is left out changes the result.
"""

from __future__ import annotations

import torch

from pagebinder.errors import CaptureError

CLASSES = ("T5Attention", "MT5Attention", "UMT5Attention")
MARK = "pagebinder_num_behind"
# Attention modules whose bias by query a leaf makes, while it traces them -> its column of distance 0.
BY_QUERY: dict[torch.nn.Module, int] = {}


def read_bias(module, position_bias: torch.Tensor | None, is_cross: bool) -> tuple[torch.Tensor, int] | None:
    """What an attention layer's `position_bias` means: (bias [H, N] or [T, H, N], num_behind), or None for no bias.

    Raises:
        CaptureError: it is neither a bias by distance nor the zeros of a cross attention known here.
    """
    if position_bias is None:
        return None
    if has_bias_by_query(module) and not is_cross:
        return position_bias[0].transpose(0, 1), BY_QUERY[module]
    num_behind = getattr(position_bias, MARK, None)
    if num_behind is not None and not is_cross:
        return position_bias, num_behind
    if num_behind is None and is_cross and is_known(module) and not module.has_relative_attention_bias:
        return None
    raise CaptureError(
        f"{type(module).__name__} passes ['position_bias'] to its attention function, which is not understood here; "
        f"ignoring it could change the result. Relative biases are understood of {', '.join(CLASSES)}."
    )


def is_known(module) -> bool:
    return type(module).__name__ in CLASSES and hasattr(module, "has_relative_attention_bias")


def has_bias_by_query(module) -> bool:
    return isinstance(module, torch.nn.Module) and module in BY_QUERY
