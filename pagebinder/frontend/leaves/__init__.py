"""Capture-time replacements of token mixing that torch.export cannot show us; one file per family."""

from pagebinder.frontend.leaves.base import Leaf, captured_leaves, patched
from pagebinder.frontend.leaves.gated_delta_net import GATED_DELTA_NET
from pagebinder.frontend.leaves.lfm2 import LFM2_SHORT_CONV
from pagebinder.frontend.leaves.llama4 import QUERY_TEMPERATURE
from pagebinder.frontend.leaves.mamba2 import MAMBA2

LEAVES: tuple[Leaf, ...] = (GATED_DELTA_NET, MAMBA2, LFM2_SHORT_CONV, QUERY_TEMPERATURE)

__all__ = ["LEAVES", "Leaf", "captured_leaves", "patched"]
