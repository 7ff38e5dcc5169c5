"""Weights that bitsandbytes keeps in 4 bits of a table (nf4, fp4): no kernel reads them, they are expanded.

    weight                                   bytes of two codes, the upper half first, of the weight row by row
    weight.quant_map [16]                    the number that a code stands for
    weight.absmax [N K / 64]                 what the numbers of each 64 are times; or codes of that, uint8:
    weight.nested_quant_map [256], weight.nested_absmax    ... numbers, and what each 256 of them are times
    weight.quant_state.bitsandbytes__nf4     JSON: shape, blocksize, nested_blocksize, nested_offset

QLoRA, Dettmers et al. 2023; the tensors are those of bitsandbytes' `Params4bit`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend.not_served import require

STATES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
BESIDE = ("nested_absmax", "nested_quant_map", "quant_map", "absmax", *STATES)


@dataclass(frozen=True, kw_only=True)
class StoredTables:
    """`kind`: nf4 or fp4. `kept`: patterns of modules that are stored plain, None = those transformers leaves out.

    `layers`: ends of the names of layers that the checkpoint's files keep so, see `int_format.tail`; None: unknown.
    """

    kind: str
    kept: tuple[str, ...] | None
    layers: frozenset[str] | None = None

    method = "bitsandbytes"
    granularity = "table"
    experts = None
    names = (*(f"weight.{name}" for name in BESIDE), "weight")  # older loaders take the first that fits
    endings = tuple(f".weight.{name}" for name in BESIDE)

    def codes_beside(self, name: str) -> str:
        return f"{name.partition('.weight.')[0]}.weight"

    @property
    def said(self) -> str:
        return f"no kernel reads codes of {self.kind}: its weight is expanded"


def tables(options: dict) -> StoredTables:
    """Of a quantization_config of bitsandbytes in 4 bits."""
    kind = options.get("bnb_4bit_quant_type", "fp4")
    require(kind in ("nf4", "fp4"), f"bnb_4bit_quant_type {kind!r}")
    kept = options.get("llm_int8_skip_modules")
    return StoredTables(kind=kind, kept=None if kept is None else tuple(kept))


def expanded(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] of the tensors above, by these names.

    Raises:
        CheckpointError: one is missing, or they contradict each other.
    """
    states = [f"weight.{name}" for name in STATES]
    state = next((name for name in states if name in tensors), states[0])
    if lacking := [
        name for name in ("weight", "weight.quant_map", "weight.absmax", state) if name not in tensors
    ]:
        raise CheckpointError(f"it lacks {lacking[0]}.")
    try:
        facts = json.loads(bytes(tensors[state].tolist()))
        shape, block = facts["shape"], facts["blocksize"]
        scales = tensors["weight.absmax"]
        if scales.dtype is torch.uint8:
            times = tensors["weight.nested_absmax"].repeat_interleave(facts["nested_blocksize"])[
                : len(scales)
            ]
            scales = tensors["weight.nested_quant_map"][scales.int()] * times + facts["nested_offset"]
        codes = tensors["weight"].contiguous().view(torch.uint8).flatten()
        values = tensors["weight.quant_map"][torch.stack((codes >> 4, codes & 15), 1).flatten().int()]
        weight = values * scales.repeat_interleave(block)[: len(values)]
        return weight.view(shape).to(dtype)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"its tensors contradict each other: {error}") from error
