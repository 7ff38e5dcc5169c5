"""The fused graph compiled by inductor, once, with the sizes of a step as symbols.

Token, request, block and table sizes are symbolic in the graph already, so `standalone_compile` compiles one
artefact that serves every step: there is no guard and nothing to recompile. Caches are whole inputs that only
custom ops touch, so inductor passes them through and never copies them.

The parameters are inputs of the compiled function, not constants in it: they are read where the source model
keeps them.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.graph_tools import attributes
from pagebinder.runtime.executables.base import input_names
from pagebinder.runtime.executables.program import Program
from pagebinder.runtime.streams import Overlap


class InductorExecutable:
    """Compiles on construction (seconds); `run` never compiles."""

    name = "inductor"
    overlap: Overlap | None = None  # for pieces of its graph that run op by op, see runtime/graphs

    def __init__(self, gm: GraphModule) -> None:
        # Imported here: it takes as long as torch, and a saved program runs without it.
        from torch._inductor import codecache
        from torch._inductor import config as inductor_config

        self.input_names = input_names(gm)
        lifted, self._weights = lift_weights(gm)
        examples = [n.meta["val"] for n in lifted.graph.nodes if n.op == "placeholder"]
        loaded = len(codecache.PyCodeCache.modules)
        with torch.no_grad(), inductor_config.patch(self._options()):
            self._compiled = torch._inductor.standalone_compile(lifted, examples, dynamic_shapes="from_graph")
        self._generated = codecache.PyCodeCache.modules[loaded:]

    @property
    def program(self) -> Program | None:
        """What was generated, in a form that can be kept; None where it is not a single program."""
        return Program.of_module(self._generated[0]) if len(self._generated) == 1 else None

    @staticmethod
    def _options() -> dict[str, object]:
        """Inductor proves each SIMD extension by compiling and importing a library in a new process, some ten
        seconds in all. Our kernels were built for this very machine by the same compiler: that is the proof.
        """
        return {"cpp.vec_isa_ok": True} if cpu_build.is_loaded() else {}

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            return self._compiled(*(inputs[name] for name in self.input_names), *self._weights)[0]


def lift_weights(gm: GraphModule) -> tuple[GraphModule, list[torch.Tensor]]:
    """A copy of the graph whose get_attr nodes are further inputs, and their tensors in that order."""
    graph, mapping, weights = torch.fx.Graph(), {}, {}
    values = attributes(gm)
    readers = {n.target: n for n in gm.graph.nodes if n.op == "get_attr"}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            mapping[node] = graph.node_copy(node)
    for name in values:
        placeholder = graph.placeholder(name.replace(".", "_"))
        placeholder.meta["val"] = readers[name].meta["val"]
        weights[name] = placeholder
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            mapping[node] = weights[node.target]
        elif node.op == "output":
            graph.output(tuple(mapping[a] for a in node.args))
        elif node.op != "placeholder":
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    return GraphModule(torch.nn.Module(), graph), [value.detach() for value in values.values()]
