"""The shipped DeepSeek-V4: readable by both libraries, small, a language model, and its index does select.

`held_out_excerpt.txt` is the start of a page of the Python 3.11 tutorial that training did not see
((c) Python Software Foundation, PSF-2.0).
"""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from pagebinder.models import deepseek_v4_mixing as mixing
from pagebinder.models import tiny_path
from pagebinder.models.deepseek_v4 import DeepseekV4ForCausalLM

DIRECTORY = tiny_path().with_name("tiny_v4")
EXCERPT = (Path(__file__).parent / "held_out_excerpt.txt").read_text(encoding="utf-8")
MAX_BITS_PER_BYTE = 1.7  # a uniform guess costs 3.5


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(scope="module")
def model():
    return DeepseekV4ForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)


@pytest.fixture(scope="module")
def ids(tokenizer):
    return torch.tensor([[tokenizer.bos_token_id, *tokenizer(EXCERPT)["input_ids"]]])


def _bits_per_byte(logits: torch.Tensor, ids: torch.Tensor) -> float:
    nats = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum").item()
    return nats / math.log(2) / len(EXCERPT.encode())


@torch.no_grad()
def test_both_libraries_agree(model, ids):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    expected = theirs(ids).logits
    assert (model(ids) - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.no_grad()
def test_it_predicts_text_it_has_not_seen(model, ids):
    assert _bits_per_byte(model(ids), ids) < MAX_BITS_PER_BYTE


@torch.no_grad()
def test_bfloat16_costs_next_to_nothing(model, ids):
    shipped = DeepseekV4ForCausalLM.from_pretrained(DIRECTORY)
    assert {p.dtype for p in shipped.parameters()} == {torch.bfloat16, torch.float32}
    assert abs(_bits_per_byte(shipped(ids), ids) - _bits_per_byte(model(ids), ids)) < 0.03


@torch.no_grad()
def test_the_index_selects_and_what_it_selects_is_read(model, ids, monkeypatch):
    """It predicts better with what it chooses than with the latest entries, with random ones, or with none."""
    config, calls = model.config, []
    assert config.index_topk < ids.shape[1] // config.sparse_ratio  # the excerpt is long enough to choose
    index_topk = mixing.index_topk

    def recorded(*operands, **options):
        calls.append(index_topk(*operands, **options))
        return calls[-1]

    monkeypatch.setattr(mixing, "index_topk", recorded)
    logits = model(ids)
    last = [set(chosen[0, -1].tolist()) for chosen in calls]
    latest = set(range(ids.shape[1] // config.sparse_ratio)[-config.index_topk :])
    assert len(last) == 2 and all(len(chosen) == config.index_topk and chosen != latest for chosen in last)
    chosen = calls[0]
    cost = {"chosen": _bits_per_byte(logits, ids)}
    for name, entries in _other_choices(chosen, config.sparse_ratio).items():
        monkeypatch.setattr(mixing, "index_topk", lambda *operands, entries=entries, **options: entries)
        cost[name] = _bits_per_byte(model(ids), ids)
    assert cost["chosen"] < cost["latest"] < cost["random"] < cost["none"]
    assert cost["none"] > 1.04 * cost["chosen"]


def _other_choices(chosen_BTK: torch.Tensor, ratio: int) -> dict[str, torch.Tensor]:
    """Entries in place of the chosen ones: none, the latest, random ones of those that a token may see."""
    _, num_tokens, topk = chosen_BTK.shape
    visible_T1 = ((torch.arange(num_tokens) + 1) // ratio)[:, None]
    latest_TK = visible_T1 - 1 - torch.arange(topk)
    order_TE = torch.rand(num_tokens, num_tokens // ratio, generator=torch.Generator().manual_seed(0))
    order_TE[torch.arange(num_tokens // ratio) >= visible_T1] = -1.0
    drawn = order_TE.topk(topk, dim=1)
    random_TK = drawn.indices.where(drawn.values >= 0, -1)
    return {
        "none": torch.full_like(chosen_BTK, -1),
        "latest": latest_TK.clamp(min=-1).expand_as(chosen_BTK).to(chosen_BTK.dtype),
        "random": random_TK.expand_as(chosen_BTK).to(chosen_BTK.dtype),
    }


def test_every_kind_of_layer_is_there(model):
    assert set(model.config.layer_types) == {
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
    }  # fmt: skip
    assert set(model.config.mlp_layer_types) == {"hash_moe", "moe"}
    assert model.config.layer_types[0] == "sliding_attention"


def test_tokenizer_fits_the_model(model, tokenizer):
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.model_max_length == model.config.max_position_embeddings


def test_size_and_figures(model):
    files = {path.name: path.stat().st_size for path in DIRECTORY.iterdir()}
    assert sum(files.values()) < 10_000_000
    wanted = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "training.json"}
    assert wanted <= files.keys()
    figures = json.loads((DIRECTORY / "training.json").read_text())
    assert figures["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert f"{figures['held_out_bits_per_byte']:.3f}" in (DIRECTORY / "README.md").read_text()
