"""Chooses who runs each stateful op, and writes the choice into the graph.

Matches:
    pagebinder.paged_attention(...) | pagebinder.kv_cache_write(...)
Replaces with:
    pagebinder_<provider>.<op>(...)          same schema, so nothing else changes

The choice is made once per distinct need (op, dtype, sizes, features), so layers may get different providers.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.providers import OpNeed, select_provider
from pagebinder.errors import ConfigError
from pagebinder.graph_tools import arg, calls, finish, val
from pagebinder.report import ProviderChoice

SELECTABLE = ("paged_attention", "kv_cache_write")


def select_providers(
    gm: GraphModule, *, device: torch.device, requested: dict[str, str]
) -> list[ProviderChoice]:
    """Rewrite the targets of stateful ops.

    Args:
        requested: op name -> provider name, from CompileConfig.providers.
    Raises:
        ConfigError: `requested` names an op that has no providers.
        ProviderError: a requested provider cannot serve; the message lists the reasons.
    """
    unknown = set(requested) - set(SELECTABLE)
    if unknown:
        raise ConfigError(f"providers: no op {sorted(unknown)}; ops with providers: {', '.join(SELECTABLE)}.")
    choices: dict[OpNeed, ProviderChoice] = {}
    selections = {}
    for name in SELECTABLE:
        for node in calls(gm.graph, getattr(torch.ops.pagebinder, name).default):
            need = _need(name, node, device)
            if need not in selections:
                selections[need] = selection = select_provider(need, requested.get(name))
                choices[need] = ProviderChoice(
                    op=name, provider=selection.provider, why=selection.why, num_nodes=0, rejected=selection.rejected
                )
            node.target = selections[need].overload
            choices[need].num_nodes += 1
    finish(gm)
    return list(choices.values())


def _need(name: str, node: Node, device: torch.device) -> OpNeed:
    """What a node asks of a provider, from its arguments."""
    if name == "kv_cache_write":
        k, v, cache = (val(a) for a in node.args[:3])
        sizes = {"head_dim": k.shape[2], "head_dim_v": v.shape[2], "num_kv_heads": k.shape[1]}
        features, dtype = frozenset(), k.dtype
    else:
        q, cache = val(node.args[0]), val(node.args[1])
        head_dim_v = node.kwargs["head_dim_v"]
        sizes = {"head_dim": q.shape[2], "head_dim_v": head_dim_v, "num_heads": q.shape[1],
                 "num_kv_heads": cache.shape[1]}  # fmt: skip
        features, dtype = _features(node), q.dtype
    sizes["block_size"] = cache.shape[2]
    return OpNeed(
        op=name,
        device=device.type,
        dtype=dtype,
        kv_dtype=cache.dtype,
        sizes=tuple(sorted((k, int(v)) for k, v in sizes.items())),
        features=features,
    )


def _features(node: Node) -> frozenset[str]:
    kwargs = node.kwargs
    present = {
        "window": kwargs.get("window") is not None,
        "chunk": kwargs.get("chunk") is not None,
        "soft_cap": kwargs.get("soft_cap") is not None,
        "sinks": arg(node, 5, "sinks") is not None,
        "alibi": arg(node, 6, "alibi_slopes") is not None,
        "bidirectional": not kwargs.get("causal", True),
    }
    return frozenset(name for name, here in present.items() if here)
