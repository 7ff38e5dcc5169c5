"""compress and compress_norm_rope_store: operands that do not fit, schemas, and transformers' own compressors."""

from __future__ import annotations

import pytest
import torch

from tests.custom_ops.compress_cases import Compressor, Paged
from tests.custom_ops.test_compress import OPS, store  # noqa: F401  (a fixture)
from tests.tolerances import assert_close


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


NAMES = (
    "kv", "gate", "position_bias", "norm_weight", "inv_freq", "state_cache", "state_table", "entry_cache",
    "entry_table", "seq_lens", "query_start_loc",
)  # fmt: skip
OPTIONS = {"ratio": 4, "overlap": True, "eps": 1e-6, "rope_scale": 1.0, "block_size": 8}


def operands() -> dict:
    """A request of 9 tokens, one of them known."""
    bias, norm, inv_freq = Compressor(4, True).weights
    values = (
        torch.randn(8, 48), torch.randn(8, 48), bias, norm, inv_freq, torch.zeros(3, 2, 3, 24), int32(1, 2)[None],
        torch.zeros(3, 2, 24), int32(1)[None], int32(9), int32(0, 8),
    )  # fmt: skip
    return dict(zip(NAMES, values))


BAD = [
    ("kv and gate are", {"gate": torch.randn(8, 47)}),
    ("one float type", {"gate": torch.randn(8, 48).half()}),
    ("with overlap", {"overlap": False}),
    ("with overlap, as norm_weight", {"norm_weight": torch.ones(20)}),
    ("position_bias is", {"position_bias": torch.zeros(3, 48)}),
    ("position_bias must be", {"position_bias": torch.zeros(4, 48).half()}),
    ("ratio must be positive", {"ratio": 0}),
    ("inv_freq is", {"inv_freq": torch.ones(4).double()}),
    ("more channels", {"inv_freq": torch.ones(13)}),
    ("state_cache is", {"state_cache": torch.zeros(3, 1, 3, 24)}),
    ("state_cache is", {"state_cache": torch.zeros(3, 2, 3, 24).half()}),
    ("wide, not", {"entry_cache": torch.zeros(3, 2, 20)}),
    ("unknown layout", {"layout": "fp8_v5"}),
    ("uint8", {"layout": "fp8_index", "entry_cache": torch.zeros(3, 200), "norm_weight": torch.ones(16)}
     | {"kv": torch.randn(8, 32), "gate": torch.randn(8, 32), "position_bias": torch.zeros(4, 32)}
     | {"state_cache": torch.zeros(3, 2, 3, 16)}),
    ("must be int32", {"seq_lens": torch.tensor([9])}),
    ("int32", {"entry_table": torch.tensor([[1]])}),
    ("at least as many rows", {"seq_lens": int32(9, 9), "query_start_loc": int32(0, 4, 8)}),
    ("one entry more", {"query_start_loc": int32(0, 4, 8)}),
    ("rise from 0", {"query_start_loc": int32(0, 9)}),
    ("rise from 0", {"query_start_loc": int32(1, 8)}),
    ("smaller than its new tokens", {"seq_lens": int32(7)}),
    ("exceeds its block table", {"seq_lens": int32(17)}),
    ("exceeds its entry table", {"seq_lens": int32(13)}),
    ("block_size must be positive", {"block_size": 0}),
    ("start state is null", {"state_table": int32(0, 2)[None]}),
    ("block_table is not valid", {"state_table": int32(1, 3)[None]}),
    ("entry_table is not valid", {"entry_table": int32(3)[None]}),
    ("entry_table is not valid", {"entry_table": int32(-1)[None]}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "change"), BAD)
def test_bad_operands_raise(store, message, change):  # noqa: F811
    arguments = operands() | OPTIONS | change
    values = [arguments.pop(name) for name in NAMES]
    kept = [values[5].clone(), values[7].clone()]
    with pytest.raises((ValueError, RuntimeError), match=message):
        store(*values, **arguments)
    if "block_table is not valid" not in message:
        assert torch.equal(values[5], kept[0]) and torch.equal(values[7], kept[1]), "it wrote and then raised"


def test_good_operands(store):  # noqa: F811
    store(*operands().values(), **OPTIONS)


def test_semantic_operands():
    for message, change in BAD[:9]:
        arguments = operands() | OPTIONS | change
        options = {name: arguments[name] for name in ("ratio", "overlap", "eps", "rope_scale")}
        with pytest.raises(ValueError, match=message):
            OPS.compress(*(arguments[name] for name in NAMES[:5]), **options)


def test_opcheck(store):  # noqa: F811
    torch.library.opcheck(store, tuple(operands().values()), OPTIONS)
    paged = operands() | {"entry_cache": torch.zeros(3, 2 * 20, dtype=torch.uint8)}
    paged |= {"kv": torch.randn(8, 32), "gate": torch.randn(8, 32), "position_bias": torch.zeros(4, 32)}
    paged |= {"norm_weight": torch.ones(16), "state_cache": torch.zeros(3, 2, 3, 16)}
    torch.library.opcheck(store, tuple(paged.values()), {**OPTIONS, "layout": "fp8_index"})
    options = {name: OPTIONS[name] for name in ("ratio", "overlap", "eps")}
    torch.library.opcheck(OPS.compress.default, tuple(operands().values())[:5], options)
    unnormed = operands() | {"norm_weight": None, "inv_freq": torch.empty(0)}
    torch.library.opcheck(store, tuple(unnormed.values()), OPTIONS)
    torch.library.opcheck(OPS.compress.default, tuple(unnormed.values())[:5], options)


def test_a_step_without_requests_or_tokens(store):  # noqa: F811
    paged = Paged(store, Compressor(4, True), [9, 9], 8)
    paged.step([0, 0], padding=3)
    paged.step([0, 0])
    assert paged.states.isnan().all() and paged.entry_arena.isnan().all()


@pytest.mark.parametrize("kind", ["heavily_compressed_attention", "compressed_sparse_attention"])
def test_agrees_with_transformers(kind):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    torch.manual_seed(0)
    overlap = kind == "compressed_sparse_attention"
    config = DeepseekV4Config(
        hidden_size=32, head_dim=32, num_hidden_layers=2, num_attention_heads=2, q_lora_rank=16
    )
    module = (v4.DeepseekV4CSACompressor if overlap else v4.DeepseekV4HCACompressor)(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ratio, hidden = config.compress_rates[kind], torch.randn(1, 300, 32)
    with torch.no_grad():
        entries, _ = module(hidden, torch.randn(1, 300, 16), torch.arange(300)[None], None, 0)
        out = OPS.compress(
            module.kv_proj(hidden)[0], module.gate_proj(hidden)[0], module.position_bias, module.kv_norm.weight,
            module.rotary_emb.compress_inv_freq, ratio=ratio, overlap=overlap, eps=config.rms_norm_eps,
            rope_scale=module.rotary_emb.compress_attention_scaling,
        )  # fmt: skip
    assert entries.shape[2] == 300 // ratio
    assert_close(out[ratio - 1 :: ratio], entries[0, 0])
