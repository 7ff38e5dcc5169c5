"""Latent rows in Triton: written, and read by the absorbed form of MLA."""

import dataclasses
import itertools

import pytest
import torch

from pagebinder.custom_ops.latent.layouts import PLAIN_DTYPES, store_rows
from pagebinder.custom_ops.latent.write import kv_rope_quant_store_reference, latent_cache_write_reference
from tests.custom_ops.test_latent_write import (  # noqa: F401  (one is run here with the provider of this folder)
    BAD,
    KINDS,
    SIZES,
    int32,
    make_cache,
    make_rows,
    make_slots,
    test_nan_stays_in_its_block,
)
from tests.custom_ops.test_mla import CASES, SINKS, assert_mla_close, make_inputs
from tests.custom_ops.triton.on_device import DEVICE, OF_A_KERNEL

PLAIN = ["decode", "mixed", "window", "no multiples", "narrow latent", "many heads"]
SMALL = ((9, 1), (0, 6), (17, 3), (40, 1))
OTHERS = {
    "indices": dataclasses.replace(CASES["indices"], lengths=SMALL),
    "indices in a window": dataclasses.replace(CASES["indices"], lengths=SMALL, window=9),
    "groups": dataclasses.replace(CASES["groups"], lengths=SMALL),
    "groups in a window": dataclasses.replace(CASES["groups in a window"], lengths=SMALL, window=11),
    "groups without RoPE": dataclasses.replace(CASES["groups without RoPE"], lengths=SMALL),
    "fp8": dataclasses.replace(CASES["fp8"], lengths=SMALL, padding=2),
    "fp8 with indices": dataclasses.replace(CASES["fp8 with indices"], lengths=SMALL),
    "fp8 with a window": dataclasses.replace(CASES["fp8 with a window"], lengths=SMALL, window=7),
    "fp8_v4": dataclasses.replace(CASES["fp8"], lengths=SMALL, layout="fp8_v4"),
}


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("name", PLAIN)
def test_paged_mla_attention(provider, name, sinks):
    for dtype in (torch.float32, torch.bfloat16) if name in ("decode", "mixed") else (torch.float32,):
        inputs = make_inputs(dataclasses.replace(CASES[name], dtype=dtype, sinks=sinks))
        options = inputs.options
        out = provider.overload("paged_mla_attention")(*inputs.operands, **options)
        assert out.dtype == dtype and out.is_contiguous()
        assert_mla_close(out, inputs.wide().run("pagebinder"))


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("name", ["decode", "mixed", "window"])
def test_rows_of_many_heads_are_served_a_token_at_a_time(provider, name, sinks):
    """Enough heads for a product of the tensor cores; not a multiple of what a program takes."""
    case = dataclasses.replace(CASES[name], dtype=torch.bfloat16, heads=67, sinks=sinks, padding=2)
    inputs = make_inputs(case)
    out = provider.overload("paged_mla_attention")(*inputs.operands, **inputs.options)
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    assert_mla_close(out, inputs.wide().run("pagebinder"))


@pytest.mark.parametrize("sinks", SINKS)
def test_a_long_context_is_split(provider, sinks):
    inputs = make_inputs(dataclasses.replace(CASES["split"], lengths=((700, 1), (600, 3)), sinks=sinks))
    out = provider.overload("paged_mla_attention")(*inputs.operands, **inputs.options)
    assert_mla_close(out, inputs.run("pagebinder"))


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("name", OTHERS)
def test_lists_and_rows_of_bytes(provider, name, sinks):
    """At once values of 1 and their rounding: absorbed queries, too, are those of a narrower type."""
    for dtype in (torch.float32, torch.bfloat16) if name == "fp8 with indices" else (torch.float32,):
        inputs = make_inputs(dataclasses.replace(OTHERS[name], dtype=dtype, sinks=sinks))
        out = provider.overload("paged_mla_attention")(*inputs.operands, **inputs.options)
        assert out.dtype == dtype and out.is_contiguous()
        assert_mla_close(out, inputs.wide().run("pagebinder"))


# ---- writes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_layout(provider, kind):
    """Rows of every layout, in arenas at even and odd addresses; DeepSeek's sizes with random ones only."""
    write = provider.overload("latent_cache_write")
    for i, (layout, width, rope_dim) in enumerate(SIZES):
        if kind != "random" and width not in (70, 134, 48, 32):
            continue
        dtype = PLAIN_DTYPES[i % 3]
        rows = make_rows(kind, 18, width).to(dtype)
        slots = make_slots(18, 7 * 7, torch.Generator().manual_seed(1))
        (ours, arena), (theirs, expected) = (
            make_cache(layout, width, rope_dim, 7, 7, torch.bfloat16, padding=24 + (kind == "tops"))
            for _ in range(2)
        )
        store_rows(rows[slots >= 0], theirs, slots[slots >= 0], layout, rope_dim)
        assert write(rows, ours, slots, layout=layout, rope_dim=rope_dim) is None
        assert torch.equal(arena.view(torch.uint8), expected.view(torch.uint8)), layout


def test_plain_rows_are_converted(provider):
    for dtype, cache_dtype in itertools.product(PLAIN_DTYPES, repeat=2):
        rows = make_rows("random", 20, 37).to(dtype)
        cache, arena = make_cache("plain", 37, 0, 3, 8, cache_dtype)
        slots = torch.arange(2, 22, dtype=torch.int32)
        slots[7], slots[9] = -1, 1 << 30
        expected = cache.clone()
        keep = (slots >= 0) & (slots < 24)
        latent_cache_write_reference(rows[keep], expected, slots[keep])
        provider.overload("latent_cache_write")(rows, cache, slots)
        assert torch.equal(cache, expected) and bool((arena[:, :8] == 7).all())


@pytest.mark.parametrize(("layout", "width", "rope_dim"), SIZES)
def test_rotated_rows_have_the_bits_of_the_reference(provider, layout, width, rope_dim):
    store, generator = provider.overload("kv_rope_quant_store"), torch.Generator().manual_seed(0)
    types = (torch.float32, torch.bfloat16, torch.float16)
    for num_tokens, pairs, dtype, table_dtype in zip(
        (9, 11, 0), (width // 2, 3, 3), types, types[1:] + types
    ):
        kv = torch.randn(num_tokens, width + 3, generator=generator).to(dtype)[:, :width]
        angles = 1000 * torch.randn(num_tokens, pairs, generator=generator)
        cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
        slots = make_slots(num_tokens, 21, generator)
        (ours, arena), (theirs, expected) = (
            make_cache(layout, width, rope_dim, 3, 7, dtype, padding=25) for _ in range(2)
        )
        kv_rope_quant_store_reference(kv, cos, sin, theirs, slots, layout=layout, rope_dim=rope_dim)
        assert store(kv, cos, sin, ours, slots, layout=layout, rope_dim=rope_dim) is None
        assert torch.equal(arena.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("message", sorted(set(BAD) - {"outside the cache"}))
def test_bad_operands_raise(provider, message):
    operands = {"rows": torch.randn(3, 36), "cache": torch.zeros(4, 8, 36), "slots": int32(0, 5, 31)}
    operands = {**operands, "layout": "plain", **BAD[message]}
    rows, cache, slots, layout = operands.values()
    table = torch.ones(3, 8)
    with pytest.raises((ValueError, RuntimeError), match=message):
        provider.overload("latent_cache_write")(rows, cache, slots, layout=layout)
    with pytest.raises((ValueError, RuntimeError), match=message):
        provider.overload("kv_rope_quant_store")(rows, table, table, cache, slots, layout=layout)


def test_opcheck(provider):
    rows, table, slots = torch.randn(3, 80), torch.randn(3, 8), int32(0, -1, 11)
    operands = [x.to(DEVICE) for x in (rows, table, table, torch.zeros(2, 8 * 104, dtype=torch.uint8), slots)]
    options = {"layout": "fp8_v4", "rope_dim": 16}
    provider.overload("kv_rope_quant_store"), provider.overload("latent_cache_write")
    torch.library.opcheck(
        torch.ops.pagebinder_triton.kv_rope_quant_store, operands, options, test_utils=OF_A_KERNEL
    )
    write = torch.ops.pagebinder_triton.latent_cache_write
    torch.library.opcheck(write, (operands[0], *operands[3:]), options, test_utils=OF_A_KERNEL)
