"""Checkpoints that benchmarks make for themselves, with random weights, and what their shapes say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def random_qwen3(folder: Path) -> None:
    """Random weights in the shape of Qwen3-0.6B, 1.2 GB."""
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
        dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02)
        else:
            parameter.data.fill_(1)
    model.tie_weights()
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Costs:
    """Of a decoder with full attention, tied embeddings and 2-byte weights."""

    weight_bytes: int  # read in every decode step
    kv_bytes_per_token: int
    head_weights: int  # of the LM head, which sees one row of each prompt
    vocab_size: int

    @property
    def decode_flops(self) -> int:
        """Of one token: two for the two bytes of each weight."""
        return self.weight_bytes

    def prefill_flops(self, requests: int, prompt_tokens: int) -> int:
        """Of all matrix products with weights; attention comes on top."""
        body = self.weight_bytes // 2 - self.head_weights
        return 2 * requests * (prompt_tokens * body + self.head_weights)


def costs(folder: Path) -> Costs:
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"], "costs() counts the embedding once"
    return Costs(
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        kv_bytes_per_token=4
        * config["num_hidden_layers"]
        * config["num_key_value_heads"]
        * config["head_dim"],
        head_weights=config["vocab_size"] * config["hidden_size"],
        vocab_size=config["vocab_size"],
    )
