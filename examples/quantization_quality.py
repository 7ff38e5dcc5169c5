"""What weights and activations of fewer bits cost: bits per byte of the shipped model on its held-out pages, as a
Markdown table.

    python examples/quantization_quality.py

The pages are those of `train_tiny.py eval`. Every figure is that of the compiled graph, run window by window: a step
is a window, so a dynamic scale per tensor is that of a whole window. Static scales are the largest values that some
training pages reach.
"""

import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import corpus
import torch
import typer
from safetensors.torch import save_file
from train_tiny import DEFAULT_CACHE, SHIPPED, CacheOption, bits_per_byte
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagebinder import CompileConfig, compile_model
from pagebinder.config import ACTIVATION_QUANTIZATIONS, QUANTIZATIONS

CALIBRATION_PAGES = 20
LARGEST_CODE = 448.0  # of e4m3


def as_model(compiled):
    """A compiled model as `bits_per_byte` calls one: ids [1, T] -> logits [1, T, V]."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return compiled.run_level("fused", ids[0])[None]

    logits.config = types.SimpleNamespace(max_position_embeddings=compiled.max_model_len)
    return logits


def static_scales(model, tokenizer, texts: list[str]) -> dict[str, torch.Tensor]:
    """Of every linear layer "<path>.input_scale": the largest value that it reads on these texts, over 448."""
    largest: dict[str, torch.Tensor] = {}

    def observe(name: str):
        def hook(module, inputs):
            largest[name] = torch.maximum(largest.get(name, torch.zeros(())), inputs[0].abs().amax().float())

        return hook

    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    handles = [layer.register_forward_pre_hook(observe(name)) for name, layer in layers]
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt").input_ids
            model(ids[:, : model.config.max_position_embeddings])
    for handle in handles:
        handle.remove()
    return {f"{name}.input_scale": amax / LARGEST_CODE for name, amax in largest.items()}


def variants(scales: Path) -> Iterator[tuple[str, str, dict]]:
    """(weights, activations, options) of each row."""
    yield "bf16", "bf16", {}
    for weights in QUANTIZATIONS:
        yield weights, "bf16", {"quantization": weights}
    for weights in (name for name in QUANTIZATIONS if name.startswith("fp8")):
        for activations in ACTIVATION_QUANTIZATIONS:
            options = {"quantization": weights, "activation_quantization": activations}
            yield weights, activations, options
            if activations == "fp8_per_tensor":
                yield weights, "fp8_per_tensor, static", {**options, "activation_scales": scales}


def main(cache: CacheOption = DEFAULT_CACHE, checkpoint: Path = SHIPPED) -> None:
    training, held_out = corpus.split(corpus.load_documents(cache))
    texts, tokenizer = [d.text for d in held_out], AutoTokenizer.from_pretrained(checkpoint)
    source = AutoModelForCausalLM.from_pretrained(checkpoint)
    print("| weights | activations | MB of weights | bits per byte | against bf16 |\n|---|---|---|---|---|")
    plain = None
    with tempfile.TemporaryDirectory() as folder:
        scales = Path(folder) / "scales.safetensors"
        pages = [d.text for d in training[:: len(training) // CALIBRATION_PAGES]]
        save_file(static_scales(source, tokenizer, pages), scales)
        for weights, activations, options in variants(scales):
            compiled = compile_model(source, CompileConfig(executable="eager", **options))
            value = bits_per_byte(as_model(compiled), tokenizer, texts)
            plain = value if plain is None else plain
            megabytes = compiled.report.graph_weight_bytes / 1e6
            row = (weights, activations, f"{megabytes:.2f}", f"{value:.4f}", f"{value / plain - 1:+.2%}")
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
