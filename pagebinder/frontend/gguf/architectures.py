"""The architectures of GGUF files that are served, by the names that files have for them."""

from __future__ import annotations

from pagebinder.frontend.gguf import (
    dense,
    gated_delta,
    gemma,
    gemma3n,
    gemma4,
    large_mixtures,
    latent,
    mixtures,
)

FAMILIES = (dense, mixtures, gemma, gemma3n, gemma4, gated_delta, latent, large_mixtures)
ARCHITECTURES = {name: each for family in FAMILIES for name, each in family.ARCHITECTURES.items()}
