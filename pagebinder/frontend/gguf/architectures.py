"""The architectures of GGUF files that are served, by the names that files have for them."""

from __future__ import annotations

from pagebinder.frontend.gguf import dense, gemma, hybrids, mixtures, recurrent

ARCHITECTURES = (
    dense.ARCHITECTURES
    | mixtures.ARCHITECTURES
    | gemma.ARCHITECTURES
    | recurrent.ARCHITECTURES
    | hybrids.ARCHITECTURES
)
