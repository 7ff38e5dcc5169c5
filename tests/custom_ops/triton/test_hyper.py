"""Hyper-connections in Triton: the cases of the other providers, and splits of the channels."""

import pytest
import torch

from pagebinder.custom_ops.triton import hyper as kernels
from tests.custom_ops import test_hyper as elsewhere
from tests.custom_ops.test_hyper import (  # noqa: F401  (run here with the provider of this folder)
    test_errors,
    test_known_logits_through_the_op,
    test_one_iteration_normalises_columns_only,
)
from tests.custom_ops.triton.on_device import DEVICE, OF_A_KERNEL
from tests.helpers import nightly

# Several tiles of channels, and of tokens; one stream, and as many as need no padding, or some.
SIZES = {
    torch.float32: [(0, 4, 64), (1, 3, 33), (2, 1, 16)],
    torch.bfloat16: [(1, 4, 1100), (1, 16, 24)],
    torch.float16: [(3, 2, 40)],
}


@pytest.mark.parametrize("dtype", SIZES)
def test_each_size(provider, dtype):
    for sizes in SIZES[dtype]:
        elsewhere.test_connection(provider, sizes, dtype)
        elsewhere.test_head(provider, sizes, dtype)
        elsewhere.test_mix(provider, sizes, dtype)


def test_splits(provider, monkeypatch):
    """The last one shorter than the others; one token, and more than a tile."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 20)
    monkeypatch.setattr(kernels, "MIN_CHANNELS_OF_SPLIT", 64)
    elsewhere.test_connection(provider, (1, 4, 200), torch.bfloat16)
    elsewhere.test_head(provider, (17, 2, 50), torch.float32)


def test_strides(provider):
    """Streams of wider ones, weights of columns; the results have the same bits."""
    connection, mix = provider.overload("hyper_connection"), provider.overload("hyper_mix")
    wide, (_, fn, base, scale) = torch.randn(4, 5, 80), elsewhere.operands(2, 4, 40)
    for strided in (wide[::2, 1:, :40], wide[:2, :4, ::2]):
        elsewhere.check_connection(connection, strided, fn.T.contiguous().T, base, scale)
        contiguous = strided.contiguous()
        post, comb, update = connection(contiguous, fn, base, scale, **elsewhere.OPTIONS)
        expected = mix(contiguous, post, comb, update)
        assert torch.equal(mix(strided, post.T.contiguous().T, comb.mT.contiguous().mT, update), expected)


def test_nan_and_extreme_logits(provider):
    connection = provider.overload("hyper_connection")
    streams, fn, base, scale = elsewhere.operands(3, 4, 8)
    streams[1, 1, 5] = float("nan")
    for x in connection(streams, fn, base, scale * 1e4, **elsewhere.OPTIONS):
        assert x[1].isnan().all() and x[::2].isfinite().all()


@nightly
def test_as_elsewhere(provider):
    elsewhere.test_layouts(provider)
    elsewhere.test_extreme_logits_stay_finite_and_stochastic(provider)
    elsewhere.test_reduced_weights_of_the_logits(provider)
    for dtype in SIZES:
        for T, S, C in elsewhere.SIZES:
            elsewhere.test_connection(provider, (min(T, 35), S, C), dtype)
            elsewhere.test_head(provider, (min(T, 35), S, C), dtype)
            elsewhere.test_mix(provider, (min(T, 35), S, C), dtype)


def test_opcheck(provider):
    for name, operands, options in (
        ("hyper_connection", elsewhere.operands(1, 4, 24), elsewhere.OPTIONS),
        ("hyper_head", elsewhere.head_operands(1, 4, 24), elsewhere.HEAD_OPTIONS),
        ("hyper_mix", elsewhere.mix_operands(1, 4, 24, torch.bfloat16), {}),
    ):
        provider.overload(name)
        moved = [x.to(DEVICE) for x in operands]
        op = getattr(torch.ops.pagebinder_triton, name)
        torch.library.opcheck(op, moved, options, test_utils=OF_A_KERNEL)
