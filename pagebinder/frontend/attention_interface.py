"""The first route into a Hugging Face model: transformers' own hook for attention functions.

Every attention layer calls `ALL_ATTENTION_FUNCTIONS[config._attn_implementation](module, q, k, v, mask, ...)`.
We register a function that emits one `pagebinder::attention` op per layer, and no mask function: transformers
then builds no mask, and the captured graph has no mask nodes.

What the hook is told is a whitelist. An argument that nobody here understands is an error, because an ignored
one is how a wrong model is compiled in silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pagebinder.errors import CaptureError
from pagebinder.graph_tools import calls, describe, num_ops
from pagebinder.report import Match, PassResult

IMPLEMENTATION = "pagebinder"

# Arguments that carry nothing for us: caches are ours, positions reach RoPE by themselves.
IGNORED = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}
# Traits of a module or its config that change the mask without being passed to the hook.
UNREAD_TRAITS = ("attention_chunk_size",)


def attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' attention function: q [1, H, T, D], k [1, G, T, D], v [1, G, T, Dv] -> ([1, T, H, Dv], None).

    Raises:
        CaptureError: an argument or a module trait that changes the result in a way not known here.
    """
    name = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if attention_mask is not None:
        raise CaptureError(f"{name} passes an attention mask of its own; its meaning is not proven here.")
    window = kwargs.pop("sliding_window", None)
    soft_cap = kwargs.pop("softcap", None)
    sinks = kwargs.pop("s_aux", None)
    causal = kwargs.pop("is_causal", None)
    unknown = {k: v for k, v in kwargs.items() if k not in IGNORED and v is not None and v is not False}
    if unknown:
        raise CaptureError(
            f"{name} passes {sorted(unknown)} to its attention function, which is not understood here; "
            "ignoring it could change the result."
        )
    for trait in UNREAD_TRAITS:
        if getattr(getattr(module, "config", None), trait, None) is not None:
            raise CaptureError(f"{name} has {trait}, which changes the mask and is not handled yet.")
    _require_window_as_configured(module, window)
    if causal is None:
        causal = getattr(module, "is_causal", None)
    if causal is None:
        raise CaptureError(f"{name} does not say whether it is causal (is_causal); it cannot be assumed.")
    if dropout and module.training:
        raise CaptureError(f"{name} applies dropout: call model.eval() before compiling.")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise CaptureError(
            f"{name} attends to {key.shape[2]} keys from {query.shape[2]} queries during capture."
        )
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    out = torch.ops.pagebinder.attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        sinks,
        scale=scale,
        window=int(window) if window is not None else None,
        soft_cap=float(soft_cap) if soft_cap is not None else None,
        causal=bool(causal),
    )
    return out.unsqueeze(0), None


def hooked_attention(captured: torch.fx.GraphModule) -> PassResult:
    """What the hook put into a captured graph, as matches for the report."""
    result = PassResult(
        name="attention_hook", num_ops_before=num_ops(captured), num_ops_after=num_ops(captured)
    )
    for node in calls(captured.graph, torch.ops.pagebinder.attention.default):
        options = {k: v for k, v in node.kwargs.items() if k in ("window", "soft_cap") and v is not None}
        detail = ", ".join(f"{k}={v:g}" for k, v in options.items())
        result.matches.append(Match(pattern="attention", detail=detail, **describe(node)))
    return result


@contextlib.contextmanager
def attention_hook(model: torch.nn.Module) -> Iterator[None]:
    """Switch a transformers model to our attention function, and back to what it had, whatever happens."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    configs = _configs(model)
    before = [config._attn_implementation_internal for config in configs]
    try:
        try:
            model.set_attn_implementation(IMPLEMENTATION)
        except (ValueError, AttributeError) as error:
            raise CaptureError(
                f"{type(model).__name__} does not take attention functions from transformers' "
                f"AttentionInterface: {error}"
            ) from error
        yield
    finally:
        for config, implementation in zip(configs, before):
            config._attn_implementation_internal = implementation


def _configs(model: torch.nn.Module) -> list:
    """Every transformers config that a module of the model holds, and their sub-configs."""
    found, queue = {}, [getattr(m, "config", None) for m in model.modules()]
    while queue:
        config = queue.pop()
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            queue += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(found.values())


def _require_window_as_configured(module, window) -> None:
    """A window that only the model's mask would have applied is lost with the mask."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and index is not None and index < len(layer_types):
        has_window = layer_types[index] == "sliding_attention"
    else:
        has_window = getattr(config, "sliding_window", None) is not None
        has_window = has_window and getattr(config, "use_sliding_window", True)
    if has_window and window is None:
        raise CaptureError(
            f"{type(module).__name__} has a sliding window by its config, but does not pass it to its "
            "attention function."
        )
