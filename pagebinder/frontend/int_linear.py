"""Linear layers whose weights a checkpoint keeps as integers or e2m1: as they are loaded, and as they are served.

LoadedInts             words and scales as stored, see int_codes.py     what transformers' loader fills
  -> QuantizedLinear   codes in the kernels' order, scales              4 or 8 bits a weight, no number changed
  -> the module that stood there, with a plain weight                   where no kernel reads codes; with the reason
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.linear.group_scales import packed_groups, packed_levels
from pagebinder.custom_ops.linear.weight_formats import (
    LEVEL_SPAN,
    STORED_GROUPS,
    levels_shape,
    packed_shapes,
    size_problem,
    weight_format,
)
from pagebinder.custom_ops.linear.weight_numbers import pack_codes
from pagebinder.errors import CheckpointError
from pagebinder.frontend.int_codes import Codes
from pagebinder.frontend.int_format import Shapes, StoredInts
from pagebinder.frontend.quantized_module import (
    QuantizedLinear,
    nothing_to_fill,
    reason_against_codes,
    rows_of_codes,
)

LARGEST_E2M1 = 6.0
E2M1_FORMATS = {16: "nvfp4", 32: "mxfp4"}  # by the size of their groups


class LoadedInts(torch.nn.Module):
    """The parameters of a linear layer as the checkpoint has them; `replaced` is the module that stood there."""

    def __init__(self, replaced: torch.nn.Linear, stored: StoredInts, found: Shapes | None = None):
        super().__init__()
        self.__dict__["replaced"] = replaced  # no submodule: its weight is in no checkpoint
        self.stored = stored
        for name, shape in (found or stored.shapes(*replaced.weight.shape)).items():
            empty = torch.empty(shape, dtype=stored.tensors.loaded_as(name), device=replaced.weight.device)
            self.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
        self.bias = replaced.bias
        if "weight" not in self._parameters:
            self.__dict__["weight"] = nothing_to_fill()

    def finished(self, path: str) -> tuple[torch.nn.Module, str]:
        """(the module to serve, what to say of it); the second begins with a reason where the weight is plain.

        Raises:
            CheckpointError: tensors that contradict each other or the model.
        """
        (rows, columns), stored = self.replaced.weight.shape, self.stored
        shape = rows_of_codes(path, rows), columns
        is_meta = self.get_parameter(stored.tensors.marker).is_meta
        codes = None if is_meta else self._codes(path)
        reason = reason_against_codes(path, self.replaced)
        if reason is None and stored.is_e2m1:
            format, reason = e2m1_format(shape, stored.group if codes is None else codes.group)
        elif reason is None:
            facts = (stored.bits, stored.group or columns, stored.symmetric)
            format, reason = kernel_format(
                shape, *(facts if codes is None else _facts(codes, stored.symmetric))
            )
        if reason is not None:
            meta = torch.empty_like(self.replaced.weight)
            return self._plain(meta if codes is None else codes.weight(self.replaced.weight.dtype)), reason
        said = f"{format} as stored (quant_method {stored.method})"
        if codes is None:
            of_scale = scale_of_stored(*shape, format)
            parts = (
                torch.empty(packed_shapes(*shape, format)[0], dtype=torch.uint8, device="meta"),
                torch.empty(of_scale[0], dtype=of_scale[1], device="meta"),
            )
            return QuantizedLinear(*parts, self.bias, format, num_rows=rows), said
        if codes.order is not None:
            said += ", columns in another order"
        packed = packed_codes(codes.of_rows(shape[0]), format)
        return QuantizedLinear(*packed, self.bias, format, codes.order, rows), said

    def _codes(self, path: str) -> Codes:
        tensors = {name: p.detach() for name, p in self.named_parameters(recurse=False) if name != "bias"}
        rows, columns = self.replaced.weight.shape
        try:
            codes = self.stored.read(tensors, columns)
        except (CheckpointError, KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if codes.values.shape != (rows, columns) or codes.zeros.shape != codes.scales.shape:
            raise CheckpointError(
                f"{path}: its codes are {list(codes.values.shape)} with zero points {list(codes.zeros.shape)} and "
                f"scales {list(codes.scales.shape)}, and the model's weight is {[rows, columns]}."
            )
        if codes.scales.shape != (rows, -(-columns // codes.group)):
            raise CheckpointError(f"{path}: scales {list(codes.scales.shape)} of a weight {[rows, columns]}.")
        dtype = self.replaced.weight.dtype
        if codes.is_e2m1 and not codes.scales.abs().max() * LARGEST_E2M1 <= torch.finfo(dtype).max:
            raise CheckpointError(f"{path}: a weight is NaN, or too large for {dtype}.")
        return codes

    def _plain(self, weight: torch.Tensor) -> torch.nn.Module:
        self.replaced.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.replaced.bias = self.bias
        return self.replaced


def _facts(codes: Codes, is_symmetric: bool) -> tuple[int, int, bool]:
    return codes.bits, codes.group, is_symmetric and bool((codes.zeros == 1 << (codes.bits - 1)).all())


def kernel_format(shape, bits: int, group: int, has_middle_zeros: bool) -> tuple[str | None, str | None]:
    """(the format of the kernels, None), or (None, why there is none).

    Args:
        shape: (N, K). group: neighbours that share a scale. has_middle_zeros: zero points are half of the range.
    """
    rows, columns = shape
    if bits == 8 and group >= columns and has_middle_zeros:
        format = "int8"
    else:
        served = next((g for g in STORED_GROUPS if group % g == 0 and columns % g == 0), None)
        if served is None:
            return None, f"no kernel reads {columns} columns of codes in groups of {group}: it is expanded"
        # of fewer bits than 4, codes less their zero points are codes of 4
        sign = "" if has_middle_zeros or bits < 4 else "u"
        format = f"{sign}int{max(bits, 4)}_g{served}"
    problem = size_problem(rows, columns, format)
    return (None, f"{problem}: its weight is expanded") if problem else (format, None)


def e2m1_format(shape, group: int) -> tuple[str | None, str | None]:
    """As `kernel_format`, of codes that are e2m1."""
    format = E2M1_FORMATS.get(group)
    if format is None:
        return None, f"no kernel reads e2m1 in groups of {group}: it is expanded"
    problem = size_problem(*shape, format)
    return (None, f"{problem}: its weight is expanded") if problem else (format, None)


def scale_of_stored(rows: int, columns: int, format: str) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, dtype) of a scale tensor that holds whatever a checkpoint has, exactly."""
    if format == "nvfp4" and columns % LEVEL_SPAN == 0:
        return levels_shape(rows, columns, format), torch.uint8
    return packed_shapes(rows, columns, format)[1], torch.bfloat16 if format == "mxfp4" else torch.float32


def packed_codes(codes: Codes, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of a kernel and their scales."""
    fmt = weight_format(format)
    half = 1 << (codes.bits - 1)
    values = codes.values
    if codes.is_e2m1:
        return pack_codes(values, format), _packed_scales(codes, format)
    if codes.bits < 4:
        values = (codes.integers() + 8).to(torch.uint8)
    elif codes.bits == 8:
        values = (values ^ half).view(torch.int8)
    packed = pack_codes(values, format)
    if not fmt.has_groups:
        return packed, codes.scales[:, 0].contiguous()
    shift = (half - codes.zeros.float()) * codes.scales if fmt.is_shifted else None
    parts = (codes.scales, shift)
    return packed, packed_groups(*(p if p is None else codes.of_columns(p, fmt.group) for p in parts))


def _packed_scales(codes: Codes, format: str) -> torch.Tensor:
    """Of e2m1."""
    rows, columns = codes.values.shape
    if scale_of_stored(rows, columns, format)[1] is torch.uint8:
        whole, scales = codes.levels
        return packed_levels(whole.expand(rows, columns // LEVEL_SPAN), scales, format)
    return packed_groups(codes.scales)
