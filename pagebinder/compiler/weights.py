"""Where compiled graphs find their weights: laid out as this machine reads them fastest."""

from __future__ import annotations

import functools

import torch
from torch.fx import GraphModule

from pagebinder.config import CompileConfig
from pagebinder.custom_ops.cpu.huge_pages import (
    HUGE_PAGE_BYTES,
    MOST_SHARE,
    MemoryAhead,
    move_to_huge_pages,
    read_whole,
)
from pagebinder.custom_ops.cpu.provider import reads_packed_weights
from pagebinder.custom_ops.linear.packed_weights import is_plain
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import attributes, looked_up
from pagebinder.passes.pack_weights import describe_packing, pack_weights
from pagebinder.report import CompileReport

# Of the free memory, for packed experts that nobody asked for: transformers makes stacks of a checkpoint's experts,
# so those that they are packed from are no file that is only mapped.
SHARE_FOR_EXPERTS = 0.25


def place_weights(
    source: ModelSource,
    config: CompileConfig,
    report: CompileReport,
    memory: MemoryAhead,
    *graphs: GraphModule,
) -> None:
    """Lay out what graphs on the CPU read as this machine reads it fastest: packed, the rest in huge pages. Tables of
    which a step takes some rows stay where they are, mapped from their file: they would gain nothing.

    A module that we were given keeps its weights, so they stay where they are: another form would take as much again.
    """
    if source.device.type != "cpu" or config.map_weights:
        return
    given = set() if source.path is not None else {w.data_ptr() for w in source.module.parameters()}
    if config.pack_weights is not False and reads_packed_weights():
        keep = set() if config.pack_weights else given
        coded = config.pack_weights == "coded"
        share = MOST_SHARE if config.pack_weights else SHARE_FOR_EXPERTS
        pack = functools.partial(
            pack_weights, keep=keep, coded=coded, share_for_experts=share, memory_for=memory.memory_for
        )
        report.weight_layout = describe_packing([pack(g) for g in graphs])
    weights = read_whole((attributes(graph), looked_up(graph)) for graph in graphs)
    movable = (w for w in weights if w.data_ptr() not in given and is_plain(w))
    move_to_huge_pages(movable, memory.memory_for)
    memory.close()


def placed_bytes(source: ModelSource, config: CompileConfig) -> int:
    """About as much memory as `place_weights` will take, as far as that shows before there is a graph. What two
    layers share (the table of an embedding that is the LM head, too) is packed for one of them."""
    others = config.map_weights or config.quantization is not None or source.stored_weights is not None
    if source.device.type != "cpu" or source.path is None or others:
        return 0
    layers = (m for m in source.module.modules() if not isinstance(m, torch.nn.Embedding))
    weights = (w for layer in layers for w in layer.parameters(recurse=False))
    return sum(n for w in weights if (n := w.numel() * w.element_size()) >= HUGE_PAGE_BYTES)
