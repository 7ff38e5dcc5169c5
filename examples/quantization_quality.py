"""What weights of fewer bits cost: bits per byte of the shipped model on its held-out pages, as a Markdown table.

    python examples/quantization_quality.py

The pages are those of `train_tiny.py eval`. Every figure is that of the compiled graph, run window by window.
"""

import types
from pathlib import Path

import corpus
import torch
import typer
from train_tiny import DEFAULT_CACHE, SHIPPED, CacheOption, bits_per_byte
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagebinder import CompileConfig, compile_model
from pagebinder.config import QUANTIZATIONS


def as_model(compiled):
    """A compiled model as `bits_per_byte` calls one: ids [1, T] -> logits [1, T, V]."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return compiled.run_level("fused", ids[0])[None]

    logits.config = types.SimpleNamespace(max_position_embeddings=compiled.max_model_len)
    return logits


def main(cache: CacheOption = DEFAULT_CACHE, checkpoint: Path = SHIPPED) -> None:
    _, held_out = corpus.split(corpus.load_documents(cache))
    texts, tokenizer = [d.text for d in held_out], AutoTokenizer.from_pretrained(checkpoint)
    source = AutoModelForCausalLM.from_pretrained(checkpoint)
    print("| weights | MB of weights | bits per byte | against bf16 |\n|---|---|---|---|")
    plain = None
    for name in (None, *QUANTIZATIONS):
        compiled = compile_model(source, CompileConfig(executable="eager", quantization=name))
        value = bits_per_byte(as_model(compiled), tokenizer, texts)
        plain = value if plain is None else plain
        megabytes = compiled.report.graph_weight_bytes / 1e6
        print(f"| {name or 'bf16'} | {megabytes:.2f} | {value:.4f} | {value / plain - 1:+.2%} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
