"""Leaf: the matrix memory of xLSTM.

The source computes it chunk by chunk and ends with a loop over the tokens left, and it cuts prompts beyond
`max_inference_chunksize` in pieces: branches on the number of tokens, which a capture must not take.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.functions import require_no_state, require_plain


def mlstm(
    self, query, key, value, igate, fgate, c_initial=None, n_initial=None, m_initial=None,
    return_last_states=None, mode=None,
):  # fmt: skip
    """xLSTMBackend.forward: q, k [1, H, T, Dk], v [1, H, T, Dv], gates [1, H, T] -> ([1, H, T, Dv], None)."""
    require_plain("xLSTMBackend", query, {"mode": mode})
    for state in (c_initial, n_initial, m_initial):
        require_no_state("xLSTMBackend", state, bool(return_last_states))
    if "autocast" in self.config.mode:
        raise CaptureError(f"xLSTM with mode={self.config.mode!r} is not known here.")
    tokens = [x[0].transpose(0, 1) for x in (query, key, value, igate, fgate)]
    scale = query.shape[-1] ** -0.5
    out = torch.ops.pagebinder.mlstm(*tokens, scale=scale, eps=float(self.config.eps))
    return out.transpose(0, 1).unsqueeze(0), None


@dataclass(frozen=True, kw_only=True)
class XLSTM(Leaf):
    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        config = model.config
        before, config.max_inference_chunksize = config.max_inference_chunksize, sys.maxsize
        try:
            with Leaf.patched(self, model):
                yield
        finally:
            config.max_inference_chunksize = before


MLSTM = XLSTM(
    name="xlstm memory",
    classes=("xLSTMBackend",),
    functions={"xLSTMBackend.forward": mlstm},
    emits=(torch.ops.pagebinder.mlstm.default,),
    seen_on=("5.23", "5.24"),
)
