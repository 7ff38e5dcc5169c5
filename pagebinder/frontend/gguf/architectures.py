"""The architectures of GGUF files that are served, by the names that files have for them."""

from __future__ import annotations

from pagebinder.frontend.gguf import dense, gemma, gemma3n, gemma4, mixtures

ARCHITECTURES = (
    dense.ARCHITECTURES
    | mixtures.ARCHITECTURES
    | gemma.ARCHITECTURES
    | gemma3n.ARCHITECTURES
    | gemma4.ARCHITECTURES
)
