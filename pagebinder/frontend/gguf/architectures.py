"""The architectures of GGUF files that are served, by the names that files have for them."""

from __future__ import annotations

from pagebinder.frontend.gguf import dense, gated_delta, gemma, mixtures

ARCHITECTURES = {
    name: architecture
    for family in (dense, mixtures, gemma, gated_delta)
    for name, architecture in family.ARCHITECTURES.items()
}
