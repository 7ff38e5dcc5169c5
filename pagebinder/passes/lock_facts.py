"""What one op of ours in a graph says about itself: name, provider, options, sizes."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from pagebinder.custom_ops.library import NAMESPACE, is_our_op
from pagebinder.graph_tools import arg

# Sizes worth naming: operand -> {name: dimension}. Other ops give the width of their first operand.
SIZES = {
    "attention": {"q": {"heads": 1, "head_dim": 2}, "k": {"kv_heads": 1}, "v": {"head_dim_v": 2}},
    "relative_attention": {"q": {"heads": 1, "head_dim": 2}, "k": {"kv_heads": 1}, "v": {"head_dim_v": 2}},
    "lookahead_attention": {"q": {"heads": 1, "head_dim": 2}, "k": {"kv_heads": 1}, "v": {"head_dim_v": 2}},
    "indexed_attention": {"q": {"heads": 1, "head_dim": 2}, "k": {"kv_heads": 1}, "v": {"head_dim_v": 2}},
    "cross_attention": {"q": {"heads": 1, "head_dim": 2}, "k": {"kv_heads": 1}, "v": {"head_dim_v": 2}},
    "gated_delta_rule": {"q": {"kv_heads": 1, "head_dim": 2}, "v": {"heads": 1, "head_dim_v": 2}},
    "ssd": {"x": {"heads": 1, "head_dim": 2}, "B": {"groups": 1, "state": 2}},
    "rope": {"x": {"width": -1}, "cos": {"dim": -1}},
    "short_conv": {"weight": {"width": 0, "taps": 1}},
    "moe_experts": {"x": {"width": 1}, "expert_ids": {"chosen": 1}, "up": {"experts": 0}},
    "moe_routed_experts": {"x": {"width": 1}, "up": {"experts": 0}},
    "quantized_moe_experts": {"x": {"width": 1}, "expert_ids": {"chosen": 1}, "up": {"experts": 0}},
    "quantized_moe_routed_experts": {"x": {"width": 1}, "up": {"experts": 0}},
}


def is_ours(node: Node) -> bool:
    """A call of an op of ours, by whichever provider."""
    return node.op == "call_function" and is_our_op(node.target)


def op_name(node: Node) -> str:
    return node.target._schema.name.split("::")[1]


def provider_of(node: Node) -> str:
    """The provider whose namespace the target is in: "cpu" of pagebinder_cpu::paged_attention."""
    return node.target.namespace.removeprefix(NAMESPACE).lstrip("_") or "reference"


def operand(node: Node, name: str) -> Any:
    """An argument by its name in the schema, None if it was left out."""
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return arg(node, position, name, argument.default_value)
    return None


def op_options(node: Node) -> dict[str, Any]:
    """Options that differ from their default, which optional operands are there, and sizes."""
    facts: dict[str, Any] = {}
    for argument in node.target._schema.arguments:
        value = operand(node, argument.name)
        if isinstance(value, (bool, int, float, str)) and not _is_default(argument, value):
            facts[argument.name] = value
        elif (
            isinstance(value, Node)
            and str(argument.type).startswith("Optional")
            and "weight" not in argument.name
        ):
            facts[argument.name] = True
    return facts | _sizes(node)


def _is_default(argument, value: Any) -> bool:
    return argument.has_default_value() and value == argument.default_value


def _sizes(node: Node) -> dict[str, int]:
    first = node.target._schema.arguments[0].name
    found = {}
    for name, sizes in SIZES.get(op_name(node), {first: {"width": -1}}).items():
        value = operand(node, name)
        shape = value.meta["val"].shape if isinstance(value, Node) else ()
        for label, dim in sizes.items():
            if shape and isinstance(shape[dim], int):
                found[label] = shape[dim]
    return found
