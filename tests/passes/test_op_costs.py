"""Costs of ops against hand counts: sizes are written out, so that each number can be followed."""

from __future__ import annotations

import operator

import pytest
import sympy
import torch
from torch.fx import Graph, GraphModule

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.passes.layer_view import layer_view
from pagebinder.passes.op_costs import CONTEXT, OpCost, scenario
from pagebinder.passes.op_costs_ours import cost_model, rows_read, visible_pairs

pytestmark = pytest.mark.usefixtures("captured_once")

aten = torch.ops.aten
ours = torch.ops.pagebinder
F32, BF16 = torch.float32, torch.bfloat16


def cost_of(target, *args, out, weights=(), **kwargs) -> OpCost:
    """Cost of one call on these tensors; `weights` says which of the arguments are weights."""
    graph, root = Graph(), torch.nn.Module()
    nodes = []
    for i, value in enumerate(args):
        if not isinstance(value, torch.Tensor):
            nodes.append(value)
            continue
        if i in weights:
            root.register_buffer(f"w{i}", value)
            node = graph.get_attr(f"w{i}")
        else:
            node = graph.placeholder(f"x{i}")
        node.meta["val"] = value
        nodes.append(node)
    call = graph.call_function(target, tuple(nodes), kwargs)
    call.meta["val"] = out
    graph.output(call)
    return cost_model(GraphModule(root, graph)).cost(call)


def t(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype)


def parts(cost: OpCost) -> tuple[int, int, int, int]:
    return tuple(map(int, (cost.flops, cost.weight_bytes, cost.activation_bytes, cost.cache_bytes)))


def test_linear():
    """3 tokens, 8 -> 5: 2 * 3 * 8 * 5 flops, and 3 * 5 for the bias."""
    plain = cost_of(aten.linear.default, t(1, 3, 8), t(5, 8), out=t(1, 3, 5), weights=(1,))
    assert parts(plain) == (240, 160, 4 * (24 + 15), 0)
    biased = cost_of(aten.linear.default, t(3, 8), t(5, 8), t(5), out=t(3, 5), weights=(1, 2))
    assert parts(biased) == (255, 160 + 20, 156, 0)
    half = [x.to(BF16) for x in (t(3, 8), t(5, 8))]
    assert parts(cost_of(aten.linear.default, *half, out=t(3, 5, dtype=BF16), weights=(1,))) == (
        240,
        80,
        78,
        0,
    )


def test_products_of_activations():
    assert parts(cost_of(aten.bmm.default, t(2, 3, 4), t(2, 4, 5), out=t(2, 3, 5))) == (
        240,
        0,
        4 * (24 + 40 + 30),
        0,
    )
    addmm = cost_of(aten.addmm.default, t(5), t(3, 8), t(8, 5), out=t(3, 5), weights=(0, 2))
    assert parts(addmm) == (255, 20 + 160, 4 * (24 + 15), 0)


def test_embedding_reads_the_rows_it_gives():
    """3 ids of 8 bytes, 3 rows of 4 values: not the whole table of 1,000 rows."""
    ids = torch.zeros(3, dtype=torch.int64)
    cost = cost_of(aten.embedding.default, t(1000, 4), ids, out=t(3, 4), weights=(0,))
    assert parts(cost) == (0, 48, 24 + 48, 0)


def test_norms_and_rope():
    """Square, sum and scale: 3 per value, and one for the weight; the fused one adds, and writes two results."""
    norm = cost_of(ours.rms_norm.default, t(3, 8), t(8), out=t(3, 8), weights=(1,), eps=1e-6, tail="offset")
    assert parts(norm) == (4 * 24, 32, 192, 0)
    assert parts(cost_of(ours.rms_norm.default, t(3, 8), out=t(3, 8), eps=1e-6, tail="none"))[0] == 72
    fused = cost_of(
        ours.add_rms_norm.default,
        t(3, 8),
        t(3, 8),
        t(8),
        out=(t(3, 8), t(3, 8)),
        weights=(2,),
        eps=1e-6,
        tail="offset",
    )
    assert parts(fused) == (5 * 24, 32, 4 * 96, 0)
    rope = cost_of(ours.rope.default, t(2, 3, 8), t(3, 8), t(3, 8), out=t(2, 3, 8), style="half")
    assert parts(rope) == (144, 0, 4 * (48 + 24 + 24 + 48), 0)


def test_pointwise_views_casts_and_copies():
    assert parts(cost_of(aten.mul.Tensor, t(3, 8), t(3, 8), out=t(3, 8))) == (24, 0, 4 * 72, 0)
    assert cost_of(aten.view.default, t(3, 8), [24], out=t(24)).is_free
    assert cost_of(aten.to.dtype, t(3, 8), F32, out=t(3, 8)).is_free
    assert parts(cost_of(aten.to.dtype, t(3, 8), BF16, out=t(3, 8, dtype=BF16))) == (0, 0, 96 + 48, 0)
    assert parts(cost_of(aten.cat.default, t(3, 8), out=t(3, 16))) == (0, 0, 2 * 192, 0)
    assert parts(cost_of(aten.mean.dim, t(3, 8), [-1], out=t(3))) == (24, 0, 96 + 12, 0)
    assert cost_of(operator.add, 1, 2, out=3).is_free
    assert cost_of(aten.dropout.default, t(3, 8), 0.1, False, out=t(3, 8)).is_free


def test_an_unknown_op_is_said_to_be_uncounted():
    cost = cost_of(aten.linalg_matrix_exp.default, t(4, 4), out=t(4, 4))
    assert not cost.counted and not cost.is_free and parts(cost) == (0, 0, 128, 0)


def paged(q, cache, num_tokens, context, **options) -> tuple:
    """T is a number here, as the graph has a fixed number of tokens; S stays a symbol."""
    tables = [torch.zeros(1, dtype=torch.int32)] * 3
    out = t(*q.shape[:2], options["head_dim_v"])
    cost = cost_of(ours.paged_attention.default, q, cache, *tables, out=out, scale=1.0, **options)
    at = {CONTEXT: context}
    assert q.shape[0] == num_tokens
    return tuple(
        int(sympy.sympify(e).subs(at)) for e in (cost.flops, cost.activation_bytes, cost.cache_bytes)
    )


def test_paged_attention():
    """2 heads of 4 + 6, 1 KV head. A query at p sees p + 1 keys: after 10 tokens, 3 queries see 11 + 12 + 13."""
    q, cache = t(3, 2, 4), t(7, 1, 16, 10)
    flops, activations, cached = paged(q, cache, 3, 10, head_dim_v=6)
    assert flops == 2 * 2 * (4 + 6) * 36
    assert activations == 4 * (3 * 2 * 4 + 3 * 2 * 6)
    assert cached == 13 * 1 * 10 * 4
    flops, _, cached = paged(q, cache, 3, 10, head_dim_v=6, window=5)
    assert flops == 2 * 2 * 10 * 15 and cached == 7 * 40  # queries at 10, 11, 12 see keys 6 ... 12
    flops, _, cached = paged(q, cache, 3, 10, head_dim_v=6, chunk=4)
    assert flops == 2 * 2 * 10 * (3 + 4 + 1) and cached == 5 * 40  # keys 8 ... 11, then 12


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"chunk": 4}, {"window": 1}, {"chunk": 1}])
@pytest.mark.parametrize(("tokens", "context"), [(1, 0), (1, 17), (13, 0), (6, 9), (4, 3)])
def test_pairs_and_rows_equal_a_count(tokens, context, options):
    def sees(p, j):
        near = p - j < options.get("window", 10**6)
        return j <= p and near and ("chunk" not in options or p // options["chunk"] == j // options["chunk"])

    queries, keys = range(context, context + tokens), range(context + tokens)
    assert visible_pairs(sympy.Integer(tokens), context, **options) == sum(
        sees(p, j) for p in queries for j in keys
    )
    rows = sum(any(sees(p, j) for p in queries) for j in keys)
    assert rows_read(sympy.Integer(tokens), context, **options) == rows


def test_attention_without_a_cache_and_across():
    args = (t(3, 2, 4), t(3, 1, 4), t(3, 1, 6))
    causal = cost_of(ours.attention.default, *args, out=t(3, 2, 6), scale=1.0)
    assert parts(causal) == (2 * 2 * 10 * 6, 0, 4 * (24 + 12 + 18 + 36), 0)
    assert (
        cost_of(ours.attention.default, *args, out=t(3, 2, 6), scale=1.0, causal=False).flops
        == 2 * 2 * 10 * 9
    )
    across = (t(3, 2, 4), t(5, 1, 4), t(5, 1, 6))
    assert cost_of(ours.cross_attention.default, *across, out=t(3, 2, 6), scale=1.0).flops == 2 * 2 * 10 * 15


def test_latent_attention():
    """2 heads of 5 + 3, values of 4, latents of 6: absorbed, 3 queries after 10 tokens see 11 + 12 + 13 rows of 9."""
    weights = (t(2, 5, 6), t(2, 4, 6))
    operands = (t(3, 2, 5), t(3, 2, 3), *weights, t(7, 16, 9), *[torch.zeros(1, dtype=torch.int32)] * 3)
    plain, with_sinks = (
        cost_of(
            ours.paged_mla_attention.default,
            *operands,
            None,
            sinks,
            out=t(3, 2, 4),
            weights=(2, 3, 9),
            scale=1.0,
        )
        for sinks in (None, t(2))
    )
    assert plain.counted and plain.weight_bytes == 4 * 2 * (5 + 4) * 6
    assert plain.flops.subs({CONTEXT: 10}) == 2 * 3 * 2 * (5 + 4) * 6 + 2 * 2 * (2 * 6 + 3) * 36
    assert plain.cache_bytes.subs({CONTEXT: 10}) == 13 * 9 * 4
    assert with_sinks.weight_bytes == plain.weight_bytes + 4 * 2
    assert (with_sinks.flops, with_sinks.cache_bytes) == (plain.flops, plain.cache_bytes)


def test_latent_attention_to_groups():
    """3 queries of 2 heads see 2 groups of 4 and half a group of tail; together they read everything."""
    operands = (t(3, 2, 5), t(3, 2, 0), t(2, 5, 6), t(2, 4, 6), t(7, 16, 6))
    step, indices = [torch.zeros(1, dtype=torch.int32)] * 3, torch.zeros(3, 2, dtype=torch.int32)
    groups = cost_of(
        ours.paged_mla_attention.default, *operands, *step, indices, out=t(3, 2, 4), weights=(2, 3), scale=1.0,
        ratio=4,
    )  # fmt: skip
    assert groups.counted
    assert groups.flops.subs({CONTEXT: 10}) == 2 * 3 * 2 * (5 + 4) * 6 + 2 * (2 * 6) * 3 * (2 * 2 * 4 + 3)
    assert groups.cache_bytes.subs({CONTEXT: 10}) == (2 * 13 + 3) * 6 * 2


def test_cache_write():
    slots = torch.zeros(3, dtype=torch.int32)
    cost = cost_of(ours.kv_cache_write.default, t(3, 1, 4), t(3, 1, 6), t(7, 1, 16, 10), slots, out=None)
    assert parts(cost) == (0, 0, 120, 120)


def test_recurrences():
    """States of 3 heads x 4 x 5 in float32, read and written; 7 flops per state value and token."""
    tables = [torch.zeros(1, dtype=torch.int32)] * 3
    tokens = (t(2, 3, 4), t(2, 3, 4), t(2, 3, 5), t(2, 3), t(2, 3))
    delta = cost_of(
        ours.paged_gated_delta_rule.default,
        *tokens,
        t(9, 3, 4, 5),
        *tables,
        out=t(2, 3, 5),
        block_size=16,
        scale=1.0,
    )
    assert parts(delta) == (7 * 2 * 60, 0, 4 * (24 + 24 + 30 + 6 + 6 + 30), 2 * 60 * 4)
    conv = cost_of(
        ours.paged_short_conv.default, t(2, 8), t(8, 4), None, t(9, 8, 3), *tables, out=t(2, 8), weights=(1,),
        block_size=16, activation="silu",
    )  # fmt: skip
    assert parts(conv) == (2 * 4 * 16, 128, 128, 2 * 24 * 4)


def test_experts():
    """1 token, 2 of 4 experts, width 8, inner 6, gated: 2 * 2 * (12 * 8 + 8 * 6) flops, 2 * 2 * 8 to weigh."""
    ids = torch.zeros(1, 2, dtype=torch.int64)
    options = {"transposed": False, "activation": "silu", "gated": True, "interleaved": False, "limit": None,
               "alpha": None, "up_offset": 0.0, "in_float32": False}  # fmt: skip
    cost = cost_of(
        ours.moe_experts.default, t(1, 8), ids, t(1, 2), t(4, 12, 8), t(4, 8, 6), None, None, out=t(1, 8),
        weights=(3, 4), **options,
    )  # fmt: skip
    assert parts(cost) == (2 * 2 * (96 + 48) + 2 * 2 * 8, 2 * (96 + 48) * 4, 32 + 16 + 8 + 32, 0)


def test_a_whole_model_counts_its_weights_once():
    """Decode flops of a Llama are twice its matrices, and attention; its weights are read once (embedding: a row)."""
    from tests.helpers import tiny_llama

    model = tiny_llama()
    import pagebinder

    compiled = pagebinder.compile_model(model, pagebinder.CompileConfig(executable="eager"))
    blocks = layer_view(compiled.graphs, compiled.report)
    costs = [(c, b["count"]) for b in blocks for c in b["costs"]]
    assert all(c["counted"] for c, _ in costs)
    products = ("linear", "linears", "gated_linear")
    flops = sum(n * c["numbers"]["decode"]["flops"] for c, n in costs if c["op"] in products)
    flops -= 2 * model.config.num_hidden_layers * model.config.intermediate_size  # the gates'
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    assert flops == 2 * matrices
    attention = sum(n * c["numbers"]["decode"]["flops"] for c, n in costs if c["op"] == "paged_attention")
    assert attention == 2 * 2 * 4 * 32 * 512  # 2 layers, 4 heads of 16 + 16, 511 tokens and the new one
    weights = sum(n * c["numbers"]["decode"]["weight_bytes"] for c, n in costs)
    table = model.model.embed_tokens.weight
    used = sum(p.numel() * 4 for p in model.parameters()) - table.numel() * 4 + table.shape[1] * 4
    assert used <= weights <= used + 64  # the frequencies of RoPE are weights, too
    assert scenario(1, 511)[CONTEXT] == 511
