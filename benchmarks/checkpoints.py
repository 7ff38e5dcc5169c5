"""Checkpoints that benchmarks make for themselves, with random weights, and what their shapes say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pagebinder.models import tiny_path

SHARED = {"tie_word_embeddings": True, "dtype": "bfloat16"}


def qwen3() -> Qwen3Config:
    """Qwen3-0.6B, 1.2 GB."""
    return Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, **SHARED,
    )  # fmt: skip


def llama() -> LlamaConfig:
    """Llama-3.2-1B without its scaling of long positions, 2.5 GB."""
    return LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131_072, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, **SHARED,
    )  # fmt: skip


def qwen3_moe() -> Qwen3MoeConfig:
    """A small mixture of experts: 8 of 64 for each token, 2.6 GB, of which one token reads 0.47."""
    return Qwen3MoeConfig(
        vocab_size=50_304, hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=40_960, **SHARED,
    )  # fmt: skip


def random_weights(config: PretrainedConfig, folder: Path) -> None:
    """A checkpoint of a config's shape in bf16: norms of ones, all else normal with a deviation of 0.02."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02)
        else:
            parameter.data.fill_(1)
    model.tie_weights()
    model.save_pretrained(folder)


def random_qwen3(folder: Path) -> None:
    random_weights(qwen3(), folder)


def shipped(folder: Path) -> None:
    """The shipped model, copied, so that what is made of it lies beside it."""
    shutil.copytree(tiny_path(), folder)


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "qwen3-0.6b": random_qwen3,
    "llama-1b": lambda folder: random_weights(llama(), folder),
    "qwen3-moe": lambda folder: random_weights(qwen3_moe(), folder),
    "tiny": shipped,
}


@dataclass(frozen=True)
class Costs:
    """Of a decoder with full attention, tied embeddings and 2-byte weights."""

    weight_bytes: int  # of the checkpoint
    kv_bytes_per_token: int
    head_weights: int = 0  # of the LM head, which sees one row of each prompt
    vocab_size: int = 0
    expert_bytes: int = 0  # of one expert in all layers
    experts: int = 0
    experts_per_token: int = 0

    @property
    def weight_bytes_per_token(self) -> int:
        """What one token reads."""
        return self.weight_bytes - (self.experts - self.experts_per_token) * self.expert_bytes

    def decode_bytes(self, requests: int) -> float:
        """Weights that a step of so many tokens reads. Each chooses its experts evenly and by itself."""
        if not self.experts:
            return self.weight_bytes
        unread = self.experts * (1 - self.experts_per_token / self.experts) ** requests
        return self.weight_bytes - unread * self.expert_bytes

    @property
    def decode_flops(self) -> int:
        """Of one token: two for the two bytes of each weight."""
        return self.weight_bytes_per_token

    def prefill_flops(self, requests: int, prompt_tokens: int) -> int:
        """Of all matrix products with weights; attention comes on top."""
        body = self.weight_bytes_per_token // 2 - self.head_weights
        return 2 * requests * (prompt_tokens * body + self.head_weights)


def max_positions(folder: Path) -> int:
    return _config(folder)["max_position_embeddings"]


def costs(folder: Path) -> Costs:
    config = _config(folder)
    assert config["tie_word_embeddings"], "costs() counts the embedding once"
    experts = {}
    if "num_experts_per_tok" in config:
        layers, width, inner = (
            config[n] for n in ("num_hidden_layers", "hidden_size", "moe_intermediate_size")
        )
        experts = {
            "expert_bytes": 6 * layers * width * inner,
            "experts": config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
        }
    return Costs(
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        kv_bytes_per_token=4
        * config["num_hidden_layers"]
        * config["num_key_value_heads"]
        * config["head_dim"],
        head_weights=config["vocab_size"] * config["hidden_size"],
        vocab_size=config["vocab_size"],
        **experts,
    )


def _config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
