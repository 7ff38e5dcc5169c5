"""RoPE in the half-split style, and the forms that only look like it."""

from __future__ import annotations

import pytest
import torch

from pagebinder.frontend.audit import audit
from pagebinder.frontend.recognise import recognise_rope
from tests.graphs import WIDTH, assert_metadata_kept, captured, clone, count, run

ROPE = torch.ops.pagebinder.rope.default
HALF = WIDTH // 2


def angles(positions, scale=1.0):
    frequencies = 1.0 / 100.0 ** (torch.arange(HALF) / HALF)
    half = positions[..., None].float() * frequencies * scale
    return torch.cat((half, half), dim=-1)


def rotate_half(x):
    return torch.cat((-x[..., HALF:], x[..., :HALF]), dim=-1)


def rotate_chunks(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_split(x):
    first, second = x.split(HALF, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_interleaved(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rope(rotate, x, positions):
    a = angles(positions)
    return x * a.cos() + rotate(x) * a.sin()


def narrow(positions):
    """One angle per pair."""
    return angles(positions)[..., :HALF]


def in_parts(x, positions, first, second, join):
    """Pairs of channels turned part by part: tables of one column per pair."""
    a, b, cos, sin = x[..., first], x[..., second], (angle := narrow(positions)).cos(), angle.sin()
    return join((a * cos - b * sin, b * cos + a * sin))


def two_parts(x, positions, turn):
    angle = narrow(positions)
    return torch.cat(turn(x[..., :HALF], x[..., HALF:], angle.cos(), angle.sin()), dim=-1)


def joined(parts):
    return torch.cat(parts, dim=-1)


def stacked(parts):
    return torch.stack(parts, dim=-1).flatten(-2)


EVEN, ODD, LOW, HIGH = slice(0, None, 2), slice(1, None, 2), slice(None, HALF), slice(HALF, None)


def every_two(x, positions):
    """As GPT-J, Cohere and GLM: each angle twice, neighbours are a pair."""
    cos, sin = (
        (angle := narrow(positions)).cos().repeat_interleave(2, -1),
        angle.sin().repeat_interleave(2, -1),
    )
    return x * cos + rotate_interleaved(x) * sin


STYLES = {
    "every_two": every_two,
    "chunked": lambda x, p: in_parts(x, p, LOW, HIGH, joined),
    "interleaved": lambda x, p: in_parts(x, p, EVEN, ODD, stacked),
    "deinterleaved": lambda x, p: in_parts(x, p, EVEN, ODD, joined),
}


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_recognised_and_keeps_every_bit(style):
    before, after, result = recognised(STYLES[style])
    assert [m.detail for m in result.matches] == [f"style={style}, dim=16"] and not result.refusals
    assert count(after, torch.ops.aten.sub.Tensor, torch.ops.aten.neg.default, torch.ops.aten.add.Tensor) == 0
    assert_metadata_kept(after, ROPE)
    for num_tokens in (1, 5, 40):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


def test_tables_that_are_looked_up():
    """As GPT-J: sines and cosines side by side in one table."""

    def body(x, positions):
        table = torch.cat((angles(torch.arange(64)).sin(), angles(torch.arange(64)).cos()), dim=-1)
        sin, cos = table[positions].split(WIDTH, dim=-1)
        return x * cos + rotate_half(x) * sin

    before, after, result = recognised(body)
    assert [m.detail for m in result.matches] == ["style=half, dim=16"]
    assert torch.equal(run(before, 40), run(after, 40))


FORMS = {
    "slices": lambda x, p: rope(rotate_half, x, p),
    "chunk": lambda x, p: rope(rotate_chunks, x, p),
    "split": lambda x, p: rope(rotate_split, x, p),
    "scaled tables": lambda x, p: x * ((a := angles(p)).cos() * 1.3) + rotate_half(x) * (a.sin() * 1.3),
    "heads": lambda x, p: (
        (h := x.view(1, -1, 1, WIDTH).transpose(1, 2)) * (a := angles(p)).cos()[:, None]
        + rotate_half(h) * a.sin().unsqueeze(1)
    ).flatten(1, 2),
}


def recognised(body, dtype=torch.float32):
    before = captured(body, dtype=dtype)
    after = clone(before)
    return before, after, recognise_rope(after)


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_recognised_and_keep_every_bit(form):
    before, after, result = recognised(FORMS[form])
    assert count(after, ROPE) == 1 and len(result.matches) == 1 and not result.refusals
    assert count(after, torch.ops.aten.neg.default) == 0
    assert "dim=16" in result.matches[0].detail
    assert_metadata_kept(after, ROPE)
    for num_tokens in (1, 5, 40):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


@pytest.mark.parametrize("product", [torch.outer, torch.ger, lambda p, f: torch.einsum("n,d->nd", p, f)])
def test_angles_may_be_an_outer_product(product):
    def body(x, positions):
        angle = product(positions[0].float(), 1.0 / 100.0 ** (torch.arange(HALF) / HALF)).repeat(1, 2)
        return x * angle.cos() + rotate_half(x) * angle.sin()

    before, after, result = recognised(body)
    assert count(after, ROPE) == 1 and not result.refusals and not audit(after, bidirectional=False)
    assert torch.equal(run(before, 5), run(after, 5))


BACK = {
    "half": lambda y: torch.cat((y[..., HALF:], -y[..., :HALF]), -1),
    "every_two": lambda y: torch.stack((y[..., 1::2], -y[..., ::2]), dim=-1).flatten(-2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", BACK)
def test_the_other_half_negated_turns_back(style, dtype):
    """As nanochat."""

    def body(x, positions):
        a = angles(positions)
        return x * a.cos().to(x.dtype) + BACK[style](x) * a.sin().to(x.dtype)

    before, after, result = recognised(body, dtype)
    assert [m.detail for m in result.matches] == [f"style={style}, dim=16"] and not result.refusals
    assert count(after, torch.ops.aten.neg.default) == 1  # of the table
    for num_tokens in (1, 5, 40):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


WIDENED = {
    "behind": lambda x, turned: (x.float(), turned(x).float()),  # as ERNIE 4.5
    "before, each by itself": lambda x, turned: (x.float(), turned(x.float())),  # as ModernBERT's decoder
    "before": lambda x, turned: ((wide := x.float()), turned(wide)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widened", WIDENED)
@pytest.mark.parametrize("rotate", [rotate_half, rotate_interleaved])
def test_values_widened_before_or_behind_the_turn(widened, rotate, dtype):
    def body(x, positions):
        a = angles(positions)
        value, turned = WIDENED[widened](x, rotate)
        return (value * a.cos() + turned * a.sin()).to(x.dtype)

    before, after, result = recognised(body, dtype)
    assert len(result.matches) == 1 and not result.refusals
    for num_tokens in (1, 5, 40):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


def test_values_that_lose_bits_are_not_widened():
    def body(x, positions):
        a = angles(positions)
        return x * a.cos() + rotate_half(x).bfloat16() * a.sin()

    before, after, result = recognised(body)
    assert not result.matches and len(result.refusals) == 2
    assert torch.equal(run(before, 40), run(after, 40))


def test_tables_rounded_to_the_model_dtype():
    def body(x, positions):
        a = angles(positions)
        return x * a.cos().to(x.dtype) + rotate_half(x) * a.sin().to(x.dtype)

    before, after, result = recognised(body, torch.bfloat16)
    assert len(result.matches) == 1
    assert run(after, 40).dtype is torch.bfloat16
    assert torch.equal(run(before, 40), run(after, 40))


def test_part_of_the_width():
    """Only the first half of the channels turns; the rest passes through."""

    def body(x, positions):
        turned, passed = x[..., :HALF], x[..., HALF:]
        a = angles(positions)[..., :HALF]
        half = torch.cat((-turned[..., HALF // 2 :], turned[..., : HALF // 2]), dim=-1)
        return torch.cat((turned * a.cos() + half * a.sin(), passed), dim=-1)

    before, after, result = recognised(body)
    assert "dim=8" in result.matches[0].detail
    assert torch.equal(run(before, 40), run(after, 40))


def test_query_and_key_share_the_tables_and_a_chain_of_two():
    def body(x, positions):
        a = angles(positions)
        cos, sin = a.cos(), a.sin()
        q = x * cos + rotate_half(x) * sin
        k = (2 * x) * cos + rotate_half(2 * x) * sin
        return q * cos + rotate_half(q) * sin + k + q

    before, after, result = recognised(body)
    # `2 * x` is computed twice, so the key's two halves are of different values: refused, and still right
    assert len(result.matches) == 2 and len(result.refusals) == 2
    assert torch.equal(run(before, 40), run(after, 40))


NEAR_MISSES = {
    "pairs in another order": (
        lambda x, p: rope(lambda y: torch.stack((-y[..., ::2], y[..., 1::2]), dim=-1).flatten(-2), x, p),
        "not the half-split",
    ),
    "chunked with another sign": (
        lambda x, p: two_parts(x, p, lambda a, b, cos, sin: (a * cos - b * sin, b * cos - a * sin)),
        "not the half-split",
    ),
    "chunked with one part swapped": (
        lambda x, p: two_parts(x, p, lambda a, b, cos, sin: (a * cos - b * sin, b * sin + a * cos)),
        "second part",
    ),
    "halves not swapped": (
        lambda x, p: rope(lambda y: torch.cat((-y[..., :HALF], y[..., HALF:]), -1), x, p),
        "not the half-split",
    ),
    "uneven halves": (
        lambda x, p: rope(lambda y: torch.cat((-y[..., 6:], y[..., :6]), -1), x, p),
        "not the half-split",
    ),
    "cosine and sine swapped": (
        lambda x, p: x * (a := angles(p)).sin() + rotate_half(x) * a.cos(),
        "not the cosine and the sine",
    ),
    "different angles": (
        lambda x, p: x * angles(p).cos() + rotate_half(x) * angles(p, 0.5).sin(),
        "different angles",
    ),
    "minus": (
        lambda x, p: x * (a := angles(p)).cos() - rotate_half(x) * a.sin(),
        "not added",
    ),
    "a factor in the sum": (
        lambda x, p: torch.add(x * (a := angles(p)).cos(), rotate_half(x) * a.sin(), alpha=2),
        "not added",
    ),
    "another value times the cosine": (
        lambda x, p: (x + 1) * (a := angles(p)).cos() + rotate_half(x) * a.sin(),
        "not x * cos",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused_with_the_reason(name):
    body, reason = NEAR_MISSES[name]
    before, after, result = recognised(body)
    assert count(after, ROPE) == 0 and not result.changed
    assert any(reason in r.reason for r in result.refusals), result.refusals
    assert all(r.module_path == "body" and "graphs.py:" in r.source_line for r in result.refusals)
    assert torch.equal(run(before, 40), run(after, 40))


def test_a_rotated_half_with_several_users_is_refused():
    def body(x, positions):
        a, half = angles(positions), rotate_half(x)
        return x * a.cos() + half * a.sin() + half

    before, after, result = recognised(body)
    assert any("several users" in r.reason for r in result.refusals)
    assert torch.equal(run(before, 40), run(after, 40))
