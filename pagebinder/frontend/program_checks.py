"""What torch.export lets through and nothing here can read: functions inside a program, constants without values.

    torch.func.vmap(f)(x)              calls on values with a dimension that the graph does not show
    flex_attention(.., score_mod=f)    a call with a graph of its own as operand; torch.cond, too
    linear.weight.data                 a constant that has lost its value: it is the weight
    (x * 2).data                       the same of a value that is not known
    torch.rand(3, generator=g)         a constant that is no tensor

Decomposition resolves the first, unless torch has kept such a value as a constant.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from pagebinder.errors import CaptureError
from pagebinder.graph_tools import module_path, source_line, storage_of, tensors


def is_transformed(node: Node) -> bool:
    """Is it inside a function that torch.func transforms?"""
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors(node)))


def weights_behind_data(program: ExportedProgram) -> None:
    """Reads a weight where the trace has read its `.data`, in place: to torch.export that is another tensor."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in specs]
    weights = {
        storage_of(node.meta["val"]): node for node in inputs if specs[node.name].kind is InputKind.PARAMETER
    }
    for node in inputs:
        target = specs[node.name].target
        constant = program.constants.get(target)
        weight = weights.get(storage_of(constant)) if isinstance(constant, FakeTensor) else None
        if weight is not None and _layout(constant) == _layout(weight.meta["val"]):
            program.constants[target] = program.state_dict[specs[weight.name].target]
            node.replace_all_uses_with(weight)


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def refuse_traced_constants(program: ExportedProgram) -> None:
    """Raises CaptureError: a constant of the program is no tensor, or has no value, by torch.func or by `.data`."""
    for name, constant in program.constants.items():
        if not isinstance(constant, torch.Tensor):
            reader = _reader(program, {name})
            where = "" if reader is None else f"{_place(reader)} ({source_line(reader)})"
            raise CaptureError(
                f"A {type(constant).__name__} is used{where}, and no graph here holds one. Compute what is made with "
                "it before the call, and keep it in a buffer."
            )
    lost = {name for name, constant in program.constants.items() if isinstance(constant, FakeTensor)}
    if not lost:
        return
    transformed = next((node for node in program.graph.nodes if is_transformed(node)), None)
    if transformed is not None:
        raise CaptureError(
            f"torch.func.vmap, or another transform of torch.func,{_place(transformed)} cannot be captured: "
            "torch.export loses its result. Write the dimension that it runs over as one of the tensors, as matmul "
            "and softmax take it."
        )
    reader = _reader(program, lost)
    where = "" if reader is None else f"{_place(reader)} ({source_line(reader)})"
    raise CaptureError(
        f"A tensor that is read{where} has lost its value in the trace: torch.export does not follow `.data` and "
        "what is made out of its sight. Use detach() instead of .data, and compute such values before the call."
    )


def _reader(program: ExportedProgram, constants: set[str]) -> Node | None:
    """The first call that reads one of them."""
    names = {spec.arg.name for spec in program.graph_signature.input_specs if spec.target in constants}
    return next((n for n in program.graph.nodes if names & {i.name for i in n.all_input_nodes}), None)


def refuse_operands_with_graphs(program: ExportedProgram) -> None:
    """Raises CaptureError: a call takes a function, whose graph would go unread."""
    for node in program.graph.nodes:
        if any(_is_graph(program, operand) for operand in node.all_input_nodes):
            raise CaptureError(
                f"{node.target}{_place(node)} takes a function, and the graph of such a function is not read here. "
                "Write attention as scaled_dot_product_attention, or as products, a mask and a softmax; write a "
                "branch as torch.where."
            )


def _is_graph(program: ExportedProgram, node: Node) -> bool:
    return node.op == "get_attr" and isinstance(getattr(program.graph_module, node.target, None), GraphModule)


def _place(node: Node) -> str:
    """The module; the innermost line would be torch's own."""
    path = module_path(node)
    return f" in {path}" if path else ""
