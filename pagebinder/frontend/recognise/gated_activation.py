"""Gated activations (SwiGLU, GeGLU, ...), found from the activation function.

Matches:
    act(gate) * up | up * act(gate)          act: silu, gelu, gelu tanh, relu, relu ** 2, sigmoid
Replaces with:
    pagebinder.gated_activation(gate, up, activation="silu")

gate and up may be two projections or the halves of one. An activation without a gate (a plain MLP) is not a near
miss, and nothing is said about it; one whose product has another form is refused.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import arg, aten, calls, describe, finish, insert_call, is_call, source_line, val
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "gated_activation"
_ACTIVATIONS = {
    aten.silu.default: "silu", aten.gelu.default: "gelu", aten.relu.default: "relu", aten.sigmoid.default: "sigmoid",
}  # fmt: skip
_SQUARES = (aten.pow.Tensor_Scalar, aten.square.default)


def recognise_gated_activation(gm: GraphModule) -> PassResult:
    """Rewrite every product of an activation with a value of its shape; refuse other products with one."""
    result = PassResult(name="recognise_gated_activation")
    for node in calls(gm.graph, *_ACTIVATIONS):
        name, gate, active = _activation_of(node)
        products = [u for u in active.users if is_call(u, aten.mul.Tensor)]
        if not products:
            continue
        reason = _reason_against(active, products)
        if reason:
            where = describe(active)
            result.refusals.append(
                Refusal(pattern=PATTERN, reason=reason, source_line=source_line(active), **where)
            )
            continue
        product = products[0]
        up = product.args[1] if product.args[0] is active else product.args[0]
        op = insert_call(
            gm.graph, product, torch.ops.pagebinder.gated_activation.default, (gate, up), {"activation": name},
            value=val(product),
        )  # fmt: skip
        product.replace_all_uses_with(op)
        gm.graph.erase_node(product)
        result.matches.append(Match(pattern=PATTERN, detail=f"activation={name}", **describe(op)))
    result.changed = bool(result.matches)
    if result.changed:
        finish(gm)
    return result


def _activation_of(node: Node) -> tuple[str, Node, Node]:
    """(name, its input, the node of its value): relu ** 2 is written with two nodes."""
    name, x = _ACTIVATIONS[node.target], node.args[0]
    only = next(iter(node.users)) if len(node.users) == 1 else None
    if name == "gelu" and arg(node, 1, "approximate", "none") == "tanh":
        return "gelu_tanh", x, node
    if name == "relu" and (is_call(only, *_SQUARES) or is_call(only, aten.mul.Tensor)):
        by_itself = is_call(only, aten.mul.Tensor) and only.args[0] is only.args[1]
        if (
            by_itself
            or is_call(only, aten.square.default)
            or (is_call(only, _SQUARES[0]) and only.args[1] == 2)
        ):
            return "relu2", x, only
    return name, x, node


def _reason_against(active: Node, products: list[Node]) -> str | None:
    if len(products) > 1 or len(active.users) > 1:
        return "the activation is used in several places"
    a, b = products[0].args
    up = b if a is active else a
    if not isinstance(up, Node) or a is b:
        return "the activation is multiplied by a number or by itself"
    shapes = [[str(s) for s in val(x).shape] for x in (active, up)]
    if shapes[0] != shapes[1]:
        return "the activation and the value it gates differ in shape"
    if isinstance(val(active).shape[-1], torch.SymInt):
        return "the tokens are the last dimension"
    if val(active).dtype is not val(up).dtype:
        return f"the activation is {val(active).dtype}, and the value it gates {val(up).dtype}"
    return None
