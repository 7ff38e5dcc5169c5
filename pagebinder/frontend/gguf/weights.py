"""Weights of a GGUF file in a model of transformers: which tensors a parameter is made of, and how each is served.

    linear layer     blocks that a kernel has a format for -> QuantizedLinear, straight from the mapped file
    experts          the same, gates on top of ups in one format; downs may be in another
    everything else  expanded to the model's dtype, and loaded as any checkpoint's weights

Rows may lie in another order there (of queries and keys in pairs of neighbours, of heads): blocks lie along rows, so
they are put into transformers' order as they are. Of columns in another order a layer gathers its inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from pagebinder.custom_ops.linear.weight_formats import (
    FORMATS,
    STORED_FORMATS,
    packed_shapes,
    size_problem,
)
from pagebinder.frontend.coded_experts import with_codes
from pagebinder.frontend.experts_interface import experts_modules
from pagebinder.frontend.gguf.architecture import AS_STORED, Rule
from pagebinder.frontend.gguf.blocks import BLOCK_KINDS, expanded, packed, widest
from pagebinder.frontend.gguf.file import NUMBERS, GgufFile, GgufTensor
from pagebinder.frontend.quantized_module import (
    QuantizedLinear,
    nothing_to_fill,
    reason_against_codes,
    rows_of_codes,
)

T, R = TypeVar("T"), TypeVar("R")


@dataclass(frozen=True)
class Source:
    """What a parameter is made of: `tensors`, the rows of one behind those of another, as `rule` says.

    `of_experts`: each expert has its rows, [E, N, K] or of biases [E, N]. `alternate`: rows of two tensors take
    turns. `transposed`: the parameter has matrices [K, N].
    """

    tensors: tuple[GgufTensor, ...]
    rule: Rule = AS_STORED
    of_experts: bool = False
    alternate: bool = False
    transposed: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(tensor.kind for tensor in self.tensors)

    @property
    def is_plain(self) -> bool:
        return all(kind in NUMBERS for kind in self.kinds)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what the tensors make, [..., N, K] whatever the parameter is; of biases of experts [E, N]."""
        if self.rule.make is not None:
            return tuple(self.rule.make(*(torch.empty(t.shape, device="meta") for t in self.tensors)).shape)
        shape = list(self.tensors[0].shape)
        shape[self.of_experts] = sum(tensor.shape[self.of_experts] for tensor in self.tensors)
        return tuple(shape)

    @property
    def shape_of_parameter(self) -> tuple[int, ...]:
        if not self.transposed:
            return self.shape
        *outer, rows, columns = self.shape
        return (*outer, columns, rows)

    def rows(self) -> np.ndarray | None:
        """Which row of the tensors each row of the parameter is; None: they are in order."""
        count = self.shape[self.of_experts]
        if self.alternate:
            return np.arange(count).reshape(len(self.tensors), -1).T.reshape(-1)
        return None if self.rule.rows is None else self.rule.rows(count)

    def columns(self) -> np.ndarray | None:
        return None if self.rule.columns is None else self.rule.columns(self.shape[-1])

    def parts(self, expert: int | None = None) -> list[tuple[np.ndarray, str]]:
        """Rows of blocks, of an expert's if it has some of its own."""
        return [(t.data if expert is None else t.data[expert], t.kind) for t in self.tensors]

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Of the parameter, rounded once."""
        wide = torch.float32 if self.rule.make is not None else dtype
        parts = [expanded(tensor.data, tensor.kind, wide) for tensor in self.tensors]
        if self.rule.make is not None:
            values = self.rule.make(*parts).to(dtype)
        else:
            values = parts[0] if len(parts) == 1 else torch.cat(parts, int(self.of_experts))
        for axis, order in ((int(self.of_experts), self.rows()), (-1, self.columns())):
            values = values if order is None else values.index_select(axis, torch.from_numpy(order))
        return values.mT.contiguous() if self.transposed else values


@dataclass(frozen=True)
class StoredBlocks:
    """The weights of a file as a model has them: the source of each parameter, by its name.

    `without_weights`: codes are made on the meta device.
    """

    file: GgufFile
    sources: Mapping[str, Source]
    without_weights: bool = False

    method = "gguf"
    granularity = "blocks"
    experts = None
    kept = ()
    names = ("weight",)
    endings = ()

    def __deepcopy__(self, memo: dict) -> StoredBlocks:
        return self

    def replace(self, model: torch.nn.Module) -> None:
        """Put modules that read codes into the places of linear layers and experts that a kernel serves."""
        for path, module in list(experts_modules(model).items()):
            if (formats := self._formats_of_experts(path, module)) is not None:
                sources = self._of_experts(path, module)
                model.set_submodule(path, LoadedBlockExperts(module, sources, formats, self.without_weights))
        for path, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and self.why_plain(path, module) is None:
                source = self.sources[f"{path}.weight"]
                model.set_submodule(path, LoadedBlocks(module, path, source, self.without_weights))

    def why_plain(self, path: str, module: torch.nn.Module) -> str | None:
        """Why a linear layer has a plain weight; None: it keeps its codes."""
        source = self.sources.get(f"{path}.weight")
        if source is None or source.is_plain:
            return "it is stored plain"
        if source.rule.make is not None:
            return "it is computed of what is stored: it is expanded"
        if source.rule.plain is not None:
            return f"{source.rule.plain}: it is expanded"
        kinds, format = "+".join(dict.fromkeys(source.kinds)), _format_of_parts(source)
        if format is None:
            return f"no kernel reads {kinds}: it is expanded"
        rows, columns = source.shape
        if problem := _problem((rows_of_codes(path, rows), columns), format):
            return f"{kinds} {problem}: it is expanded"
        return reason_against_codes(path, module)

    @property
    def paths_of_experts(self) -> tuple[str, ...]:
        """Of all experts, whichever way their module computes."""
        owners = (name.rpartition(".")[0] for name, source in self.sources.items() if source.of_experts)
        return tuple(dict.fromkeys(owners))

    def why_plain_experts(self, path: str, module: torch.nn.Module) -> str:
        kinds = sorted({kind for source in self._of_experts(path, module).values() for kind in source.kinds})
        if all(kind in NUMBERS for kind in kinds):
            return "they are stored plain"
        return f"they are stored in {', '.join(kinds)}, for which experts have no kernel: they are expanded"

    def _of_experts(self, path: str, module: torch.nn.Module) -> dict[str, Source]:
        return {
            name: self.sources[f"{path}.{name}"]
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == 3
        }

    def _formats_of_experts(self, path: str, module: torch.nn.Module) -> dict[str, str] | None:
        """Of each weight; None: some have no kernel."""
        sources = self._of_experts(path, module)
        formats = {name: _format_of_parts(source) for name, source in sources.items()}
        known = all(
            format and not _problem(sources[name].shape[1:], format) for name, format in formats.items()
        )
        return formats if known else None


def _format_of_parts(source: Source) -> str | None:
    """One that holds all parts of a weight; None: there is none."""
    if not set(source.kinds) <= BLOCK_KINDS.keys():
        return None
    formats = {BLOCK_KINDS[kind].format for kind in source.kinds}
    if len(formats) == 1:
        return formats.pop()
    return None if formats & FORMATS.keys() - {"int4_g32"} else widest(formats)


def _problem(shape: tuple[int, ...], format: str) -> str | None:
    if format not in STORED_FORMATS and format not in FORMATS:
        return "has no kernel"
    return size_problem(*shape, format)


class LoadedBlocks(torch.nn.Module):
    """A linear layer whose weight is blocks of a file. `read` comes first, then `finished`."""

    def __init__(self, replaced: torch.nn.Linear, path: str, source: Source, without_weights: bool):
        super().__init__()
        self.source, self.without_weights = source, without_weights
        self.rows_of_codes = rows_of_codes(path, source.shape[0])
        self.bias = replaced.bias
        self.__dict__["weight"] = nothing_to_fill()

    def read(self) -> None:
        format = _format_of_parts(self.source)
        self.__dict__["codes"] = packed(self.source.parts(), format, self._rows())

    def _rows(self) -> np.ndarray | None:
        count, order = self.source.shape[0], self.source.rows()
        if count == self.rows_of_codes:
            return order
        order = np.arange(count) if order is None else order
        return np.pad(order, (0, self.rows_of_codes - count), mode="edge")

    def finished(self, path: str) -> tuple[torch.nn.Module, str]:
        """(the module to serve, what to say of it)."""
        format, columns = _format_of_parts(self.source), self.source.columns()
        rows, width = self.source.shape
        if self.without_weights:
            codes, device = _on_meta((self.rows_of_codes, width), format), torch.device("meta")
        else:
            codes, device = self.__dict__.pop("codes"), torch.device("cpu")
        order = None if columns is None else torch.from_numpy(np.argsort(columns)).to(device)
        kinds = "+".join(dict.fromkeys(self.source.kinds))
        layer = QuantizedLinear(*codes, self.bias, format, order, rows)
        return layer, f"{format}: {kinds} of a GGUF file"


class LoadedBlockExperts(torch.nn.Module):
    """Experts whose weights are blocks of a file. `read` comes first, then `finished`."""

    def __init__(
        self,
        replaced: torch.nn.Module,
        sources: Mapping[str, Source],
        formats: Mapping[str, str],
        without_weights: bool,
    ):
        super().__init__()
        self.__dict__["replaced"] = replaced  # no submodule: nobody loads its weights
        self.sources, self.formats, self.without_weights = sources, formats, without_weights
        for name, parameter in replaced.named_parameters(recurse=False):
            if name not in sources:
                self.register_parameter(name, parameter)
        self._buffers.update(replaced._buffers)
        self._modules.update(replaced._modules)

    def read(self) -> None:
        self.__dict__["codes"] = {
            name: self._packed(source, self.formats[name]) for name, source in self.sources.items()
        }

    def finished(self, path: str) -> torch.nn.Module:
        """The module that stood there, its weights as buffers of codes and scales."""
        module, dtype = self.replaced, next(iter(self.replaced._parameters.values())).dtype
        module._parameters.update(self._parameters)
        if self.without_weights:
            codes = {
                name: _on_meta(source.shape, self.formats[name]) for name, source in self.sources.items()
            }
        else:
            codes = self.__dict__.pop("codes")
        return with_codes(module, codes, self.formats, dtype)

    def _packed(self, source: Source, format: str) -> tuple[torch.Tensor, torch.Tensor]:
        order = source.rows()
        experts = [packed(source.parts(expert), format, order) for expert in range(source.shape[0])]
        codes, scales = ([each[i] for each in experts] for i in range(2))
        wide = functools.reduce(torch.promote_types, {scale.dtype for scale in scales})
        return torch.stack(codes), torch.stack([scale.to(wide) for scale in scales])


def read_all(model: torch.nn.Module) -> None:
    """Read the weights of all such modules, some at a time."""
    modules = [m for m in model.modules() if isinstance(m, LoadedBlocks | LoadedBlockExperts)]
    _at_once(lambda module: module.read(), modules)


def _at_once(body: Callable[[T], R], each: Sequence[T]) -> list[R]:
    """As many at a time as torch has threads, each in one: what they read are slices that fit a cache, and loops of
    torch that small wait for each other longer than they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(body, each))
    finally:
        torch.set_num_threads(threads)


def _on_meta(shape: tuple[int, ...], format: str) -> tuple[torch.Tensor, torch.Tensor]:
    *outer, rows, columns = shape
    of_codes, of_scale = packed_shapes(rows, columns, format)
    return (
        torch.empty((*outer, *of_codes), dtype=torch.uint8, device="meta"),
        torch.empty((*outer, *of_scale), device="meta"),
    )


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint has: parameters, and buffers that are kept (corrections of a router's scores)."""
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return dict(model.named_parameters()) | buffers


def plain_values(model: torch.nn.Module, stored: StoredBlocks, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights that a model still has once modules that read codes are in place, by name. Those that files have in
    float32, and models of any dtype may, stay so: vectors, and routers."""

    def values(named: tuple[str, torch.Tensor]) -> torch.Tensor:
        name, weight = named
        source = stored.sources.get(name)
        if source is None:
            return torch.zeros(weight.shape, dtype=dtype)
        is_wide = source.is_plain and (weight.dim() == 1 or weight.dtype == torch.float32)
        return source.values(torch.float32 if is_wide else dtype).reshape(weight.shape)

    weights = list(weights_of(model).items())
    return {name: found for (name, _), found in zip(weights, _at_once(values, weights))}
