"""`pagebinder generate` with an encoder-decoder: --encoder-prompt, and what is said without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import pagebinder
from tests.encoder_decoders import tiny
from tests.test_cli import fail, generate, succeed

pytestmark = pytest.mark.usefixtures("captured_once")

TEXT = "the cache holds keys"
GREEDY = ("--temperature", 0, "--max-tokens", 8, "--json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random BART with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("encoder_decoder")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    tiny("bart", vocab_size=300, encoder_layers=1, decoder_layers=1).save_pretrained(path)
    return path


def test_generate_from_encoder_prompts(checkpoint):
    lines = generate(checkpoint, "--encoder-prompt", TEXT, "--encoder-prompt-ids", "5,6,7", *GREEDY)
    rows = sorted((json.loads(line) for line in lines.splitlines()), key=lambda row: row["index"])
    compiled = pagebinder.compile_model(checkpoint, pagebinder.CompileConfig(executable="eager"))
    params = pagebinder.SamplingParams(temperature=0.0, max_tokens=8)
    wanted = compiled.engine().generate(params=params, encoder_prompts=[TEXT, [5, 6, 7]])
    assert [row["token_ids"] for row in rows] == [output.token_ids for output in wanted]
    assert [row["prompt"] for row in rows] == [TEXT, None]
    assert [row["prompt_token_ids"] for row in rows] == [[2], [2]]


def test_a_decoder_prompt_besides(checkpoint):
    row = json.loads(
        generate(checkpoint, "--encoder-prompt", TEXT, "--prompt-ids", "2,40,41", "--max-tokens", 3, "--json")
    )
    assert row["prompt_token_ids"] == [2, 40, 41]


def test_one_encoder_prompt_streams(checkpoint):
    assert generate(checkpoint, "--encoder-prompt", "-", "--max-tokens", 5, stdin=TEXT)


def test_what_is_missing_is_told(checkpoint):
    command = ("generate", "--model", checkpoint, "--executable", "eager")
    assert "give encoder_prompt" in fail(*command, "--prompt", TEXT)
    two = ("--encoder-prompt", "a", "--encoder-prompt", "b", "--prompt", "c")
    assert "2 encoder prompts but 1 prompts" in fail(*command, *two)
    assert "only one prompt" in fail(*command, "--encoder-prompt", "-", "--prompt", "-")
    assert "--encoder-prompt" in succeed("generate", "--help")
