"""Sound models that faults are seeded into: each is captured once, and compiled once with every net stretched."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import pagebinder
import pagebinder.compile as compiler
from pagebinder import CompileConfig
from tests import helpers, moe_models
from tests.captures import capture_once
from tests.encoder_decoders import tiny
from tests.fuzz.random_decoders import decoder_of
from tests.fuzz.recipes import Recipe

WINDOW = CHUNK = 8
_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_ONE = {"num_hidden_layers": 1}
PLAIN = {"masks": ("window",), "attention": "sdpa bool", "positions": "partial", "extra": "first values"}

BASES: dict[str, Callable[[], torch.nn.Module]] = {
    "mistral": lambda: helpers.tiny_mistral(WINDOW),
    "mistral bf16": lambda: helpers.tiny_mistral(WINDOW, num_hidden_layers=1).bfloat16(),
    "gemma2": lambda: helpers.tiny_gemma2(WINDOW, **_TWO_LAYERS),
    "gemma3": lambda: helpers.tiny_gemma3(WINDOW, **_TWO_LAYERS),
    "gpt-oss": lambda: helpers.tiny_gpt_oss(WINDOW, **_TWO_LAYERS),
    "llama4": lambda: helpers.tiny_llama4(
        CHUNK, layer_types=["chunked_attention"], no_rope_layers=[1], **_ONE
    ),
    "lfm2": lambda: helpers.tiny_lfm2(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "mamba2": lambda: helpers.tiny_mamba2(**_ONE),
    "qwen3-next": lambda: helpers.tiny_qwen3_next(
        layer_types=["linear_attention"], mlp_only_layers=[0], **_ONE
    ),
    "gpt-oss experts": lambda: moe_models.tiny_gpt_oss_moe(layer_types=["full_attention"], **_ONE),
    "qwen3 experts": lambda: moe_models.tiny_qwen3_moe(mlp_only_layers=[], **_ONE),
    "bart": lambda: tiny("bart", encoder_layers=1, decoder_layers=1),
    "plain": lambda: decoder_of(Recipe(**PLAIN)),
    "written out": lambda: decoder_of(Recipe(masks=("window",), attention="masked_fill")),
    "alibi": lambda: decoder_of(Recipe(masks=("causal",), attention="masked_fill", positions="alibi")),
    "by distance": lambda: decoder_of(
        Recipe(masks=("causal",), attention="masked_fill", positions="by distance")
    ),
}


@functools.cache
def base(name: str) -> torch.nn.Module:
    return BASES[name]()


def config(verify: str, **options) -> CompileConfig:
    return CompileConfig(executable="eager", verify=verify, block_size=8, max_model_len=64, **options)


@functools.cache
def lock_path(name: str) -> Path:
    """The plan lock of a base, written by a sound compilation."""
    path = Path(_locks().name) / f"{name.replace(' ', '-')}.lock"
    compile_base(name, "off", lock=path)
    return path


@functools.cache
def _locks() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


_capture = compiler._capture


def compile_base(name: str, verify: str, **options):
    """Compile a base, from its one capture unless somebody replaced the capture."""
    before = compiler._capture
    if before is _capture:
        compiler._capture = capture_once
    try:
        return pagebinder.compile_model(base(name), config(verify, **options))
    finally:
        compiler._capture = before
