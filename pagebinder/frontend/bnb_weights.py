"""Weights that bitsandbytes keeps in 4 bits of a table. Those of linear layers in nf4 are served from their codes.

    weight                                   bytes of two codes, the upper half first, of the weight row by row
    weight.quant_map [16]                    the number that a code stands for
    weight.absmax [N K / 64]                 what the numbers of each 64 are times; or codes of that, uint8:
    weight.nested_quant_map [256], weight.nested_absmax    ... numbers, and what each 256 of them are times
    weight.quant_state.bitsandbytes__nf4     JSON: shape, blocksize, nested_blocksize, nested_offset

    LoadedTables           bytes of codes and scales, uint8 [N/32, .]    what a loader makes of the tensors above
      -> QuantizedLinear   codes in the kernels' order, scales           no number changes

Others are expanded as they are loaded. QLoRA, Dettmers et al. 2023; the tensors are those of bitsandbytes'
`Params4bit`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagebinder.custom_ops.linear.group_scales import packed_groups
from pagebinder.custom_ops.linear.weight_formats import NF4_VALUES, packed_shapes, size_problem, weight_format
from pagebinder.custom_ops.linear.weight_numbers import pack_codes
from pagebinder.errors import CheckpointError
from pagebinder.frontend.not_served import require
from pagebinder.frontend.quantized_module import QuantizedLinear, reason_against_codes
from pagebinder.frontend.stored_names import NamedLayers

STATES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
FORMAT = "nf4_g64"
BLOCK = 64  # weights that share a scale, if nothing else is known
BESIDE = ("nested_absmax", "nested_quant_map", "quant_map", "absmax", *STATES)


@dataclass(frozen=True, kw_only=True)
class StoredTables(NamedLayers):
    """`kind`: nf4 or fp4. `kept`: patterns of modules that are stored plain, None = those transformers leaves out.

    `layers`: how many blocks those have that the checkpoint's files keep so.
    """

    kind: str
    kept: tuple[str, ...] | None
    layers: Mapping[str, int] | None = None
    plain: frozenset[str] = frozenset()

    method = "bitsandbytes"
    granularity = "table"
    experts = None
    names = (*(f"weight.{name}" for name in BESIDE), "weight")  # older loaders take the first that fits
    endings = tuple(f".weight.{name}" for name in BESIDE)

    def codes_beside(self, name: str) -> str:
        return f"{name.partition('.weight.')[0]}.weight"

    def reason_against(self, path: str, module: torch.nn.Linear, num_blocks: int | None) -> str | None:
        """Why a linear layer that is stored so needs a plain weight; None: a kernel reads its codes.

        Args:
            num_blocks: that its weight has; None: unknown.
        """
        if self.kind != "nf4":
            return f"no kernel reads codes of {self.kind}: its weight is expanded"
        rows, columns = module.weight.shape
        block = BLOCK if num_blocks is None else rows * columns // max(num_blocks, 1)
        if columns % block or block % weight_format(FORMAT).group:
            return f"no kernel reads {columns} columns in blocks of {block} of nf4: its weight is expanded"
        if problem := size_problem(rows, columns, FORMAT):
            return f"{problem}: its weight is expanded"
        return reason_against_codes(path, module)


def tables(options: dict) -> StoredTables:
    """Of a quantization_config of bitsandbytes in 4 bits."""
    kind = options.get("bnb_4bit_quant_type", "fp4")
    require(kind in ("nf4", "fp4"), f"bnb_4bit_quant_type {kind!r}")
    kept = options.get("llm_int8_skip_modules")
    return StoredTables(kind=kind, kept=None if kept is None else tuple(kept))


class LoadedTables(torch.nn.Module):
    """A linear layer whose weight is codes of nf4, as a loader fills it. `replaced`: what stood there."""

    def __init__(self, replaced: torch.nn.Linear):
        super().__init__()
        self.__dict__["replaced"] = replaced  # no submodule: its weight is in no checkpoint
        self.shapes = packed_shapes(*replaced.weight.shape, FORMAT)
        sizes = [math.prod(shape[1:]) for shape in self.shapes]
        num_bytes = sizes[0] + sizes[1] * torch.float32.itemsize
        empty = torch.empty((self.shapes[0][0], num_bytes), dtype=torch.uint8, device=replaced.weight.device)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)
        self.bias = replaced.bias

    def finished(self, path: str) -> tuple[torch.nn.Module, str]:
        """(the module to serve, what to say of it)."""
        of_codes = math.prod(self.shapes[0][1:])
        weight = self.weight.detach()
        codes = weight[:, :of_codes].contiguous().view(self.shapes[0])
        scale = weight[:, of_codes:].contiguous().view(torch.float32).view(self.shapes[1])
        return QuantizedLinear(
            codes, scale, self.bias, FORMAT
        ), f"{FORMAT} as stored (quant_method bitsandbytes)"


def panel_bytes(tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """What LoadedTables keeps of a weight [N, K] of that shape.

    Raises:
        CheckpointError: its tensors are missing, contradict each other, or are of another table.
    """
    codes, scales, block, found = _parts(tensors)
    table = tensors["weight.quant_map"].float().tolist()
    if tuple(found) != tuple(shape) or len(scales) * block != len(codes):
        raise CheckpointError(
            f"it is {found} in {len(scales)} blocks of {block}, and the model's {list(shape)}."
        )
    if not scales.isfinite().all() or table != list(NF4_VALUES):
        raise CheckpointError("its table is not that of nf4, or a scale is NaN or infinity.")
    of_groups = scales.view(shape[0], -1).repeat_interleave(block // weight_format(FORMAT).group, dim=1)
    packed, scale = pack_codes(codes.view(*shape), FORMAT), packed_groups(of_groups).float()
    return torch.cat((packed.flatten(1), scale.flatten(1).view(torch.uint8)), dim=1)


def expanded(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] of the tensors above, by these names.

    Raises:
        CheckpointError: one is missing, or they contradict each other.
    """
    codes, scales, block, shape = _parts(tensors)
    try:
        values = tensors["weight.quant_map"][codes.int()]
        weight = values * scales.repeat_interleave(block)[: len(values)]
        return weight.view(shape).to(dtype)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"its tensors contradict each other: {error}") from error


def _parts(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int, list[int]]:
    """(codes uint8 [N K], scales float32 of blocks, the size of a block, [N, K]).

    Raises:
        CheckpointError: a tensor is missing, or they contradict each other.
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
        if not all(isinstance(number, int) and number > 0 for number in (*shape, block)):
            raise CheckpointError(f"its shape {shape} or blocksize {block} is none.")
        scales = tensors["weight.absmax"]
        if scales.dtype is torch.uint8:
            times = tensors["weight.nested_absmax"].repeat_interleave(facts["nested_blocksize"])[
                : len(scales)
            ]
            scales = tensors["weight.nested_quant_map"][scales.int()] * times + facts["nested_offset"]
        pairs = tensors["weight"].contiguous().view(torch.uint8).flatten()
        return torch.stack((pairs >> 4, pairs & 15), 1).flatten(), scales.float(), block, shape
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"its tensors contradict each other: {error}") from error
