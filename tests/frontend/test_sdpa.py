"""scaled_dot_product_attention -> pagebinder.attention: masks, grouped heads, scales, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagebinder.frontend import mask_proof
from pagebinder.frontend.recognise import recognise_sdpa
from pagebinder.frontend.recognise import sdpa as sdpa_module
from pagebinder.graph_tools import aten, calls
from tests.graphs import assert_metadata_kept, captured, clone, count, run

ATTENTION = torch.ops.pagebinder.attention.default
SDPA = aten.scaled_dot_product_attention.default
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
WIDTH = HEADS * HEAD_DIM


def heads(x, num_heads, head_dim=HEAD_DIM):
    return x[..., : num_heads * head_dim].view(1, -1, num_heads, head_dim).transpose(1, 2)


def merge(out):
    return out.transpose(1, 2).flatten(2)


def qkv(x, kv_heads=HEADS):
    return heads(x, HEADS), heads(x.sin(), kv_heads), heads(x.cos(), kv_heads)


def causal_mask(positions, window=10**9):
    p, j = positions[0, :, None], positions[0, None, :]
    return (j <= p) & (p - j < window) if window < 10**9 else j <= p


def repeat_kv(x, n):
    """As transformers does."""
    b, g, t, d = x.shape
    return x[:, :, None, :, :].expand(b, g, n, t, d).reshape(b, g * n, t, d)


def recognised(body, dtype=torch.float32):
    before = captured(body, width=WIDTH, dtype=dtype)
    after = clone(before)
    return before, after, recognise_sdpa(after)


def assert_close(before, after):
    for num_tokens in (1, 2, 5, 40):
        torch.testing.assert_close(run(after, num_tokens), run(before, num_tokens), atol=1e-5, rtol=1e-5)


MATCHES = {
    "is_causal": (lambda x, p: merge(sdpa(*qkv(x), is_causal=True)), "causal"),
    "boolean mask": (lambda x, p: merge(sdpa(*qkv(x), attn_mask=causal_mask(p))), "causal"),
    "additive mask": (
        lambda x, p: merge(sdpa(*qkv(x), torch.where(causal_mask(p), 0.0, -1e9)[None, None])),
        "causal",
    ),
    "window": (lambda x, p: merge(sdpa(*qkv(x), attn_mask=causal_mask(p, 7))), "causal, window=7"),
    "no mask": (lambda x, p: merge(sdpa(*qkv(x))), "bidirectional"),
    "scale": (lambda x, p: merge(sdpa(*qkv(x), is_causal=True, scale=0.9)), "causal"),
    "grouped heads": (
        lambda x, p: merge(sdpa(*qkv(x, KV_HEADS), is_causal=True, enable_gqa=True)),
        "causal",
    ),
    "one KV head": (lambda x, p: merge(sdpa(*qkv(x, 1), is_causal=True, enable_gqa=True)), "causal"),
    "wider values": (
        lambda x, p: merge(
            sdpa(qkv(x)[0], qkv(x)[1], heads(torch.cat((x, x), -1), HEADS, 12), is_causal=True)
        ),
        "causal",
    ),
}


@pytest.mark.parametrize("name", MATCHES)
def test_understood_attention_is_rewritten_and_equal(name):
    body, detail = MATCHES[name]
    before, after, result = recognised(body)
    assert count(after, ATTENTION) == 1 and count(after, SDPA) == 0
    assert [m.detail for m in result.matches] == [detail] and not result.refusals
    assert result.matches[0].module_path == "body"
    assert_metadata_kept(after, ATTENTION)
    assert_close(before, after)


REPEATS = {
    "expand and reshape": lambda k, n: repeat_kv(k, n),
    "repeat_interleave": lambda k, n: k.repeat_interleave(n, dim=1),
    "repeat_interleave from the right": lambda k, n: k.repeat_interleave(n, dim=-3),
}
NOT_GROUPED = {
    "repeated as a whole": lambda k, n: k.repeat(1, n, 1, 1),
    "expanded as a whole": lambda k, n: k[:, None].expand(1, n, *k.shape[1:]).reshape(1, -1, *k.shape[2:]),
}


def repeated(repeat_k, repeat_v):
    def body(x, positions):
        q, k, v = qkv(x, KV_HEADS)
        return merge(sdpa(q, repeat_k(k, HEADS // KV_HEADS), repeat_v(v, HEADS // KV_HEADS), is_causal=True))

    return body


def kv_heads_of(gm):
    node = next(calls(gm.graph, ATTENTION))
    return [n.meta["val"].shape[1] for n in node.args[1:3]]


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_keys_and_values_are_unwrapped(name):
    before, after, _ = recognised(repeated(REPEATS[name], REPEATS[name]))
    assert kv_heads_of(after) == [KV_HEADS, KV_HEADS]
    assert_close(before, after)


@pytest.mark.parametrize("name", NOT_GROUPED)
def test_a_repetition_in_another_order_is_left_as_it_stands(name):
    before, after, result = recognised(repeated(NOT_GROUPED[name], NOT_GROUPED[name]))
    assert len(result.matches) == 1 and kv_heads_of(after) == [HEADS, HEADS]
    assert_close(before, after)


def test_keys_and_values_repeated_in_different_ways_stay_repeated():
    before, after, result = recognised(repeated(repeat_kv, NOT_GROUPED["repeated as a whole"]))
    assert len(result.matches) == 1 and kv_heads_of(after) == [HEADS, HEADS]
    assert_close(before, after)


@pytest.mark.parametrize("rounded", [(0,), (1,), (2,), (1, 2)])
def test_operands_that_are_rounded_and_widened_again(rounded):
    def body(x, p):
        operands = [t.bfloat16().float() if i in rounded else t for i, t in enumerate(qkv(x))]
        return merge(sdpa(*operands, is_causal=True))

    before, after, _ = recognised(body)
    (attention,) = calls(after.graph, ATTENTION)
    assert len({n.meta["val"].dtype for n in attention.args[:3]}) == 1
    assert_close(before, after)


def test_two_layers_share_a_mask_that_is_proven_once(monkeypatch):
    def body(x, positions):
        mask = causal_mask(positions, 7)
        x = x + merge(sdpa(*qkv(x), attn_mask=mask))
        return x + merge(sdpa(*qkv(x), attn_mask=mask))

    proofs = []
    monkeypatch.setattr(sdpa_module, "prove_mask", lambda m: proofs.append(m) or mask_proof.prove_mask(m))
    before, after, result = recognised(body)
    assert len(result.matches) == 2 and len(proofs) == 1
    assert_close(before, after)


def test_an_output_with_several_users():
    def body(x, positions):
        out = sdpa(*qkv(x), is_causal=True)
        return merge(out) + merge(out.exp()) + out.mean(1).repeat(1, 1, HEADS)

    before, after, result = recognised(body)
    assert len(result.matches) == 1
    assert_close(before, after)


def test_bfloat16_is_as_close_as_the_source_to_float32():
    body = MATCHES["window"][0]
    before, after, _ = recognised(body, torch.bfloat16)
    exact = run(before.to(torch.float32), 40)
    own_error = (run(before.to(torch.bfloat16), 40).float() - exact).abs().max()
    assert (run(after, 40).float() - exact).abs().max() <= 2 * own_error


MEMORY = torch.ones(1, HEADS, 6, HEAD_DIM)
REFUSALS = {
    "heads of one channel": (
        lambda x, p: merge(sdpa(*(heads(y, HEADS, 1) for y in (x, x.sin(), x.cos())), is_causal=True)),
        "heads are one channel wide",
    ),
    "dropout": (lambda x, p: merge(sdpa(*qkv(x), is_causal=True, dropout_p=0.1)), "evaluation mode"),
    "one wrong element": (
        lambda x, p: merge(sdpa(*qkv(x), causal_mask(p) & ~((p.mT == 40) & (p == 2)))),
        "none of",
    ),
    "heads for tokens": (
        lambda x, p: sdpa(*(y.transpose(1, 2) for y in qkv(x)), is_causal=True).flatten(2),
        "heads, tokens",
    ),
    "three dimensions": (lambda x, p: sdpa(x, x, x, is_causal=True), "heads, tokens"),
    "fixed keys": (lambda x, p: merge(sdpa(heads(x, HEADS), MEMORY, MEMORY)), "heads, tokens"),
    "more keys than queries": (
        lambda x, p: merge(sdpa(qkv(x)[0], *(torch.cat((y, y), dim=2) for y in qkv(x)[1:]))),
        "same tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_attention_that_is_not_understood_is_refused_with_the_reason(name):
    body, reason = REFUSALS[name]
    _, after, result = recognised(body)
    assert count(after, ATTENTION) == 0 and count(after, SDPA) == 1 and not result.changed
    (refusal,) = result.refusals
    assert reason in refusal.reason
    assert refusal.module_path == "body" and "graphs.py:" in refusal.source_line


WITHIN_TOKENS = {
    "heads of a token": lambda x, p: sdpa(*(y.transpose(1, 2) for y in qkv(x)), scale=0.3).flatten(2),
    "learned queries": lambda x, p: sdpa(
        MEMORY[:, 0, None, :3].expand(1, x.shape[1], 3, HEAD_DIM), *(y.transpose(1, 2) for y in qkv(x)[1:])
    ).flatten(2),
}


@pytest.mark.parametrize("name", WITHIN_TOKENS)
def test_attention_within_each_token_becomes_products(name):
    before, after, result = recognised(WITHIN_TOKENS[name])
    assert count(after, ATTENTION) == 0 and count(after, SDPA) == 0
    assert [m.detail for m in result.matches] == ["within each token"] and not result.refusals
    assert_metadata_kept(after, aten.softmax.int)
    assert_close(before, after)


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))

    def forward(self, x, positions):
        q, k, v = heads(self.q(x), HEADS), heads(self.k(x), KV_HEADS), heads(self.v(x), KV_HEADS)
        return merge(sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=True))


def test_projections_are_untouched():
    before, after, _ = recognised(Projections())
    assert count(after, aten.linear.default) == 3
    assert_close(before, after)
