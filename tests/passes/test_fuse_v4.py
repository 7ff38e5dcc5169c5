"""Fusions of DeepSeek-V4's attention: norm + RoPE of the query heads, RoPE + write of latent rows."""

from __future__ import annotations

import pytest
import torch

from pagebinder.graph_tools import aten, calls, insert_call
from pagebinder.passes.fuse_kv_rope_store import fuse_kv_rope_store
from pagebinder.passes.fuse_q_norm_rope import fuse_q_norm_rope
from pagebinder.passes.simplify import simplify
from pagebinder.passes.step_inputs import add_step_input
from tests.graphs import assert_metadata_kept, captured, clone, count, run
from tests.passes.v4_bodies import (
    DTYPES,
    FUSED_KV,
    FUSED_Q,
    HEAD_DIM,
    HEADS,
    NORM,
    OPS,
    PAIRS,
    ROPE,
    WIDTH,
    WRITE,
    Model,
    assert_refused,
    assert_same_bits,
    fused,
    heads,
    norm,
    rotate_split,
    rotate_tail,
    styled,
)

# ---- queries ----


def turned_queries(model, x, cos, sin):
    return rotate_tail(norm(heads(x)), cos, sin).flatten(2)


@pytest.mark.parametrize("rotate", [rotate_tail, rotate_split])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_rotation_become_one_op(dtype, rotate):
    def body(model, x, cos, sin):
        return rotate(norm(heads(x)), cos, sin).flatten(2)

    before, after, result = fused(body, fuse_q_norm_rope, dtype)
    assert count(after, FUSED_Q) == 1 and count(after, NORM, ROPE, aten.cat.default) == 0
    assert len(result.matches) == 1 and not result.refusals and result.changed
    assert result.matches[0].module_path == "body"
    assert_metadata_kept(after, FUSED_Q)
    (node,) = calls(after.graph, FUSED_Q)
    assert node.meta["val"].dtype is dtype and list(node.meta["val"].shape)[1:] == [HEADS, HEAD_DIM]
    assert node.kwargs == {"eps": 1e-6}
    assert_same_bits(before, after)


def test_the_rotated_queries_keep_their_other_users():
    def body(model, x, cos, sin):
        q = rotate_tail(norm(heads(x)), cos, sin)
        return q[0].exp().sum(1) + q.sin().sum(2)[0] + q[0].cos().sum(1) + x[0].sum(-1, keepdim=True)

    before, after, result = fused(body, fuse_q_norm_rope)
    assert len(result.matches) == 1 and count(after, FUSED_Q) == 1
    assert_same_bits(before, after)


def test_two_layers_share_their_tables():
    def body(model, x, cos, sin):
        for _ in range(2):
            x = x + turned_queries(model, x, cos, sin)
        return x

    before, after, result = fused(body, fuse_q_norm_rope, torch.bfloat16)
    assert len(result.matches) == 2 and count(after, FUSED_Q) == 2 and count(after, NORM, ROPE) == 0
    first, second = calls(after.graph, FUSED_Q)
    assert first.args[1:] == second.args[1:]
    assert_same_bits(before, after)


def leading(x, cos, sin):
    turned = OPS.rope(x[..., : 2 * PAIRS].float(), cos.unsqueeze(2), sin.unsqueeze(2), style="interleaved")
    return torch.cat([turned.to(x.dtype), x[..., 2 * PAIRS :]], -1)


def by_head(x, cos, sin):
    """Angles by head instead of by token."""
    return rotate_tail(x.transpose(1, 2), cos[:, :HEADS], sin[:, :HEADS]).transpose(1, 2)


def crosswise(x, cos, sin):
    """Joined with other channels than those before them."""
    turned = OPS.rope(x[..., -2 * PAIRS :], cos.unsqueeze(2), sin.unsqueeze(2), style="interleaved")
    return torch.cat([x[..., 2 * PAIRS :], turned], -1)


def split_and_read(x, cos, sin):
    """The split's first part has another reader."""
    kept, turned = x.split([HEAD_DIM - 2 * PAIRS, 2 * PAIRS], -1)
    turned = OPS.rope(turned, cos.unsqueeze(2), sin.unsqueeze(2), style="interleaved")
    return torch.cat([kept, turned], -1) + kept.sum(-1, keepdim=True)


REFUSED_Q = {
    "has a weight": lambda m, x, c, s: rotate_tail(norm(heads(x), m.weight, "scale_cast"), c, s),
    "read elsewhere": lambda m, x, c, s: rotate_tail(n := norm(heads(x)), c, s) + n,
    "style chunked": lambda m, x, c, s: styled(norm(heads(x)), c, s),
    "not computed in float32": lambda m, x, c, s: styled(norm(heads(x)), c, s, "interleaved", torch.float64),
    "not the trailing channels": lambda m, x, c, s: leading(norm(heads(x)), c, s),
    "not joined": lambda m, x, c, s: crosswise(norm(heads(x)), c, s),
    "read elsewhere ": lambda m, x, c, s: rotate_split(n := norm(heads(x)), c, s) + n,
    "read elsewhere  ": lambda m, x, c, s: split_and_read(norm(heads(x)), c, s),
    "angles do not go by token": lambda m, x, c, s: rotate_tail(norm(heads(x)), c.mean(1, True), s.mean(1, True)),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED_Q)
def test_near_misses_of_queries_are_refused(reason):
    before, after, result = fused(REFUSED_Q[reason], fuse_q_norm_rope)
    assert count(after, FUSED_Q) == 0
    assert_refused(result, reason.strip())
    assert_same_bits(before, after)


def test_rotations_of_other_values_are_not_queries():
    before, after, result = fused(lambda m, x, c, s: rotate_tail(heads(x).sin(), c, s), fuse_q_norm_rope)
    assert not result.matches and not result.refusals
    assert_same_bits(before, after)


# ---- rows of the cache ----

ROW_DIM = 64 + 2 * PAIRS  # 64 is the least that layout fp8_v4 quantises
BLOCKS, BLOCK_SIZE = 4, 4
ROW_BYTES = 64 + 4 * PAIRS + 8
CACHES = {"plain": (BLOCKS, BLOCK_SIZE, ROW_DIM), "fp8_v4": (BLOCKS, BLOCK_SIZE * ROW_BYTES)}


def with_writes(gm, layout, dtype):
    """The body ends in cat([rows [1, T, D], ..., rest]): the rows are written, each to a cache of its own."""
    joined = list(calls(gm.graph, aten.cat.default))[-1]
    *rows, rest = joined.args[0]
    slots = add_step_input(gm, "slot_mapping_0", ("num_tokens",), torch.int32)
    for i, row in enumerate(rows):
        cache = add_step_input(gm, f"cache_{i}", CACHES[layout], torch.uint8 if layout != "plain" else dtype)
        flat = insert_call(gm.graph, joined, aten.select.int, (row, 0, 0))
        options = {"layout": layout, "rope_dim": 2 * PAIRS}
        insert_call(gm.graph, joined, WRITE, (flat, cache, slots), options)
    joined.replace_all_uses_with(rest)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def rows_fused(function, layout="plain", dtype=torch.float32, cache_dtype=None):
    torch.manual_seed(0)
    before = captured(Model(function), width=WIDTH, dtype=dtype)
    simplify(before)
    before = with_writes(before, layout, cache_dtype or dtype)
    after = clone(before)
    return before, after, fuse_kv_rope_store(after)


def assert_same_rows(before, after):
    """Both write the same bytes, at slots dealt out of order, one token of them to none."""
    shapes = [n.meta["val"] for n in before.graph.nodes if str(n.target).startswith("cache_")]
    for num_tokens in (1, 9):
        slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[
            :num_tokens
        ].int()
        slots[num_tokens // 2] = -1 if num_tokens > 1 else 3
        written = []
        for gm in (before, after):
            caches = {f"cache_{i}": torch.zeros(c.shape, dtype=c.dtype) for i, c in enumerate(shapes)}
            out = run(gm, num_tokens, slot_mapping_0=slots, **caches)
            written.append([out, *caches.values()])
        assert all(c.any() for c in written[0][1:])
        assert all(map(torch.equal, *written))


def kv_rows(model, x, cos, sin):
    return rotate_tail(x[..., :ROW_DIM].sin(), cos, sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", CACHES)
def test_rotation_and_write_become_one_op(layout, dtype):
    before, after, result = rows_fused(lambda m, *x: torch.cat([kv_rows(m, *x), x[0]], -1), layout, dtype)
    assert count(after, FUSED_KV) == 1 and count(after, WRITE, ROPE) == 0
    assert len(result.matches) == 1 and not result.refusals and result.changed
    assert result.matches[0].module_path == "body"
    (node,) = calls(after.graph, FUSED_KV)
    assert node.meta["nn_module_stack"] and ".py" in node.meta["stack_trace"]
    assert node.kwargs == {"layout": layout, "rope_dim": 2 * PAIRS}
    assert_same_rows(before, after)


def test_rows_before_the_rotation_keep_their_other_users():
    def body(model, x, cos, sin):
        kv = x[..., :ROW_DIM].sin()
        return torch.cat([rotate_tail(kv, cos, sin), kv.exp() + kv], -1)

    before, after, result = rows_fused(body)
    assert len(result.matches) == 1
    assert_same_rows(before, after)


def test_two_layers_write_to_their_own_caches():
    def body(model, x, cos, sin):
        return torch.cat([kv_rows(model, x, cos, sin), kv_rows(model, x.exp(), cos, sin), x], -1)

    before, after, result = rows_fused(body, "fp8_v4", torch.bfloat16)
    first, second = calls(after.graph, FUSED_KV)
    assert (
        len(result.matches) == 2 and first.args[1:3] == second.args[1:3] and first.args[3] != second.args[3]
    )
    assert_same_rows(before, after)


REFUSED_KV = {
    "not rotated": lambda m, x, c, s: torch.cat([x[..., :ROW_DIM].sin(), x], -1),
    "read elsewhere": lambda m, x, c, s: torch.cat([kv := kv_rows(m, x, c, s), kv.exp()], -1),
    "no part of a row": lambda m, x, c, s: torch.cat(
        [torch.cat([x[..., :64], OPS.rope(x[..., :16].exp(), c, s, style="interleaved")], -1), x], -1
    ),
    "style chunked": lambda m, x, c, s: torch.cat([styled_rows(x[..., :ROW_DIM], c, s), x], -1),
    "do not go by token": lambda m, x, c, s: torch.cat(
        [kv_rows(m, x, c.mean(1, True), s.mean(1, True)), x], -1
    ),
}


def styled_rows(x, cos, sin):
    turned = OPS.rope(x[..., 64:], cos, sin, style="chunked")
    return torch.cat([x[..., :64], turned], -1)


@pytest.mark.parametrize("reason", REFUSED_KV)
def test_near_misses_of_rows_are_refused(reason):
    before, after, result = rows_fused(REFUSED_KV[reason])
    assert count(after, FUSED_KV) == 0
    assert_refused(result, reason)
    assert_same_rows(before, after)


def test_rows_that_are_rounded_before_the_cache_rounds_them_are_refused():
    body = lambda m, *x: torch.cat([kv_rows(m, *x), x[0]], -1)  # noqa: E731
    for layout, dtype, stored in (("plain", torch.bfloat16, torch.float16), ("fp8_v4", torch.float16, None)):
        before, after, result = rows_fused(body, layout, dtype, stored)
        assert_refused(result, f"rounded to {dtype} before")
        assert_same_rows(before, after)
