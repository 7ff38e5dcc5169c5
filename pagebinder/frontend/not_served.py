"""What readers of `quantization_config` raise: which part of a method is not served."""

from __future__ import annotations


class NotServedError(Exception):
    """Its message names the part and its value."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise NotServedError(what)
