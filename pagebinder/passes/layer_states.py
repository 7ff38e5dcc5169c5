"""Which layers keep state: every stateful op of a semantic graph gives one `LayerState`.

    semantic op       ->  LayerState               ->  page pass that rewrites the op
    attention             AttentionState               page_attention
    (one line in BUILDERS per op; its page pass lives in a file of its own)

`layer_states` numbers the ops in execution order and leaves the number in node.meta["layer_index"], where the
page passes find it again on their copy of the graph. `Paging` is what they all need to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.layer_state import DTYPE_BYTES, AttentionState, CacheTensor, LayerState
from pagebinder.graph_tools import module_path, val
from pagebinder.passes.step_inputs import add_step_input


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _attention_state(node: Node, index: int, max_model_len: int) -> AttentionState:
    """A window or chunk that no request can outgrow is full attention."""
    k, v = val(node.args[1]), val(node.args[2])
    window, chunk = (node.kwargs.get(name) for name in ("window", "chunk"))
    return AttentionState(
        layer=module_path(node) or f"attention_{index}",
        index=index,
        dtype=_dtype_name(k),
        num_kv_heads=int(k.shape[1]),
        head_dim=int(k.shape[2]),
        head_dim_v=int(v.shape[2]),
        window=window if window is not None and window < max_model_len else None,
        chunk=chunk if chunk is not None and chunk < max_model_len else None,
    )


BUILDERS: dict[torch._ops.OpOverload, Callable[[Node, int, int], LayerState]] = {
    torch.ops.pagebinder.attention.default: _attention_state,
}


def layer_states(gm: GraphModule, *, max_model_len: int) -> list[LayerState]:
    """The state of every stateful op, in execution order; numbers the ops in node.meta["layer_index"]."""
    states: list[LayerState] = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in BUILDERS:
            node.meta["layer_index"] = len(states)
            states.append(BUILDERS[node.target](node, len(states), max_model_len))
    return states


@dataclass(frozen=True, kw_only=True)
class Paging:
    """Where each layer's state lies.

    states: as `layer_states` gave them. group_of: KV group of each. block_sizes: tokens per block of each group.
    bytes_per_block: distance of a layer's page in one block from its page in the next.
    """

    states: Sequence[LayerState]
    group_of: Sequence[int]
    block_sizes: Sequence[int]
    bytes_per_block: int

    def of(self, node: Node) -> tuple[LayerState, int, int]:
        """(state, KV group, block size) of a stateful op."""
        index = node.meta["layer_index"]
        group = self.group_of[index]
        return self.states[index], group, self.block_sizes[group]


def add_caches(gm: GraphModule, paging: Paging, node: Node) -> list[Node]:
    """One graph input per cache tensor of the op's layer: dense inside a page, one block stride apart."""
    state, _, block_size = paging.of(node)
    return [_add_cache(gm, state, tensor, paging.bytes_per_block) for tensor in state.tensors(block_size)]


def _add_cache(gm: GraphModule, state: LayerState, tensor: CacheTensor, bytes_per_block: int) -> Node:
    stride = bytes_per_block // DTYPE_BYTES[tensor.dtype]
    inner = torch.empty(tensor.shape, device="meta").stride()
    return add_step_input(
        gm,
        f"kv_cache_{state.index}{tensor.suffix}",
        ("num_blocks", *tensor.shape),
        getattr(torch, tensor.dtype),
        (stride, *inner),
    )


def add_block_table(gm: GraphModule, group: int) -> Node:
    """block_table_g [table_rows, table_width_g]: the first R rows are the step's requests."""
    return add_step_input(gm, f"block_table_{group}", ("table_rows", f"table_width_{group}"), torch.int32)


def add_request_lengths(gm: GraphModule) -> tuple[Node, Node]:
    """seq_lens [R] (context and new tokens) and query_start_loc [R + 1]."""
    return (
        add_step_input(gm, "seq_lens", ("num_reqs",), torch.int32),
        add_step_input(gm, "query_start_loc", ("num_reqs_plus_1",), torch.int32),
    )
