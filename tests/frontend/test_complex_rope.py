"""RoPE written with complex numbers, and the forms that only look like it."""

from __future__ import annotations

import re

import pytest
import torch

from pagebinder.frontend.audit import audit
from pagebinder.frontend.recognise import recognise_rope
from tests.graphs import WIDTH, assert_metadata_kept, captured, clone, count, run

ROPE = torch.ops.pagebinder.rope.default
VIEW_AS_COMPLEX = torch.ops.aten.view_as_complex.default
HALF = WIDTH // 2


def table(positions, scale=1.0, columns=HALF):
    """[1, T, D/2] complex numbers of length one."""
    frequencies = 1.0 / 100.0 ** (torch.arange(columns) / columns)
    angles = positions[..., None].float() * frequencies
    return torch.polar(torch.ones_like(angles), angles) * scale


def as_complex(x):
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))


def as_real(z, x):
    return torch.view_as_real(z).flatten(-2).type_as(x)


def heads(x):
    return x.view(1, -1, 2, WIDTH // 2)


FORMS = {
    "table last": lambda x, p: as_real(as_complex(x) * table(p), x),
    "table first": lambda x, p: as_real(table(p) * as_complex(x), x),
    "a scaled table": lambda x, p: as_real(as_complex(x) * table(p, 1.3), x),
    "reshaped back": lambda x, p: torch.view_as_real(as_complex(x) * table(p)).reshape(x.shape),
    "heads": lambda x, p: as_real(
        as_complex(heads(x)) * table(p, columns=HALF // 2)[:, :, None], heads(x)
    ).flatten(-2),
    "heads before tokens": lambda x, p: (
        as_real(as_complex(h := heads(x).transpose(1, 2)) * table(p, columns=HALF // 2).unsqueeze(1), h)
        .transpose(1, 2)
        .flatten(-2)
    ),
}


def recognised(body, dtype=torch.float32):
    before = captured(body, dtype=dtype)
    after = clone(before)
    return before, after, recognise_rope(after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_forms_are_recognised(form, dtype):
    before, after, result = recognised(FORMS[form], dtype)
    assert count(after, ROPE) == 1 and len(result.matches) == 1 and not result.refusals
    assert not any("complex" in str(n.target) or "polar" in str(n.target) for n in after.graph.nodes)
    assert "style=interleaved" in result.matches[0].detail
    assert_metadata_kept(after, ROPE)
    assert not audit(after)
    for num_tokens in (1, 5, 40):
        expected, got = run(before, num_tokens), run(after, num_tokens)
        assert got.dtype is expected.dtype
        tolerance = 1e-6 if expected.dtype is torch.float32 else 2**-8
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_the_audit_accepts_it_unrecognised(form):
    assert not audit(captured(FORMS[form]))


def test_query_and_key_share_one_pair_of_tables():
    def body(x, positions):
        z = table(positions)
        q, k = as_real(as_complex(x) * z, x), as_real(as_complex(2 * x) * z, x)
        return as_real(as_complex(q) * z, q) + k

    before, after, result = recognised(body)
    assert len(result.matches) == 3 and not result.refusals
    assert count(after, torch.ops.aten.cos.default) == count(after, torch.ops.aten.sin.default) == 1
    torch.testing.assert_close(run(after, 40), run(before, 40), atol=1e-5, rtol=1e-5)


def test_a_product_with_other_users_is_refused():
    def body(x, positions):
        product = as_complex(x) * table(positions)
        return as_real(product, x) + product.abs().sum(-1, keepdim=True)

    before, after, result = recognised(body)
    assert [r.reason for r in result.refusals] == ["the complex product is used in several places"]
    assert torch.equal(run(after, 40), run(before, 40))


NEAR_MISSES = {
    "rotated back": (lambda x, p: as_real(as_complex(x) * table(p).conj(), x), "not a table"),
    "no rotation": (lambda x, p: as_real(as_complex(x) * 2.0, x), "not multiplied by a table|by a number"),
    "a sum": (lambda x, p: as_real(as_complex(x) + table(p), x), "not multiplied by a table"),
    "squared": (lambda x, p: as_real((z := as_complex(x)) * z, x), "several places|not multiplied"),
    "numbers of other lengths": (
        lambda x, p: as_real(as_complex(x) * torch.polar(p[..., None].float(), table(p).angle()), x),
        "not of length one",
    ),
    "a table of the values": (
        lambda x, p: as_real(as_complex(x) * as_complex(x + 1), x),
        "not a table of complex numbers",
    ),
    "one angle for all pairs": (lambda x, p: as_real(as_complex(x) * table(p, columns=1), x), "per pair"),
    "halves for pairs": (
        lambda x, p: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()) * table(p)
        ).flatten(-2),
        "neighbouring channels",
    ),
    "only the real part": (
        lambda x, p: torch.view_as_real(as_complex(x) * table(p))[..., 0],
        "not laid out as",
    ),
    "in double precision": (
        lambda x, p: torch.view_as_real(
            torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2)) * table(p)
        ).flatten(-2),
        "float64",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused_with_the_reason(name):
    body, reason = NEAR_MISSES[name]
    before, after, result = recognised(body)
    assert count(after, ROPE) == 0 and not result.changed
    assert count(after, VIEW_AS_COMPLEX) == len(result.refusals) > 0
    assert any(re.search(reason, r.reason) for r in result.refusals), result.refusals
    assert all(r.module_path == "body" and r.source_line for r in result.refusals)
    assert torch.equal(run(before, 40), run(after, 40))
