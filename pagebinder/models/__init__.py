"""Plain PyTorch model definitions, and a small trained checkpoint that ships with the package."""

from pathlib import Path


def tiny_path() -> Path:
    """The directory of the shipped checkpoint: config, bfloat16 weights, tokenizer, README."""
    return Path(__file__).parent / "tiny"
