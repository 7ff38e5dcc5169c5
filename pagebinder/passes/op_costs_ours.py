"""Cost rules of our own ops, from their papers' arithmetic. Legend and conventions: `op_costs`."""

from __future__ import annotations

from collections.abc import Callable

import sympy
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.layer_state import ENCODER_TOKENS
from pagebinder.passes.lock_facts import operand
from pagebinder.passes.op_costs import CONTEXT, ZERO, CostModel, OpCost, tensors

GATED_DELTA_FLOPS = 7  # per state value and token: decay 1, S^T k 2, rank-one update 2, S^T q 2
SSD_FLOPS = 5  # decay 1, rank-one update 2, read-out 2


def visible_pairs(tokens, context, *, window: int | None = None, chunk: int | None = None) -> sympy.Expr:
    """(query, key) pairs of causal attention: queries at positions context ... context + tokens - 1."""
    tokens, context = sympy.sympify(tokens), sympy.sympify(context)
    pairs = _pairs_below(context + tokens, window, chunk) - _pairs_below(context, window, chunk)
    return pairs if window is not None or chunk is not None else sympy.expand(pairs)


def _pairs_below(n, window: int | None, chunk: int | None) -> sympy.Expr:
    """Pairs of the queries at 0 ... n - 1."""
    if window is not None:
        full = sympy.Min(n, window)
        return full * (full + 1) / 2 + (n - full) * window
    if chunk is not None:
        chunks, rest = sympy.floor(n / sympy.Integer(chunk)), sympy.Mod(n, chunk)
        return chunks * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2
    return n * (n + 1) / 2


def rows_read(tokens, context, *, window: int | None = None, chunk: int | None = None) -> sympy.Expr:
    """Keys that some query of the step sees, each read once."""
    if window is not None:
        return sympy.Min(context + tokens, window + tokens - 1)
    if chunk is not None:
        return sympy.Mod(context, chunk) + tokens
    return context + tokens


def _attention(model: CostModel, node: Node) -> OpCost:
    """Without a cache: T queries, all keys in the same step."""
    (q_len, heads, width), (k_len, *_) = model.shape(operand(node, "q")), model.shape(operand(node, "k"))
    width_v = model.shape(operand(node, "v"))[2]
    causal = operand(node, "causal") is not False and "cross" not in node.target._schema.name
    window, chunk = operand(node, "window"), operand(node, "chunk")
    pairs = visible_pairs(q_len, ZERO, window=window, chunk=chunk) if causal else q_len * k_len
    return model.moved(node, flops=2 * heads * (width + width_v) * pairs)


def _paged_attention(model: CostModel, node: Node) -> OpCost:
    """Q and the result move once, K and V of what is seen once; not causal means the encoder's tokens."""
    q, cache = operand(node, "q"), operand(node, "kv_cache")
    tokens, heads, width = model.shape(q)
    _, kv_heads, _, row = model.shape(cache)
    limits = {"window": operand(node, "window"), "chunk": operand(node, "chunk")}
    if operand(node, "causal") is False:
        pairs, rows = tokens * ENCODER_TOKENS, ENCODER_TOKENS
    else:
        pairs, rows = visible_pairs(tokens, CONTEXT, **limits), rows_read(tokens, CONTEXT, **limits)
    return OpCost(
        flops=2 * heads * (width + operand(node, "head_dim_v")) * pairs,
        activation_bytes=model.bytes_of(q) + model.out_bytes(node),
        cache_bytes=rows * kv_heads * row * tensors(cache)[0].dtype.itemsize,
    )


def _kv_cache_write(model: CostModel, node: Node) -> OpCost:
    new = model.bytes_of(operand(node, "k")) + model.bytes_of(operand(node, "v"))
    return OpCost(activation_bytes=new, cache_bytes=new)


def _rms_norm(model: CostModel, node: Node) -> OpCost:
    """Square, sum, scale: 3 per value; the weight and a residual add one each."""
    per_value = 3 + (operand(node, "weight") is not None) + ("add_" in node.target._schema.name)
    return model.moved(node, flops=per_value * model.numel(operand(node, "x")))


def _rope(model: CostModel, node: Node) -> OpCost:
    """Two products and a sum per value."""
    return model.moved(node, flops=3 * model.numel(operand(node, "x")))


def _gated_activation(model: CostModel, node: Node) -> OpCost:
    """As its two pointwise ops would count."""
    return model.moved(node, flops=2 * model.numel(node))


def _with_state(model: CostModel, node: Node, flops) -> OpCost:
    """A recurrence: its operands, and its state once read and once written."""
    cache = operand(node, "cache")
    plain = model.moved(node, flops=flops)
    if cache is None:
        return plain
    entry = model.bytes_of(cache) / model.shape(cache)[0]
    tables = [operand(node, name) for name in ("block_table", "seq_lens", "query_start_loc")]
    metadata = sum(model.bytes_of(t) for t in (cache, *tables))
    return OpCost(
        flops=flops,
        weight_bytes=plain.weight_bytes,
        activation_bytes=sympy.expand(plain.activation_bytes - metadata),
        cache_bytes=2 * entry,
    )


def _short_conv(model: CostModel, node: Node) -> OpCost:
    taps = model.shape(operand(node, "weight"))[-1]
    return _with_state(model, node, 2 * taps * model.numel(operand(node, "x")))


def _gated_delta_rule(model: CostModel, node: Node) -> OpCost:
    key_width = model.shape(operand(node, "q"))[2]
    return _with_state(model, node, GATED_DELTA_FLOPS * key_width * model.numel(operand(node, "v")))


def _ssd(model: CostModel, node: Node) -> OpCost:
    state = model.shape(operand(node, "B"))[2]
    return _with_state(model, node, SSD_FLOPS * state * model.numel(operand(node, "x")))


def _moe_experts(model: CostModel, node: Node) -> OpCost:
    """Tokens spread evenly: T tokens that choose K of E experts reach E (1 - (1 - K / E)^T) of them."""
    tokens, chosen = model.shape(operand(node, "expert_ids"))
    up, down = operand(node, "up"), operand(node, "down")
    experts = model.shape(up)[0]
    width = model.shape(operand(node, "x"))[1]
    values = (model.numel(up) + model.numel(down)) / experts
    reached = experts * (1 - (1 - chosen / experts) ** tokens)
    stored = [operand(node, name) for name in ("up", "down", "up_bias", "down_bias")]
    small = [operand(node, name) for name in ("x", "expert_ids", "expert_weights")]
    return OpCost(
        flops=2 * tokens * chosen * (values + width),  # the last product weighs the experts' results
        weight_bytes=sum(model.bytes_of(w) for w in stored) * reached / experts,
        activation_bytes=sum(model.bytes_of(x) for x in small) + model.out_bytes(node),
    )


def _expert_linear(model: CostModel, node: Node) -> OpCost:
    ids, weight = operand(node, "expert_ids"), operand(node, "weight")
    tokens, chosen = model.shape(ids)
    experts = model.shape(weight)[0]
    reached = experts * (1 - (1 - chosen / experts) ** tokens)
    return OpCost(
        flops=2 * tokens * chosen * model.numel(weight) / experts,
        weight_bytes=(model.bytes_of(weight) + model.bytes_of(operand(node, "bias"))) * reached / experts,
        activation_bytes=sum(model.bytes_of(x) for x in (operand(node, "x"), ids)) + model.out_bytes(node),
    )


RULES: dict[str, Callable[[CostModel, Node], OpCost]] = {
    "linear": CostModel.product,
    "attention": _attention,
    "relative_attention": _attention,
    "packed_attention": _attention,
    "packed_relative_attention": _attention,
    "cross_attention": _attention,
    "paged_attention": _paged_attention,
    "paged_relative_attention": _paged_attention,
    "kv_cache_write": _kv_cache_write,
    "rms_norm": _rms_norm,
    "add_rms_norm": _rms_norm,
    "rope": _rope,
    "gated_activation": _gated_activation,
    "short_conv": _short_conv,
    "paged_short_conv": _short_conv,
    "gated_delta_rule": _gated_delta_rule,
    "paged_gated_delta_rule": _gated_delta_rule,
    "ssd": _ssd,
    "paged_ssd": _ssd,
    "moe_experts": _moe_experts,
    "expert_linear": _expert_linear,
}


def cost_model(gm: GraphModule) -> CostModel:
    """A model of a graph's costs that knows our ops."""
    from pagebinder.passes.op_costs_latent import RULES as LATENT_RULES  # which builds on the functions above

    return CostModel(gm, {**RULES, **LATENT_RULES})
