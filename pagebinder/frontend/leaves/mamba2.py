"""Leaf: the mixer of Mamba-2, which hybrid models copy with other names for its sizes.

Without it the capture sees a convolution along the tokens and the chunked scan, which pads the tokens to whole
chunks and sums along them: true, but nothing that can be paged.
"""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.functions import causal_conv1d_fn, mamba2_chunk_scan

MAMBA2 = Leaf(
    name="mamba2",
    classes=(
        "Mamba2Mixer",
        "BambaMixer",
        "FalconH1Mixer",
        "GraniteMoeHybridMambaLayer",
        "NemotronHMamba2Mixer",
        "Zamba2MambaMixer",
    ),
    functions={"causal_conv1d_fn": causal_conv1d_fn, "mamba2_chunk_scan": mamba2_chunk_scan},
    emits=(torch.ops.pagebinder.short_conv.default, torch.ops.pagebinder.ssd.default),
    seen_on=("5.17", "5.23", "5.24"),
)
