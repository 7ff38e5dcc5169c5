"""Runs a graph node by node: with other weights than its own, in float32 whatever it was made for, values observed.

    get_attr "model.norm.weight"     the tensor of that name in `weights`, else the graph's own
    aten.to.dtype(x, bfloat16)       widened: to float32, as are reduced-precision constants

The graph and the source model stay as they are: nothing is swapped in, so nothing has to be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from pagebinder.custom_ops.library import is_our_op
from pagebinder.custom_ops.pointwise.program import read_program
from pagebinder.graph_tools import recipe_of, tensors
from pagebinder.passes.kernel_checks import WatchedCall, is_foreign

REDUCED = (torch.bfloat16, torch.float16)
PRODUCTS = ("linear", "mm", "matmul", "einsum", "attention", "experts", "conv")  # in names of ops


def widened(value: Any) -> Any:
    """float32 in place of a reduced dtype, or of a tensor of one; anything else as it is."""
    if value in REDUCED if isinstance(value, torch.dtype) else False:
        return torch.float32
    if isinstance(value, torch.Tensor) and value.dtype in REDUCED:
        return value.float()
    return value


def rounded_to(gm: GraphModule, dtype: torch.dtype) -> torch.dtype:
    """The dtype of at least half of a graph's products, if that is a reduced one, whatever it returns
    (`head(x).float()`); else `dtype`. A single op in a reduced dtype tells nothing of the others."""
    products = [
        tensors(node)[0].dtype
        for node in gm.graph.nodes
        if node.op == "call_function" and tensors(node) and _is_product(node.target)
    ]
    most = max(REDUCED, key=products.count)
    return most if products and 2 * products.count(most) >= len(products) else dtype


def _is_product(target: Any) -> bool:
    name = getattr(getattr(target, "_schema", None), "name", "").rpartition("::")[2]
    return any(word in name for word in PRODUCTS)


class GraphRunner(torch.fx.Interpreter):
    """Interprets a graph.

    Args:
        weights: attribute name -> tensor, in place of the graph's.
        widen: compute in float32 what the graph computes in bfloat16 or float16.
        observe: called with every node and its value.
        check_kernels: see `kernel_checks`; a fault is a VerificationError.
    """

    def __init__(
        self,
        gm: GraphModule,
        *,
        weights: Mapping[str, torch.Tensor] | None = None,
        widen: bool = False,
        observe: Callable[[Node, Any], None] | None = None,
        check_kernels: bool = False,
    ) -> None:
        super().__init__(gm)
        self.weights = weights or {}
        self.widen = widen
        self.observe, self.check_kernels = observe, check_kernels
        self.input_names = [n.target for n in gm.graph.nodes if n.op == "placeholder"]

    def run_named(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Run on inputs by name; names that the graph lacks are left out."""
        with torch.inference_mode():
            return self.run(*(inputs[name] for name in self.input_names))

    def fetch_attr(self, target: str) -> Any:
        value = self.weights.get(target)
        if value is None:
            value = super().fetch_attr(target)
            if self.weights and isinstance(value, torch.Tensor) and (recipe := recipe_of(value)) is not None:
                value = recipe.made(self.weights)
        return widened(value) if self.widen else value

    def call_function(self, target, args, kwargs) -> Any:
        if self.widen:
            if is_our_op(target) and target._opname == "pointwise":
                args = (args[0], str(read_program(args[1]).widened()))
            args, kwargs = map_aggregate(args, widened), map_aggregate(kwargs, widened)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        watched = None
        if self.check_kernels and is_foreign(n):
            watched = WatchedCall(n, *self.fetch_args_kwargs_from_env(n), widened=self.widen)
        value = super().run_node(n)
        if watched is not None:
            watched.check(value)
        if self.observe is not None:
            self.observe(n, value)
        return value
