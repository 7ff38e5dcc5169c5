"""DeepSeek-V4's operations against loops over queries and entries that follow their definition word by word."""

import pytest
import torch

from pagebinder.models import deepseek_v4_mixing as mixing

B, H, D, ROPE = 2, 3, 12, 4
INV_FREQ = torch.tensor([1.0, 0.1])


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)))


def _turned(row: torch.Tensor, position: int) -> torch.Tensor:
    turned = row.clone()
    for i, speed in enumerate(INV_FREQ.double()):
        even, odd = row[D - ROPE + 2 * i], row[D - ROPE + 2 * i + 1]
        cos, sin = (position * speed).cos(), (position * speed).sin()
        turned[D - ROPE + 2 * i] = even * cos - odd * sin
        turned[D - ROPE + 2 * i + 1] = odd * cos + even * sin
    return turned


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 8, 13])
def test_compress(overlap, num_tokens):
    ratio, width = 4, D * (2 if overlap else 1)
    kv, gate = _normal(B, num_tokens, width), _normal(B, num_tokens, width, seed=1)
    bias, weight = _normal(ratio, width), 1 + 0.2 * _normal(D)
    entries = mixing.compress(kv, gate, bias, weight, INV_FREQ, ratio=ratio, overlap=overlap, eps=1e-6)
    assert entries.shape == (B, num_tokens, D)
    z = gate.double() + bias.double()[torch.arange(num_tokens) % ratio]
    for b in range(B):
        for p in range(num_tokens):
            if (p + 1) % ratio:
                assert not entries[b, p].any()
                continue
            w = (p + 1) // ratio - 1
            rows = [(j, D if overlap else 0) for j in range(w * ratio, p + 1)]
            rows += [(j, 0) for j in range((w - 1) * ratio, w * ratio) if overlap and w]
            logits = torch.stack([z[b, j, c : c + D] for j, c in rows])
            values = torch.stack([kv.double()[b, j, c : c + D] for j, c in rows])
            mean = (logits.softmax(0) * values).sum(0)
            normed = mean * (mean.square().mean() + 1e-6).rsqrt() * weight.double()
            torch.testing.assert_close(
                entries[b, p].double(), _turned(normed, w * ratio), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("num_tokens", [1, 5, 8, 9, 31])
@pytest.mark.parametrize("kind", ["window", "all", "listed", "no sinks"])
def test_compressed_attention(num_tokens, kind):
    window, ratio, scale = 5, 4, 0.7
    q, kv = _normal(B, num_tokens, H, D), _normal(B, num_tokens, D)
    entries = None if kind == "window" else _normal(B, num_tokens, D, seed=5)
    sinks = None if kind == "no sinks" else _normal(H)
    indices = None
    if kind == "listed":
        indices = torch.randint(-1, max(num_tokens // ratio, 1), (B, num_tokens, 3)).int()
    out = mixing.compressed_attention(q, kv, entries, indices, sinks, scale=scale, window=window, ratio=ratio)
    for b in range(B):
        for p in range(num_tokens):
            keys = [kv[b, j] for j in range(max(p - window + 1, 0), p + 1)]
            for w in range((p + 1) // ratio if entries is not None else 0):
                if indices is None or w in indices[b, p]:
                    keys.append(entries[b, (w + 1) * ratio - 1])
            keys = torch.stack(keys).double()
            for h in range(H):
                logits = scale * keys @ q[b, p, h].double()
                sink = logits.new_empty(0) if sinks is None else sinks[h : h + 1].double()
                weights = torch.cat((logits, sink)).softmax(0)[: len(keys)]
                torch.testing.assert_close(out[b, p, h].double(), weights @ keys, atol=1e-5, rtol=1e-5)


def test_index_topk_takes_the_best_in_ascending_order():
    T, ratio, topk, heads = 30, 4, 3, 2
    q, k, weights = _normal(B, T, heads, D), _normal(B, T, D), _normal(B, T, heads)
    indices = mixing.index_topk(q, k, weights, topk=topk, ratio=ratio, scale=0.5)
    assert indices.shape == (B, T, topk)
    assert indices.dtype == torch.int32
    for b in range(B):
        for p in range(T):
            scores = {
                w: sum(
                    weights[b, p, h] * (0.5 * q[b, p, h] @ k[b, (w + 1) * ratio - 1]).relu()
                    for h in range(heads)
                ).item()
                for w in range((p + 1) // ratio)
            }
            # Scores of exactly 0 are common with ReLU: `sorted` is stable, so the lowest entry comes first.
            best = sorted(sorted(scores, key=scores.get, reverse=True)[:topk])
            assert indices[b, p].tolist() == best + [-1] * (topk - len(best))


def test_index_topk_breaks_ties_by_the_lowest_entry():
    T = 17
    zeros = torch.zeros(1, T, 2, D)
    indices = mixing.index_topk(zeros, zeros[:, :, 0], torch.ones(1, T, 2), topk=3, ratio=2, scale=1.0)
    assert indices[0, :, :].tolist() == [
        list(range(min(3, (p + 1) // 2))) + [-1] * (3 - min(3, (p + 1) // 2)) for p in range(T)
    ]


def test_the_inverse_undoes_the_rotation():
    x, angles = _normal(B, 7, D), torch.arange(7)[:, None] * INV_FREQ
    turned = mixing.rotate(x, angles.cos(), angles.sin())
    assert torch.equal(turned[..., : D - ROPE], x[..., : D - ROPE])
    torch.testing.assert_close(turned[0, 3].double(), _turned(x[0, 3].double(), 3), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mixing.rotate(turned, angles.cos(), -angles.sin()), x)


def test_grouped_linear_projects_each_group_by_its_own_rows():
    x, weight = _normal(B, 5, 4, D), _normal(6, 2 * D)
    angles = torch.zeros(B, 5, 2)
    out = mixing.inverse_rope_grouped_linear(x, angles.cos(), angles.sin(), weight, groups=2)
    first, second = x[:, :, :2].flatten(2) @ weight[:3].T, x[:, :, 2:].flatten(2) @ weight[3:].T
    torch.testing.assert_close(out, torch.cat((first, second), dim=-1))


def test_streams_are_read_mixed_and_closed():
    S, C = 4, 6
    streams, update = _normal(B, 5, S, C), _normal(B, 5, C)
    fn, base, scale = _normal((2 + S) * S, S * C) * 0.2, _normal((2 + S) * S), torch.tensor([0.7, 1.1, 0.9])
    options = {"norm_eps": 1e-6, "eps": 1e-3}
    post, comb, collapsed = mixing.hyper_connection(streams, fn, base, scale, sinkhorn_iters=3, **options)
    flat = streams.flatten(2).double()
    m = (flat @ fn.double().T) * (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    pre = (m[..., :S] * 0.7 + base[:S]).sigmoid() + 1e-3
    expected = sum(pre[..., i, None] * streams[:, :, i] for i in range(S))
    torch.testing.assert_close(collapsed.double(), expected, atol=1e-5, rtol=1e-5)
    expected = 2 * (m[..., S : 2 * S] * 1.1 + base[S : 2 * S]).sigmoid()
    torch.testing.assert_close(post.double(), expected, atol=1e-5, rtol=1e-5)
    rows = (m[..., 2 * S :] * 0.9 + base[2 * S :]).unflatten(-1, (S, S)).softmax(-1) + 1e-3
    rows = rows / (rows.sum(-2, keepdim=True) + 1e-3)
    for _ in range(2):
        rows = rows / (rows.sum(-1, keepdim=True) + 1e-3)
        rows = rows / (rows.sum(-2, keepdim=True) + 1e-3)
    torch.testing.assert_close(comb.double(), rows, atol=1e-5, rtol=1e-5)
    mixed = mixing.hyper_mix(streams, post, comb, update)
    expected = [
        post[..., k, None] * update + sum(comb[..., j, k, None] * streams[:, :, j] for j in range(S))
        for k in range(S)
    ]
    torch.testing.assert_close(mixed, torch.stack(expected, dim=2), atol=1e-5, rtol=1e-5)
    head = mixing.hyper_head(streams, fn[:S], base[:S], scale[:1], **options)
    torch.testing.assert_close(head, collapsed)
