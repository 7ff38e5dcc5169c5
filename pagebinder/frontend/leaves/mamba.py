"""Leaves: the mixer of Mamba-1, with the norms of Falcon-Mamba and Jamba, and with the heads of Zamba.

Without them the capture sees a convolution along the tokens and a loop over them, unrolled for one number of tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.functions import causal_conv1d_fn, mamba_selective_scan

_FUNCTIONS = {"causal_conv1d_fn": causal_conv1d_fn, "mamba_selective_scan": mamba_selective_scan}
_EMITS = (torch.ops.pagebinder.short_conv.default, torch.ops.pagebinder.selective_scan.default)


@dataclass(frozen=True, kw_only=True)
class MambaOfHeads(Leaf):
    """Zamba scans each head of a mixer on its own."""

    def expected(self, module: torch.nn.Module) -> Counter:
        conv, scan = self.emits
        return Counter({conv: 1, scan: module.n_mamba_heads})


MAMBA = Leaf(
    name="mamba",
    classes=("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"),
    functions=_FUNCTIONS,
    emits=_EMITS,
    seen_on=("5.23", "5.24"),
)

ZAMBA = MambaOfHeads(
    name="mamba of heads",
    classes=("ZambaMambaMixer",),
    functions=_FUNCTIONS,
    emits=_EMITS,
    seen_on=("5.23", "5.24"),
)
