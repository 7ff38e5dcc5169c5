"""What readers of `quantization_config` share: how they say which part of a method is not served, and which modules
are left out."""

from __future__ import annotations

import re
from typing import Any


class NotServedError(Exception):
    """Its message names the part and its value."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise NotServedError(what)


def described(weights: dict) -> str:
    """Weights of a config group of compressed-tensors."""
    names = ("num_bits", "type", "strategy", "group_size")
    return "weights of " + ", ".join(
        f"{name} {weights[name]}" for name in names if weights.get(name) is not None
    )


def names_of(said: Any, option: str) -> list[str]:
    """What an option says: a list of names, one name, or none of them."""
    names = [said] if isinstance(said, str) else said or []
    require(isinstance(names, list) and all(isinstance(name, str) for name in names), f"{option} {said!r}")
    return names


def kept_by_wildcards(options: dict) -> tuple[str, ...]:
    """The modules that a quantization_config of ModelOpt leaves out, as expressions for names and what begins so."""
    names = names_of(options.get("ignore") or options.get("exclude_modules"), "ignore")
    return tuple(re.escape(name).replace(r"\*", ".*") + r"(?:\.|$)" for name in names)
