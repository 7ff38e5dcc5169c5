"""An ONNX decoder as a PyTorch module, `module(input_ids [1, T], position_ids [1, T]) -> logits [1, T, V]`.

Running it runs the graph's operators in torch, and so does torch.export when it traces it: what is captured is an
ordinary graph of ATen operators, in which caches are gone and sizes are what they are for T tokens. Nodes keep their
ONNX name as source line ("model.onnx:12 in node_linear") and the module they stood in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
import torch.fx.traceback as fx_traceback

import pagebinder.frontend.onnx_arithmetic
import pagebinder.frontend.onnx_shapes  # noqa: F401  (register their operators)
from pagebinder.errors import CaptureError
from pagebinder.frontend import onnx_layers
from pagebinder.frontend.onnx_file import OnnxGraph, OnnxNode, most_common
from pagebinder.frontend.onnx_host import OPERATORS, as_host, filled, host, is_host, number, sizes
from pagebinder.frontend.onnx_inputs import Cache, Inputs
from pagebinder.graph_tools import attach

VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Gather")  # where a Gather takes the only row there is
# Tried first: two nodes that are one PyTorch operator.
FUSED = {"Add": onnx_layers.with_bias, "Mul": onnx_layers.silu_of}


class OnnxDecoder(torch.nn.Module):
    """`graph` with its inputs sorted by meaning; constants become parameters and buffers.

    Raises:
        CaptureError: operators without a translation, all of them named.
    """

    def __init__(self, graph: OnnxGraph, inputs: Inputs) -> None:
        super().__init__()
        self.graph, self.inputs = graph, inputs
        self.needed = needed_nodes(graph, inputs.logits)
        unknown = [node for node in self.needed if node.op not in OPERATORS]
        if unknown:
            raise CaptureError(
                f"{graph.path} has operators that are not translated: {most_common(unknown)}. Export the model to "
                "the standard operators (ai.onnx)."
            )
        self.hosts: dict[str, np.ndarray] = {}
        self.paths: dict[str, str] = {}
        self.flipped: set[str] = set()  # weights [K, N] that are kept as [N, K]
        used = {name for node in self.needed for name in node.inputs}
        # The largest first: the first parameter's dtype is taken for the model's.
        for name, tensor in sorted(graph.constants.items(), key=lambda item: -item[1].numel()):
            if name in used | {inputs.logits}:
                self._keep(name, tensor)
        graph.constants.clear()  # what is needed is held here
        self.carriers = _carriers(self.needed, graph.path.name)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        known = as_host(tensor)
        if known is not None:
            self.hosts[name] = host(known)
            return
        if tensor.is_floating_point():
            if tensor.dim() == 2 and all(_multiplies(node, name) for node in self.graph.users[name]):
                tensor = tensor.t().contiguous()
                self.flipped.add(name)
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
        self.paths[name] = _attribute_path(name, set(self.paths.values()))
        attach(self, self.paths[name], tensor)

    def constant(self, name: str):
        """A constant as the graph has it; None: there is none of this name."""
        if name in self.hosts:
            return self.hosts[name]
        tensor = self.stored(name)
        return tensor.t() if name in self.flipped else tensor

    def stored(self, name: str) -> torch.Tensor | None:
        """The parameter or buffer behind a constant."""
        owner: Any = self
        for part in self.paths[name].split(".") if name in self.paths else ():
            owner = getattr(owner, part)
        return None if owner is self else owner

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        run = Run(self, input_ids, position_ids)
        run.all_of(range(len(self.needed)))
        logits, num_tokens = run.value(_without_views(run, self.inputs.logits)), input_ids.shape[1]
        if logits.dim() == 2:
            logits = logits.unsqueeze(0)
        if logits.dim() != 3 or str(logits.shape[1]) != str(num_tokens):
            raise CaptureError(
                f"The output {self.inputs.logits} has the shape {[str(s) for s in logits.shape]} for {num_tokens} "
                "tokens: export a model that returns logits [batch, length, vocabulary] of every token."
            )
        return logits


class Run:
    """One pass over the graph: values by name, and what some of them mean."""

    def __init__(self, module: OnnxDecoder, input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        self.module, self.graph, self.device = module, module.graph, input_ids.device
        self.num_tokens, self.positions = input_ids.shape[1], position_ids[0]
        self._ones: set[int] = set()
        self._positions: set[int] = set()
        self._done: dict[tuple, OnnxNode] = {}
        self.with_heads: dict[int, torch.Tensor] = {}  # of values that were made flat
        self._made: dict[tuple[str, ...], torch.Tensor] = {}
        self._first: dict[str, str] = {}  # a value that was computed before -> that value
        self.values: dict[str, Any] = {"": None} | self._inputs(input_ids, position_ids)

    def _inputs(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
        inputs = self.module.inputs
        dtype = self.graph.inputs[inputs.ids].dtype
        ids = input_ids if input_ids.dtype is dtype else input_ids.to(dtype)
        values: dict[str, Any] = {inputs.ids: ids, **inputs.caches}
        for name in inputs.positions:
            flat = len(self.graph.inputs[name].shape) == 1
            values[name] = self.positions if flat else position_ids
            self._positions |= set() if flat else {id(values[name])}
        for name in inputs.masks:
            dtype = self.graph.inputs[name].dtype
            values[name] = torch.ones((1, self.num_tokens), dtype=dtype, device=self.device)
            self._ones.add(id(values[name]))
        values |= dict.fromkeys(inputs.zeros, np.zeros(1, np.int64))
        return values | dict.fromkeys(inputs.lengths, self.filled_rows(True).reshape(1))

    def all_of(self, numbers: Iterable[int]) -> None:
        """Evaluate nodes, by their places among the needed ones."""
        with fx_traceback.preserve_node_meta():
            for i in numbers:
                with fx_traceback.set_current_meta(self.module.carriers[i]):
                    self._evaluate(self.module.needed[i])

    def _evaluate(self, node: OnnxNode) -> None:
        inputs = tuple(self._first.get(name, name) for name in node.inputs)
        given = tuple(map(bool, node.outputs))
        same = self._done.setdefault((node.op, inputs, given, repr(node.attributes)), node)
        if same is not node:  # the same table of cosines for every layer, for example
            self._first |= dict(zip(node.outputs, same.outputs))
            self.values |= {a: self.values[b] for a, b in zip(node.outputs, same.outputs) if a}
            return
        call = Call(self, node)
        try:
            results = call.evaluate()
        except CaptureError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise CaptureError(f"{node} cannot be translated: {str(error).splitlines()[0]}") from error
        results = results if isinstance(results, tuple) else (results,)
        self.values |= {name: value for name, value in zip(node.outputs, results) if name}

    def value(self, name: str):
        if name not in self.values:
            self.values[name] = self.module.constant(name)
        return self.values[name]

    def once(self, names: tuple[str, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What is made of the values of these names, made when it is first asked for."""
        names = tuple(self._first.get(name, name) for name in names)
        if names not in self._made:
            self._made[names] = make()
        return self._made[names]

    def transposed(self, name: str) -> torch.Tensor:
        """W^T of a weight, without a copy."""
        return self.module.stored(name) if name in self.module.flipped else self.value(name).t()

    def is_num_tokens(self, value) -> bool:
        return str(value) == str(self.num_tokens)

    def is_positions(self, x) -> bool:
        return id(x) in self._positions

    def is_cache(self, x) -> bool:
        return isinstance(x, Cache)

    def filled_rows(self, keepdim: bool) -> np.ndarray:
        """The number of tokens so far, of a batch of one."""
        return sizes([self.num_tokens]).reshape((1, 1) if keepdim else (1,))

    def is_full(self, num_keys) -> bool:
        return is_host(num_keys) and num_keys.size == 1 and self.is_num_tokens(number(num_keys))


class Call:
    """One node while it is translated: what translations ask of its surroundings."""

    def __init__(self, run: Run, node: OnnxNode) -> None:
        self.run, self.node = run, node

    def evaluate(self):
        fused = FUSED.get(self.node.op)
        result = None if fused is None else fused(self)
        if result is not None:
            return result
        translation, values = OPERATORS[self.node.op], [self.value(name) for name in self.node.inputs]
        known = inspect.signature(translation).parameters
        if not any(p.kind is p.VAR_POSITIONAL for p in known.values()):
            positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in known.values()) - 1
            if any(value is not None for value in values[positional:]):
                self.refuse(f"it has {len(values)} inputs, of which {positional} are understood")
            values = values[:positional]
        for name in self.node.attributes:
            if name not in known or known[name].kind is not inspect.Parameter.KEYWORD_ONLY:
                self.refuse(f"its attribute {name} is not understood")
        cached = [v for v in values if self.run.is_cache(v)]
        if cached and self.node.op not in ("Shape", "Concat", "TensorScatter", "Attention"):
            self.refuse(f"it reads the cache {cached[0].value.name}")
        return translation(self, *values, **self.node.attributes)

    def refuse(self, reason: str) -> NoReturn:
        raise CaptureError(f"{self.node}: {reason}.")

    def value(self, name: str):
        return self.run.value(name)

    def maker(self, name: str, op: str) -> OnnxNode | None:
        """The node that makes a value, if it is an `op`."""
        node = self.run.graph.makers.get(name)
        return node if node is not None and node.op == op else None

    def is_weight(self, name: str) -> bool:
        return name in self.run.module.paths

    def shape(self, x):
        """Of a cache: P = 0 rows, or as many slots as there are tokens."""
        if not self.run.is_cache(x):
            return x.shape
        rows = self.run.num_tokens if x.kind == "slots" else 0
        said = [1, *x.value.shape[1:]]
        return [rows if i == x.axis else s for i, s in enumerate(said)]

    def known(self, x, what: str) -> np.ndarray:
        """A value that must be known while tracing."""
        if is_host(x):
            return x
        if isinstance(x, torch.Tensor) and x.numel() == 0:
            return np.zeros(0, np.int64)
        return self.refuse(f"{what} depends on the data, and not on sizes alone")

    def tensor(self, x) -> torch.Tensor:
        return filled(x, self.run.device) if is_host(x) else x

    def tensors(self, *values) -> list[torch.Tensor]:
        return [self.tensor(x) for x in values]

    def scalar(self, x, *, rank: int):
        """A known scalar as a number, if broadcasting it adds no dimension."""
        return number(x) if is_host(x) and x.size == 1 and x.ndim <= rank else self.tensor(x)

    def operands(self, a, b) -> tuple:
        """Two operands, of which one may be a number."""
        rank = max(x.dim() for x in (a, b) if not is_host(x))
        return self.scalar(a, rank=rank), self.scalar(b, rank=rank)

    def is_ones(self, x) -> bool:
        return id(x) in self.run._ones

    def same_meaning(self, before, after):
        """What a cast or an expansion makes of a mask of ones is one, too."""
        if self.is_ones(before):
            self.run._ones.add(id(after))
        return after


def _without_views(run: Run, name: str) -> str:
    """The earliest value that has the entries of `name` in the same order, and its shape."""
    earliest, shape = name, run.value(name).shape
    while (node := run.graph.makers.get(name)) is not None and node.op in VIEWS:
        x = run.value(node.inputs[0])
        picks = node.op == "Gather" and not (is_host(i := run.value(node.inputs[1])) and i.ndim == 0)
        if is_host(x) or picks or str(x.numel()) != str(run.value(name).numel()):
            break
        name = node.inputs[0]
        earliest = name if str(x.shape) == str(shape) else earliest
    return earliest


def needed_nodes(graph: OnnxGraph, output: str) -> list[OnnxNode]:
    """The nodes behind an output, in the graph's order."""
    wanted, needed = {output}, []
    for node in reversed(graph.nodes):
        if wanted & set(node.outputs):
            needed.append(node)
            wanted |= set(node.inputs)
    return needed[::-1]


def _multiplies(node: OnnxNode, name: str) -> bool:
    """Is `name` [K, N] the weight of this product, and nothing else in it?"""
    if list(node.inputs).count(name) != 1 or len(node.inputs) < 2 or node.inputs[1] != name:
        return False
    return node.op == "MatMul" or (node.op == "Gemm" and not node.attributes.get("transB", 0))


def _attribute_path(name: str, taken: set[str]) -> str:
    """A dotted name for a constant: "onnx::MatMul_7" -> "constants.onnx_MatMul_7"."""
    taken_by_modules = {"training", "graph", "inputs", "needed", "hosts", "paths", "flipped", "carriers"}
    parts = [part for part in (re.sub(r"\W+", "_", part) for part in name.split(".")) if part]
    parts = [f"{p}_" if hasattr(torch.nn.Module, p) or p in taken_by_modules else p for p in parts]
    # Not of the root itself: its own parameters come first, and the first one's dtype is the model's.
    path = ".".join(parts if len(parts) > 1 else ["constants", *parts])
    while any(path == t or t.startswith(path + ".") or path.startswith(t + ".") for t in taken):
        path = path.replace(".", "_") + "_"
    return path


def _carriers(nodes: list[OnnxNode], file: str) -> list[torch.fx.Node]:
    """FX nodes with the metadata that traced operators take over: where in the ONNX file they come from."""
    graph, carriers = torch.fx.Graph(), []
    for node in nodes:
        carrier = graph.create_node("call_function", torch.add, name="onnx")
        stack = {"L__self__": ("", "torch.nn.Module")}
        if node.scope:
            stack["L__self___" + node.scope.replace(".", "_")] = (f"source.{node.scope}", "onnx")
        carrier.meta = {
            "stack_trace": f'  File "{file}", line {node.number}, in {node.name}\n',
            "nn_module_stack": stack,
        }
        carriers.append(carrier)
    return carriers
