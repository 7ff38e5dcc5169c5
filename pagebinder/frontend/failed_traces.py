"""Why torch.export could not trace a model, where its own words do not tell: the line of the model's code that asks.

if (torch.sigmoid(halt) > 0.99).all(): break        a branch by values: its line
nn.TransformerEncoder(..)(x, mask)                   the same in torch's code, which looks whether the mask is causal
"""

from __future__ import annotations

import os
import traceback

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_NO_MODELS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
_ASKS_IF_CAUSAL = "_detect_is_causal_mask"


def branch_by_values(error: Exception) -> str:
    """What to say of a trace that failed at a branch by values of tensors; else ""."""
    if not isinstance(error, GuardOnDataDependentSymNode):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == _ASKS_IF_CAUSAL for frame in frames):
        return (
            ", as torch looks into the mask of nn.TransformerEncoder or nn.TransformerDecoder, whether it is causal: "
            "say it beside the mask (is_causal=True, tgt_is_causal=True), or call its layers with the mask"
        )
    line = next((f for f in reversed(frames) if not f.filename.startswith(_NO_MODELS)), None)
    place = f" ({'/'.join(line.filename.split(os.sep)[-3:])}:{line.lineno} in {line.name})" if line else ""
    return (
        f", as its code branches on values of tensors, or makes numbers of them{place}, and a graph has one way for "
        "all values: write torch.where"
    )
