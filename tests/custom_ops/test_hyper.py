"""Hyper-connections: the reference against its definition and its source, every provider against the reference."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.hyper.hyper import hyper_connection_reference, hyper_head_reference, sinkhorn
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.tolerances import assert_close

OPTIONS = {"sinkhorn_iters": 20, "norm_eps": 1e-6, "eps": 1e-6}
HEAD_OPTIONS = {"norm_eps": 1e-6, "eps": 1e-6}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, S, C: nothing, one token, less and more than a tile and a block of tokens; widths on both sides of a segment.
SIZES = [(0, 4, 64), (1, 4, 64), (5, 4, 1100), (129, 4, 40), (17, 2, 72), (3, 1, 16), (6, 3, 33), (2, 16, 24)]
# The mixing weights are float32 results of sums over all channels, whatever the streams are.
WEIGHTS = {"rtol": 1e-5, "atol": 2e-6}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def provider(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    chosen.prepare()
    return chosen


def operands(T, S, C, dtype=torch.float32, *, rows=None, num_scales=3, seed=0):
    """streams, fn, base, scale: logits of magnitude about 1, so that no sigmoid saturates."""
    generator = torch.Generator().manual_seed(seed)
    rows = (2 + S) * S if rows is None else rows
    streams = torch.randn(T, S, C, generator=generator).to(dtype)
    fn = torch.randn(rows, S * C, generator=generator) * (S * C) ** -0.5
    base, scale = (torch.randn(size, generator=generator) for size in (rows, num_scales))
    return streams, fn, base, scale


def head_operands(T, S, C, dtype=torch.float32):
    return operands(T, S, C, dtype, rows=S, num_scales=1)


def mix_operands(T, S, C, dtype=torch.float32):
    streams, fn, base, scale = operands(T, S, C, dtype)
    post, comb, update = hyper_connection_reference(streams, fn, base, scale, **OPTIONS)
    return streams, post, comb, update.flip(-1)


def check_connection(op, streams, fn, base, scale):
    post, comb, collapsed = op(streams, fn, base, scale, **OPTIONS)
    exact = hyper_connection_reference(streams.float(), fn, base, scale, **OPTIONS)
    assert post.dtype == comb.dtype == torch.float32 and collapsed.dtype == streams.dtype
    assert all(x.is_contiguous() for x in (post, comb, collapsed))
    torch.testing.assert_close(post, exact[0], **WEIGHTS)
    torch.testing.assert_close(comb, exact[1], **WEIGHTS)
    assert_close(collapsed, exact[2])


# ---- definition ----


def test_sinkhorn_of_known_logits():
    """Computed by hand, in float64."""
    logits = torch.tensor([[0, 1, 2, 3], [1, 0, -1, 0.5], [0.2, 0.4, 0.6, 0.8], [-2, 0, 1, 0]])
    comb = sinkhorn(logits, 20, 1e-6)
    golden = {
        0: [0.065969, 0.163821, 0.251102, 0.519107],
        1: [0.608480, 0.204503, 0.042423, 0.144593],
        3: [0.047637, 0.321566, 0.492893, 0.137903],
    }
    for row, values in golden.items():
        torch.testing.assert_close(comb[row], torch.tensor(values), rtol=0, atol=1e-6)
    torch.testing.assert_close(comb.sum(0), torch.full((4,), 1 - 1e-6), rtol=0, atol=3e-7)
    torch.testing.assert_close(comb.sum(1), torch.ones(4), rtol=0, atol=1e-4)


def test_known_logits_through_the_op(provider):
    """With fn zero the logits are base: the same matrix comes out, and sigmoids of 0."""
    logits = torch.tensor([0, 1, 2, 3, 1, 0, -1, 0.5, 0.2, 0.4, 0.6, 0.8, -2, 0, 1, 0])
    streams, fn, _, _ = operands(3, 4, 8)
    base = torch.cat([torch.zeros(8), logits])
    op = provider.overload("hyper_connection")
    post, comb, collapsed = op(streams, torch.zeros_like(fn), base, torch.ones(3), **OPTIONS)
    torch.testing.assert_close(comb, sinkhorn(logits.view(1, 4, 4), 20, 1e-6).expand(3, 4, 4), **WEIGHTS)
    torch.testing.assert_close(post, torch.ones(3, 4), **WEIGHTS)
    torch.testing.assert_close(collapsed, streams.sum(1) * (0.5 + 1e-6), rtol=1e-5, atol=1e-5)


def test_one_iteration_normalises_columns_only(provider):
    streams, fn, base, scale = operands(5, 4, 24)
    options = {**OPTIONS, "sinkhorn_iters": 1}
    _, comb, _ = provider.overload("hyper_connection")(streams, fn, base, scale, **options)
    torch.testing.assert_close(comb.sum(1), torch.ones(5, 4), rtol=0, atol=5e-6)
    assert (comb.sum(2) - 1).abs().max() > 1e-2


# ---- providers ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_connection(provider, sizes, dtype):
    check_connection(provider.overload("hyper_connection"), *operands(*sizes, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_head(provider, sizes, dtype):
    streams, fn, base, scale = head_operands(*sizes, dtype)
    out = provider.overload("hyper_head")(streams, fn, base, scale, **HEAD_OPTIONS)
    assert out.dtype == dtype and out.is_contiguous()
    assert_close(out, hyper_head_reference(streams.float(), fn, base, scale, **HEAD_OPTIONS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_mix(provider, sizes, dtype):
    """Three roundings to the streams' dtype are part of the contract: exact but for the sum's order."""
    streams, post, comb, update = mix_operands(*sizes, dtype)
    out = provider.overload("hyper_mix")(streams, post, comb, update)
    assert out.dtype == dtype and out.is_contiguous()
    post, comb, update, streams = (x.to(dtype).double() for x in (post, comb, update, streams))
    added, kept = post.unsqueeze(-1) * update.unsqueeze(1), comb.transpose(1, 2) @ streams
    # A product that lies at a midpoint may be rounded either way: one unit of each term.
    unit = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert ((out.double() - added - kept).abs() <= unit * (added.abs() + kept.abs()) + 1e-6).all()
    if dtype is not torch.float32:
        same = added.to(dtype) + kept.to(dtype)
        assert out.numel() == 0 or (out == same).double().mean() > 0.99


def test_reduced_weights_of_the_logits(provider):
    streams, fn, base, scale = operands(5, 4, 1100, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = tuple(x.to(dtype) for x in (fn, base, scale))
        check_connection(provider.overload("hyper_connection"), streams, *narrow)


def test_layouts(provider):
    connection, mix = provider.overload("hyper_connection"), provider.overload("hyper_mix")
    streams, fn, base, scale = operands(8, 4, 40)
    wide = torch.randn(8, 6, 80)
    for strided in (
        wide[:, 1:5, :40],
        wide[:, :4, ::2],
        wide[::2, :4, 40:],
        wide[:, :4, :40].transpose(0, 1)[:, :4],
    ):
        check_connection(connection, strided, fn, base, scale)
        contiguous = strided.contiguous()
        post, comb, update = connection(contiguous, fn, base, scale, **OPTIONS)
        assert torch.equal(mix(strided, post, comb, update), mix(contiguous, post, comb, update))
    check_connection(connection, streams, fn.T.contiguous().T, base, scale)
    check_connection(connection, streams, torch.cat([fn, fn], 1)[:, : fn.shape[1]], base, scale)
    post, comb, update = connection(streams, fn, base, scale, **OPTIONS)
    strided = mix(streams, post.T.contiguous().T, comb.transpose(1, 2).contiguous().transpose(1, 2), update)
    assert torch.equal(strided, mix(streams, post, comb, update))


def test_extreme_logits_stay_finite_and_stochastic(provider):
    streams, fn, base, scale = operands(4, 4, 24)
    for factor in (1e4, -1e4):
        out = provider.overload("hyper_connection")(streams, fn, base, scale * factor, **OPTIONS)
        assert all(x.isfinite().all() for x in out)
        torch.testing.assert_close(out[1].sum(1), torch.ones(4, 4), rtol=0, atol=2e-5)


def test_nan_stays_with_its_token(provider):
    streams, fn, base, scale = operands(20, 4, 24)
    streams[3, 1, 5] = float("nan")
    for x in provider.overload("hyper_connection")(streams, fn, base, scale, **OPTIONS):
        assert x[3].isnan().all() and not x[:3].isnan().any() and not x[4:].isnan().any()


def test_errors(provider):
    connection, mix = provider.overload("hyper_connection"), provider.overload("hyper_mix")
    streams, fn, base, scale = operands(4, 4, 24)
    bad = [(streams[0], fn, base, scale), (streams, fn[1:], base, scale), (streams, fn[:, 1:], base, scale)]
    bad += [(streams, fn, base[1:], scale), (streams, fn, base, scale[1:])]
    for args in bad:
        with pytest.raises((ValueError, RuntimeError), match="must be"):
            connection(*args, **OPTIONS)
        with pytest.raises((ValueError, RuntimeError), match="must be"):
            provider.overload("hyper_head")(*args, **HEAD_OPTIONS)
    with pytest.raises((ValueError, RuntimeError), match="1 or more"):
        connection(streams, fn, base, scale, **{**OPTIONS, "sinkhorn_iters": 0})
    streams, post, comb, update = mix_operands(4, 4, 24)
    bad = [(streams, post[1:], comb, update), (streams, post, comb[:, 1:], update)]
    bad += [(streams, post, comb, update[1:]), (streams, post, comb, update.bfloat16())]
    for args in bad:
        with pytest.raises((ValueError, RuntimeError), match="must be"):
            mix(*args)


def test_same_bits_with_any_number_of_tokens_and_threads():
    """Promised of the kernels; torch's matrix product promises nothing."""
    chosen = registered_providers()["cpu"]
    if chosen.problem() is not None:
        pytest.skip(str(chosen.problem()))
    chosen.prepare()
    op = chosen.overload("hyper_connection")
    streams, fn, base, scale = operands(40, 4, 1100, torch.bfloat16)
    together = op(streams, fn, base, scale, **OPTIONS)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, op(streams, fn, base, scale, **OPTIONS), together))
    finally:
        torch.set_num_threads(threads)
    for T in (1, 2, 7, 33):
        alone = op(streams[:T], fn, base, scale, **OPTIONS)
        assert all(torch.equal(a, b[:T]) for a, b in zip(alone, together, strict=True))


def test_opcheck(provider):
    torch.library.opcheck(provider.overload("hyper_connection"), operands(4, 4, 24), OPTIONS)
    torch.library.opcheck(provider.overload("hyper_head"), head_operands(4, 4, 24), HEAD_OPTIONS)
    torch.library.opcheck(provider.overload("hyper_mix"), mix_operands(4, 4, 24, torch.bfloat16))
