"""The route into mixtures of experts: transformers' own hook for the experts of a layer.

    routing                               traced as it is; the audit proves that it looks along experts, not tokens
    experts(hidden, top_k_index, top_k_weights)
      -> ALL_EXPERTS_FUNCTIONS[config._experts_implementation](module, ...)
           ours: one `pagebinder::moe_experts`; or, where the code between the projections is no known gate,
           `expert_linear`, the module's own code, traced, `expert_linear`

What a module computes is proven before the trace, by numbers: its gate against the known ones, and then the whole
of it, in miniature, against the loop over experts that its class defines. So a module that does more than our op
says, whatever it is called and whatever its attributes say, is an error.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.errors import CaptureError
from pagebinder.frontend.experts_proof import KEPT_AS, Experts, code_between, matrices_of, understand
from pagebinder.frontend.model_kinds import parts_beside_text
from pagebinder.graph_tools import calls, describe, first_paths, module_path, num_ops
from pagebinder.report import Match, PassResult

IMPLEMENTATION = "pagebinder"
# What transformers' decorator sets on every module that goes through the interface.
TRAITS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def experts_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of a model that call transformers' experts interface, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if all(hasattr(module, trait) for trait in TRAITS)
    }


@contextlib.contextmanager
def experts_hook(model: torch.nn.Module) -> Iterator[None]:
    """Switch a transformers model to our experts function, and back to what it had, whatever happens.

    Raises:
        CaptureError: a module computes something that is not understood; says what.
    """
    modules = experts_modules(model)
    if not modules:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    with contextlib.ExitStack() as undo:
        known: list[Gate] = []
        for path, module in modules.items():
            setattr(module, KEPT_AS, understand(path, module, experts_forward, known))
            undo.callback(delattr, module, KEPT_AS)
        ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = experts_forward
        undo.callback(ALL_EXPERTS_FUNCTIONS.__delitem__, IMPLEMENTATION)
        for config in {id(m.config): m.config for m in modules.values()}.values():
            undo.callback(setattr, config, "_experts_implementation_internal", config._experts_implementation)
            config._experts_implementation_internal = IMPLEMENTATION
        yield


def experts_forward(module, hidden_states, top_k_index, top_k_weights):
    """transformers' experts function: hidden [T, C], index and weights [T, K] -> [T, C].

    Raises:
        CaptureError: called otherwise.
    """
    x, ids, weights = hidden_states, top_k_index, top_k_weights
    if x.dim() != 2 or ids.dim() != 2 or weights.dim() != 2:
        raise CaptureError(
            f"{type(module).__name__} is called with hidden states of {x.dim()} dimensions, ids of {ids.dim()} and "
            f"weights of {weights.dim()}; [tokens, width], [tokens, top k] and [tokens, top k] are understood."
        )
    experts: Experts = getattr(module, KEPT_AS)
    (up, down, up_bias, down_bias), transposed = matrices_of(module)
    x, ids = x.to(up.dtype), ids.to(torch.int64)
    if experts.gate is not None:
        out = torch.ops.pagebinder.moe_experts(
            x, ids, weights, up, down, up_bias, down_bias,
            transposed=transposed, **experts.gate.as_options(),
        )  # fmt: skip
        return out.to(hidden_states.dtype)
    h = torch.ops.pagebinder.expert_linear(x, ids, up, up_bias, transposed=transposed)
    h = code_between(module)(h.reshape(-1, h.shape[-1])).reshape(*h.shape[:2], -1)
    out = torch.ops.pagebinder.expert_linear(h, ids, down, down_bias, transposed=transposed)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    return (out * weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def hooked_experts(model: torch.nn.Module, *graphs: GraphModule) -> PassResult:
    """What the hook put into the captured graphs of a model, as matches for the report.

    Raises:
        CaptureError: a module did not emit its ops, and is none of experts for images that text alone does not
            reach: one that nothing reads, in a model that takes more than text.
    """
    size = sum(map(num_ops, graphs))
    result = PassResult(name="experts_hook", num_ops_before=size, num_ops_after=size)
    modules, emitted, first = experts_modules(model), Counter(), first_paths(model)
    read = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "get_attr"}
    ops = [getattr(torch.ops.pagebinder, name).default for name in ("moe_experts", "expert_linear")]
    for graph in graphs:
        for node in calls(graph.graph, *ops):
            path = first.get(module_path(node))
            if path in modules:
                emitted[path, node.target] += 1
                result.matches.append(
                    Match(pattern=node.target._opname, detail=_detail(node), **describe(node))
                )
    for path in modules:
        counts = [emitted[path, op] for op in ops]
        unread = counts == [0, 0] and not any(name.startswith(f"{path}.") for name in read)
        if unread and _takes_more_than_text(model):
            continue
        mixtures, linears = counts  # each as often as the module was called, by a loop several times
        if bool(mixtures) == bool(linears) or linears % 2:
            raise CaptureError(
                f"{path} ({type(modules[path]).__name__}) was traced as {mixtures} moe_experts and {linears} "
                "expert_linear, not as one mixture of experts: it was not called, or for something else."
            )
    return result


def _takes_more_than_text(model: torch.nn.Module) -> bool:
    config = getattr(model, "config", None)
    return config is not None and bool(parts_beside_text(config))


def _detail(node) -> str:
    if "activation" not in node.kwargs:
        return ""
    fields = {k: v for k, v in node.kwargs.items() if k != "transposed"}
    return str(Gate(**fields)) + (", transposed" if node.kwargs["transposed"] else "")
