"""A semantic graph as a module with the inputs and outputs of its ONNX model, for torch's exporter to trace.

    decoder   input_ids, position_ids [b, L], past     -> logits [b, L, V], present
              of an encoder-decoder: and encoder_states [b, E, C], encoder_attention_mask [b, E]
    encoder   input_ids, attention_mask [b, L]         -> output [b, L, C]: states or logits

    past_key_values.i.key [b, G, S, D], .value [b, G, S, Dv]    ->  present.i.key, .value       i-th attention
    past_state.i          [b, ...]                              ->  present_state.i             i-th recurrence

The tokens of all rows go through the graph as one flat sequence: outside attention and recurrences no token reads
another one, which the audit has proven, so a graph of one sequence serves a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Interpreter, Node

from pagebinder.errors import ExportError
from pagebinder.export.onnx_ops import TRANSLATIONS
from pagebinder.export.onnx_step import Step
from pagebinder.graph_tools import module_path, val

ENCODER_STATES = "encoder_states"
# Any sizes that differ: they are examples of dynamic ones.
EXAMPLE_SIZES = {"batch": 2, "length": 3, "capacity": 7, "encoder_length": 5}
CACHED = ("pagebinder::attention", "pagebinder::relative_attention")


@dataclass
class Signature:
    """Inputs by name with an example and their dynamic sizes, and the names of the outputs."""

    examples: dict[str, torch.Tensor] = field(default_factory=dict)
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def add(self, name: str, *shape: str | int, dtype: torch.dtype = torch.int64) -> None:
        """An input; sizes given by name are dynamic."""
        sizes = [EXAMPLE_SIZES[size] if isinstance(size, str) else size for size in shape]
        self.examples[name] = torch.zeros(sizes, dtype=dtype)
        self.dynamic[name] = {i: size for i, size in enumerate(shape) if isinstance(size, str)}


def op_name(node: Node) -> str:
    """ "pagebinder::attention", whatever the overload; "" of what is no op."""
    return getattr(getattr(node.target, "_schema", None), "name", "") if node.op == "call_function" else ""


class OnnxModule(torch.nn.Module):
    """`signature` says what forward takes and returns, in this order."""

    def __init__(self, gm: GraphModule, *, cached: bool):
        super().__init__()
        self.gm = gm
        self.cached = cached
        self.signature = decoder_signature(gm) if cached else encoder_signature()

    def forward(self, *inputs):
        named = dict(zip(self.signature.examples, inputs, strict=True))
        ids, encoder_mask = named["input_ids"], named.get("encoder_attention_mask")
        if self.cached:
            past = [x for name, x in named.items() if name.startswith("past_")]
            slots = next((x.shape[2] for name, x in named.items() if name.startswith("past_key_values")), 0)
            step = Step(named["position_ids"], slots, past=iter(past))
            step.encoder_mask = None if encoder_mask is None else encoder_mask != 0
        else:
            positions = torch.arange(ids.shape[1]).expand(ids.shape)
            step = Step(positions, ids.shape[1], key_mask=named["attention_mask"] != 0)
        flat = [ids.flatten(), step.position_ids.flatten()]
        if ENCODER_STATES in named:
            flat.append(named[ENCODER_STATES].flatten(0, 1))
        out = _Translator(self.gm, step).run(*flat)
        return step.rows(out), *step.present


class _Translator(Interpreter):
    """Runs a graph with our ops replaced by their translations."""

    def __init__(self, gm: GraphModule, step: Step):
        super().__init__(gm)
        self.step = step

    def run_node(self, node: Node):
        translation = TRANSLATIONS.get(op_name(node))
        if translation is None:
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return translation(self.step, *args, **kwargs)


def check_translatable(gm: GraphModule) -> None:
    """Raises ExportError: an op of ours has no translation; names it and the layers it stands in."""
    missing: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        name = op_name(node)
        if name.startswith("pagebinder::") and name not in TRANSLATIONS:
            missing.setdefault(name, []).append(module_path(node) or node.name)
    if missing:
        listed = "; ".join(f"{name} ({len(places)}: {places[0]}, ...)" for name, places in missing.items())
        raise ExportError(f"ONNX has no operator for: {listed}. Serve this model with engine() instead.")


def encoder_signature() -> Signature:
    signature = Signature(outputs=["output"])
    signature.add("input_ids", "batch", "length")
    signature.add("attention_mask", "batch", "length")
    return signature


def decoder_signature(gm: GraphModule) -> Signature:
    signature = Signature(outputs=["logits"])
    signature.add("input_ids", "batch", "length")
    signature.add("position_ids", "batch", "length")
    states = next((n for n in gm.graph.nodes if n.target == ENCODER_STATES), None)
    if states is not None:
        width, dtype = int(val(states).shape[1]), val(states).dtype
        signature.add(ENCODER_STATES, "batch", "encoder_length", width, dtype=dtype)
        signature.add("encoder_attention_mask", "batch", "encoder_length")
    num_cached = num_states = 0
    for node in gm.graph.nodes:
        name = op_name(node)
        if name in CACHED:
            for part, operand in (("key", node.args[1]), ("value", node.args[2])):
                _, heads, width = val(operand).shape
                signature.add(
                    f"past_key_values.{num_cached}.{part}",
                    "batch", int(heads), "capacity", int(width), dtype=val(operand).dtype,
                )  # fmt: skip
                signature.outputs.append(f"present.{num_cached}.{part}")
            num_cached += 1
        elif (state := _state_of(node)) is not None:
            shape, dtype = state
            signature.add(f"past_state.{num_states}", "batch", *shape, dtype=dtype)
            signature.outputs.append(f"present_state.{num_states}")
            num_states += 1
    return signature


def _state_of(node: Node) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of what a recurrence carries for one sequence; None of other ops."""
    name = op_name(node)
    if name == "pagebinder::short_conv":
        channels, taps = val(node.args[1]).shape
        return (int(channels), int(taps) - 1), val(node.args[0]).dtype
    if name == "pagebinder::ssd":
        _, heads, width = val(node.args[0]).shape
        return (int(heads), int(width), int(val(node.args[3]).shape[2])), torch.float32
    return None
