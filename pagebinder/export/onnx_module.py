"""A semantic graph as a module that computes what its ONNX model does, for torch's exporter to trace.

The tokens of all rows go through the graph as one flat sequence: outside attention and recurrences no token reads
another one, which the audit has proven, so a graph of one sequence serves a batch. For inputs and outputs see
onnx_signature.py.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Interpreter, Node

from pagebinder.errors import ExportError
from pagebinder.export.onnx_functions import LocalFunctions
from pagebinder.export.onnx_ops import TRANSLATIONS
from pagebinder.export.onnx_signature import (
    CAPACITY,
    ENCODER_STATES,
    decoder_signature,
    encoder_signature,
    op_name,
)
from pagebinder.export.onnx_step import Step
from pagebinder.graph_tools import module_path

READERS_OF_ENTRIES = ("pagebinder::compressed_attention", "pagebinder::index_topk")


class OnnxModule(torch.nn.Module):
    """`signature` says what forward takes and returns, in this order; `functions` what it calls."""

    def __init__(self, gm: GraphModule, *, cached: bool, contrib: bool = False):
        super().__init__()
        self.gm = gm
        self.cached, self.contrib = cached, contrib
        self.signature = decoder_signature(gm) if cached else encoder_signature()
        self.functions = LocalFunctions()

    def forward(self, *inputs):
        named = dict(zip(self.signature.examples, inputs, strict=True))
        ids, encoder_mask = named["input_ids"], named.get("encoder_attention_mask")
        if self.cached:
            past = [x for name, x in named.items() if name.startswith("past_")]
            step = Step(named["position_ids"], self._num_slots(named), past=iter(past), contrib=self.contrib)
            step.encoder_mask = None if encoder_mask is None else encoder_mask != 0
        else:
            positions = torch.arange(ids.shape[1]).expand(ids.shape)
            step = Step(positions, ids.shape[1], key_mask=named["attention_mask"] != 0)
        step.functions = self.functions
        flat = [ids.flatten(), step.position_ids.flatten()]
        if ENCODER_STATES in named:
            flat.append(named[ENCODER_STATES].flatten(0, 1))
        out = _Translator(self.gm, step).run(*flat)
        return step.rows(out), *step.present

    def _num_slots(self, named):
        """S, of any cache that has slots; 0 of a model without."""
        for name, sizes in self.signature.dynamic.items():
            for dim, size in sizes.items():
                if size == CAPACITY:
                    return named[name].shape[dim]
        return 0


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
        elif name == "pagebinder::compress":
            for user in node.users:
                if op_name(user) not in READERS_OF_ENTRIES:
                    raise ExportError(
                        f"{module_path(node) or node.name}: {user.name} reads compressed entries row by row, which "
                        "an export keeps for attention and indexers alone. Serve this model with engine() instead."
                    )
    if missing:
        listed = "; ".join(f"{name} ({len(places)}: {places[0]}, ...)" for name, places in missing.items())
        raise ExportError(f"ONNX has no operator for: {listed}. Serve this model with engine() instead.")
