"""Legal recipes that are refused all the same, and why."""

from __future__ import annotations

from tests.fuzz.recipes import Recipe


def known_refusal(recipe: Recipe) -> str | None:
    """A part of the reason with which a legal recipe is refused; None = it must be served."""
    return None
