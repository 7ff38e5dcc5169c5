"""An OnnxModule run without exporting it: every ONNX operator it calls is computed by onnx's reference evaluator.

An export takes seconds, this milliseconds; shapes and dtypes that a translation declares are checked, too.
Model-local functions that are traced from PyTorch run as PyTorch.
"""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch.fx import GraphModule

from pagebinder.export.onnx_experts import definition
from pagebinder.export.onnx_functions import DOMAIN
from pagebinder.export.onnx_module import OnnxModule
from pagebinder.export.onnx_step import OPSET


def onnx_results(op: str, inputs: dict[str, np.ndarray | None], num_outputs: int = 1, **attributes):
    """What the reference evaluator computes for one node; an input that is None is left out."""
    domain, _, kind = op.rpartition("::")
    given = {name: value for name, value in inputs.items() if value is not None}
    names = [name if name in given else "" for name in inputs]
    outputs = [f"out{i}" for i in range(num_outputs)]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    node = helper.make_node(kind, names, outputs, domain=domain, **attributes)
    functions = [definition(kind, OPSET)] if domain == DOMAIN else []
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([node], kind, infos, results)
    model = helper.make_model(graph, opset_imports=opsets, functions=functions)
    return ReferenceEvaluator(model).run(None, given)


def symbolic(op, inputs, attributes=None, *, dtype, shape, version):
    """`torch.onnx.ops.symbolic`, but with values."""
    arrays = {f"in{i}": None if x is None else x.contiguous().numpy() for i, x in enumerate(inputs)}
    (value,) = onnx_results(op, arrays, **(attributes or {}))
    out = torch.from_numpy(np.ascontiguousarray(value))
    assert (out.dtype, tuple(out.shape)) == (dtype, tuple(shape)), f"{op} is declared otherwise"
    return out


class EvaluatedModel:
    """Has of an InferenceSession what tests use. `patch` must outlive the runs."""

    def __init__(self, gm: GraphModule, patch: pytest.MonkeyPatch, *, cached: bool = True):
        for module in ("onnx_step", "onnx_experts"):
            patch.setattr(f"pagebinder.export.{module}.symbolic", symbolic)
        self.module = OnnxModule(gm, cached=cached).eval()

    def get_inputs(self):
        signature = self.module.signature
        for name, example in signature.examples.items():
            sizes = [signature.dynamic[name].get(i, size) for i, size in enumerate(example.shape)]
            yield types.SimpleNamespace(name=name, shape=sizes)

    def run(self, names, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        inputs = (torch.from_numpy(np.array(feed[name])) for name in self.module.signature.examples)
        with torch.no_grad():
            return [out.numpy() for out in self.module(*inputs)]
