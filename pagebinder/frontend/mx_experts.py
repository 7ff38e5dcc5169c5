"""Mixtures of experts whose weights a checkpoint keeps in a microscaled format, as they are loaded.

experts                gate_up_proj [E, N, K], down_proj, biases, ...         as transformers builds them
  -> LoadedExperts     codes and scales of both, biases, ...                  what its loader fills
  -> QuantizedExperts  codes in the kernels' order, scales                    mxfp4
  -> experts           every weight is its code times its scale, exactly      where no kernel reads the codes
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.linear.group_scales import packed_groups
from pagebinder.custom_ops.linear.weight_formats import packed_shapes, size_problem
from pagebinder.custom_ops.linear.weight_numbers import empty_codes, pack_codes
from pagebinder.errors import CheckpointError
from pagebinder.frontend.coded_experts import with_codes
from pagebinder.frontend.fp8_format import StoredFp8
from pagebinder.frontend.mx_numbers import (
    GROUP,
    PAIR_DTYPES,
    num_groups,
    powers_of_two,
    scale_values,
    times_scale,
)

FORMAT = "mxfp4"
LEAST_SCALE = 2.0**-126  # bf16's smallest normal number
LARGEST = 6.0  # of e2m1


class LoadedExperts(torch.nn.Module):
    """The parameters of experts as the checkpoint has them; `replaced` is the module that stood there."""

    def __init__(self, replaced: torch.nn.Module, stored: StoredFp8):
        super().__init__()
        self.__dict__["replaced"] = replaced  # no submodule: its weights are in no checkpoint
        self.stored = stored
        self.weights = [name for name, p in replaced.named_parameters(recurse=False) if p.dim() == 3]
        for name, parameter in replaced.named_parameters(recurse=False):
            if name not in self.weights:
                self.register_parameter(name, parameter)
        for name in self.weights:
            codes, scale = self._stored_shapes(name)
            self._register(name + stored.codes_suffix, codes, self._codes_dtypes[0])
            # a loader casts scales in float8_e8m0fnu to float32, and leaves those in uint8
            self._register(name + stored.scale_suffix, scale, torch.float32)
        self._buffers.update(replaced._buffers)
        self._modules.update(replaced._modules)

    def finished(self, path: str) -> torch.nn.Module:
        """The module that stood there, its weights as buffers of codes and scales, or plain.

        Raises:
            CheckpointError: codes or scales of another shape or dtype, scales that are NaN; names the module.
        """
        stored = {name: self._checked(path, name) for name in self.weights}
        dtype = self.replaced._parameters[self.weights[0]].dtype
        packed = {}
        if all(self._is_read(name, scale, dtype) for name, (_, scale) in stored.items()):
            packed = {name: self._packed(path, name, *both) for name, both in stored.items()}
        for name, (codes, scale) in stored.items():
            if not packed and not codes.is_meta:
                plain = self._plain(path, name, codes.flatten(2), scale)
                self.replaced._parameters[name] = torch.nn.Parameter(plain, requires_grad=False)
        self.replaced._parameters.update(self._parameters)
        self.replaced._buffers.update(self._buffers)
        if not packed:
            return self.replaced
        return with_codes(self.replaced, packed, dict.fromkeys(packed, FORMAT), dtype)

    def _checked(self, path: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scale as stored."""
        codes, scale = (
            self._parameters.pop(name + suffix).detach()
            for suffix in (self.stored.codes_suffix, self.stored.scale_suffix)
        )
        if not codes.is_meta:
            found, expected = (tuple(codes.shape), tuple(scale.shape)), self._stored_shapes(name)
            if found != expected or codes.dtype not in self._codes_dtypes:
                raise CheckpointError(
                    f"{path}.{name} cannot be loaded: its codes {found[0]} are {codes.dtype} and its scale is "
                    f"{found[1]}, not {expected[0]} of {self._codes_dtypes[0]} and {expected[1]}."
                )
        return codes, scale

    def _is_read(self, name: str, scale: torch.Tensor, dtype: torch.dtype) -> bool:
        """Does a kernel read the codes of a weight, with such scales?"""
        if self.stored.experts != FORMAT or size_problem(*self._sizes(name)[1:], FORMAT):
            return False
        if scale.is_meta:
            return True
        least, most = scale_values(scale).aminmax()
        return bool(least >= LEAST_SCALE) and bool(LARGEST * most <= torch.finfo(dtype).max)

    def _packed(
        self, path: str, name: str, codes: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """codes [E, N, K/2] or [E, N, K/32, 16], scale [E, N, K/32] -> codes and scale of kernels."""
        experts, rows, columns = self._sizes(name)
        of_codes, of_scale = packed_shapes(rows, columns, FORMAT)
        packed = empty_codes((experts, *of_codes), codes.device)
        scales = torch.empty((experts, *of_scale), dtype=torch.bfloat16, device=codes.device)
        for expert in range(0 if codes.is_meta else experts):
            try:
                values = powers_of_two(scale[expert])
            except CheckpointError as error:
                raise CheckpointError(f"{path}.{name} of expert {expert}: {error}") from error
            pairs = codes[expert].reshape(rows, -1).view(torch.uint8)
            packed[expert] = pack_codes(torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1), FORMAT)
            scales[expert] = packed_groups(values)
        return packed, scales

    def _plain(self, path: str, name: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """codes [E, N, K] or [E, N, K/2], scale [E, N, K/32] -> the weights, one expert at a time."""
        parameter = self.replaced._parameters[name]
        plain = torch.empty(parameter.shape, dtype=parameter.dtype, device=codes.device)
        for expert, to in enumerate(plain.transpose(1, 2) if self.replaced.is_transposed else plain):
            try:
                to.copy_(times_scale(codes[expert], scale[expert], parameter.dtype))
            except CheckpointError as error:
                raise CheckpointError(f"{path}.{name} of expert {expert}: {error}") from error
        return plain

    @property
    def _codes_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float8_e4m3fn,) if self.stored.experts == "mxfp8" else PAIR_DTYPES

    def _sizes(self, name: str) -> tuple[int, int, int]:
        """E, N and K of a weight."""
        experts, rows, columns = self.replaced._parameters[name].shape
        return (experts, columns, rows) if self.replaced.is_transposed else (experts, rows, columns)

    def _stored_shapes(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a weight's codes and of its scale."""
        experts, rows, columns = self._sizes(name)
        scale = (experts, rows, num_groups(columns))
        if self.stored.codes_suffix:
            return (*scale, GROUP // 2), scale
        return (experts, rows, columns // (2 if self.stored.experts == "mxfp4" else 1)), scale

    def _register(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        device = self.replaced._parameters[self.weights[0]].device
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
