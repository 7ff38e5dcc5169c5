"""The architectures of GGUF files that are served, by the names that files have for them."""

from __future__ import annotations

from pagebinder.frontend.gguf import (
    dense,
    gated_delta,
    gemma,
    gemma3n,
    gemma4,
    hybrids,
    large_mixtures,
    latent,
    layer_norms,
    mixtures,
    recurrent,
)

FAMILIES = (
    dense,
    layer_norms,
    mixtures,
    large_mixtures,
    latent,
    gemma,
    gemma3n,
    gemma4,
    gated_delta,
    recurrent,
    hybrids,
)
ARCHITECTURES = {name: each for family in FAMILIES for name, each in family.ARCHITECTURES.items()}
