"""Weights with what lies beside them, as transformers' loader collects them -> what it merges to a model's tensors.

of experts, of which each has its tensors   plain weights, or rows of panels: codes with their scales
of layers in nf4                            the same, of one
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend import bnb_weights
from pagebinder.frontend.bnb_weights import StoredTables
from pagebinder.frontend.coded_experts import LoadedCodedExperts, fp8_panel_bytes, panel_bytes
from pagebinder.frontend.fp8_format import GROUPED, OF_ACTIVATIONS, StoredFp8
from pagebinder.frontend.fp8_linear import checked_scale, expanded
from pagebinder.frontend.int_format import StoredInts
from pagebinder.frontend.mx_numbers import times_scale
from pagebinder.frontend.stored_parts import StoredParts


def _by_owner(found: dict[str, list], names) -> Iterator[tuple[str, dict[str, list], str]]:
    """What a loader collected, by the patterns of its names: of each owner of weights its name and a dot behind it,
    its tensors by `names`, and the pattern of its weight."""
    owners: dict[str, dict[str, list]] = {}
    for pattern, tensors in found.items():
        name = pattern.removesuffix("$")
        kind = max(filter(name.endswith, names), key=len)
        owners.setdefault(name.removesuffix(kind), {})[kind] = tensors
    end = "$" if any(pattern.endswith("$") for pattern in found) else ""  # of transformers 5.17
    for owner, kinds in owners.items():
        yield owner, kinds, f"{owner}weight{end}"


def of_tables(
    found: dict[str, list], stored: StoredTables, dtype: torch.dtype, shape: tuple[int, int] | None, name: str
) -> dict[str, list]:
    """Tensors of bitsandbytes, or plain weights, by name and of each -> plain weights; of a layer that keeps its
    codes, and whose weight has that shape, what LoadedTables keeps."""
    made = {}
    for _, kinds, weights in _by_owner(found, stored.names):
        made[weights] = plain = []
        for i in range(max(map(len, kinds.values()))):
            tensors = {kind: of_each[i] for kind, of_each in kinds.items() if i < len(of_each)}
            try:
                if shape is not None:
                    plain.append(bnb_weights.panel_bytes(tensors, shape))
                    continue
                is_plain = tensors.keys() == {"weight"}
                plain.append(
                    tensors["weight"].to(dtype) if is_plain else bnb_weights.expanded(tensors, dtype)
                )
            except CheckpointError as error:
                raise CheckpointError(f"{name} cannot be read: {error}") from error
    return made


def of_parts(
    found: dict[str, list], stored: StoredParts, dtype: torch.dtype, owner: torch.nn.Module, name: str
) -> dict[str, list]:
    """Tensors of experts of a checkpoint in several formats, by name and of each -> plain weights, or what the owner
    keeps. name: that of the parameter which they become."""
    made = {}
    for prefix, kinds, weights in _by_owner(found, stored.names):
        number = stored.part_of_experts(name, prefix.removesuffix(".").rpartition(".")[2])
        if number is None:
            made[weights] = [weight.to(dtype) for weight in kinds["weight"]]
            continue
        part = stored.parts[number]
        own = {f"{prefix}{kind}": tensors for kind, tensors in kinds.items() if kind in part.names}
        made[weights] = of_codes(own, part, dtype, owner)[f"{prefix}weight"]
    return made


def of_codes(
    found: dict[str, list], stored: StoredInts | StoredFp8, dtype: torch.dtype, owner: torch.nn.Module
) -> dict[str, list]:
    """The same of a checkpoint in one format."""
    if isinstance(stored, StoredInts):
        return of_ints(found, stored, dtype, getattr(owner, "format", None))
    return of_fp8(found, stored, dtype, owner)


def of_ints(
    found: dict[str, list], stored: StoredInts, dtype: torch.dtype, format: str | None
) -> dict[str, list]:
    """Tensors of experts, as integers or plain, by name and of each -> plain weights, or bytes in `format`."""
    made = {}
    for owner, kinds, weights in _by_owner(found, stored.names):
        if stored.tensors.marker not in kinds:
            made[weights] = (
                [weight.to(dtype) for weight in kinds["weight"]] if format is None else kinds["weight"]
            )
            continue
        if len(counts := {len(tensors) for tensors in kinds.values()}) != 1:
            raise CheckpointError(
                f"{owner[:-1]}: some of its {max(counts)} weights lack one of {', '.join(kinds)}."
            )
        each = ({kind: tensors[i] for kind, tensors in kinds.items()} for i in range(counts.pop()))
        try:
            if format is None:
                made[weights] = [stored.read(tensors).weight(dtype) for tensors in each]
            else:
                made[weights] = [panel_bytes(stored.read(tensors), format, stored) for tensors in each]
        except (CheckpointError, KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{owner[:-1]} cannot be read: {error}") from error
    return made


def of_fp8(
    found: dict[str, list], stored: StoredFp8, dtype: torch.dtype, owner: torch.nn.Module
) -> dict[str, list]:
    """Weights in e4m3, or plain, and their scales, by name and of each -> plain weights, or what the owner keeps."""
    made = {}
    for name, weights in found.items():
        if name.endswith((stored.scale_name, *OF_ACTIVATIONS)):
            continue
        scales = found.get(name + stored.scale_suffix)
        if scales is not None and len(weights) != len(scales):
            raise CheckpointError(f"{name}: {len(weights)} weights in fp8 have {len(scales)} scales.")
        if not isinstance(owner, LoadedCodedExperts) and scales is None:
            made[name] = weights
            continue
        each = zip(weights, [None] * len(weights) if scales is None else scales, strict=True)
        try:
            if isinstance(owner, LoadedCodedExperts):
                made[name] = [_fp8_bytes(weight, scale, owner) for weight, scale in each]
            else:
                made[name] = [_expanded(weight, scale, stored, dtype) for weight, scale in each]
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
    return made


def _fp8_bytes(weight: torch.Tensor, scale: torch.Tensor | None, owner: LoadedCodedExperts) -> torch.Tensor:
    packed, num_rounded = fp8_panel_bytes(weight, scale, owner.format, owner.stored)
    owner.num_rounded += num_rounded
    return packed


def _expanded(
    weight: torch.Tensor, scale: torch.Tensor, stored: StoredFp8, dtype: torch.dtype
) -> torch.Tensor:
    if stored.experts is not None or stored.granularity == GROUPED:
        return times_scale(weight, scale, dtype)
    return expanded(weight, checked_scale(weight, scale, stored), dtype)
