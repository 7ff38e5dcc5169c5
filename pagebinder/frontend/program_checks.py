"""Functions inside a program: what torch.export lets through and nothing here can read.

    torch.func.vmap(f)(x)              calls on values with a dimension that the graph does not show
    flex_attention(.., score_mod=f)    a call with a graph of its own as operand; torch.cond, too

Decomposition resolves the first, unless torch has kept such a value as a constant.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pagebinder.errors import CaptureError
from pagebinder.graph_tools import module_path, tensors


def is_transformed(node: Node) -> bool:
    """Is it inside a function that torch.func transforms?"""
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors(node)))


def refuse_traced_constants(program: ExportedProgram) -> None:
    """Raises CaptureError: a constant of the program has no value, which torch leaves behind under torch.func."""
    if not any(isinstance(constant, FakeTensor) for constant in program.constants.values()):
        return
    place = next((_place(node) for node in program.graph.nodes if is_transformed(node)), "")
    raise CaptureError(
        f"torch.func.vmap, or another transform of torch.func,{place} cannot be captured: torch.export loses its "
        "result. Write the dimension that it runs over as one of the tensors, as matmul and softmax take it."
    )


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
