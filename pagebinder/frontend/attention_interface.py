"""The first route into a Hugging Face model: transformers' own hook for attention functions.

Every attention layer calls `ALL_ATTENTION_FUNCTIONS[config._attn_implementation](module, q, k, v, mask, ...)`.
We register a function that emits one `pagebinder::attention` op per layer, and no mask function: transformers
then builds no mask, and the captured graph has no mask nodes.

What the hook is told is a whitelist. An argument that nobody here understands is an error, because an ignored
one is how a wrong model is compiled in silence.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch

from pagebinder.ambient import autocast_dtype, is_compiled_elsewhere
from pagebinder.errors import CaptureError
from pagebinder.frontend.layer_places import refuse_misplaced
from pagebinder.frontend.own_code import attention_is_replaced, replaced_in
from pagebinder.frontend.position_bias import has_bias_by_query, read_bias
from pagebinder.graph_tools import calls, describe, num_ops
from pagebinder.report import Match, PassResult

IMPLEMENTATION = "pagebinder"
ours = torch.ops.pagebinder

# Arguments that carry nothing for us: caches are ours, positions reach RoPE by themselves.
IGNORED = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "logits_to_keep",
}
# Attention modules whose model builds a chunked mask for its layers of type "chunked_attention", from a trait of
# the config that is not passed to the hook. In any other module that trait means something not known here.
CHUNKED_BY_LAYER_TYPE = {"Llama4TextAttention"}
# Attention modules of decoders that are causal by the mask that their model builds, and say is_causal=False.
CAUSAL_BY_MASK = {"BigBirdPegasusDecoderAttention", "NllbMoeAttention"}
# Attention modules that get the mask of padding always, [1, 1, 1, T] of zeros for a sequence without padding.
MASK_OF_PADDING = {"LayoutLMSelfAttention"}
# Attention modules of models whose mask applies `config.sliding_window` to every layer, or to those of the type
# "sliding_attention" if they have types, and which do not pass it.
WINDOW_OF_THE_MASK = {"PhimoeAttention", "Qwen2MoeAttention"}
# Attention modules whose config has a sliding_window that no computation reads: the model's mask is plainly causal,
# and the window only bounds the cache that transformers makes by itself.
WINDOW_UNUSED = {"MoshiAttention"}
# Attention modules that a leaf makes pass latents as keys and values, while it traces them -> what emits their op:
# f(q [T, H, D], latent [T, 1, L], k_rope [T, 1, P], sinks, indices=..., ratio=..., and the options of `attention`).
LATENT_ATTENTIONS: dict[torch.nn.Module, Callable] = {}
# Options in words of refusals.
WORDS = {
    "window": "a window",
    "chunk": "chunks",
    "soft_cap": "a soft cap",
    "bias": "a bias",
    "indices": "a list of others",
}


class CausalMask:
    """Stands for the mask [1, 1, T, T] in models that cut it before it comes here: it says nothing but causality."""

    dtype = torch.bool

    def __getitem__(self, index) -> CausalMask:
        return self

    def __invert__(self) -> CausalMask:
        return self

    def is_floating_point(self) -> bool:
        return False

    def __and__(self, other: ChosenKeys) -> ChosenKeys:
        return other if isinstance(other, ChosenKeys) else NotImplemented


class ChosenKeys(CausalMask):
    """A causal mask that leaves some groups of `ratio` keys: indices [1, T, K] as `index_topk` gives them."""

    def __init__(self, indices: torch.Tensor, ratio: int) -> None:
        self.indices, self.ratio = indices, ratio


def attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' attention function: q [1, H, T, D], k [1, G, T, D], v [1, G, T, Dv] -> ([1, T, H, Dv], None).

    Raises:
        CaptureError: an argument or a module trait that changes the result in a way not known here.
    """
    name = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if is_compiled_elsewhere():
        raise CaptureError(f"{name} is being compiled by another thread: call the model when that has ended.")
    if (dtype := autocast_dtype(query.device)) is not None:
        dtype = str(dtype).removeprefix("torch.")
        raise CaptureError(
            f"{name} is called under torch.autocast({dtype}) by the model's own code: compile the model in that "
            f'dtype instead, without autocast (CompileConfig(dtype="{dtype}")).'
        )
    chosen = attention_mask if isinstance(attention_mask, ChosenKeys) else None
    attention_mask = None if isinstance(attention_mask, CausalMask) else attention_mask
    is_of_padding = type(module).__name__ in MASK_OF_PADDING and attention_mask is not None
    if attention_mask is not None and not (is_of_padding and attention_mask.shape[2] == 1):
        raise CaptureError(f"{name} passes an attention mask of its own; its meaning is not proven here.")
    if _is_within_tokens(query, key):
        return _attention_within_tokens(module, name, query, key, value, scaling, kwargs)
    is_latent = isinstance(module, torch.nn.Module) and module in LATENT_ATTENTIONS
    indexed = {"indices": kwargs.pop("indices")} if is_latent and "indices" in kwargs else {}
    is_cross = _is_of_another_sequence(query, key)
    bias = read_bias(module, kwargs.pop("position_bias", None), is_cross)
    options = _told_options(module, name, kwargs, is_cross)
    causal = _told_causality(module, name, kwargs.pop("is_causal", None), is_cross, is_of_padding)
    _require_all_understood(name, kwargs)
    if dropout and module.training:
        raise CaptureError(f"{name} applies dropout: call model.eval() before compiling.")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    q_k_v = [x[0].transpose(0, 1) for x in (query, key, value)]
    if is_cross:
        soft_cap = options.pop("soft_cap")
        _require_absent(name, "reads another sequence", {**options, "causality": causal or None})
        return ours.cross_attention(*q_k_v, scale=scale, soft_cap=soft_cap).unsqueeze(0), None
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise CaptureError(
            f"{name} attends to {key.shape[2]} keys from {query.shape[2]} queries during capture."
        )
    if chosen is not None and is_latent:
        _require_absent(name, "attends to chosen latents", {"bias": bias, "indices": indexed or None})
        indexed = {"indices": chosen.indices, "ratio": chosen.ratio}
    elif chosen is not None:
        unread = {**options, "bias": bias, "no causality": None if causal else True}
        _require_absent(name, "attends to chosen keys", unread)
        out = ours.indexed_attention(*q_k_v, chosen.indices[0], scale=scale, ratio=chosen.ratio)
        return out.unsqueeze(0), None
    if not causal:
        options["window"] = _window_to_both_sides(module, options["window"])
    sinks = options.pop("sinks")
    if bias is not None:
        unread = {option: options.pop(option) for option in ("chunk", "soft_cap")}
        _require_absent(name, "has a relative bias", unread)
        bias, num_behind = bias
        out = ours.relative_attention(
            *q_k_v, bias, sinks, scale=scale, num_behind=num_behind, causal=causal, **options
        )
        return out.unsqueeze(0), None
    attend = LATENT_ATTENTIONS[module] if is_latent else ours.attention
    return attend(*q_k_v, sinks, scale=scale, causal=causal, **options, **indexed).unsqueeze(0), None


def _is_within_tokens(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Do tokens lie where heads do, so that each attends to rows of its own (as to the layers before)?"""
    sizes = query.shape[2], key.shape[2]
    same = query.shape[:2] == key.shape[:2]
    return (
        same
        and isinstance(query.shape[1], torch.SymInt)
        and not any(isinstance(s, torch.SymInt) for s in sizes)
    )


def _attention_within_tokens(module, name: str, query, key, value, scaling, kwargs: dict):
    """q [1, T, M, C], k and v [1, T, N, C] -> ([1, M, T, C], None), traced as torch's own; the audit sees that no
    token meets another.

    Raises:
        CaptureError: more is said than a scale.
    """
    causal = _told_causality(module, name, kwargs.pop("is_causal", None), False, False)
    _require_absent(name, "attends within each token", {"causality": causal or None})
    _require_all_understood(name, kwargs)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    return out.transpose(1, 2), None


def _told_options(module, name: str, kwargs: dict, is_cross: bool) -> dict:
    """window, chunk, soft_cap and sinks of a layer, None where it has none; taken out of `kwargs`.

    A config's window is one over tokens of one sequence: cross attention need not have it.

    Raises:
        CaptureError: the config says something of a window or of chunks that does not arrive here.
    """
    chunk = _configured_chunk(module, name)
    window = kwargs.pop("sliding_window", None)
    if window is None and type(module).__name__ in WINDOW_OF_THE_MASK and _may_have_window(module):
        window = module.config.sliding_window
    if not is_cross:
        _require_window_as_configured(module, window)
    soft_cap = kwargs.pop("softcap", None)
    sinks = kwargs.pop("s_aux", None)
    if sinks is None and has_bias_by_query(module) and kwargs.get("sinks") is not None:
        sinks = kwargs.pop("sinks")[0, ..., 0].transpose(0, 1)  # [1, H, T, 1] -> [T, H]
    return {
        "window": None if window is None else int(window),
        "chunk": chunk,
        "soft_cap": None if soft_cap is None else float(soft_cap),
        "sinks": None if sinks is None else sinks.float(),  # they join float32 scores; widening is exact
    }


def _window_to_both_sides(module, window: int | None) -> int | None:
    """transformers' mask for both sides shows the key at the distance of the config's window, too. Most layers pass
    one more, as flash attention counts; T5Gemma's encoder passes the window itself."""
    is_by_mask = hasattr(sys.modules.get(type(module).__module__), "create_bidirectional_sliding_window_mask")
    if window is None or not is_by_mask:
        return window
    config, of_layers = module.config, getattr(module.config, "per_layer_config", None)
    if of_layers:  # NeoMME: a config of its own for each layer
        config = of_layers[module.layer_idx]
    return window + 1 if window == getattr(config, "sliding_window", None) else window


def _told_causality(module, name: str, told: bool | None, is_cross: bool, is_of_padding: bool) -> bool:
    """Raises CaptureError: nothing says it."""
    if type(module).__name__ in CAUSAL_BY_MASK and not is_cross and getattr(module, "is_decoder", False):
        return True
    if told is None:
        told = False if is_of_padding else getattr(module, "is_causal", None)
    if told is None:
        raise CaptureError(f"{name} does not say whether it is causal (is_causal); it cannot be assumed.")
    return bool(told)


def _require_all_understood(name: str, kwargs: dict) -> None:
    unknown = {k for k, v in kwargs.items() if k not in IGNORED and v is not None and v is not False}
    if unknown:
        raise CaptureError(
            f"{name} passes {sorted(unknown)} to its attention function, which is not understood here; "
            "ignoring it could change the result."
        )


def _require_absent(name: str, what: str, options: dict) -> None:
    """Raises CaptureError: `what` the layer does is not known here together with one of these."""
    found = [WORDS.get(option, option) for option, value in options.items() if value is not None]
    if found:
        raise CaptureError(f"{name} {what} with {', '.join(found)}; not known here together.")


def _is_of_another_sequence(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Are the keys an encoder's? Its size is a symbol of its own, and the audit checks that it is that one."""
    sizes = (query.shape[2], key.shape[2])
    return all(isinstance(s, torch.SymInt) for s in sizes) and sizes[0].node.expr != sizes[1].node.expr


def hooked_attention(captured: torch.fx.GraphModule) -> PassResult:
    """What the hook put into a captured graph, as matches for the report."""
    result = PassResult(
        name="attention_hook", num_ops_before=num_ops(captured), num_ops_after=num_ops(captured)
    )
    names = ("attention", "cross_attention", "relative_attention", "indexed_attention", "mla_attention")
    for node in calls(captured.graph, *(getattr(ours, name).default for name in names)):
        options = {
            k: v for k, v in node.kwargs.items() if k in ("window", "chunk", "soft_cap") and v is not None
        }
        detail = ", ".join(f"{k}={v:g}" for k, v in options.items())
        pattern = node.target._opname
        result.matches.append(Match(pattern=pattern, detail=detail, **describe(node)))
    return result


@contextlib.contextmanager
def attention_hook(model: torch.nn.Module) -> Iterator[None]:
    """Switch a transformers model to our attention function, and back to what it had, whatever happens.

    Raises:
        CaptureError: the model takes no such functions, or its layers do not stand where its config says.
    """
    from transformers import AttentionInterface

    refuse_misplaced(model)

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
        if model.config._attn_implementation_internal == IMPLEMENTATION:
            for config in configs:  # transformers 5.17 leaves copies of the model's own config as they are
                if type(config) is type(model.config):
                    config._attn_implementation_internal = IMPLEMENTATION
        yield
    finally:
        for config, implementation in zip(configs, before):
            config._attn_implementation_internal = implementation


def has_functions_of_its_own(model: torch.nn.Module) -> bool:
    """Would the model call an attention or mask function that is none of transformers', or one that calls such? Ours
    replaces those alone."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = {config._attn_implementation_internal or "eager" for config in _configs(model)}
    functions = [
        table[name]
        for name in names
        for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
        if name in table
    ]
    for file in {type(module).__module__ for module in model.modules()}:
        called = vars(sys.modules.get(file, object))
        functions += [called[n] for n in called if n.startswith("create_") and n.endswith("_mask")]
        if "eager" in names and "eager_attention_forward" in called:
            functions.append(called["eager_attention_forward"])
    functions = [getattr(f, "func", f) for f in functions]  # of partial ones
    files = {str(getattr(f, "__module__", "")) for f in functions}
    if not all(file.startswith(("transformers.", "pagebinder.")) for file in files):
        return True
    return attention_is_replaced() or any(True for _ in replaced_in(files))


def _configs(model: torch.nn.Module) -> list:
    """Every transformers config that a module of the model holds, and their sub-configs."""
    found, queue = {}, [getattr(m, "config", None) for m in model.modules()]
    while queue:
        config = queue.pop()
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            queue += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(found.values())


def _layer_type(module) -> str | None:
    """What the config calls this layer ("full_attention", "sliding_attention", ...), if it says."""
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if layer_types is None or index is None or index >= len(layer_types):
        return None
    return layer_types[index]


def _may_have_window(module) -> bool:
    return _layer_type(module) in (None, "sliding_attention")


def _configured_chunk(module, name: str) -> int | None:
    """The chunk in tokens that the model's mask would have applied to this layer; None = no chunks."""
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    layer_type = _layer_type(module)
    if chunk is None and layer_type != "chunked_attention":
        return None
    if type(module).__name__ not in CHUNKED_BY_LAYER_TYPE:
        raise CaptureError(
            f"{name} has attention_chunk_size={chunk} and the layer type {layer_type!r}: how this model applies "
            "chunks is not known here, and it could change the mask. Unset attention_chunk_size if it does not."
        )
    if layer_type == "full_attention":
        return None
    if layer_type == "chunked_attention" and isinstance(chunk, int) and chunk >= 1:
        return chunk
    raise CaptureError(
        f"{name} has the layer type {layer_type!r} with attention_chunk_size={chunk}; "
        "chunks are understood for chunked_attention with a whole number of tokens."
    )


def _require_window_as_configured(module, window) -> None:
    """A window that only the model's mask would have applied is lost with the mask."""
    config, layer_type = getattr(module, "config", None), _layer_type(module)
    if type(module).__name__ in WINDOW_UNUSED:
        return
    if layer_type is not None:
        has_window = layer_type == "sliding_attention"
    else:
        has_window = getattr(config, "sliding_window", None) is not None
        has_window = has_window and getattr(config, "use_sliding_window", True)
    if has_window and window is None:
        raise CaptureError(
            f"{type(module).__name__} has a sliding window by its config, but does not pass it to its "
            "attention function."
        )
    # One that the module was made with; encoders pass half of it and the token itself.
    if window is None or getattr(module, "sliding_window", None) != window:
        return
    if not getattr(module, "is_causal", False):
        return
    told = getattr(config, "sliding_window", None)
    is_another = has_window and isinstance(told, int) and window != told
    if is_another or layer_type == "full_attention":
        raise CaptureError(
            f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')}) passes a sliding window of "
            f"{window}, but transformers makes its mask by the config, which says "
            f"{told if is_another else layer_type!r}: make the model with the config that it has."
        )
