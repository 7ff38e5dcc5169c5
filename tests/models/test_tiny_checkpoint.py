"""The shipped checkpoint: readable by both libraries, small, and a language model rather than noise.

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

from pagebinder.models import tiny_path
from pagebinder.models.llama import LlamaConfig, LlamaForCausalLM

EXCERPT = (Path(__file__).parent / "held_out_excerpt.txt").read_text(encoding="utf-8")
MAX_BITS_PER_BYTE = 1.5  # a uniform guess costs 3.5


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(tiny_path())


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)


def _ids(tokenizer, text: str) -> torch.Tensor:
    return torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])


@torch.no_grad()
def _bits_per_byte(model, tokenizer, text: str) -> float:
    ids = _ids(tokenizer, text)
    nats = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="sum").item()
    return nats / math.log(2) / len(text.encode())


@torch.no_grad()
def test_both_libraries_agree(model, tokenizer):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    ids = _ids(tokenizer, EXCERPT)
    torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "text",
    [EXCERPT, "Grüße, 世界! 🙂\t\r\n\x00 end ", "", "   leading", "a" * 300, "don't  stop\n\n\nnow"],
    ids=["excerpt", "unicode", "empty", "leading", "long", "spaces"],
)
def test_tokenizer_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_fits_the_model(model, tokenizer):
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.convert_ids_to_tokens(model.config.eos_token_id) == "<|endoftext|>"
    assert tokenizer.model_max_length == model.config.max_position_embeddings


def test_it_predicts_text_it_has_not_seen(model, tokenizer):
    trained = _bits_per_byte(model, tokenizer, EXCERPT)
    untrained = LlamaForCausalLM(model.config)
    untrained.init_weights(seed=0)
    assert trained < MAX_BITS_PER_BYTE
    assert _bits_per_byte(untrained, tokenizer, EXCERPT) > 2 * MAX_BITS_PER_BYTE


def test_bfloat16_costs_next_to_nothing(model, tokenizer):
    shipped = LlamaForCausalLM.from_pretrained(tiny_path())
    assert {parameter.dtype for parameter in shipped.parameters()} == {torch.bfloat16}
    costs = [_bits_per_byte(m, tokenizer, EXCERPT) for m in (model, lambda ids: shipped(ids).float())]
    assert abs(costs[0] - costs[1]) < 0.02


def test_greedy_continuation_matches_transformers(model, tokenizer):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    prompt = _ids(tokenizer, "The `json` module provides")
    ids = prompt
    with torch.no_grad():
        for _ in range(24):
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    mask = torch.ones_like(prompt)
    generated = theirs.generate(
        prompt, attention_mask=mask, do_sample=False, max_new_tokens=24, pad_token_id=0
    )
    assert generated.shape[1] > prompt.shape[1] + 4
    assert ids[:, : generated.shape[1]].tolist() == generated.tolist()


def test_size_and_figures():
    files = {path.name: path.stat().st_size for path in tiny_path().iterdir()}
    assert sum(files.values()) < 10_000_000
    assert {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "training.json",
    } <= files.keys()
    figures = json.loads((tiny_path() / "training.json").read_text())
    config = LlamaConfig.from_dict(json.loads((tiny_path() / "config.json").read_text()))
    model = LlamaForCausalLM(config)
    assert figures["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert f"{figures['held_out_bits_per_byte']:.3f}" in (tiny_path() / "README.md").read_text()
