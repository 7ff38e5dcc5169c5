"""The fused graph compiled by inductor, once, with the sizes of a step as symbols.

Token, request, block and table sizes are symbolic in the graph already, so `standalone_compile` compiles one
artefact that serves every step: there is no guard and nothing to recompile. Caches are whole inputs that only
custom ops touch, so inductor passes them through and never copies them.

The parameters are inputs of the compiled function, not constants in it: they are read where the source model
keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.graph_tools import attributes
from pagebinder.runtime.executables.base import StepExecutable, input_names
from pagebinder.runtime.executables.piece_compiler import PieceCompiler
from pagebinder.runtime.executables.program import Program


class InductorExecutable(StepExecutable):
    """Compiles on construction (seconds); `run` never compiles. `pieces`: compiles what its graph is cut into."""

    name = "inductor"

    def __init__(self, gm: GraphModule) -> None:
        # Imported here: it takes as long as torch, and a saved program runs without it.
        from torch._inductor import codecache

        self.input_names = input_names(gm)
        self.pieces = PieceCompiler()
        lifted, self._weights = lift_weights(gm)
        examples = [n.meta["val"] for n in lifted.graph.nodes if n.op == "placeholder"]
        loaded = len(codecache.PyCodeCache.modules)
        self._compiled = compile_lifted(lifted, examples)
        self._generated = codecache.PyCodeCache.modules[loaded:]

    @property
    def program(self) -> Program | None:
        """What was generated, in a form that can be kept; None where it is not a single program."""
        return Program.of_module(self._generated[0]) if len(self._generated) == 1 else None

    def _step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._compiled(*(inputs[name] for name in self.input_names), *self._weights)[0]


def compile_lifted(lifted: GraphModule, examples: Sequence[Any]) -> Callable[..., Sequence]:
    """Compile a graph without weights of its own; the code returns a list or tuple, also of one result.

    `examples`: a tensor without values for each input, or a symbolic size. Their symbols are the compiled code's;
    where inductor makes its own from examples, it takes equal numbers for one size (torch 2.11: fixed ones, too).
    """
    from torch._inductor import config as inductor_config

    mode = next(x.fake_mode for x in examples if isinstance(x, torch.Tensor))
    context = torch._guards.TracingContext(mode)
    with torch.no_grad(), inductor_config.patch(_options(lifted)), torch._guards.tracing(context):
        return torch._inductor.standalone_compile(
            lifted, list(examples), dynamic_shapes="from_tracing_context"
        )


def _options(gm: GraphModule) -> dict[str, object]:
    """Inductor proves each SIMD extension by compiling and importing a library in a new process, some ten seconds in
    all. Our kernels were built for this very machine by the same compiler, or the compiler knows how to: that is the
    proof.

    Of a graph that decodes, the loops that inductor makes stay with the caller's thread: what is heavy is an op of
    ours, and OpenMP's threads, which go on looking for work for milliseconds, would take the cores of the pool's
    (cpu/thread_pool.h). Encoders have wide loops and no decodes.
    """
    if not cpu_build.compiler_is_proven():
        return {}
    encodes = any(n.op == "call_function" and "packed_" in str(n.target) for n in gm.graph.nodes)
    return {"cpp.vec_isa_ok": True} | ({} if encodes else {"cpp.threads": 1})


def lift_weights(gm: GraphModule) -> tuple[GraphModule, list[torch.Tensor]]:
    """A copy of the graph whose get_attr nodes are further inputs, and their tensors in that order. It returns a
    tuple, also of one result."""
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
            results = torch.fx.node.map_arg(node.args[0], mapping.__getitem__)
            graph.output(results if isinstance(results, (tuple, list)) else (results,))
        elif node.op != "placeholder":
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    return GraphModule(torch.nn.Module(), graph), [value.detach() for value in values.values()]
