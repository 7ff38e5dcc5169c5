"""Which line of a model's code asks for the truth of a traced value."""

from __future__ import annotations

import os
import sys

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = tuple(
    os.path.join(os.path.dirname(__file__), file) for file in ("few_tokens.py", "mask_questions.py")
)


def asking_place() -> str | None:
    """Of the frame that called our functions in place of torch's: "file:line". None: torch itself asks."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in (*_OURS, __file__):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return None if file.startswith(_TORCH) else f"{'/'.join(file.split(os.sep)[-3:])}:{frame.f_lineno}"
