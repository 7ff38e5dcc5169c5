"""Mixtures of experts whose weights a checkpoint keeps in a microscaled format, as they are loaded.

experts              gate_up_proj [E, N, K], down_proj, biases, ...             as transformers builds them
  -> LoadedExperts   codes and scales of both, biases, ...                      what its loader fills
  -> experts         every weight is its code times its scale, exactly          no kernel reads the codes
"""

from __future__ import annotations

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend.fp8_format import StoredFp8
from pagebinder.frontend.mx_numbers import GROUP, PAIR_DTYPES, num_groups, times_scale


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
        """The module that stood there, with plain weights.

        Raises:
            CheckpointError: codes or scales of another shape or dtype, scales that are NaN; names the module.
        """
        for name in self.weights:
            codes, scale = (
                self._parameters.pop(name + suffix).detach()
                for suffix in (self.stored.codes_suffix, self.stored.scale_suffix)
            )
            if codes.is_meta:
                continue
            found, expected = (tuple(codes.shape), tuple(scale.shape)), self._stored_shapes(name)
            if found != expected or codes.dtype not in self._codes_dtypes:
                raise CheckpointError(
                    f"{path}.{name} cannot be loaded: its codes {found[0]} are {codes.dtype} and its scale is "
                    f"{found[1]}, not {expected[0]} of {self._codes_dtypes[0]} and {expected[1]}."
                )
            self.replaced._parameters[name] = torch.nn.Parameter(
                self._plain(path, name, codes.flatten(2), scale), requires_grad=False
            )
        self.replaced._parameters.update(self._parameters)
        self.replaced._buffers.update(self._buffers)
        return self.replaced

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

    def _stored_shapes(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a weight's codes and of its scale."""
        experts, rows, columns = self.replaced._parameters[name].shape
        if self.replaced.is_transposed:
            rows, columns = columns, rows
        scale = (experts, rows, num_groups(columns))
        if self.stored.codes_suffix:
            return (*scale, GROUP // 2), scale
        return (experts, rows, columns // (2 if self.stored.experts == "mxfp4" else 1)), scale

    def _register(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        device = self.replaced._parameters[self.weights[0]].device
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
