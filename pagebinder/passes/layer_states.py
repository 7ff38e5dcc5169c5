"""Which layers keep state: every stateful op of a semantic graph gives its `LayerState`s.

    semantic op           ->  LayerStates                              ->  page pass that rewrites the op
    attention                 AttentionState                               page_attention
    relative_attention        AttentionState                               page_attention
    lookahead_attention       AttentionState                               page_attention
    indexed_attention         AttentionState                               page_attention
    cross_attention           CrossAttentionState                          page_cross_attention
    mla_attention             LatentState                                  page_mla
    index_topk                LatentState (keys), if not compressed        page_mla
    compress                  RecurrentState (sums), LatentState (entries) page_compressed
    compressed_attention      LatentState (window)                         page_compressed
    short_conv                ShortConvState                               page_recurrent
    gated_delta_rule          RecurrentState                               page_recurrent
    ssd                       RecurrentState                               page_recurrent
    RECURRENCES               RecurrentState                               page_recurrent
    (one line in BUILDERS per op; its page pass lives in a file of its own)

`layer_states` numbers the states in execution order of their ops and leaves the numbers in
node.meta["layer_indices"], where the page passes find them again on their copy of the graph. `Paging` is what they
all need to know, `rewrite_stateful` what most of them do. `latent_states.py` has the builders of latent rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.layer_state import (
    DTYPE_BYTES,
    AttentionState,
    CacheFormats,
    CacheTensor,
    CrossAttentionState,
    EncoderOnlyState,
    LatentState,
    LayerState,
    RecurrentState,
    ShortConvState,
)
from pagebinder.custom_ops.recurrent.define import RECURRENCES
from pagebinder.errors import UnsupportedLayerError
from pagebinder.graph_tools import calls, describe, dtype_name, finish, module_path, source_line, val
from pagebinder.passes.latent_states import (
    COMPRESS,
    COMPRESSED_ATTENTION,
    INDEX_TOPK,
    compressor_states,
    index_states,
    mla_states,
    window_states,
)
from pagebinder.passes.quantize_kv import FORMAT, quantized_source
from pagebinder.passes.step_inputs import add_step_input
from pagebinder.report import Match, PassResult


def _attention_state(node: Node, index: int, max_model_len: int) -> AttentionState:
    """A window or chunk that no request can outgrow is full attention."""
    k, v = val(node.args[1]), val(node.args[2])
    window, chunk = (node.kwargs.get(name) for name in ("window", "chunk"))
    stored = quantized_source(node)
    return AttentionState(
        layer=module_path(node) or f"attention_{index}",
        index=index,
        dtype=dtype_name(k),
        num_kv_heads=int(k.shape[1]),
        head_dim=int(k.shape[2]),
        head_dim_v=int(v.shape[2]),
        window=window if window is not None and window < max_model_len else None,
        chunk=chunk if chunk is not None and chunk < max_model_len else None,
        layout="plain" if stored is None else stored.meta[FORMAT],
    )


def _cross_attention_state(node: Node, index: int, max_model_len: int) -> CrossAttentionState:
    k, v = val(node.args[1]), val(node.args[2])
    return CrossAttentionState(
        layer=module_path(node) or f"cross_attention_{index}",
        index=index,
        dtype=dtype_name(k),
        num_kv_heads=int(k.shape[1]),
        head_dim=int(k.shape[2]),
        head_dim_v=int(v.shape[2]),
    )


def _short_conv_state(node: Node, index: int, max_model_len: int) -> ShortConvState:
    channels, taps = val(node.args[1]).shape
    return ShortConvState(
        layer=module_path(node) or f"short_conv_{index}",
        index=index,
        dtype=dtype_name(val(node.args[0])),
        shape=(int(channels), int(taps) - 1),
    )


def _gated_delta_state(node: Node, index: int, max_model_len: int) -> RecurrentState:
    q, v = val(node.args[0]), val(node.args[2])
    shape = (int(v.shape[1]), int(q.shape[2]), int(v.shape[2]))
    return _recurrent_state(node, index, shape)


def _ssd_state(node: Node, index: int, max_model_len: int) -> RecurrentState:
    x, B = val(node.args[0]), val(node.args[3])
    return _recurrent_state(node, index, (int(x.shape[1]), int(x.shape[2]), int(B.shape[2])))


def _defined_state(node: Node, index: int, max_model_len: int) -> RecurrentState:
    """Of an op that `define_recurrence` made, which knows its state's shape."""
    operands = [val(a) if isinstance(a, Node) else a for a in node.args]
    return _recurrent_state(node, index, tuple(map(int, RECURRENCES[node.target].state_shape(*operands))))


def _recurrent_state(node: Node, index: int, shape: tuple[int, ...]) -> RecurrentState:
    """float32 whatever the model's dtype: the state is added to at every token, and rounding would add up."""
    layer = module_path(node) or f"recurrent_{index}"
    return RecurrentState(layer=layer, index=index, dtype="float32", shape=shape)


def _one(build: Callable[[Node, int, int], LayerState]) -> Builder:
    """The builder of an op that keeps one state, whatever the formats."""
    return lambda node, index, max_model_len, formats: [build(node, index, max_model_len)]


# op -> builder(node, number of its first state, max_model_len, formats) -> its states
Builder = Callable[[Node, int, int, CacheFormats], list[LayerState]]
BUILDERS: dict[torch._ops.OpOverload, Builder] = {
    torch.ops.pagebinder.attention.default: _one(_attention_state),
    torch.ops.pagebinder.relative_attention.default: _one(_attention_state),
    torch.ops.pagebinder.lookahead_attention.default: _one(_attention_state),
    torch.ops.pagebinder.indexed_attention.default: _one(_attention_state),
    torch.ops.pagebinder.cross_attention.default: _one(_cross_attention_state),
    torch.ops.pagebinder.mla_attention.default: mla_states,
    INDEX_TOPK: index_states,
    COMPRESS: compressor_states,
    COMPRESSED_ATTENTION: window_states,
    torch.ops.pagebinder.short_conv.default: _one(_short_conv_state),
    torch.ops.pagebinder.gated_delta_rule.default: _one(_gated_delta_state),
    torch.ops.pagebinder.ssd.default: _one(_ssd_state),
    **dict.fromkeys(RECURRENCES, _one(_defined_state)),
}


def layer_states(
    gm: GraphModule, *, max_model_len: int, formats: CacheFormats | None = None
) -> list[LayerState]:
    """The states of every stateful op, in execution order; leaves their numbers in node.meta["layer_indices"]."""
    formats = formats or CacheFormats()
    states: list[LayerState] = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in BUILDERS:
            found = BUILDERS[node.target](node, len(states), max_model_len, formats)
            _require_kernels(found, node)
            node.meta["layer_indices"] = tuple(range(len(states), len(states) + len(found)))
            states += found
    return states


def _require_kernels(states: Sequence[LayerState], node: Node) -> None:
    """Raises UnsupportedLayerError: of a dtype without any."""
    for state in states:
        if state.dtype not in DTYPE_BYTES:
            raise UnsupportedLayerError(
                f"{state.layer} ({source_line(node)}) keeps what later tokens read in {state.dtype}, and there are "
                "kernels for float32, bfloat16 and float16 only: convert the model, with model.float() for example, "
                f"or, where its weights are none of {state.dtype}, take the conversion out of its code."
            )


def encoder_layer_states(gm: GraphModule) -> list[EncoderOnlyState]:
    """The attention layers of an encoder's graph, for reports: they keep nothing."""
    ops = (torch.ops.pagebinder.attention.default, torch.ops.pagebinder.relative_attention.default)
    nodes = calls(gm.graph, *ops)
    return [
        EncoderOnlyState(
            layer=module_path(node) or f"attention_{index}", index=index, dtype=dtype_name(val(node))
        )
        for index, node in enumerate(nodes)
    ]


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

    @classmethod
    def by_plan(cls, states: Sequence[LayerState], plan) -> Paging:
        """As a KVPlan says that was made from these states."""
        return cls(
            states=states,
            group_of=[page.group for page in plan.layers],
            block_sizes=[group.block_size for group in plan.groups],
            bytes_per_block=plan.bytes_per_block,
        )

    @property
    def rounds_latents(self) -> bool:
        """Rows of latents are stored in fewer bits, so reading them back changes numbers."""
        return any(isinstance(state, LatentState) and state.layout != "plain" for state in self.states)

    def of(self, node: Node, which: int = 0) -> tuple[LayerState, int, int]:
        """(state, KV group, block size) of state number `which` of a stateful op."""
        index = node.meta["layer_indices"][which]
        group = self.group_of[index]
        return self.states[index], group, self.block_sizes[group]


def add_caches(gm: GraphModule, paging: Paging, node: Node, which: int = 0) -> list[Node]:
    """One graph input per cache tensor of a state of the op: dense inside a page, one block stride apart."""
    state, _, block_size = paging.of(node, which)
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


def add_slots(gm: GraphModule, group: int) -> Node:
    """slot_mapping_g [T]: where each token's row is written."""
    return add_step_input(gm, f"slot_mapping_{group}", ("num_tokens",), torch.int32)


def add_request_lengths(gm: GraphModule) -> tuple[Node, Node]:
    """seq_lens [R] (context and new tokens) and query_start_loc [R + 1]."""
    return (
        add_step_input(gm, "seq_lens", ("num_reqs",), torch.int32),
        add_step_input(gm, "query_start_loc", ("num_reqs_plus_1",), torch.int32),
    )


def where_kept(paging: Paging, node: Node) -> str:
    """The states of an op, with group and block size, for the report."""
    places = (paging.of(node, which) for which in range(len(node.meta["layer_indices"])))
    kept = (f"{state.kind}, KV group {group}, block size {size}" for state, group, size in places)
    return "; ".join(kept) or "keeps nothing"


def rewrite_stateful(
    gm: GraphModule,
    paging: Paging,
    name: str,
    patterns: Mapping[torch._ops.OpOverload, str],
    rewrite: Callable[[GraphModule, Node, Paging], Node],
) -> PassResult:
    """What every page pass does: put `rewrite(gm, op, paging)` in the place of each stateful op of some kinds.

    Args:
        name: of the pass. patterns: op -> what a match is called in the report.
        rewrite: inserts the paged form before the op and returns the node that stands for its result.
    """
    result = PassResult(name=name)
    for node in calls(gm.graph, *patterns):
        result.matches.append(
            Match(pattern=patterns[node.target], detail=where_kept(paging, node), **describe(node))
        )
        node.replace_all_uses_with(rewrite(gm, node, paging))
        gm.graph.erase_node(node)
    result.changed = bool(result.matches)
    finish(gm)
    return result
