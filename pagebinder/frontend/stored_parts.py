"""Checkpoints that keep their layers in several formats, or some of their linear layers only -> `StoredParts`.

    quant_method         a part is                     and has the layers
    compressed-tensors   one of config_groups          that its targets name: paths, expressions, or "Linear"
    modelopt             an algorithm of               whose names quantized_layers says it of
                         quantized_layers

A part says what a whole checkpoint says elsewhere, and `layers` which weights are its own. With files they are those
whose tensors lie there as the part's do (stored_files.py); of a config alone they are those that it names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend.checkpoint_names import CheckpointNames
from pagebinder.frontend.experts_interface import experts_modules
from pagebinder.frontend.fp8_format import StoredFp8
from pagebinder.frontend.int_format import StoredInts
from pagebinder.frontend.not_served import NotServedError
from pagebinder.frontend.stored_names import NamedLayers, StoredTensors, tail

Part = StoredInts | StoredFp8
ALL = "Linear"  # a target: every linear layer
EXPRESSION = "re:"


@dataclass(frozen=True, kw_only=True)
class StoredParts(NamedLayers):
    """`method`: quant_method. `targets`: of each part, what the config says of its layers. `kept`: patterns of
    modules that are stored plain. `layers`: the number of the part that each layer belongs to; None: unknown.
    """

    method: str
    parts: tuple[Part, ...]
    targets: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...] = ()
    layers: Mapping[str, int] | None = None
    plain: frozenset[str] = frozenset()

    experts = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors of a weight, however it is stored."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.names))

    @property
    def endings(self) -> tuple[str, ...]:
        """Of names of tensors that only codes have."""
        return tuple(dict.fromkeys(ending for part in self.parts for ending in part.endings))

    def codes_beside(self, name: str) -> str:
        """The tensor that marks the weight which another one belongs to."""
        number = self.found(name.rpartition(".")[0])
        return self.parts[number or 0].codes_beside(name)

    def part_of(self, tensors: StoredTensors, name: str) -> int | None:
        """The number of the part that keeps a weight so, None: none does.

        Args:
            tensors: dtype and shape of those that the weight has. name: of its layer.
        """
        fitting = [n for n, part in enumerate(self.parts) if part.describes(tensors)]
        named = self._named(name)
        return named if named in fitting else next(iter(fitting), None)

    def part_of_experts(self, path: str, projection: str) -> int | None:
        """The number of the part that keeps a projection of the experts of a layer, which a path lies in; None: it is
        plain. Raises CheckpointError: some of them are stored so, and some otherwise."""
        own = {number for name, number in self.of_experts(path) if name == projection} or {None}
        if len(own) > 1:
            raise CheckpointError(
                f"{path}: the files keep {projection} of some experts in one format and of others in another."
            )
        return next(iter(own))

    def with_layers(
        self, layers: Mapping[str, tuple[int, StoredTensors]], plain: frozenset[str]
    ) -> StoredParts:
        """Knowing of each layer the part that it belongs to and its tensors, and which layers are plain."""
        parts = []
        for number, part in enumerate(self.parts):
            own = {name: tensors for name, (of, tensors) in layers.items() if of == number}
            parts.append(part.with_layers(own, plain | (layers.keys() - own.keys())))
        numbers = {name: number for name, (number, _) in layers.items()}
        return replace(self, parts=tuple(parts), layers=numbers, plain=plain)

    def of_model(self, model: torch.nn.Module, head: torch.nn.Module | None) -> StoredParts:
        """As the config says it, of a model without weights. head: the module whose weight is tied to embeddings."""
        from transformers.quantizers.quantizers_utils import should_convert_module

        layers = {}
        for path, name, (rows, columns) in _weights_of(model, head):
            number = self._named(name) if should_convert_module(name, list(self.kept)) else None
            if number is not None:
                layers[path] = number, self.parts[number].expected(rows, columns)
        return self.with_layers(layers, frozenset())

    def _named(self, name: str) -> int | None:
        """The part whose targets name a layer: by its path or that of its experts, by an expression (of several by
        the first in order of their letters, as the tool does it), or as every linear layer."""
        path = tail(name)
        for named in (
            path,
            path[: path.find(".experts.") + len(".experts")] if ".experts." in path else path,
        ):
            if named in self._paths:
                return self._paths[named]
        for number, expression in self._expressions:
            if expression.match(name):
                return number
        return next((number for number, said in enumerate(self.targets) if ALL in said), None)

    @functools.cached_property
    def _paths(self) -> dict[str, int]:
        paths: dict[str, int] = {}
        for number, said in enumerate(self.targets):
            for name in said:
                if name != ALL and not name.startswith(EXPRESSION):
                    paths.setdefault(tail(name), number)
        return paths

    @functools.cached_property
    def _expressions(self) -> list[tuple[int, re.Pattern]]:
        named = ((name, number) for number, said in enumerate(self.targets) for name in said)
        return [(number, compiled(name)) for name, number in sorted(named) if name.startswith(EXPRESSION)]


def compiled(target: str) -> re.Pattern:
    """Of "re:" and an expression. Raises NotServedError: it is none."""
    try:
        return re.compile(target.removeprefix(EXPRESSION))
    except re.error as error:
        raise NotServedError(f"{target!r}, no regular expression: {error}") from error


def _weights_of(
    model: torch.nn.Module, head: torch.nn.Module | None
) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(path, name in checkpoints, [N, K]) of the weights of linear layers; of experts the name twice."""
    experts, names = experts_modules(model), CheckpointNames(model)
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            yield path, names.of_layer(path), tuple(module.weight.shape)
        elif path in experts:
            for parameter, weight in module.named_parameters(recurse=False):
                if weight.dim() != 3:
                    continue
                count, rows, columns = weight.shape
                rows, columns = (columns, rows) if module.is_transposed else (rows, columns)
                parts = names.of_experts(path, parameter)
                for name in (part.replace("*", str(e), 1) for part in parts for e in range(count)):
                    yield name, name, (rows // len(parts), columns)
