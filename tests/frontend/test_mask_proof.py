"""What a mask means is proven by evaluating it: the right numbers, and no proof for what is not in the family."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.frontend.mask_proof import MaskFacts, MaskNotProven, prove_mask
from pagebinder.graph_tools import aten, calls
from tests.graphs import Embedded, captured, captured_model
from tests.helpers import by_day

SDPA = aten.scaled_dot_product_attention.default


def attend(x, mask):
    """One head over x [1, T, C]; `mask` is [.., T, T]."""
    q = x.unsqueeze(1)
    return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0]


def prove(make_mask) -> MaskFacts:
    """Prove the mask that `make_mask(p [T, 1], j [1, T])` returns in a captured model."""
    gm = captured(lambda x, pos: attend(x, make_mask(pos[0, :, None], pos[0, None, :])))
    return prove_mask(next(calls(gm.graph, SDPA)).args[3])


def additive(visible, hidden=-3.4028234663852886e38):
    return torch.zeros(visible.shape).masked_fill(~visible, hidden)


CAUSAL = MaskFacts(causal=True)
FAMILY = {
    "causal": (lambda p, j: j <= p, CAUSAL),
    "bidirectional": (lambda p, j: (j - p) == (j - p), MaskFacts(causal=False)),
    "window": (lambda p, j: (j <= p) & (p - j < 20), MaskFacts(causal=True, window=20)),
    "window, one more by <=": (lambda p, j: (j <= p) & (p - j <= 20), MaskFacts(causal=True, window=21)),
    "window, one less by >": (lambda p, j: (j <= p) & (p - j < 20 - 1), MaskFacts(causal=True, window=19)),
    "window of one token": (lambda p, j: (j <= p) & (p - j < 1), MaskFacts(causal=True, window=1)),
    "window larger than the small sizes": (
        lambda p, j: (j <= p) & (p - j < 700),
        MaskFacts(causal=True, window=700),
    ),
    "window of both sides": (lambda p, j: (p - j).abs() < 12, MaskFacts(causal=False, window=12)),
    "chunks": (lambda p, j: (j <= p) & (p // 24 == j // 24), MaskFacts(causal=True, chunk=24)),
    "large chunks": (lambda p, j: (j <= p) & (p // 500 == j // 500), MaskFacts(causal=True, chunk=500)),
    "chunks of both sides": (lambda p, j: p // 24 == j // 24, MaskFacts(causal=False, chunk=24)),
    "chunks by a shift": (lambda p, j: (j <= p) & (p >> 7 == j >> 7), MaskFacts(causal=True, chunk=128)),
    "window inside chunks": (
        lambda p, j: (j <= p) & (p // 24 == j // 24) & (p - j < 7),
        MaskFacts(causal=True, chunk=24, window=7),
    ),
    "a window of 128k tokens": (
        lambda p, j: (j <= p) & (p - j < 131_072),
        MaskFacts(causal=True, window=131_072),
    ),
    "a float window of 20000": (
        lambda p, j: (j <= p) & ((j - p).float() > -2e4),
        MaskFacts(causal=True, window=20_000),
    ),
    "large chunks of 40000": (
        lambda p, j: (j <= p) & (p // 40_000 == j // 40_000),
        MaskFacts(causal=True, chunk=40_000),
    ),
    "chunks by a shift in a tensor": (
        lambda p, j: (j <= p) & (p >> torch.tensor(10) == j >> torch.tensor(10)),
        MaskFacts(causal=True, chunk=1024),
    ),
    "a large window inside larger chunks": (
        lambda p, j: (j <= p) & (p // 8192 == j // 8192) & (p - j < 5000),
        MaskFacts(causal=True, chunk=8192, window=5000),
    ),
    "a large band by triu and tril": (
        lambda p, j: torch.ones(p.shape[0], p.shape[0], dtype=torch.bool).tril().triu(-29_999),
        MaskFacts(causal=True, window=30_000),
    ),
    "a large window, additive, transposed": (
        lambda p, j: additive(((j <= p).T & (p - j < 9000).T).transpose(0, 1))[None],
        MaskFacts(causal=True, window=9000),
    ),
    "additive": (lambda p, j: additive(j <= p), CAUSAL),
    "additive, -1e9": (lambda p, j: additive(j <= p, -1e9), CAUSAL),
    "additive, -inf": (lambda p, j: additive(j <= p, float("-inf")), CAUSAL),
    "additive, -1e4": (lambda p, j: (1.0 - (j <= p).float()) * -10000.0, CAUSAL),
    "additive window by where": (
        lambda p, j: torch.where((j <= p) & (p - j < 9), 0.0, -1e9),
        MaskFacts(causal=True, window=9),
    ),
    "tril": (lambda p, j: torch.ones(p.shape[0], p.shape[0], dtype=torch.bool).tril(), CAUSAL),
    "triu": (lambda p, j: torch.full((p.shape[0], p.shape[0]), -1e9).triu(1), CAUSAL),
    "band by triu and tril": (
        lambda p, j: torch.ones(p.shape[0], p.shape[0], dtype=torch.bool).tril().triu(-29),
        MaskFacts(causal=True, window=30),
    ),
    "arange": (lambda p, j: torch.arange(p.shape[0])[None] <= torch.arange(p.shape[0])[:, None], CAUSAL),
    "one mask for all heads": (lambda p, j: (j <= p)[None, None].expand(1, 3, -1, -1), CAUSAL),
}


@pytest.mark.parametrize("name", by_day(FAMILY, list(FAMILY)[::2]))
def test_masks_of_the_family_are_classified_with_the_right_number(name):
    make_mask, facts = FAMILY[name]
    assert prove(make_mask) == facts


@pytest.mark.parametrize("name", by_day(FAMILY, list(FAMILY)[::2]))
def test_the_facts_say_which_keys_are_visible(name):
    make_mask, facts = FAMILY[name]
    p = torch.arange(97)
    mask = make_mask(p[:, None], p[None, :])
    visible = mask if mask.dtype is torch.bool else mask == 0
    expected = visible_keys(p[:, None], p[None], window=facts.window, chunk=facts.chunk, causal=facts.causal)
    assert torch.equal(visible.expand(1, 3, 97, 97)[0, 0], expected)


def thrice(n):
    return n + n + n


def window_by(keeps):
    """A causal mask of the keys whose distance, a float from 0 on, `keeps`."""
    return lambda p, j: (j <= p) & keeps((p - j).clamp(min=0).float())


WINDOWS = {
    "a fraction": (window_by(lambda d: d * 0.05 < 1), 20),
    "a small fraction": (window_by(lambda d: d * 1e-3 < 1.5), 1500),
    "a small bound": (lambda p, j: (j <= p) & (p.float() * 1e-3 - j.float() * 1e-3 < 0.0205), 21),
    "a power": (window_by(lambda d: 0.9**d > 0.1), 22),
    "an exponential": (window_by(lambda d: torch.exp(-0.1 * d) > 0.1), 24),
    "a logarithm": (window_by(lambda d: torch.log2(d + 1) < 5), 31),
    "a root": (window_by(lambda d: d.sqrt() < 6), 36),
    "a quotient": (window_by(lambda d: 1 / (d + 1) > 0.04), 24),
    "a large exponential": (window_by(lambda d: torch.exp(-0.004 * d) > 0.1), 576),
    "a formula that says nothing of its width": (window_by(lambda d: 0.9995**d > 0.1), 4604),
    "a product of numbers": (lambda p, j: (j <= p) & (p - j < torch.tensor(100) * 9), 900),
    "a number used three times": (lambda p, j: (j <= p) & (p - j < thrice(torch.full((), 300))), 900),
    "a factor in a tensor": (lambda p, j: (j <= p) & ((p - j) * torch.tensor([1e-3]) < 1.5), 1500),
    "a divisor in a tensor": (lambda p, j: (j <= p) & ((p - j) / torch.tensor(100.0) < 8), 800),
    "divisors below two": (lambda p, j: (j <= p) & ((p - j) / 1.9 / 1.9 / 1.9 < 140), 961),
    "an exponential that ends far away": (window_by(lambda d: torch.exp(-d / 1024) > 0.01), 4716),
    "a product of the distance": (lambda p, j: (j <= p) & ((p - j) * 0.001 * torch.tensor(50) < 500), 10_000),
    "a square": (lambda p, j: (j <= p) & ((p - j) * (p - j) < torch.tensor(200) * 100_000), 4473),
    "as far as is looked": (lambda p, j: (j <= p) & (p - j < torch.tensor(128) * 1024), 131_072),
    "a very small fraction": (lambda p, j: (j <= p) & ((p - j) * 1e-6 < 0.00115), 1150),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_found_by_whatever_formula(name):
    make_mask, window = WINDOWS[name]
    assert prove(make_mask) == MaskFacts(causal=True, window=window)


REFUSED = {
    "positions in half precision, which is exact up to 2048": (
        lambda p, j: (j <= p) & (p.half() - j.half() < 9),
        "is causal, window=9 at some hundred tokens, and another one at 262147",
    ),
    "products of positions, which overflow": (
        lambda p, j: p.int() * p.int() * p.int() >= j.int() * j.int() * j.int(),
        "is causal at some hundred tokens, and another one at 262147",
    ),
    "blocks of a width in a tensor": (
        lambda p, j: (j <= p) & (p // torch.tensor(100) - j // torch.tensor(100) < 8),
        "none of causal, window, chunk, full",
    ),
    "a cast to few bits": (
        lambda p, j: (j <= p) & ((p // 10).to(torch.int8) >= (j // 10).to(torch.int8)),
        "none of causal, window, chunk, full",
    ),
    "another mask at a length that is not tried": (
        lambda p, j: (j <= p) & ((torch.tensor(p.shape[0]) != 300) | (p - j < 9)),
        "is computed with the number of tokens",
    ),
    "the same by a size": (
        lambda p, j: (j <= p) & ((p - p + p.shape[0] <= 600) | (p - j < 64) | (p - p + p.shape[0] > 700)),
        "is computed with the number of tokens",
    ),
    "waves": (window_by(lambda d: torch.cos(0.1 * d) > -0.5), "none of"),
    "the last tokens alone": (lambda p, j: (j <= p) & ((j >= p.shape[0] - 30) | (j == p)), "none of"),
    "the last of many tokens": (lambda p, j: (j <= p) & ((j >= p.shape[0] - 3000) | (j == p)), "none of"),
    "a window that grows with the sequence": (
        lambda p, j: (j <= p) & (p - j < torch.sym_max(24, p.shape[0] // 2)),
        "none of",
    ),
    "a prefix of all but the last tokens": (
        lambda p, j: (j <= p) | (j < p.shape[0] - 32),
        "none of|prefix-LM",
    ),
    "one wrong row far away": (lambda p, j: (j <= p) & (p - j < 9000) & (p != 11_000), "none of"),
    "one wrong entry far away": (
        lambda p, j: (j <= p) & (p - j < 9000) & ~((p == 11_000) & (j == 7000)),
        "none of",
    ),
    "a large window that grows once": (
        lambda p, j: (j <= p) & (p - j < torch.where(p > 20_000, 9001, 9000)),
        "none of",
    ),
    "a large window that lets the first tokens through": (
        lambda p, j: (j <= p) & ((p - j < 9000) | (j < 4)),
        "first|none of",
    ),
    "one wrong element": (lambda p, j: (j <= p) & ~((p == 50) & (j == 3)), "none of"),
    "one wrong element, additive": (lambda p, j: additive((j <= p) | ((p == 30) & (j == 31))), "none of"),
    "strictly earlier tokens": (lambda p, j: j < p, "none of"),
    "the first tokens stay visible": (
        lambda p, j: (j <= p) & ((p - j < 16) | (j < 4)),
        "none of.*first 4 tokens stay visible beside a window of 16",
    ),
    "dilated": (lambda p, j: (j <= p) & ((p - j) % 2 == 0), "none of"),
    "blocks that see the block before": (lambda p, j: (j <= p) & (p // 16 - j // 16 < 2), "none of"),
    "blocks that reach beyond the small sizes": (lambda p, j: (j <= p) & (p // 16 - j // 16 < 16), "none of"),
    "a prefix seen by all": (lambda p, j: (j <= p) | (j < 10), "prefix-LM mask .the first 10 tokens"),
    "ALiBi": (lambda p, j: additive(j <= p) - 0.5 * (p - j).abs(), "bias"),
    "a small penalty": (lambda p, j: (~(j <= p)).float() * -50.0, "bias"),
    "a window too large to evaluate": (lambda p, j: (j <= p) & (p - j < 10_000_000), "too many"),
    "a float window too large to evaluate": (lambda p, j: (j <= p) & ((j - p).float() > -3e6), "too many"),
    "a large window that cannot be evaluated in parts": (
        lambda p, j: (j <= p) & (p - j < 50_000) & ((j <= p).cumsum(0) > 0),
        "cannot be evaluated in parts",
    ),
    "different heads": (
        lambda p, j: torch.stack([j <= p, (j <= p) & (p - j < 5)])[None],
        "differs between heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_outside_the_family_are_refused_with_the_reason(name):
    make_mask, reason = REFUSED[name]
    with pytest.raises(MaskNotProven, match=reason):
        prove(make_mask)


class TokenMask(nn.Module):
    """Masks made from the tokens themselves, as packed sequences and padding need."""

    def __init__(self, make_mask):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.make_mask = make_mask

    def forward(self, input_ids, position_ids):
        causal = position_ids[0, None, :] <= position_ids[0, :, None]
        return attend(self.embed(input_ids), self.make_mask(causal, input_ids[0], self.embed(input_ids)))


@pytest.mark.parametrize(
    "make_mask",
    [
        lambda causal, ids, x: causal & (ids != 31),
        lambda causal, ids, x: causal & ((d := (ids == 31).cumsum(0))[:, None] == d[None]),
        lambda causal, ids, x: causal & (x[0, :, 0] > -1e6),
        lambda causal, ids, x: additive(causal).masked_fill((ids == 31)[None], -1e9),
    ],
    ids=["padding", "packed documents", "hidden values", "additive padding"],
)
def test_a_mask_that_depends_on_the_tokens_is_refused(make_mask):
    gm = captured_model(TokenMask(make_mask))
    with pytest.raises(MaskNotProven, match="values of the tokens"):
        prove_mask(next(calls(gm.graph, SDPA)).args[3])


@pytest.mark.parametrize(
    "make_mask",
    [
        lambda causal, ids, x: causal & torch.ones_like(ids, dtype=torch.bool),
        lambda causal, ids, x: x.new_ones(x.shape[1], ids.shape[0]).tril() == 1,
    ],
    ids=["ones like the tokens", "new ones of the hidden size"],
)
def test_a_mask_may_depend_on_the_number_of_tokens(make_mask):
    gm = captured_model(TokenMask(make_mask))
    assert prove_mask(next(calls(gm.graph, SDPA)).args[3]) == CAUSAL


class BufferWindow(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.register_buffer("window", window)

    def forward(self, x, positions):
        p, j = positions[0, :, None], positions[0, None, :]
        return attend(x, (j <= p) & (p - j < self.window))


@pytest.mark.parametrize("window", [torch.tensor(9), torch.tensor(300), torch.tensor(300.0)], ids=str)
def test_a_window_that_is_a_buffer(window):
    gm = captured_model(Embedded(BufferWindow(window)))
    facts = prove_mask(next(calls(gm.graph, SDPA)).args[3])
    assert facts == MaskFacts(causal=True, window=int(window))


class BufferMask(nn.Module):
    def __init__(self, size, hidden=()):
        super().__init__()
        visible = torch.ones(size, size, dtype=torch.bool).tril()
        if hidden:
            visible[hidden] = False
        self.register_buffer("visible", visible)

    def forward(self, x, positions):
        return attend(x, self.visible[: x.shape[1], : x.shape[1]])


def test_a_buffer_with_an_entry_for_each_pair_of_tokens_is_compared_in_full():
    whole, other = (
        next(calls(captured_model(Embedded(BufferMask(3000, hidden))).graph, SDPA)).args[3]
        for hidden in ((), (2741, 1613))
    )
    assert prove_mask(whole) == CAUSAL
    with pytest.raises(MaskNotProven, match="none of"):
        prove_mask(other)


def test_a_mask_from_a_buffer_without_values_is_refused():
    gm = captured_model(Embedded(BufferWindow(torch.tensor(9))).to("meta"))
    with pytest.raises(MaskNotProven, match="meta device"):
        prove_mask(next(calls(gm.graph, SDPA)).args[3])
