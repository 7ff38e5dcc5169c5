"""Experts whose weights a checkpoint keeps as codes: as they are loaded, and as they are served.

experts of transformers    gate_up_proj [E, N, K], down_proj [E, N, K], biases
  -> LoadedCodedExperts    bytes of codes and scales of each, uint8 [E, N/32, .]      what its loader merges and fills
  -> the experts' class    codes and scales as buffers, weights computed from them:   4 or 8 bits a weight
                           dequantize_weight(codes, scale), which a pass makes one op with their products

A loader stacks the weights of experts and puts gates on top of the others. Panels of 32 rows may be stacked so, too:
each has its codes, of integers, e2m1 or e4m3, and behind them its scales, of blocks those of the one that it is in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.linear.weight_formats import (
    BLOCK,
    PANEL,
    in_8_bits,
    num_weights,
    packed_shapes,
    size_problem,
    weight_format,
)
from pagebinder.custom_ops.linear.weight_numbers import codes_of_8_bits, dequantize, pack_e4m3
from pagebinder.errors import CheckpointError
from pagebinder.frontend.fp8_format import StoredFp8
from pagebinder.frontend.fp8_linear import checked_scale
from pagebinder.frontend.int_codes import Codes
from pagebinder.frontend.int_format import Shapes, StoredInts
from pagebinder.frontend.int_linear import e2m1_format, kernel_format, packed_codes, scale_of_stored
from pagebinder.frontend.quantized_module import moved_scale

# Granularity of scales in the checkpoint -> format of the kernels: a scale for each row instead of one for all.
FP8_FORMATS = {"block": "fp8_block", "channel": "fp8", "tensor": "fp8"}
BY_ROWS = ("fp8", "int8")  # formats with a scale for each row
CODES, SCALE = "_codes", "_scale"  # what the names of buffers add to the weight's


def format_of_experts(path: str, module: torch.nn.Module, stored: StoredInts) -> str | None:
    """The format in which kernels read the codes of a module's experts; None: they are plain, or have no kernel.

    Up and down have one format there, and columns are in order.
    """
    if module.is_transposed or stored.by_activation:
        return None
    if stored.layers is not None:
        found = _of_codes(path, stored)
        if len(found) != _num_matrices(module) or not all(
            _as_said(shapes, module, stored) for shapes in found
        ):
            return None
    shapes = (p.shape[1:] for p in module.parameters(recurse=False) if p.dim() == 3)
    formats = {_format(shape, stored) for shape in shapes}
    return formats.pop() if len(formats) == 1 else None


def format_of_fp8_experts(path: str, module: torch.nn.Module, stored: StoredFp8) -> str | None:
    """The same of e4m3 with scales of blocks, rows or tensors; gates and values have no block in common."""
    if module.is_transposed or stored.experts is not None or stored.granularity not in FP8_FORMATS:
        return None
    if stored.layers is not None and len(_of_codes(path, stored)) != _num_matrices(module):
        return None
    format = FP8_FORMATS[stored.granularity]
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() != 3:
            continue
        _, rows, columns = parameter.shape
        parts = 2 if module.has_gate and name != "down_proj" else 1
        has_mixed_blocks = format == "fp8_block" and parts == 2 and rows // 2 % BLOCK
        if size_problem(rows // parts, columns, format) or has_mixed_blocks:
            return None
    return format


def _format(shape: tuple[int, int], stored: StoredInts) -> str | None:
    if stored.is_e2m1:
        return e2m1_format(shape, stored.group)[0]
    return kernel_format(shape, stored.bits, stored.group or shape[1], stored.symmetric)[0]


def _of_codes(path: str, stored: StoredInts | StoredFp8) -> list:
    """What the files say of each weight of the experts of a layer that they keep as codes."""
    return [said for _, said in stored.of_experts(path) if said is not None]


def _num_matrices(module: torch.nn.Module) -> int:
    """How many weights of a module's experts a checkpoint has."""
    return next(p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3) * (
        3 if module.has_gate else 2
    )


def _as_said(found: Shapes, module: torch.nn.Module, stored: StoredInts) -> bool:
    """Has a weight the sizes that the config says? Tools may give some of them other bits or groups."""
    expected = []
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 3:
            _, rows, columns = parameter.shape
            parts = 2 if module.has_gate and name != "down_proj" else 1
            expected.append(stored.shapes(rows // parts, columns))
    known = [{name: shapes[name] for name in shapes if name in found} for shapes in expected]
    return any(shapes == {name: found[name] for name in shapes} for shapes in known)


class LoadedCodedExperts(torch.nn.Module):
    """The parameters of experts as a loader merges them; `replaced` is the module that stood there.

    `num_rounded`: codes of e4m3 that were, see `pack_e4m3`.
    """

    def __init__(self, replaced: torch.nn.Module, stored: StoredInts | StoredFp8, format: str):
        super().__init__()
        self.__dict__["replaced"] = replaced  # no submodule: its weights are in no checkpoint
        self.stored, self.format, self.num_rounded = stored, format, 0
        self.shapes = {name: p.shape for name, p in replaced.named_parameters(recurse=False) if p.dim() == 3}
        for name, parameter in replaced.named_parameters(recurse=False):
            if name in self.shapes:
                experts, rows, columns = parameter.shape
                panels, num_bytes = _bytes_of_panels(rows, columns, format, stored)
                empty = torch.empty((experts, panels, num_bytes), dtype=torch.uint8, device=parameter.device)
                parameter = torch.nn.Parameter(empty, requires_grad=False)
            self.register_parameter(name, parameter)
        self._buffers.update(replaced._buffers)
        self._modules.update(replaced._modules)

    def finished(self, path: str) -> torch.nn.Module:
        """The module that stood there, its weights as buffers of codes and scales.

        Raises:
            CheckpointError: the loader stacked them in another way.
        """
        module, dtype = self.replaced, next(iter(self.replaced._parameters.values())).dtype
        weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, (experts, rows, columns) in self.shapes.items():
            stacked = self._parameters.pop(name).detach()
            of_codes = packed_shapes(rows, columns, self.format)[0]
            of_scale, scale_dtype = _panel_scales(rows, columns, self.format, self.stored)
            expected = (experts, *_bytes_of_panels(rows, columns, self.format, self.stored))
            if tuple(stacked.shape) != expected and isinstance(self.stored, StoredFp8):
                raise left_as_codes(f"{path}.{name}")
            if tuple(stacked.shape) != expected:
                raise CheckpointError(
                    f"{path}.{name} cannot be loaded: its experts were stacked to {list(stacked.shape)} bytes, not "
                    f"to {list(expected)}."
                )
            of_panel = math.prod(of_codes[1:])
            codes = stacked[..., :of_panel].contiguous().view(experts, *of_codes)
            scale = stacked[..., of_panel:].contiguous().view(scale_dtype)
            weights[name] = (codes, _of_weights(scale.view(experts, *of_scale), self.format))
        module._parameters.update(self._parameters)
        module._buffers.update(self._buffers)
        return with_codes(module, weights, dict.fromkeys(weights, self.format), dtype)


def left_as_codes(name: str) -> CheckpointError:
    import transformers

    return CheckpointError(
        f"{name} is stored as codes, and transformers {transformers.__version__} leaves it so, without its scales; "
        "transformers 5.23 merges what the config describes."
    )


def with_codes(
    module: torch.nn.Module,
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]],
    formats: Mapping[str, str],
    dtype: torch.dtype,
) -> torch.nn.Module:
    """The same experts, weights computed in `dtype` from (codes [E, ...], scale [E, ...]), each in its format."""
    for name, (codes, scale) in weights.items():
        module._parameters.pop(name, None)
        module.register_buffer(name + CODES, codes)
        module.register_buffer(name + SCALE, scale)
    module.__class__ = _quantized_class(type(module), tuple((name, formats[name]) for name in weights))
    module.weights_dtype = dtype
    return module


def fp8_panel_bytes(
    weight: torch.Tensor, scale: torch.Tensor | None, format: str, stored: StoredFp8
) -> tuple[torch.Tensor, int]:
    """The weight of one expert [N, K] e4m3 with its scale as stored -> uint8 [N/32, bytes], and how many codes were
    rounded.

    Raises:
        CheckpointError: it is plain, or of other shapes than the config says, or holds NaN or infinity.
    """
    scale = checked_scale(weight, scale, stored)
    if bool((weight.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise CheckpointError("a weight is NaN or infinity.")
    if stored.granularity == "tensor":
        scale = scale.expand(len(weight))
    packed, num_rounded = pack_e4m3(weight)
    return _joined(packed, _in_panels(scale, format, len(packed))), num_rounded


def panel_bytes(codes: Codes, format: str, stored: StoredInts) -> torch.Tensor:
    """The weight of one expert, as codes: uint8 [N/32, bytes].

    Raises:
        CheckpointError: zero points or an order of columns that the config does not speak of.
    """
    fmt = weight_format(format)
    has_groups = codes.scales.shape[1] == 1 if fmt.group is None else codes.group % fmt.group == 0
    if max(codes.bits, 4) != fmt.bits or codes.is_e2m1 != fmt.is_float or not has_groups:
        raise CheckpointError(
            f"it has {codes.bits} bits in groups of {codes.group}, of which the config says nothing."
        )
    has_zeros = bool((codes.zeros != 1 << (codes.bits - 1)).any())
    if codes.order is not None or (has_zeros and codes.bits >= 4 and not fmt.is_shifted):
        raise CheckpointError("it has zero points or an order of columns that the config does not speak of.")
    packed, scale = packed_codes(codes, format)
    scale = scale.to(_panel_scales(*codes.values.shape, format, stored)[1])
    return _joined(packed, _in_panels(scale, format, len(packed)))


def _joined(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of panels, bytes."""
    return torch.cat((codes.flatten(1), scale.flatten(1).contiguous().view(torch.uint8)), dim=1)


def _in_panels(scale: torch.Tensor, format: str, panels: int) -> torch.Tensor:
    """The scale tensor of a weight, with a row for each panel."""
    if format in BY_ROWS:
        return scale.reshape(-1, PANEL)
    return scale.repeat_interleave(BLOCK // PANEL, dim=0)[:panels] if format == "fp8_block" else scale


def _of_weights(scale: torch.Tensor, format: str) -> torch.Tensor:
    """The other way round, of a stack of weights."""
    if format in BY_ROWS:
        return scale.flatten(1)
    return scale[:, :: BLOCK // PANEL].contiguous() if format == "fp8_block" else scale


class QuantizedExperts:
    """What a class of experts gets: its weights are computed from codes.

    `formats`: of the codes, by the names of the weights. `plain_class`: that of the module as transformers has it.
    """

    formats: Mapping[str, str]
    plain_class: type
    weights_dtype: torch.dtype  # in which weights are computed

    def _apply(self, fn, recurse=True):
        """A module that is moved or converted takes its scales along, in their dtype."""
        scales = {name: self._buffers[name] for name in (n + SCALE for n in self.formats)}
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            self._buffers[name] = moved_scale(
                scale, self._buffers[name], self.formats[name.removesuffix(SCALE)]
            )
        self.weights_dtype = fn(torch.empty(0, dtype=self.weights_dtype, device="cpu")).dtype
        return self

    def widen_codes(self) -> dict[str, str]:
        """As that of QuantizedLinear."""
        formats = dict(self.formats)
        for name, old in self.formats.items():
            if (new := in_8_bits(old)) is not None:
                self._buffers[name + CODES] = codes_of_8_bits(self._buffers[name + CODES], old)
                formats[name] = new
        renamed = {old: formats[name] for name, old in self.formats.items() if formats[name] != old}
        self.__class__ = _quantized_class(self.plain_class, tuple(formats.items()))
        return renamed

    def coded_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(codes, scale) of each stack."""
        return [(self._buffers[name + CODES], self._buffers[name + SCALE]) for name in self.formats]

    def num_weights(self) -> int:
        """That codes stand for."""
        return sum(num_weights(codes) for codes, _ in self.coded_weights())

    def expand(self) -> None:
        """Have plain weights from now on."""
        weights = {name: self.expert_weight(name) for name in self.formats}
        for name in self.formats:
            del self._buffers[name + CODES], self._buffers[name + SCALE]
        self.__class__ = self.plain_class
        for name, weight in weights.items():
            self.register_parameter(name, torch.nn.Parameter(weight.contiguous(), requires_grad=False))

    def expert_weight(self, name: str) -> torch.Tensor:
        """[E, N, K] of the model's dtype, or as the module has it, [E, K, N]."""
        matrices = self.expert_matrices(name)
        return matrices.mT if self.is_transposed else matrices

    def expert_matrices(self, name: str) -> torch.Tensor:
        """[E, N, K] of the model's dtype."""
        codes, scale = self._buffers[name + CODES], self._buffers[name + SCALE]
        return torch.ops.pagebinder.dequantize_weight(
            codes, scale, format=self.formats[name], dtype=self.weights_dtype
        )

    def exact_weight(self, name: str, expert: int) -> torch.Tensor:
        """[N, K] of one expert, in float32."""
        codes, scale = self._buffers[name + CODES][expert], self._buffers[name + SCALE][expert]
        return dequantize(codes, scale, self.formats[name])


@functools.cache
def _quantized_class(plain: type, named: tuple[tuple[str, str], ...]) -> type:
    formats = dict(named)
    weights = {
        name: property(functools.partial(QuantizedExperts.expert_weight, name=name)) for name in formats
    }
    facts = {"formats": formats, "plain_class": plain, "__module__": plain.__module__}
    return type(plain.__name__, (QuantizedExperts, plain), {**weights, **facts})


def _bytes_of_panels(rows: int, columns: int, format: str, stored: StoredInts) -> tuple[int, int]:
    """(panels, bytes of each) of a weight [rows, columns]."""
    of_codes = packed_shapes(rows, columns, format)[0]
    of_scale, dtype = _panel_scales(rows, columns, format, stored)
    return of_codes[0], math.prod(of_codes[1:]) + math.prod(of_scale[1:]) * dtype.itemsize


def _panel_scales(
    rows: int, columns: int, format: str, stored: StoredInts | StoredFp8
) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, dtype) of the scales of one expert's panels: one for all of them, exact for each."""
    if format in BY_ROWS:
        return (rows // PANEL, PANEL), torch.float32
    if format == "fp8_block":
        return (rows // PANEL, -(-columns // BLOCK)), torch.float32
    shape, dtype = scale_of_stored(rows, columns, format)
    is_narrow = stored.bf16_scales and not weight_format(format).is_shifted and not stored.is_e2m1
    return shape, torch.bfloat16 if is_narrow else dtype
