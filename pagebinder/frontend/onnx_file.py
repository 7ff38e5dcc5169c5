"""An ONNX file as plain data: nodes, inputs, outputs and constants, weights mapped from where they lie.

Model-local functions are inlined, Constant nodes become constants, and what no decoder can be imported with (control
flow, quantised operators, weights in exotic formats) is refused here, by name.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagebinder.errors import CaptureError, CheckpointError, ConfigError
from pagebinder.frontend.onnx_tensors import OnnxTensors, stored_dtype

OLDEST_OPSET = 13  # before, axes were attributes, and Softmax flattened its input
STANDARD = ("", "ai.onnx")  # the domain of ONNX's own operators, by both its names
CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}
OUR_FUNCTIONS = "function pagebinder::"  # the domain of those that our own export writes
QUANTISED = re.compile(r"[Qq]uantize|^QLinear|^QAttention|^QGemm|Integer$|NBits|Bnb4|BlockQuantized")
SCOPES = "pkg.torch.onnx.name_scopes"  # torch's exporter keeps the modules of a node under this name
UNREAD_TEXTS = {"doc_string", "metadata_props", "producer_name", "producer_version"}  # of anything in a file


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
    _check_text(model, path)
    _check_opset(model, path)
    for function in model.functions:
        _refuse_operators(function.node, where=f"function {function.domain}::{function.name}")
    if model.functions:
        from onnx.inliner import inline_local_functions

        model = inline_local_functions(model)
    _refuse_operators(model.graph.node)
    _check_nodes(model, path)
    return _graph(model.graph, path, weights)


def _graph(proto, path: Path, weights: bool) -> OnnxGraph:
    if proto.sparse_initializer:
        raise CaptureError(
            f"{path}: the sparse tensor {proto.sparse_initializer[0].values.name!r} cannot be imported."
        )
    reader = OnnxTensors(path, weights)
    constants = {tensor.name: reader.read(tensor) for tensor in proto.initializer}
    nodes = []
    for number, node in enumerate(proto.node):
        attributes = {a.name: _attribute(a, reader) for a in node.attribute}
        if node.op_type == "Constant" and not node.domain:
            constants[node.output[0]] = _constant(attributes)
            continue
        domain = "" if node.domain in STANDARD else f"{node.domain}::"
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


def _check_text(message, path: Path, place: str = "") -> None:
    """The strings in a message are text: protobuf hands on as bytes what is not UTF-8. Raises CheckpointError."""
    for part, value in message.ListFields():
        if part.type not in (part.TYPE_STRING, part.TYPE_MESSAGE) or part.name in UNREAD_TEXTS:
            continue
        for one in [value] if isinstance(value, (str, bytes)) or hasattr(value, "ListFields") else value:
            if isinstance(one, bytes):
                raise CheckpointError(f"{path} is damaged: {place}{part.name} {one!r} is not UTF-8.")
            if not isinstance(one, str):
                name = getattr(one, "name", "")
                _check_text(one, path, f"{place}{part.name} {name!r}, " if name else place)


def _check_nodes(model, path: Path) -> None:
    """Standard operators have all that they need: what reads them counts on it."""
    import onnx

    newest = onnx.defs.onnx_opset_version()
    version = min([newest, *(o.version for o in model.opset_import if o.domain in STANDARD)])
    for number, node in enumerate(model.graph.node):
        if node.domain not in STANDARD or not onnx.defs.has(node.op_type, version):
            continue
        schema = onnx.defs.get_schema(node.op_type, version)
        given = {a.name for a in node.attribute}
        needed = [name for name, a in schema.attributes.items() if a.required and name not in given]
        needed += ["an input"] * (len(node.input) < schema.min_input)
        needed += ["an output"] * (len(node.output) < schema.min_output)
        if needed:
            name = node.name or number
            raise CheckpointError(
                f"{path} is damaged: {node.op_type} (node {name}) lacks {', '.join(needed)}."
            )


def _check_opset(model, path: Path) -> None:
    versions = [o.version for o in model.opset_import if o.domain in STANDARD]
    if versions and versions[0] < OLDEST_OPSET:
        raise CaptureError(
            f"{path} is of opset {versions[0]}, and operators meant other things before {OLDEST_OPSET}: export the "
            "model anew, or convert it with onnx.version_converter."
        )


def _refuse_operators(nodes, where: str = "") -> None:
    """Control flow and quantised operators; all others are looked up when they are translated."""
    for node in nodes:
        name = node.name or next(iter(node.output), "")
        place = f"{node.op_type} (node {name}{', in ' + where if where else ''})"
        if node.op_type in CONTROL_FLOW and where.startswith(OUR_FUNCTIONS):
            raise CaptureError(
                f"{place}: what Pagebinder exports as loops (experts, recurrences, selected tokens) is for other "
                "runtimes, and is not read back. Compile the checkpoint that the file was exported from."
            )
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
    return OnnxValue(proto.name, stored_dtype(kind.elem_type, proto.name), shape)


def _attribute(attribute, reader: OnnxTensors):
    import onnx

    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == onnx.AttributeProto.TENSOR:
        return reader.read(value)
    return value.decode() if isinstance(value, bytes) else value


def _constant(attributes: dict) -> torch.Tensor:
    kind, value = next(iter(attributes.items()), ("nothing", None))
    if kind == "value":
        return value
    dtypes = {"value_int": torch.int64, "value_ints": torch.int64, "value_float": torch.float32}
    dtypes["value_floats"] = torch.float32
    if kind not in dtypes:
        raise CaptureError(f"A Constant holds its value as {kind}, which cannot be imported.")
    return torch.tensor(value, dtype=dtypes[kind], device="cpu")


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


def most_common(nodes: list[OnnxNode]) -> str:
    """Operators with how often they occur and the first node of each."""
    first: dict[str, OnnxNode] = {}
    for node in nodes:
        first.setdefault(node.op, node)
    counts = Counter(node.op for node in nodes)
    return "; ".join(
        f"{op} ({counts[op]}: {node.name}{', ...' if counts[op] > 1 else ''})" for op, node in first.items()
    )
