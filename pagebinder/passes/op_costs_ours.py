"""Cost rules of our own ops, from their papers' arithmetic. Legend and conventions: `op_costs`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import sympy
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.layer_state import ENCODER_TOKENS
from pagebinder.custom_ops.linear.packed_weights import is_coded, plain_shape
from pagebinder.custom_ops.linear.weight_formats import PANEL, STEP
from pagebinder.custom_ops.pointwise.program import read_program
from pagebinder.custom_ops.recurrent.define import RECURRENCES, Recurrence
from pagebinder.graph_tools import tensors, val
from pagebinder.passes.lock_facts import operand
from pagebinder.passes.op_costs import CONTEXT, ZERO, CostModel, OpCost

GATED_DELTA_FLOPS = 7  # per state value and token: decay 1, S^T k 2, rank-one update 2, S^T q 2
SSD_FLOPS = 5  # decay 1, rank-one update 2, read-out 2
# The same of the ops in RECURRENCES; exponentials count 1. Decays of a selective scan and weights of wkv are theirs.
STATE_FLOPS = {"linear_recurrence": 2, "selective_scan": 7, "wkv": 6, "mlstm": 5}


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
    """K and V are read once, and a row of each head is written, in the cache's dtype."""
    k, cache = operand(node, "k"), operand(node, "kv_cache")
    rows, row = model.numel(k) / model.shape(k)[2], model.shape(cache)[3]
    return OpCost(
        activation_bytes=model.bytes_of(k) + model.bytes_of(operand(node, "v")),
        cache_bytes=rows * row * tensors(cache)[0].dtype.itemsize,
    )


def _quantized_kv(model: CostModel, node: Node) -> OpCost:
    """Amax, scaling and its reverse: 3 per value."""
    values = model.numel(operand(node, "k")) + model.numel(operand(node, "v"))
    return model.moved(node, flops=3 * values)


def _rms_norm(model: CostModel, node: Node) -> OpCost:
    """Square, sum, scale: 3 per value; the weight and a residual add one each."""
    per_value = 3 + (operand(node, "weight") is not None) + ("add_" in node.target._schema.name)
    return model.moved(node, flops=per_value * model.numel(operand(node, "x")))


def _layer_norm(model: CostModel, node: Node) -> OpCost:
    """Mean, square, sum, scale: 5 per value; the weight, the bias and a residual add one each."""
    present = sum(operand(node, name) is not None for name in ("weight", "bias"))
    per_value = 5 + present + ("add_" in node.target._schema.name)
    return model.moved(node, flops=per_value * model.numel(operand(node, "x")))


def _rope(model: CostModel, node: Node) -> OpCost:
    """Two products and a sum per value."""
    return model.moved(node, flops=3 * model.numel(operand(node, "x")))


def _pointwise(model: CostModel, node: Node) -> OpCost:
    """An operation of the program per value, as torch's pointwise ops count."""
    program = read_program(operand(node, "program"))
    return model.moved(node, flops=len(program.statements) * model.numel(node))


def _qk_norm_rope_write(model: CostModel, node: Node) -> OpCost:
    """As the norms, the rotations and the write would count: 4 per value of a norm with a weight, 3 of a rotation."""
    q, k = operand(node, "q"), operand(node, "k")
    weights = [w for w in (operand(node, "q_weight"), operand(node, "k_weight")) if w is not None]
    per_value = 3 + (3 + bool(weights) if operand(node, "tail") else 0)
    write = _kv_cache_write(model, node)
    small = sum(model.bytes_of(operand(node, name)) for name in ("cos", "sin", "slot_mapping"))
    return OpCost(
        flops=per_value * (model.numel(q) + model.numel(k)),
        weight_bytes=sum((model.bytes_of(w) for w in weights), ZERO),
        activation_bytes=model.bytes_of(q) + write.activation_bytes + small + model.out_bytes(node),
        cache_bytes=write.cache_bytes,
    )


def _linears(model: CostModel, node: Node) -> OpCost:
    """As its layers would count, x read once; of quantised weights, codes and scales are read."""
    x, biases = operand(node, "x"), operand(node, "biases")
    values = model.numel(x) / model.shape(x)[-1] * sum(y.shape[-1] for y in tensors(node))
    return model.moved(node, flops=2 * model.shape(x)[-1] * values + (values if biases else ZERO))


def _quantized_linear(model: CostModel, node: Node) -> OpCost:
    """As the layer would count; of the weight, codes and scales are read."""
    per_value = 2 * model.shape(operand(node, "x"))[-1] + (operand(node, "bias") is not None)
    return model.moved(node, flops=per_value * model.numel(node))


def _fp8_quant(model: CostModel, node: Node) -> OpCost:
    """Amax and scaling: 2 per value; the norm or the gate before them as they would count by themselves."""
    name, x = node.target._schema.name.split("::")[1], node.args[0]
    per_value = 2
    if "rms_norm" in name:
        per_value += 3 + (operand(node, "weight") is not None) + name.startswith("add_")
    if "gated" in name:
        per_value += 2
    return model.moved(node, flops=per_value * model.numel(x))


def _attention_fp8_quant(model: CostModel, node: Node) -> OpCost:
    """As attention, and 2 for each value of its output."""
    attention = _paged_attention(model, node)
    return dataclasses.replace(attention, flops=attention.flops + 2 * model.numel(node))


def _dequantize_weight(model: CostModel, node: Node) -> OpCost:
    return model.moved(node, flops=model.numel(node))


def _norm_linears(model: CostModel, node: Node) -> OpCost:
    """As the norm, the layers and the gate would count; what the norm would write and they read is not moved."""
    x, values = operand(node, "x"), [y.shape for y in tensors(node)]
    has_sum, has_weight = (operand(node, name) is not None for name in ("residual", "norm_weight"))
    rows, width = model.numel(x) / model.shape(x)[-1], model.shape(x)[-1]
    outs = sum(shape[-1] for shape in (values[:-1] if has_sum else values))
    gate = bool(operand(node, "activation"))
    per_value = (4 * width + 2 if gate else 2 * width) + (1 + gate) * bool(operand(node, "biases"))
    return model.moved(node, flops=rows * (width * (3 + has_weight + has_sum) + outs * per_value))


def _gated_linear(model: CostModel, node: Node) -> OpCost:
    """Two products and their biases, and two pointwise ops."""
    x = operand(node, "x")
    biases = sum(operand(node, name) is not None for name in ("gate_bias", "up_bias"))
    return model.moved(node, flops=(4 * model.shape(x)[-1] + biases + 2) * model.numel(node))


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


def _defined_recurrence(recurrence: Recurrence, model: CostModel, node: Node) -> OpCost:
    operands = [val(a) if isinstance(a, Node) else a for a in node.args[: recurrence.num_operands]]
    values = math.prod(map(int, recurrence.state_shape(*operands)))
    tokens = model.shape(node.args[0])[0]
    return _with_state(model, node, STATE_FLOPS[recurrence.name] * values * tokens)


def _moe_experts(model: CostModel, node: Node) -> OpCost:
    """Tokens spread evenly: T tokens that choose K of E experts reach E (1 - (1 - K / E)^T) of them."""
    tokens, chosen = model.shape(operand(node, "expert_ids"))
    return _experts(model, node, tokens, chosen, ("x", "expert_ids", "expert_weights"))


def _moe_routed_experts(model: CostModel, node: Node) -> OpCost:
    tokens = model.shape(operand(node, "x"))[0]
    return _experts(model, node, tokens, operand(node, "top_k"), ("x", "logits", "choice_bias"))


def _experts(model: CostModel, node: Node, tokens, chosen, read: tuple[str, ...]) -> OpCost:
    up, down = operand(node, "up"), operand(node, "down")
    experts = model.shape(up)[0]
    width = model.shape(operand(node, "x"))[1]
    values = _values_of_expert(model, up) + _values_of_expert(model, down)
    reached = experts * (1 - (1 - chosen / experts) ** tokens)
    stored = [
        operand(node, name) for name in ("up", "up_scale", "down", "down_scale", "up_bias", "down_bias")
    ]
    small = [operand(node, name) for name in read]
    return OpCost(
        flops=2 * tokens * chosen * (values + width),  # the last product weighs the experts' results
        weight_bytes=sum(model.bytes_of(w) for w in stored) * reached / experts,
        activation_bytes=sum(model.bytes_of(x) for x in small) + model.out_bytes(node),
    )


def _values_of_expert(model: CostModel, stack: Node):
    """Of weights [E, N, K] in any form, or of their codes [E, panels, steps, 2, bytes], of 8, 6 or 4 bits."""
    if is_coded(val(stack)):
        return math.prod(plain_shape(val(stack))[1:])
    shape = model.shape(stack)
    return shape[1] * PANEL * shape[2] * STEP if len(shape) == 5 else model.numel(stack) / shape[0]


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
    "linears": _linears,
    "quantized_linear": _quantized_linear,
    "quantized_linears": _linears,
    "fp8_linear": _quantized_linear,
    "scaled_fp8_quant": _fp8_quant,
    "rms_norm_fp8_quant": _fp8_quant,
    "add_rms_norm_fp8_quant": _fp8_quant,
    "gated_activation_fp8_quant": _fp8_quant,
    "paged_attention_fp8_quant": _attention_fp8_quant,
    "quantized_paged_attention_fp8_quant": _attention_fp8_quant,
    "dequantize_weight": _dequantize_weight,
    "gated_linear": _gated_linear,
    "norm_linears": _norm_linears,
    "quantized_gated_linear": _gated_linear,
    "attention": _attention,
    "relative_attention": _attention,
    "lookahead_attention": _attention,
    "packed_attention": _attention,
    "packed_relative_attention": _attention,
    "cross_attention": _attention,
    "paged_attention": _paged_attention,
    "paged_relative_attention": _paged_attention,
    "paged_lookahead_attention": _paged_attention,
    "unified_attention": _paged_attention,
    "kv_cache_write": _kv_cache_write,
    "quantized_paged_attention": _paged_attention,
    "quantized_kv_cache_write": _kv_cache_write,
    "quantized_kv": _quantized_kv,
    "qk_norm_rope_write": _qk_norm_rope_write,
    "qk_norm_rope_quantized_write": _qk_norm_rope_write,
    "rms_norm": _rms_norm,
    "add_rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "add_layer_norm": _layer_norm,
    "rope": _rope,
    "pointwise": _pointwise,
    "gated_activation": _gated_activation,
    "short_conv": _short_conv,
    "paged_short_conv": _short_conv,
    "gated_delta_rule": _gated_delta_rule,
    "paged_gated_delta_rule": _gated_delta_rule,
    "ssd": _ssd,
    "paged_ssd": _ssd,
    **{
        name: functools.partial(_defined_recurrence, recurrence)
        for recurrence in RECURRENCES.values()
        for name in (recurrence.name, f"paged_{recurrence.name}")
    },
    "moe_experts": _moe_experts,
    "moe_routed_experts": _moe_routed_experts,
    "quantized_moe_experts": _moe_experts,
    "quantized_moe_routed_experts": _moe_routed_experts,
    "expert_linear": _expert_linear,
}


def cost_model(gm: GraphModule, *, decoded: bool = False) -> CostModel:
    """A model of a graph's costs that knows our ops. `decoded`: see CostModel."""
    from pagebinder.passes.op_costs_latent import RULES as LATENT_RULES  # which builds on the functions above

    return CostModel(gm, {**RULES, **LATENT_RULES}, decoded)
