"""Weights of a GGUF file in a model of transformers: which tensors a parameter is made of, and how each is served.

    linear layer     blocks that a kernel has a format for -> QuantizedLinear, straight from the mapped file
    experts          the same, gates on top of ups in one format; downs may be in another
    everything else  expanded to the model's dtype, and loaded as any checkpoint's weights

Rows of queries and keys lie in pairs of neighbours there, where an architecture rotates such pairs: blocks lie along
rows, so they are put into transformers' order as they are.
"""

from __future__ import annotations

import re
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
    plain_scale,
    size_problem,
)
from pagebinder.errors import CheckpointError
from pagebinder.frontend.checkpoint_tensors import counted
from pagebinder.frontend.coded_experts import with_codes
from pagebinder.frontend.experts_interface import experts_modules
from pagebinder.frontend.gguf_blocks import BLOCK_KINDS, expanded, packed, widest
from pagebinder.frontend.gguf_config import LAYER, Architecture, architecture_of
from pagebinder.frontend.gguf_file import FLOATS, NUMBERS, GgufFile, GgufTensor
from pagebinder.frontend.quantized_module import QuantizedLinear, reason_against_codes

T, R = TypeVar("T"), TypeVar("R")
PARAMETER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
EXPERTS = {  # of experts, and where a tensor's rows are among those of the parameter
    "ffn_gate_exps": ("gate_up_proj", 0), "ffn_up_exps": ("gate_up_proj", 1), "ffn_gate_up_exps": ("gate_up_proj", 0),
    "ffn_down_exps": ("down_proj", 0),
}  # fmt: skip
NO_BIASES = ("self_attn.o_proj.bias",)  # which no layer may have where transformers has all of them: zeros
NO_WEIGHTS = frozenset(NUMBERS) - frozenset(FLOATS) | {"Q8_1", "Q8_K"}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Source:
    """What a parameter is made of: `tensors`, the rows of one behind those of another.

    `heads`: rows of each of so many are in pairs of neighbours; None: they are in order. `added`: to all values.
    `alternate`: rows of two tensors take turns. `transposed`: the parameter has matrices [K, N].
    """

    tensors: tuple[GgufTensor, ...]
    heads: int | None = None
    added: float = 0.0
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
        shapes = [list(tensor.shape) for tensor in self.tensors]
        if len(shapes) > 1:
            shapes[0][1] = sum(shape[1] for shape in shapes)
        return tuple(shapes[0])

    @property
    def shape_of_parameter(self) -> tuple[int, ...]:
        if not self.transposed:
            return self.shape
        *outer, rows, columns = self.shape
        return (*outer, columns, rows)

    def data(self, number: int) -> np.ndarray:
        """Of a tensor, with its rows in transformers' order."""
        data = self.tensors[number].data
        if self.heads is None:
            return data
        return data.reshape(self.heads, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Of the parameter, rounded once."""
        wide = torch.float32 if self.added else dtype
        parts = [expanded(self.data(i), kind, wide) for i, kind in enumerate(self.kinds)]
        if len(parts) == 1:
            (values,) = parts
        else:
            values = torch.stack(parts, 2).flatten(1, 2) if self.alternate else torch.cat(parts, 1)
        values = (values + self.added).to(dtype) if self.added else values
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
                model.set_submodule(path, LoadedBlocks(module, source, self.without_weights))

    def why_plain(self, path: str, module: torch.nn.Module) -> str | None:
        """Why a linear layer has a plain weight; None: it keeps its codes."""
        source = self.sources.get(f"{path}.weight")
        if source is None or source.is_plain:
            return "it is stored plain"
        (kind,) = source.kinds
        if kind not in BLOCK_KINDS:
            return f"no kernel reads {kind}: it is expanded"
        if problem := _problem(source.shape, BLOCK_KINDS[kind].format):
            return f"{kind} {problem}: it is expanded"
        return reason_against_codes(path, module)

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
        if any(source.alternate and len(set(source.kinds)) > 1 for source in sources.values()):
            return None
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

    def __init__(self, replaced: torch.nn.Linear, source: Source, without_weights: bool):
        super().__init__()
        self.source, self.without_weights = source, without_weights
        self.bias = replaced.bias

    def read(self) -> None:
        (kind,) = self.source.kinds
        self.__dict__["codes"] = packed(self.source.data(0), kind)

    def finished(self, path: str) -> tuple[torch.nn.Module, str]:
        """(the module to serve, what to say of it)."""
        (kind,) = self.source.kinds
        format = BLOCK_KINDS[kind].format
        codes = _on_meta(self.source.shape, format) if self.without_weights else self.__dict__.pop("codes")
        return QuantizedLinear(*codes, self.bias, format), f"{format}: {kind} of a GGUF file"


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
        experts = []
        for expert in range(source.shape[0]):
            if source.alternate:
                rows = np.stack([tensor.data[expert] for tensor in source.tensors], axis=1)
                experts.append(packed(rows.reshape(-1, rows.shape[-1]), source.kinds[0], format))
                continue
            parts = [packed(source.data(i)[expert], kind, format) for i, kind in enumerate(source.kinds)]
            if len(set(source.kinds)) > 1:  # scales of one kind for all rows
                parts = [(codes, plain_scale(scale, format)) for codes, scale in parts]
            experts.append([torch.cat(each) for each in zip(*parts)])
        codes, scales = ([each[i] for each in experts] for i in range(2))
        return torch.stack(codes), torch.stack(scales)


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


def sources_of(file: GgufFile, model: torch.nn.Module) -> dict[str, Source]:
    """What each parameter of a model on the meta device is made of.

    Raises:
        CheckpointError: a tensor has no place in the model, or another shape; a parameter has no tensor.
    """
    architecture, config = architecture_of(file), model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    parts = LAYER | dict(architecture.names)
    found: dict[str, dict[int, tuple[GgufTensor, str]]] = {}
    for name, tensor in file.tensors.items():
        if name in architecture.frequencies:
            continue
        parameter, number, part = _place(name, parts, architecture)
        if parameter not in shapes:
            raise CheckpointError(
                f"{file.path}: nothing in a {config.model_type} of transformers is its {name}."
            )
        if tensor.kind in NO_WEIGHTS:
            raise CheckpointError(f"{file.path}: {name} is stored in {tensor.kind}, which no weights are.")
        others = found.setdefault(parameter, {})
        if number in others or any(not _stack(tensor, other) for other, _ in others.values()):
            raise CheckpointError(f"{file.path}: {name} does not go with others of {parameter}.")
        others[number] = tensor, part
    sources = {}
    for parameter, tensors in found.items():
        is_norm = architecture.norms_are_one_more and parameter.endswith("norm.weight")
        part = tensors[min(tensors)][1]
        source = sources[parameter] = Source(
            tuple(tensors[number][0] for number in sorted(tensors)),
            heads.get(part) if part in architecture.paired else None,
            -1.0 if is_norm else 0.0,
            alternate=architecture.experts_alternate and len(tensors) > 1,
            transposed=architecture.experts_alternate
            and ".experts." in parameter
            and len(shapes[parameter]) == 3,
        )
        found_shape = source.shape_of_parameter
        if not _is_alike(found_shape, shapes[parameter]):
            raise CheckpointError(
                f"{file.path}: {parameter} is {list(found_shape)} there, and {list(shapes[parameter])} in the model "
                "that the file describes."
            )
    if HEAD in shapes and HEAD not in sources:
        sources[HEAD] = sources[TABLE]
    some = {bias for bias in NO_BIASES if any(name.endswith(bias) for name in sources)}
    needed = (name for name in shapes if not name.endswith(NO_BIASES) or name.endswith(tuple(some)))
    if missing := [name for name in needed if name not in sources]:
        raise CheckpointError(f"{file.path} lacks {counted(missing)} of its model, for example {missing[0]}.")
    return sources


def _is_alike(shape: tuple[int, ...], of_parameter: tuple[int, ...]) -> bool:
    """But for a dimension of 1 that llama.cpp drops, in front (of gates) or behind the first (of convolutions)."""
    return of_parameter in (shape, (1, *shape), (*shape[:1], 1, *shape[1:]))


def _stack(one: GgufTensor, other: GgufTensor) -> bool:
    """May rows of one stand behind those of the other? Of experts, and of their biases."""
    sizes = {(tensor.shape[0], *tensor.shape[2:]) for tensor in (one, other)}
    return len(one.shape) == len(other.shape) and len(one.shape) in (2, 3) and len(sizes) == 1


def _place(name: str, parts: Mapping[str, str], architecture: Architecture) -> tuple[str | None, int, str]:
    """(The parameter that a tensor belongs to, the place of its rows among those of others, its part of the name)."""
    whole = WHOLE | dict(architecture.whole)
    if (owner := name.removesuffix(".weight")) in whole and owner != name:
        return f"{whole[owner]}.weight", 0, name
    match = PARAMETER.fullmatch(name)
    if match is None:
        return None, 0, name
    layer, part, kind = match.groups()
    if part in EXPERTS:
        parameter, number = EXPERTS[part]
        ending = "" if kind == "weight" else "_bias"
        return f"model.layers.{layer}.{architecture.experts}.{parameter}{ending}", number, part
    if part in architecture.bare and kind == "weight":
        return f"model.layers.{layer}.{architecture.bare[part]}", 0, part
    return (f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else None), 0, part


def plain_values(model: torch.nn.Module, stored: StoredBlocks, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters that a model still has once modules that read codes are in place, by name."""

    def values(named: tuple[str, torch.nn.Parameter]) -> torch.Tensor:
        name, parameter = named
        if name not in stored.sources:
            return torch.zeros(parameter.shape, dtype=dtype)
        return stored.sources[name].values(dtype).reshape(parameter.shape)

    parameters = list(model.named_parameters())
    return {name: found for (name, _), found in zip(parameters, _at_once(values, parameters))}
