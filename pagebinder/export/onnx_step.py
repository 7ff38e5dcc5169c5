"""What the translations of ops share in one ONNX model: rows of a batch, positions, masks, and what is carried.

    flat rows      [T, ...]          T = b * L: the graph's own convention, one sequence or many
    rows of a batch   [b, L, ...]    what ONNX's operators take

    cache  [b, G, S, D]     | p = 0 | 1 | 2 | ... | S - 1 |     slot j of a row holds position j
    latents [b, S, D]       the same, of rows that all heads share

A step writes its L keys at slots position_ids[:, 0] on. A query at position p sees slot j iff j <= p, so what a
shorter row was padded with on the right is never seen and overwritten later. b sequences, L tokens of each, S slots;
else the legend of docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.onnx.ops import symbolic

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.errors import ExportError
from pagebinder.export.onnx_functions import LocalFunctions

OPSET = 24
NEGATIVE = float("-inf")
FLOAT32 = 1  # of onnx.TensorProto.DataType


def onnx_op(name: str, inputs, attributes: dict | None = None, *, like: torch.Tensor, shape=None):
    """A call of the standard ONNX operator `name`, with the dtype of `like`, and its shape where none is given."""
    shape = like.shape if shape is None else shape
    return symbolic(name, inputs, attributes, dtype=like.dtype, shape=shape, version=OPSET)


def attend(q_BHLD, k, v, mask, scale, soft_cap=None):
    """q [b, H, L, D] over k [b, G, S, D], v [b, G, S, Dv] -> [b, H, L, Dv]; mask [b, 1 or H, L, S] bool or added."""
    attributes = {"scale": float(scale)}
    if soft_cap is not None:
        attributes["softcap"] = float(soft_cap)
    if q_BHLD.dtype is not torch.float32:
        attributes["softmax_precision"] = FLOAT32
    shape = (*q_BHLD.shape[:3], v.shape[3])
    return onnx_op("Attention", [q_BHLD, k, v, mask], attributes, like=q_BHLD, shape=shape)


def with_sinks(mask, sinks, dtype):
    """mask [b, 1 or H, L, S] bool or added, sinks [H] or [b, H, L, 1] -> added [b, H, L, S + 1].

    A sink is one more key, of zeros, whose score is its entry of the mask.
    """
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, NEGATIVE)
    batch, _, length, num_keys = mask.shape
    if sinks.dim() == 1:
        sinks = sinks[:, None, None].expand(batch, sinks.shape[0], length, 1)
    return torch.cat([mask.expand(batch, sinks.shape[1], length, num_keys), sinks.to(dtype)], dim=-1)


@dataclass
class Step:
    """One call of the model, while it is traced.

    position_ids: [b, L]. num_slots: S, or L of an encoder, whose keys are the tokens of the call. key_mask: [b, L]
    bool of an encoder. encoder_mask: [b, E] bool, of cross attention. past: what is carried from call to call, in the
    order of the ops; present: the same after this call. functions: the model-local functions that are called.
    contrib: attention is ONNX Runtime's own operator.
    """

    position_ids: torch.Tensor
    num_slots: int
    key_mask: torch.Tensor | None = None
    encoder_mask: torch.Tensor | None = None
    past: Iterator[torch.Tensor] | None = None
    present: list[torch.Tensor] = field(default_factory=list)
    functions: LocalFunctions = field(default_factory=LocalFunctions)
    contrib: bool = False
    _masks: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [b, L, ...]"""
        return x.reshape(*self.position_ids.shape, *x.shape[1:])

    @staticmethod
    def flat(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[b, L, ...] -> [T, ...], with the T of `like`: while tracing, b * L is not known to be the same."""
        return x.reshape(like.shape[0], *x.shape[2:])

    def heads(self, x_TGD: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        """[b * n, G, D] -> [b, G, n, D], with n = L or `num_rows`."""
        batch, length = self.position_ids.shape
        return x_TGD.reshape(batch, num_rows or length, *x_TGD.shape[1:]).transpose(1, 2)

    def keys(self, x_TGD: torch.Tensor) -> torch.Tensor:
        """Keys or values of all tokens that a query may see: with a cache, of earlier calls, too. [b, G, S, D]"""
        new = self.heads(x_TGD)
        return new if self.key_mask is not None else self._written(new)

    def latents(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Rows of all tokens that a query may see, of a cache whose rows all heads share. [b, S, D]"""
        return self._written(self.rows(x_TD))

    def _written(self, new: torch.Tensor) -> torch.Tensor:
        """The next cache [..., S, D] with the rows of this step [..., L, D] in their slots."""
        cache = next(self.past)
        self.present.append(onnx_op("TensorScatter", [cache, new, self.position_ids[:, 0]], like=cache))
        return self.present[-1]

    def distances(self) -> torch.Tensor:
        """Slot minus position of every query and key: [b, L, S]."""
        return torch.arange(self.num_slots) - self.position_ids[:, :, None]

    def mask(self, **rule) -> torch.Tensor:
        """Which slots a query sees: [b, 1, L, S] bool. Layers of one rule share it."""
        if self.key_mask is None and not rule["causal"]:
            raise ExportError(
                "A decoder's attention is not causal: it would read slots that no step has written."
            )
        key = tuple(sorted(rule.items()))
        if key not in self._masks:
            visible = visible_keys(self.position_ids[:, :, None], torch.arange(self.num_slots), **rule)
            if self.key_mask is not None:  # what is padding sees itself, so that nothing becomes NaN
                visible = (visible & self.key_mask[:, None]) | (self.distances() == 0)
            self._masks[key] = visible[:, None]
        return self._masks[key]
