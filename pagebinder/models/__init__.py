"""Plain PyTorch model definitions, and two small trained checkpoints that ship with the package."""

from pathlib import Path


def tiny_path() -> Path:
    """The directory of the shipped checkpoint: config, bfloat16 weights, tokenizer, README."""
    return Path(__file__).parent / "tiny"


def tiny_v4_path() -> Path:
    """The directory of the shipped DeepSeek-V4: all kinds of its layers, in the format of transformers."""
    return Path(__file__).parent / "tiny_v4"


# By the names of `pagebinder demo --model`.
SHIPPED = {"tiny": tiny_path, "v4": tiny_v4_path}
