"""Why torch.export could not trace a model, where its own words do not tell: the line of the model's code that asks.

if (torch.sigmoid(halt) > 0.99).all(): break        a branch by values: its line
nn.TransformerEncoder(..)(x, mask)                   the same in torch's code, which looks whether the mask is causal
for i in range(T): mask[i, :i] = 0                   a length that became one number: the line, as torch tells
"""

from __future__ import annotations

import os
import re
import traceback

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_OURS = os.path.dirname(os.path.dirname(__file__))
_NO_MODELS = (os.path.dirname(torch.__file__) + os.sep, _OURS + os.sep)
_STACK, _FRAME = "User stack:", re.compile(r'File "(.+)", line (\d+), in (\S+)')
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
    place = f" ({_place(line.filename, line.lineno, line.name)})" if line else ""
    return (
        f", as its code branches on values of tensors, or makes numbers of them{place}, and a graph has one way for "
        "all values: write torch.where"
    )


def line_that_fixed_the_length(torchs_words: str) -> str:
    """Where a model's code made the number of tokens one number ("file:line in function"); "": that is not told."""
    _, _, stacks = torchs_words.rpartition(_STACK)
    frames = [f for f in _FRAME.findall(stacks) if not f[0].startswith(_NO_MODELS)]
    return _place(*frames[-1]) if frames else ""


def _place(file: str, line: int | str, function: str) -> str:
    return f"{'/'.join(file.split(os.sep)[-3:])}:{line} in {function}"
