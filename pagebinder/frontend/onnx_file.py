"""An ONNX file as plain data: nodes, inputs, outputs and constants, weights mapped from where they lie.

Model-local functions are inlined, Constant nodes become constants, and what no decoder can be imported with (control
flow, quantised operators, weights in exotic formats) is refused here, by name.
"""

from __future__ import annotations

import ast
import importlib.util
import mmap
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagebinder.errors import CaptureError, CheckpointError, ConfigError

OLDEST_OPSET = 13  # before, axes were attributes, and Softmax flattened its input
CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}
QUANTISED = re.compile(r"[Qq]uantize|^QLinear|^QAttention|^QGemm|Integer$|NBits|Bnb4|BlockQuantized")
SCOPES = "pkg.torch.onnx.name_scopes"  # torch's exporter keeps the modules of a node under this name
# onnx.TensorProto.DataType -> torch's name
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip


@dataclass
class OnnxNode:
    """One call of an operator. op: "Add", or "domain::Name" outside the standard. scope: the module it stands in."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    number: int
    scope: str = ""

    def __str__(self) -> str:
        return f"{self.op} (node {self.name})"


@dataclass(frozen=True)
class OnnxValue:
    """An input or output of the graph. shape: sizes, names of dynamic ones, None where nothing is said."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | None, ...] | None


@dataclass
class OnnxGraph:
    """What an ONNX file says. constants: initialisers and the values of Constant nodes, by name."""

    path: Path
    inputs: dict[str, OnnxValue]
    outputs: dict[str, OnnxValue]
    nodes: list[OnnxNode]
    constants: dict[str, torch.Tensor]
    users: dict[str, list[OnnxNode]] = field(default_factory=dict)
    makers: dict[str, OnnxNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.nodes:
            self.makers |= dict.fromkeys(filter(None, node.outputs), node)
            for name in dict.fromkeys(filter(None, node.inputs)):
                self.users.setdefault(name, []).append(node)


def read_onnx(path: Path, *, weights: bool = True) -> OnnxGraph:
    """Read a file. `weights=False`: tensors in external files are on the meta device, and the files not needed.

    Raises:
        ConfigError: the package onnx is missing. CheckpointError: no ONNX model, or its weights are missing.
        CaptureError: something in it cannot be imported, with the node's name.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ConfigError(
            "Importing ONNX models needs onnx: install the extra, pip install 'pagebinder[onnx]'."
        )
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise CheckpointError(f"{path} is not an ONNX model: {error}") from error
    if not model.graph.node:
        raise CheckpointError(f"{path} is not an ONNX model, or an empty one: it has no nodes.")
    _check_opset(model, path)
    for function in model.functions:
        _refuse_operators(function.node, where=f"function {function.domain}::{function.name}")
    if model.functions:
        from onnx.inliner import inline_local_functions

        model = inline_local_functions(model)
    return _graph(model.graph, path, weights)


def _graph(proto, path: Path, weights: bool) -> OnnxGraph:
    _refuse_operators(proto.node)
    if proto.sparse_initializer:
        raise CaptureError(
            f"{path}: the sparse tensor {proto.sparse_initializer[0].values.name!r} cannot be imported."
        )
    reader = _Tensors(path.parent, weights)
    constants = {tensor.name: reader.read(tensor) for tensor in proto.initializer}
    nodes = []
    for number, node in enumerate(proto.node):
        attributes = {a.name: _attribute(a, reader) for a in node.attribute}
        if node.op_type == "Constant" and not node.domain:
            constants[node.output[0]] = _constant(attributes)
            continue
        domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}::"
        name = re.sub(r"\s", "_", node.name) or f"{node.op_type}_{number}"
        nodes.append(
            OnnxNode(domain + node.op_type, name, tuple(node.input), tuple(node.output), attributes, number)
        )
        nodes[-1].scope = _scope_said(node)
    _inherit_scopes(nodes, constants)
    inputs = {v.name: _value(v) for v in proto.input if v.name not in constants}
    outputs = {v.name: _value(v) for v in proto.output}
    _check_order(path, nodes, {*inputs, *constants}, outputs)
    return OnnxGraph(path, inputs, outputs, nodes, constants)


def _check_order(path: Path, nodes: list[OnnxNode], known: set[str], outputs: Collection[str]) -> None:
    """Every value is there before it is read."""
    for node in nodes:
        for name in filter(None, node.inputs):
            if name not in known:
                raise CheckpointError(
                    f"{path} is damaged: {node} reads {name!r}, which is no input, no tensor of the file, and the "
                    "result of no node before it."
                )
        known |= set(node.outputs)
    for name in outputs:
        if name not in known:
            raise CheckpointError(f"{path} is damaged: its output {name!r} is the result of no node.")


def _check_opset(model, path: Path) -> None:
    versions = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if versions and versions[0] < OLDEST_OPSET:
        raise CaptureError(
            f"{path} is of opset {versions[0]}, and operators meant other things before {OLDEST_OPSET}: export the "
            "model anew, or convert it with onnx.version_converter."
        )


def _refuse_operators(nodes, where: str = "") -> None:
    """Control flow and quantised operators; all others are looked up when they are translated."""
    for node in nodes:
        place = f"{node.op_type} (node {node.name or node.output[0]}{', in ' + where if where else ''})"
        if node.op_type in CONTROL_FLOW:
            raise CaptureError(
                f"{place}: control flow cannot be imported, as every token must go through the same operators. "
                "Export a model without branches (optimum: one decoder, not a merged one) and with loops unrolled."
            )
        if QUANTISED.search(node.op_type):
            raise CaptureError(
                f"{place}: quantised operators cannot be imported. Import the model in float32, float16 or "
                "bfloat16, and quantise it here: CompileConfig(quantization=...)."
            )


def _value(proto) -> OnnxValue:
    kind = proto.type.tensor_type
    if not proto.type.HasField("tensor_type"):
        raise CaptureError(f"{proto.name!r}, an input or output, is no tensor.")
    shape = None
    if kind.HasField("shape"):
        sizes = ((d.dim_value if d.HasField("dim_value") else d.dim_param or None) for d in kind.shape.dim)
        shape = tuple(sizes)
    return OnnxValue(proto.name, _dtype(kind.elem_type, proto.name), shape)


def _dtype(number: int, name: str) -> torch.dtype:
    if number not in DTYPES:
        import onnx

        said = onnx.TensorProto.DataType.Name(number)
        raise CaptureError(
            f"{name!r} is of the type {said}, which cannot be imported: export the model unquantised."
        )
    return DTYPES[number]


def _attribute(attribute, reader: _Tensors):
    import onnx

    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == onnx.AttributeProto.TENSOR:
        return reader.read(value)
    return value.decode() if isinstance(value, bytes) else value


def _constant(attributes: dict) -> torch.Tensor:
    (kind, value), *_ = attributes.items()
    if kind == "value":
        return value
    dtypes = {"value_int": torch.int64, "value_ints": torch.int64, "value_float": torch.float32}
    dtypes["value_floats"] = torch.float32
    if kind not in dtypes:
        raise CaptureError(f"A Constant holds its value as {kind}, which cannot be imported.")
    return torch.tensor(value, dtype=dtypes[kind])


def _scope_said(node) -> str:
    """The module path that torch's exporters keep: as metadata, or in the name ("/model/layers.0/mlp/MatMul")."""
    said = next((p.value for p in node.metadata_props if p.key == SCOPES), None)
    if said is not None:
        try:
            scopes = ast.literal_eval(said)
            return max((str(s) for s in scopes[:-1]), key=len, default="")
        except (ValueError, SyntaxError):
            return ""
    return ".".join(node.name.strip("/").split("/")[:-1]) if node.name.startswith("/") else ""


def _inherit_scopes(nodes: list[OnnxNode], constants: dict) -> None:
    """Where nothing is said, a node stands where its weight does, and one without weights in the same layer."""
    layer, transposed = "", {}
    for node in nodes:
        weights = [
            transposed.get(name, name) for name in node.inputs if transposed.get(name, name) in constants
        ]
        if node.op == "Transpose" and weights:
            transposed[node.outputs[0]] = weights[0]
        paths = [name.rpartition(".")[0] for name in weights if "." in name]
        node.scope = node.scope or (paths[0] if paths else layer)
        found = re.match(r".*?\.\d+(?=\.|$)", node.scope)
        layer = found.group() if found else ""


class _Tensors:
    """Reads tensors: those of external files as views of a mapping, others from the message."""

    def __init__(self, folder: Path, weights: bool) -> None:
        self.folder, self.weights = folder, weights
        self.files: dict[str, mmap.mmap] = {}

    def read(self, proto) -> torch.Tensor:
        dtype, shape = _dtype(proto.data_type, proto.name), tuple(proto.dims)
        if proto.data_location == 1:
            return self._external(proto, dtype, shape)
        if proto.HasField("raw_data"):
            data = bytearray(proto.raw_data)
            return (
                torch.frombuffer(data, dtype=dtype).reshape(shape)
                if data
                else torch.empty(shape, dtype=dtype)
            )
        import onnx

        array = onnx.numpy_helper.to_array(proto)
        if dtype is torch.bfloat16:
            array = array.astype("float32")
        return torch.tensor(array, dtype=dtype)

    def _external(self, proto, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if not self.weights:
            return torch.empty(shape, dtype=dtype, device="meta")
        said = {entry.key: entry.value for entry in proto.external_data}
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        offset, memory = int(said.get("offset", 0)), self._mapped(said.get("location", ""), proto.name)
        if offset + count * dtype.itemsize > len(memory):
            raise CheckpointError(
                f"{said['location']} ends before the tensor {proto.name!r}: it is damaged or another."
            )
        if offset % dtype.itemsize:  # rare, and no view could have such an address
            return torch.frombuffer(
                bytearray(memory[offset : offset + count * dtype.itemsize]), dtype=dtype
            ).view(shape)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)

    def _mapped(self, location: str, name: str) -> mmap.mmap:
        if location not in self.files:
            path = (self.folder / location).resolve()
            if not location or not path.is_relative_to(self.folder.resolve()):
                raise CheckpointError(
                    f"The tensor {name!r} lies in {location!r}, outside the model's directory."
                )
            try:
                with path.open("rb") as file:  # private: nothing can write to the file through it
                    self.files[location] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{path}, which holds the weights, cannot be read: {error}. It belongs beside the ONNX file."
                ) from error
        return self.files[location]


def most_common(nodes: list[OnnxNode]) -> str:
    """Operators with how often they occur and the first node of each."""
    first: dict[str, OnnxNode] = {}
    for node in nodes:
        first.setdefault(node.op, node)
    counts = Counter(node.op for node in nodes)
    return "; ".join(
        f"{op} ({counts[op]}: {node.name}{', ...' if counts[op] > 1 else ''})" for op, node in first.items()
    )
