"""The architectures of GGUF files that are served, by the names that files have for them."""

from __future__ import annotations

from pagebinder.frontend.gguf import dense, gemma, latent, mixtures

ARCHITECTURES = dense.ARCHITECTURES | mixtures.ARCHITECTURES | gemma.ARCHITECTURES | latent.ARCHITECTURES
