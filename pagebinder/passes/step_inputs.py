"""Adding inputs to a graph: step metadata and caches, one placeholder per resource, dynamic sizes as symbols."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from pagebinder.graph_tools import device_of, fake_mode_of, val

EXAMPLE_SIZES = {
    "num_tokens": 40,
    "num_logits": 3,
    "num_reqs": 5,
    "num_reqs_plus_1": 6,
    "num_blocks": 7,
    "table_rows": 11,
}
# Group g's table has the example width EXAMPLE_TABLE_WIDTH + g: inductor takes sizes with equal examples for one.
TABLE_WIDTH = "table_width_"
EXAMPLE_TABLE_WIDTH = 101
# Inputs that captured graphs have, and the name of their first size.
CAPTURED_SIZES = {"input_ids": "num_tokens", "encoder_states": "num_encoder_tokens"}


def add_step_input(
    gm: GraphModule,
    name: str,
    shape: tuple[str | int, ...],
    dtype: torch.dtype,
    strides: tuple[int, ...] | None = None,
) -> Node:
    """Append a placeholder; named sizes are symbols shared by all inputs of the graph, whole numbers are fixed.

    "num_tokens" is the token count that input_ids already has, "num_encoder_tokens" that of encoder_states. Without
    strides the input is contiguous.
    """
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.target == name:
            return node
    fake = _fake_input(gm, name, shape, dtype, strides)
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(name)
    node.meta["val"] = fake
    node.meta["size_names"] = shape
    return node


def _fake_input(gm: GraphModule, name: str, shape, dtype: torch.dtype, strides) -> torch.Tensor:
    known = _known_sizes(gm)
    mode = fake_mode_of(gm.graph)
    missing = [s for s in shape if isinstance(s, str) and s not in known]
    if missing:
        from torch._dynamo.source import ConstantSource  # imports compilers: a second

        example = [_example_size(s) if isinstance(s, str) else s for s in shape]
        dynamic = [DimDynamic.DYNAMIC if s in missing else DimDynamic.STATIC for s in shape]
        context = StatelessSymbolicContext(dynamic_sizes=dynamic, constraint_sizes=[None] * len(shape))
        real = torch.empty(example, dtype=dtype, device=device_of(gm.graph))
        symbolic = mode.from_tensor(real, source=ConstantSource(name), symbolic_context=context)
        known.update({s: symbolic.shape[d] for d, s in enumerate(shape) if s in missing})
    sizes = [known.get(s, s) for s in shape]
    with mode:
        if strides is not None:
            return torch.empty_strided(sizes, strides, dtype=dtype, device=device_of(gm.graph))
        return torch.empty(sizes, dtype=dtype, device=device_of(gm.graph))


def _example_size(name: str) -> int:
    """A size to trace with that no other name has."""
    if name.startswith(TABLE_WIDTH):
        return EXAMPLE_TABLE_WIDTH + int(name.removeprefix(TABLE_WIDTH))
    return EXAMPLE_SIZES[name]


def _known_sizes(gm: GraphModule) -> dict[str, torch.SymInt]:
    """Symbols of the sizes that earlier inputs introduced."""
    known = {}
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        if node.target in CAPTURED_SIZES:
            known[CAPTURED_SIZES[node.target]] = val(node).shape[0]
        for size, symbol in zip(node.meta.get("size_names", ()), val(node).shape):
            if isinstance(size, str):
                known.setdefault(size, symbol)
    return known
