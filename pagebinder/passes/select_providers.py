"""Chooses who runs each op that has providers, and writes the choice into the graph.

Matches:
    pagebinder.paged_attention(...) | pagebinder.kv_cache_write(...) | pagebinder.linear(...) | ...
Replaces with:
    pagebinder_<provider>.<op>(...)          same schema, so nothing else changes

The choice is made once per distinct need (op, dtype, sizes, features), so layers may get different providers.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.providers import OpNeed, select_provider
from pagebinder.errors import ConfigError
from pagebinder.graph_tools import arg, calls, dtype_name, finish, val
from pagebinder.passes.page_recurrent import PAGED as PAGED_RECURRENCES
from pagebinder.report import ProviderChoice

# Over caches of latent rows, whose layout is an argument.
LATENT_OPS = (
    "latent_cache_write",
    "kv_rope_quant_store",
    "compress_norm_rope_store",
    "indexer_score_topk",
    "sparse_mla_attention",
    "paged_mla_attention",
)
# Over blocks that hold a state.
RECURRENT_OPS = tuple(op._opname for op in PAGED_RECURRENCES.values())
# Over the weights of experts.
EXPERT_OPS = (
    "moe_experts",
    "moe_routed_experts",
    "quantized_moe_experts",
    "quantized_moe_routed_experts",
    "expert_linear",
)
# Over activations and weights, and caches of their dtype.
PLAIN_OPS = (
    "hyper_connection",
    "hyper_mix",
    "hyper_head",
    "q_norm_rope",
    "inverse_rope_grouped_linear",
    "quantized_linear",
    "quantized_linears",
    "quantized_gated_linear",
    "linears",
    "norm_linears",
    "qk_norm_rope_write",
    "qk_norm_rope_quantized_write",
    "gated_linear",
    "scaled_fp8_quant",
    "rms_norm_fp8_quant",
    "add_rms_norm_fp8_quant",
    "gated_activation_fp8_quant",
)
# Of activations in e4m3, whose dtype is that of the result.
FP8_OPS = ("fp8_linear",)
# A compiler fuses their references with what stands around them; a provider gets them only if it is asked for, or if
# nobody fuses anything: ops run one by one on a GPU, where each reference is several launches, or on a CPU. There
# norms are ops of their own in any case: a compiler's loops wait for threads of theirs, see cpu/thread_pool.h.
ALWAYS_ON_CPU = ("rms_norm", "add_rms_norm")
LOOPS_ON_CPU = ("layer_norm", "add_layer_norm", "rope", "pointwise")
ON_REQUEST = (*ALWAYS_ON_CPU, *LOOPS_ON_CPU, "gated_activation")
SELECTABLE = (
    "paged_attention",
    "paged_attention_fp8_quant",
    "paged_relative_attention",
    "paged_lookahead_attention",
    "paged_indexed_attention",
    "unified_attention",
    "kv_cache_write",
    "quantized_paged_attention",
    "quantized_paged_attention_fp8_quant",
    "quantized_kv_cache_write",
    "packed_attention",
    "packed_relative_attention",
    "linear",
    *LATENT_OPS,
    *RECURRENT_OPS,
    *EXPERT_OPS,
    *PLAIN_OPS,
    *FP8_OPS,
)


def select_providers(
    gm: GraphModule, *, device: torch.device, requested: dict[str, str], prepare: bool = True,
    is_compiled: bool = True,
) -> list[ProviderChoice]:  # fmt: skip
    """Rewrite the targets of ops that have providers.

    Args:
        requested: op name -> provider name, from CompileConfig.providers.
        prepare: False only plans, and builds or loads nothing (for `explain`).
        is_compiled: does a compiler fuse what has no provider? On a CPU: loops of layers, too.
    Raises:
        ConfigError: `requested` names an op that has no providers.
        ProviderError: a requested provider cannot serve; the message lists the reasons.
    """
    unknown = set(requested) - {*SELECTABLE, *ON_REQUEST}
    if unknown:
        known = ", ".join((*SELECTABLE, *ON_REQUEST))
        raise ConfigError(f"providers: no op {sorted(unknown)}; ops with providers: {known}.")
    choices: dict[OpNeed, ProviderChoice] = {}
    selections = {}
    if device.type == "cpu":
        always = ALWAYS_ON_CPU if is_compiled else (*ALWAYS_ON_CPU, *LOOPS_ON_CPU)
    else:
        always = () if is_compiled else ON_REQUEST
    for name in (*SELECTABLE, *(op for op in ON_REQUEST if op in requested or op in always)):
        may_stay = name in ON_REQUEST and name not in requested  # with the compiler
        for node in calls(gm.graph, getattr(torch.ops.pagebinder, name).default):
            need = _need(name, node, device)
            if need not in selections:
                selections[need] = select_provider(need, requested.get(name), prepare=prepare)
            selection = selections[need]
            if may_stay and selection.provider == "reference":
                continue
            node.target = selection.overload
            choice = ProviderChoice(
                op=name,
                provider=selection.provider,
                why=selection.why,
                num_nodes=0,
                rejected=selection.rejected,
            )
            choices.setdefault(need, choice).num_nodes += 1
    finish(gm)
    return list(choices.values())


def unused_requests(requested: dict[str, str], choices: list[ProviderChoice]) -> list[str]:
    """A note for each provider that was asked for and serves nothing: the graph has no such op."""
    used = {choice.op for choice in choices}
    return [
        f"providers: {provider} was asked to serve {op}, and there is none in this graph (the model has none, or a "
        "fusion made it part of a larger op)."
        for op, provider in requested.items()
        if op not in used and provider != "auto"
    ]


def _need(name: str, node: Node, device: torch.device) -> OpNeed:
    """What a node asks of a provider, from its arguments."""
    if name == "linear":
        return OpNeed(op=name, device=device.type, dtype=dtype_name(val(node.args[1])))
    if name in FP8_OPS:
        return OpNeed(op=name, device=device.type, dtype=dtype_name(val(node)))
    if name == "pointwise":  # of any of its types: each value has its own
        return OpNeed(op=name, device=device.type, dtype="float32")
    if name in (*LATENT_OPS, *RECURRENT_OPS, *EXPERT_OPS, *PLAIN_OPS, *ON_REQUEST):
        layout = node.kwargs.get("layout", "plain")
        features = frozenset() if layout == "plain" else frozenset((layout,))
        if name == "paged_mla_attention":
            optional = {"indices": 8, "sinks": 9}
            features |= {of for of, place in optional.items() if arg(node, place, of) is not None}
            features |= {"groups"} if node.kwargs.get("ratio", 1) > 1 else set()
        dtype = dtype_name(val(node.args[0]))
        return OpNeed(op=name, device=device.type, dtype=dtype, features=features)
    if name.startswith("packed_"):
        return _packed_need(name, node, device)
    is_write = name.endswith("kv_cache_write")
    cache = val(node.args[2] if is_write else node.args[1])
    new = val(node.args[0])  # the keys to write, or the queries
    width_v = val(node.args[1]).shape[2] if is_write else node.kwargs["head_dim_v"]
    codes = frozenset((node.kwargs["codes"],)) if "codes" in node.kwargs else frozenset()
    return OpNeed(
        op=name,
        device=device.type,
        dtype=dtype_name(new),
        kv_dtype=None if codes else dtype_name(cache),
        head_dim=int(new.shape[2]),
        head_dim_v=int(width_v),
        block_size=int(cache.shape[2]),
        num_heads=None if is_write else int(new.shape[1]),
        num_kv_heads=int(cache.shape[1]),
        features=codes | _attention_features(name, node),
    )


def _packed_need(name: str, node: Node, device: torch.device) -> OpNeed:
    q, k, v = (val(n) for n in node.args[:3])
    return OpNeed(
        op=name,
        device=device.type,
        dtype=dtype_name(q),
        head_dim=int(q.shape[2]),
        head_dim_v=int(v.shape[2]),
        num_heads=int(q.shape[1]),
        num_kv_heads=int(k.shape[1]),
        features=_features(node, first_optional=4) if name == "packed_attention" else frozenset(),
    )


def _attention_features(name: str, node: Node) -> frozenset[str]:
    if name == "unified_attention":
        return _features(node, first_optional=8)
    return _features(node) if "paged_attention" in name else frozenset()


def _features(node: Node, first_optional: int = 5) -> frozenset[str]:
    kwargs = node.kwargs
    present = {
        "window": kwargs.get("window") is not None,
        "chunk": kwargs.get("chunk") is not None,
        "soft_cap": kwargs.get("soft_cap") is not None,
        "sinks": arg(node, first_optional, "sinks") is not None,
        "alibi": arg(node, first_optional + 1, "alibi_slopes") is not None,
        "bidirectional": not kwargs.get("causal", True),
    }
    return frozenset(name for name, here in present.items() if here)
