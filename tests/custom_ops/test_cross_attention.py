"""Cross attention: the reference against torch, and the paged form over the encoder's blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagebinder.custom_ops.attention.cross import cross_attention_reference
from pagebinder.custom_ops.providers import OpNeed, select_provider
from tests.tolerances import assert_close

HEADS, KV_HEADS, D, DV, BLOCK = 4, 2, 8, 6, 4


def rows(num, heads, width, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, heads, width, generator=generator).to(dtype)


@pytest.mark.parametrize(("num_tokens", "encoder_len"), [(1, 1), (1, 9), (9, 1), (5, 13)])
def test_the_reference_equals_torch(num_tokens, encoder_len):
    q, k, v = (
        rows(num_tokens, HEADS, D, 0),
        rows(encoder_len, KV_HEADS, D, 1),
        rows(encoder_len, KV_HEADS, DV, 2),
    )
    expected = sdpa(*(x.transpose(0, 1)[None] for x in (q, k, v)), enable_gqa=True, scale=0.3)
    assert_close(cross_attention_reference(q, k, v, scale=0.3), expected[0].transpose(0, 1))


def test_a_soft_cap_bends_the_scores():
    q, k, v = rows(5, HEADS, D, 0), rows(9, KV_HEADS, D, 1), rows(9, KV_HEADS, DV, 2)
    scores = torch.einsum("thd,ehd->hte", q, k.repeat_interleave(2, dim=1)) * 0.7
    weights = (1.5 * torch.tanh(scores / 1.5)).softmax(-1)
    expected = torch.einsum("hte,ehd->thd", weights, v.repeat_interleave(2, dim=1))
    assert_close(cross_attention_reference(q, k, v, scale=0.7, soft_cap=1.5), expected)


def test_the_op_refuses_operands_that_do_not_fit():
    op = torch.ops.pagebinder.cross_attention
    q, k, v = (torch.empty(3, h, D, device="meta") for h in (HEADS, KV_HEADS, KV_HEADS))
    assert op(q, k[:2], v[:2], scale=1.0).shape == (3, HEADS, D)
    for bad in ((q, k, v[:2]), (q, k[..., :4], v), (q[:, :3], k, v), (q, k, v[:, :1])):
        with pytest.raises(RuntimeError):
            op(*bad, scale=1.0)


@pytest.mark.parametrize("soft_cap", [None, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("provider", ["reference", "cpu"])
def test_the_paged_form_sees_every_encoder_token(provider, dtype, soft_cap):
    """More queries than keys, fewer, none, and no keys: positions mean nothing, all keys below the length count."""
    name = str(dtype).removeprefix("torch.")
    shape = {"head_dim": D, "head_dim_v": DV, "block_size": BLOCK, "num_kv_heads": KV_HEADS, "dtype": name}
    shape["kv_dtype"] = name
    needs = (
        OpNeed(op="kv_cache_write", **shape),
        OpNeed(op="paged_attention", num_heads=HEADS, features=frozenset({"bidirectional"}), **shape),
    )
    write, attend = (select_provider(need, provider).overload for need in needs)
    query_lens, encoder_lens = (11, 1, 0, 3, 6), (2, 19, 7, 5, 0)
    tables = torch.tensor([[1, 0, 0, 0, 0], [9, 3, 2, 8, 4], [5, 6, 0, 0, 0], [7, 10, 0, 0, 0], [0] * 5])
    k, v = rows(sum(encoder_lens), KV_HEADS, D, 1, dtype), rows(sum(encoder_lens), KV_HEADS, DV, 2, dtype)
    slots = [tables[r, j // BLOCK] * BLOCK + j % BLOCK for r, n in enumerate(encoder_lens) for j in range(n)]
    cache = torch.full((12, KV_HEADS, BLOCK, D + DV), torch.nan, dtype=dtype)
    cache[0] = 0
    write(k, v, cache, torch.tensor(slots, dtype=torch.int32))
    q = rows(sum(query_lens), HEADS, D, 3, dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    got = attend(q, cache, tables.int(), torch.tensor(encoder_lens).int(), starts,
                 head_dim_v=DV, scale=0.4, soft_cap=soft_cap, causal=False)  # fmt: skip
    key_start = 0
    for r, encoder_len in enumerate(encoder_lens):
        mine, keys = slice(starts[r], starts[r + 1]), slice(key_start, key_start + encoder_len)
        key_start += encoder_len
        if encoder_len == 0:
            assert not got[mine].any()
        else:
            operands = (q[mine].float(), k[keys].float(), v[keys].float())
            assert_close(got[mine], cross_attention_reference(*operands, scale=0.4, soft_cap=soft_cap))


def test_a_padding_row_writes_nothing():
    cache = torch.zeros(3, KV_HEADS, BLOCK, D + DV)
    for provider in ("reference", "cpu"):
        need = OpNeed(op="kv_cache_write", head_dim=D, head_dim_v=DV, block_size=BLOCK, num_kv_heads=KV_HEADS)
        write = select_provider(need, provider).overload
        write(
            torch.ones(1, KV_HEADS, D),
            torch.ones(1, KV_HEADS, DV),
            cache,
            torch.tensor([-1], dtype=torch.int32),
        )
        assert not cache.any()
