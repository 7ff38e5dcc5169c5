"""The cache of DeepSeek-V4 at its real sizes, against the figures of the design that pages compressor states.

That design (vLLM 0.33, 8-bit rows): V4-Flash takes 3,915 bytes per token of context in the long run, about 26 blocks
of 1,002,240 bytes per decoding request whatever its length, and 322 kB per token of a prompt in flight.
"""

from __future__ import annotations

import functools

import pytest

from pagebinder.custom_ops.layer_state import LatentState, RecurrentState
from pagebinder.runtime.kv import plan_kv_cache

MAX_MODEL_LEN = 1 << 20
PAGED_STATE_DESIGN = {"bytes_per_token": 3915, "fixed_bytes": 26 * 1_002_240}
FLASH = ("sliding",) * 2 + ("csa", "hca") * 20 + ("csa",)
PRO = ("hca",) * 2 + tuple("csa" if i % 2 == 0 else "hca" for i in range(59))
RATIO = {"csa": 4, "hca": 128}


def v4_states(layers, index_layout="fp8_index"):
    """The states that the compiler finds in a V4 model with these kinds of layers, 8-bit layouts."""
    states = []

    def add(kind, name, **options):
        states.append(kind(layer=name, index=len(states), **options))

    def compressor(name, kind, width, layout, rope_dim):
        add(RecurrentState, f"{name}.sums", dtype="float32", shape=(2 if kind == "csa" else 1, 3, width))
        add(LatentState, f"{name}.entries", dtype="bfloat16", head_dim=width, latent_dim=width, layout=layout,
            rope_dim=rope_dim, tokens_per_entry=RATIO[kind])  # fmt: skip

    for i, kind in enumerate(layers):
        row = {"dtype": "bfloat16", "head_dim": 512, "latent_dim": 512, "rope_dim": 64, "layout": "fp8_v4"}
        if kind != "sliding":
            compressor(f"{i}.compressor", kind, 512, "fp8_v4", 64)
        if kind == "csa":
            compressor(f"{i}.indexer", kind, 128, index_layout, 0)
        add(LatentState, f"{i}.window", window=128, **row)
    return states


@functools.cache
def flash_plan(**options):
    return plan_kv_cache(v4_states(FLASH, **options), max_model_len=MAX_MODEL_LEN)


def test_the_kinds_of_v4_flash():
    kinds = [state.kind for state in v4_states(FLASH)]
    assert len(FLASH) == 43 and kinds.count("sliding_window_mla") == 43
    assert kinds.count("compressed_latent") == 21 + 20 + 21 == kinds.count("recurrent")


def test_entries_have_the_true_sizes():
    by_bytes = {state.entry_bytes for state in v4_states(FLASH) if state.kind != "recurrent"}
    assert by_bytes == {584, 132}
    assert {s.entry_bytes for s in v4_states(FLASH, "fp4_index") if s.kind == "compressed_latent"} == {
        584,
        68,
    }


def test_v4_flash_takes_no_more_than_with_paged_states():
    plan = flash_plan()
    used = 21 * (584 + 132) / 4 + 20 * 584 / 128
    assert used == 3850.25
    assert used <= plan.bytes_per_token <= PAGED_STATE_DESIGN["bytes_per_token"]
    assert plan.fixed_bytes_per_request < PAGED_STATE_DESIGN["fixed_bytes"] / 4


def test_4_bit_index_keys_save_what_they_should():
    saved = flash_plan().bytes_per_token - flash_plan(index_layout="fp4_index").bytes_per_token
    assert saved == pytest.approx(21 * (132 - 68) / 4, rel=0.06)


def test_a_prompt_in_flight_costs_no_states():
    """8,192 tokens in one step: rows of the windows, entries, and a state at the end; 3.4 GB with paged states."""
    plan = flash_plan()
    decoding = plan.min_bytes(16_384, max_in_flight_tokens=1)
    states = sum(s.entry_bytes for s in v4_states(FLASH) if s.kind == "recurrent")
    recurrent = [g for g in plan.groups if g.spec.kind == "recurrent"]
    assert states == 445_440
    assert sum(g.page_bytes for g in recurrent) == states  # one state a request, not one a token
    (window,) = [g for g in plan.groups if g.spec.kind == "sliding_window_mla"]
    rows = 8192 / window.block_size * plan.bytes_per_block
    # Every boundary may be a checkpoint that prefix caching keeps, if retention is dense.
    checkpoints = sum(8192 / g.block_size * plan.bytes_per_block for g in recurrent)
    in_flight = plan.min_bytes(16_384, max_in_flight_tokens=8192) - decoding
    assert in_flight <= rows + checkpoints < 0.1 * 3.4e9


def test_requests_that_fit():
    plan = flash_plan()
    per_request = 141_000_000_000 / plan.capacity(141_000_000_000, 32_768)
    assert per_request <= 32_768 * 3915 + PAGED_STATE_DESIGN["fixed_bytes"]


def test_v4_pro():
    layers = tuple(PRO)
    plan = plan_kv_cache(v4_states(layers), max_model_len=MAX_MODEL_LEN)
    used = layers.count("csa") * (584 + 132) / 4 + layers.count("hca") * 584 / 128
    assert len(layers) == 61 and used <= plan.bytes_per_token <= used * 1.02
