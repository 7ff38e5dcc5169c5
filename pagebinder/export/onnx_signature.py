"""Names, types and sizes of what an ONNX model takes and returns.

    decoder   input_ids, position_ids [b, L], past     -> logits [b, L, V], present
              of an encoder-decoder: and encoder_states [b, E, C], encoder_attention_mask [b, E]
    encoder   input_ids, attention_mask [b, L]         -> output [b, L, C]: states or logits

    past_key_values.i.key [b, G, S, D], .value [b, G, S, Dv]    ->  present.i.key, .value       i-th attention
    past_state.i          [b, ...]                              ->  present_state.i             i-th recurrence
    past_latent.i         [b, S, D]                             ->  present_latent.i            rows that heads share
    past_entries.i        [b, entries_R, d]                     ->  present_entries.i           of R tokens each

b sequences, L new tokens, S = capacity slots, entries_R >= S // R + 1. All of it starts as zeros. A state is that of
a recurrence, or the last rows of a compressor: it knows no padding, so rows of a batch must then be of one length.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from pagebinder.export.onnx_recurrent import state_of
from pagebinder.export.onnx_sparse import tokens_kept
from pagebinder.graph_tools import val

ENCODER_STATES = "encoder_states"
BATCH, CAPACITY = "batch", "capacity"
# Any sizes that differ: they are examples of dynamic ones.
EXAMPLE_SIZES = {BATCH: 2, "length": 3, CAPACITY: 7, "encoder_length": 5}
MOST_SLOTS = 10

# Kind of input, its sizes (those by name are dynamic), its type.
Carried = tuple[str, tuple[str | int, ...], torch.dtype]


@dataclass
class Signature:
    """Inputs by name with an example and their dynamic sizes, and the names of the outputs."""

    examples: dict[str, torch.Tensor] = field(default_factory=dict)
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def add(self, name: str, *shape: str | int, dtype: torch.dtype = torch.int64) -> None:
        """An input; sizes given by name are dynamic."""
        sizes = [example_size(size) if isinstance(size, str) else size for size in shape]
        self.examples[name] = torch.zeros(sizes, dtype=dtype)
        self.dynamic[name] = {i: size for i, size in enumerate(shape) if isinstance(size, str)}


def example_size(name: str) -> int:
    """Of entries_R: one for each R."""
    return EXAMPLE_SIZES[name] if name in EXAMPLE_SIZES else MOST_SLOTS + int(name.rpartition("_")[2])


def op_name(node: Node) -> str:
    """ "pagebinder::attention", whatever the overload; "" of what is no op."""
    return getattr(getattr(node.target, "_schema", None), "name", "") if node.op == "call_function" else ""


def encoder_signature() -> Signature:
    signature = Signature(outputs=["output"])
    signature.add("input_ids", BATCH, "length")
    signature.add("attention_mask", BATCH, "length")
    return signature


def decoder_signature(gm: GraphModule) -> Signature:
    signature = Signature(outputs=["logits"])
    signature.add("input_ids", BATCH, "length")
    signature.add("position_ids", BATCH, "length")
    states = next((n for n in gm.graph.nodes if n.target == ENCODER_STATES), None)
    if states is not None:
        width, dtype = int(val(states).shape[1]), val(states).dtype
        signature.add(ENCODER_STATES, BATCH, "encoder_length", width, dtype=dtype)
        signature.add("encoder_attention_mask", BATCH, "encoder_length")
    counts: collections.Counter[str] = collections.Counter()
    for node in gm.graph.nodes:
        for kind, shape, dtype in carried_by(node):
            stem, _, part = kind.partition(".")
            end = f".{counts[kind]}.{part}" if part else f".{counts[kind]}"
            counts[kind] += 1
            signature.add(f"past_{stem}{end}", BATCH, *shape, dtype=dtype)
            signature.outputs.append(("present" if part else f"present_{stem}") + end)
    return signature


def carried_by(node: Node) -> Iterator[Carried]:
    """What an op carries from call to call, in the order in which its translation takes it."""
    name = op_name(node)
    operands = [val(arg) if isinstance(arg, Node) else arg for arg in node.args]
    if name in ("pagebinder::attention", "pagebinder::relative_attention"):
        for part, operand in (("key", operands[1]), ("value", operands[2])):
            _, heads, width = operand.shape
            yield f"key_values.{part}", (int(heads), CAPACITY, int(width)), operand.dtype
    elif name == "pagebinder::compressed_attention":
        yield "latent", (CAPACITY, int(operands[1].shape[1])), operands[1].dtype
    elif name == "pagebinder::mla_attention":
        width = int(operands[2].shape[1]) + int(operands[3].shape[1])
        yield "latent", (CAPACITY, width), operands[2].dtype
    elif name == "pagebinder::index_topk" and op_name(node.args[1]) != "pagebinder::compress":
        yield "latent", (CAPACITY, int(operands[1].shape[1])), operands[1].dtype
    elif name == "pagebinder::compress":
        kv, ratio = operands[0], node.kwargs["ratio"]
        kept = tokens_kept(ratio, node.kwargs["overlap"])
        yield "state", (2, kept, int(kv.shape[1])), kv.dtype
        yield "entries", (f"entries_{ratio}", int(val(node).shape[1])), kv.dtype
    elif (state := state_of(name, operands)) is not None:
        yield "state", tuple(int(size) for size in state[0]), state[1]
