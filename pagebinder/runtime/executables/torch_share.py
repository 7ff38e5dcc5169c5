"""How much of a graph is torch's. Where it is little, its loops need no threads: custom_ops/cpu/num_threads.h."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.cpu.provider import NAMESPACE as CPU_NAMESPACE
from pagebinder.custom_ops.library import is_our_op, op_info
from pagebinder.graph_tools import CASTS, is_view_op, val

LITTLE = 0.1  # of the weights that products read
aten = torch.ops.aten
PRODUCTS = {
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
}  # fmt: skip
OUTER = {aten.matmul.default, aten.mm.default, aten.bmm.default}  # where one dimension of 1 is summed over
HEAVY = PRODUCTS | {
    aten.baddbmm.default, aten.conv1d.default, aten.convolution.default, aten.scaled_dot_product_attention.default,
}  # fmt: skip


def leaves_little_to_torch(gm: GraphModule) -> bool:
    """Do kernels of the CPU provider read nearly all weights? No, where anything heavy is a reference or another
    provider's, torch multiplies computed values, or the graph is an encoder's, whose loops are wide."""
    ours = torchs = 0
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        namespace, name = node.target._schema.name.split("::")
        read = sum(_weights(n) for n in node.all_input_nodes)
        if namespace == CPU_NAMESPACE:
            ours += read
            if name.startswith("packed_"):
                return False
        elif is_our_op(node.target) and not op_info(name).transparent:
            return False
        elif node.target in HEAVY and not _is_outer_product(node):
            torchs += read
            if not read:
                return False
    return ours > 0 and torchs <= LITTLE * ours


def _is_outer_product(node: Node) -> bool:
    """One multiplication an element, however it is written: the angles of RoPE in transformers 5.17."""
    if node.target not in OUTER:
        return False
    contracted = val(node.args[0]).shape[-1]
    return isinstance(contracted, int) and contracted == 1


def _weights(node: Node) -> int:
    """How many weights an operand is, be it cast or seen in another shape; 0 where it is computed."""
    while isinstance(node.target, torch._ops.OpOverload) and (
        node.target in CASTS or is_view_op(node.target)
    ):
        node = node.args[0]
    is_matrix = node.op == "get_attr" and isinstance(val(node), torch.Tensor) and val(node).dim() > 1
    return val(node).numel() if is_matrix else 0
