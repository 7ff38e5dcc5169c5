"""T5's relative position bias: a bias by distance [H, N] of the weights alone, instead of one by query and key.

    the source                                        while capturing
    position_bias [1, H, T, T] from arange(T)         bias_by_distance [H, N], columns j - p = -D .. A
      row i counts as position i: wrong in a step     the same whatever the step; `relative_attention` looks it up

D is the distance from which on all keys share a bucket, A the same ahead (0 in a decoder). The values come from the
source's own `compute_bias`, called for one query at position D with the keys 0 .. D + A. The first layer computes the
bias and hands it to the others, so what reaches the attention hook is that very tensor: it carries `num_behind`.
Cross attention has no relative bias: the source adds zeros there.

For the attention classes that `position_bias.py` lists, seen in transformers 5.23.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.position_bias import MARK, is_known

PARAMETERS = ["query_length", "key_length", "device", "past_seen_tokens"]


@contextlib.contextmanager
def bias_by_distance(model: torch.nn.Module) -> Iterator[None]:
    """Patch the modules that compute a relative bias, and put them back as they were.

    Raises:
        CaptureError: `compute_bias` of this version of transformers takes other arguments.
    """
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if is_known(module) and module.has_relative_attention_bias:
                _require_known_signature(module)
                module.compute_bias = partial(_compute_bias, module, module.compute_bias)
                undo.callback(delattr, module, "compute_bias")
        yield


def _require_known_signature(module) -> None:
    found = list(inspect.signature(module.compute_bias).parameters)
    if found != PARAMETERS:
        raise CaptureError(
            f"{type(module).__name__}.compute_bias takes {found} in this version of transformers, not {PARAMETERS}: "
            "how it makes its relative bias is not known. It was seen on transformers 5.23."
        )


def _compute_bias(module, compute_bias, *args, **kwargs) -> torch.Tensor:
    behind = module.relative_attention_max_distance
    ahead = 0 if module.is_decoder else behind
    bias = compute_bias(1, behind + ahead + 1, device=kwargs.get("device"), past_seen_tokens=behind)[0, :, 0]
    setattr(bias, MARK, behind)
    return bias
