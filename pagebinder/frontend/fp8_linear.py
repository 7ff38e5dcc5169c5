"""Linear layers whose weights a checkpoint keeps in fp8: as they are loaded, and as they are served.

LoadedFp8Linear    weight [N, K] e4m3, scale as stored        what transformers' loader fills
  -> QuantizedLinear   codes in the kernels' order, scale     calls quantized_linear: 8 bits a weight
  -> the module that stood there, with a plain weight         where no kernel reads codes; with the reason
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.linear.group_scales import scale_of_each
from pagebinder.custom_ops.linear.weight_formats import packed_shapes, size_problem
from pagebinder.custom_ops.linear.weight_numbers import pack_e4m3
from pagebinder.errors import CheckpointError
from pagebinder.frontend.fp8_format import GROUPED, StoredFp8
from pagebinder.frontend.mx_numbers import SCALE_DTYPES, scale_values, times_scale
from pagebinder.frontend.quantized_module import (
    QuantizedLinear,
    reason_against_codes,
    rows_of_codes,
    with_rows,
)


class LoadedFp8Linear(torch.nn.Module):
    """The parameters of a linear layer as the checkpoint has them; `replaced` is the module that stood there."""

    def __init__(self, replaced: torch.nn.Linear, stored: StoredFp8):
        super().__init__()
        self.__dict__["replaced"] = replaced  # no submodule: its weight is in no checkpoint
        self.stored = stored
        rows, columns = replaced.weight.shape
        device = replaced.weight.device

        def parameter(*shape, dtype):
            return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.weight = parameter(rows, columns, dtype=torch.float8_e4m3fn)
        setattr(self, stored.scale_name, parameter(*stored.scale_shape(rows, columns), dtype=torch.float32))
        self.bias = replaced.bias

    def finished(self, path: str) -> tuple[torch.nn.Module, str]:
        """(the module to serve, what to say of it); the second begins with a reason where the weight is plain.

        Raises:
            CheckpointError: the tensors are not numbers in fp8 with a scale in float32, or have other shapes.
        """
        reason = self._reason_against_codes(path)
        scale = self._scale(path)
        if reason is not None:
            self.replaced.weight = torch.nn.Parameter(self._plain(path, scale), requires_grad=False)
            self.replaced.bias = self.bias
            return self.replaced, reason
        rows, columns = self.weight.shape
        count = rows_of_codes(path, rows)
        if self.weight.is_meta:
            shape = packed_shapes(count, columns, self.stored.format)[0]
            codes, num_rounded = torch.empty(shape, dtype=torch.uint8, device="meta"), 0
        else:
            whole = with_rows(self.weight.detach().view(torch.uint8), count)
            codes, num_rounded = pack_e4m3(whole.view(torch.float8_e4m3fn))
        if self.stored.format == "fp8":
            scale = with_rows(scale, count)
        rounded = f", {num_rounded} of {self.weight.numel()} codes below 2^-6 rounded" if num_rounded else ""
        layer = QuantizedLinear(codes, scale, self.bias, self.stored.format, num_rows=rows)
        return layer, f"{self.stored}{rounded}"

    def _reason_against_codes(self, path: str) -> str | None:
        if self.stored.granularity == GROUPED:
            return "no kernel reads codes with a scale for 32 columns: it is stored in mxfp8 and expanded"
        if reason := reason_against_codes(path, self.replaced):
            return reason
        rows, columns = self.weight.shape
        problem = size_problem(rows_of_codes(path, rows), columns, self.stored.format)
        return f"{problem}: its weight is expanded" if problem else None

    def _scale(self, path: str) -> torch.Tensor:
        """In the shape of `weight_formats`."""
        scale = getattr(self, self.stored.scale_name).detach()
        scale = scale_values(scale) if scale.dtype in SCALE_DTYPES else scale
        if self.weight.dtype is not torch.float8_e4m3fn or scale.dtype is not torch.float32:
            raise CheckpointError(
                f"{path}: its weight is stored as {self.weight.dtype} and its scale as {scale.dtype}; e4m3 and "
                "floating point are understood."
            )
        expected = self.stored.scale_shape(*self.replaced.weight.shape)
        if scale.shape != torch.Size(expected) or self.weight.shape != self.replaced.weight.shape:
            raise CheckpointError(
                f"{path} cannot be loaded: its weight is {list(self.weight.shape)}, its scale {list(scale.shape)}, "
                f"not {list(self.replaced.weight.shape)} and {list(expected)}."
            )
        if not scale.is_meta and not (scale.isfinite().all() and self._is_numbers()):
            raise CheckpointError(f"{path}: its weight or its scale holds NaN or infinity.")
        return self.stored.scale_of_kernels(scale).clone()

    def _is_numbers(self) -> bool:
        return bool(((self.weight.detach().view(torch.uint8) & 0x7F) != 0x7F).all())

    def _plain(self, path: str, scale: torch.Tensor) -> torch.Tensor:
        """The weight in the dtype of the module that stood there."""
        dtype = self.replaced.weight.dtype
        if self.weight.is_meta:
            return torch.empty_like(self.weight, dtype=dtype)
        if self.stored.granularity != GROUPED:
            return expanded(self.weight.detach(), scale, dtype)
        try:
            return times_scale(self.weight.detach(), scale, dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


def checked_scale(weight: torch.Tensor, scale: torch.Tensor | None, stored: StoredFp8) -> torch.Tensor:
    """A scale as stored -> what kernels take.

    Raises:
        CheckpointError: the weight is plain, the scale missing, of another shape than the config says, or no number.
    """
    expected = stored.scale_shape(*weight.shape) if weight.dim() == 2 else None
    found = None if scale is None else tuple(scale.shape)
    if weight.dtype is not torch.float8_e4m3fn or found is None or found != expected:
        raise CheckpointError(
            f"a weight {list(weight.shape)} is stored as {weight.dtype} with a scale {found}; e4m3 with {expected} "
            "is what the config says."
        )
    scale = stored.scale_of_kernels(scale_values(scale))
    if not scale.isfinite().all():
        raise CheckpointError("a scale is NaN or infinity.")
    return scale


def expanded(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight [N, K] e4m3 times scale [N/128, K/128], [N] or [1], rounded to `dtype`."""
    return (weight.float() * scale_of_each(scale.float(), weight.shape)).to(dtype)
