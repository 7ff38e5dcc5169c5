"""A decoder in an ONNX file as a `ModelSource`, and what the engine needs to know of it.

FILE.onnx, or a directory with model.onnx and no *.safetensors
beside it, where there is one: config.json, generation_config.json, tokenizer.json     as optimum writes them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from pagebinder.errors import CaptureError, CheckpointError, ConfigError
from pagebinder.frontend.onnx_file import OnnxGraph, read_onnx
from pagebinder.frontend.onnx_inputs import Inputs, inputs_of
from pagebinder.frontend.onnx_module import OnnxDecoder, Run, needed_nodes
from pagebinder.frontend.source import (
    DEFAULT_MAX_MODEL_LEN,
    GENERATION,
    WEIGHT_PATTERNS,
    ModelSource,
    as_ids,
    generation_options,
    read_options,
)
from pagebinder.graph_tools import val
from pagebinder.paths import user_path
from pagebinder.sampling_defaults import said_by_config

MODEL = "model.onnx"
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def onnx_file(path: str | Path) -> Path | None:
    """The ONNX file that a path means; None: it means something else.

    A directory with weights in safetensors is a checkpoint, whatever lies beside them.

    Raises:
        CheckpointError: a directory with ONNX files of other names.
    """
    path = user_path(path, CheckpointError)
    if path.suffix == ".onnx" and not path.is_dir():
        return path
    if not path.is_dir() or any(any(path.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        return None
    if (path / MODEL).is_file():
        return path / MODEL
    others = sorted(file.name for file in path.glob("*.onnx"))
    if others and not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} holds no {MODEL}, but {', '.join(others)}: name the file that is meant."
        )
    return None


def check_head(source: ModelSource, captured: GraphModule) -> None:
    """The graph of an ONNX decoder must end in a row of logits for each token of the vocabulary."""
    if not isinstance(source.module, OnnxDecoder):
        return
    (output,) = captured.graph.find_nodes(op="output")
    width = val(output.all_input_nodes[0]).shape[-1]
    if isinstance(width, int) and width < source.vocab_size:
        raise CaptureError(
            f"{source.name}: the output {source.module.inputs.logits} is {width} wide, and there are "
            f"{source.vocab_size:,} tokens: this is no decoder with its LM head. (If the table has more rows than "
            "there are tokens, say vocab_size in a config.json beside the file.)"
        )


def source_from_onnx(path: Path, *, dtype: torch.dtype | None = None, weights: bool = True) -> ModelSource:
    """Read an ONNX decoder: its weights are mapped from where they lie, and the cache among its inputs disappears.

    Args:
        dtype: must be the model's own, whose operators name the types they compute in.
        weights: False leaves weights that lie in files of their own on the meta device (for `explain`).
    Raises:
        ConfigError: the package onnx is missing; another dtype. CheckpointError: no such file, or a damaged one.
        CaptureError: what cannot be imported, with the node's name.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. Give an ONNX file, or a directory that holds {MODEL}.")
    graph = read_onnx(path, weights=weights)
    inputs = inputs_of(graph)
    module = OnnxDecoder(graph, inputs).eval()
    source = ModelSource(
        module=module, name=str(path), is_transformers=False, path=path.parent, num_attention_layers=_layers(inputs),
        **_facts(module, path.parent),
    )  # fmt: skip
    if dtype is not None and dtype is not source.dtype:
        raise ConfigError(
            f"{path} computes in {str(source.dtype).removeprefix('torch.')}, which its operators name: leave dtype "
            "out, or export the model in the dtype you want."
        )
    if not weights:
        module.to("meta")
    return source


def _layers(inputs: Inputs) -> int | None:
    """Attention layers, by their caches; None: the model was exported without."""
    return len(inputs.caches) // 2 or None


def _facts(module: OnnxDecoder, folder: Path) -> dict[str, Any]:
    config = _config(folder)
    rows, limit = _vocabulary(module), _last_position(module)
    vocab_size = min(filter(None, (rows, config.get("vocab_size"))), default=None)
    if vocab_size is None:
        raise ConfigError(
            f"{module.graph.path} does not say how many tokens there are: its ids are looked up in no table, and no "
            "config.json with vocab_size lies beside it."
        )
    told = next((config[name] for name in LENGTHS if config.get(name)), limit)
    length = told or DEFAULT_MAX_MODEL_LEN
    eos, bos, generation = generation_options(folder)
    eos = as_ids(config.get("eos_token_id")) if eos is None else eos
    return {
        "vocab_size": vocab_size,
        "max_model_len": length if limit is None else min(length, limit),
        "says_length": told is not None,
        "eos_token_ids": frozenset(t for t in eos if 0 <= t < vocab_size),
        "bos_token_id": config.get("bos_token_id") if bos is None else bos,
        "sampling": said_by_config(generation, str(folder / GENERATION), vocab_size),
    }


def _config(folder: Path) -> dict[str, Any]:
    """config.json, of which only facts about the vocabulary and the length are read."""
    config = read_options(folder / "config.json", "the options of a model")
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def _look_ups(module: OnnxDecoder) -> list[tuple[str, str]]:
    """(table, indices) of every look-up in the rows of a constant."""
    found = [
        (n.inputs[0], n.inputs[1])
        for n in module.needed
        if n.op == "Gather" and not n.attributes.get("axis", 0)
    ]
    found += [
        (n.inputs[1], n.inputs[3]) for n in module.needed if n.op == "RotaryEmbedding" and len(n.inputs) > 3
    ]
    return [(table, indices) for table, indices in found if table in module.paths]


def _behind(graph: OnnxGraph, name: str) -> set[str]:
    """The values that a value is computed from, by more than their shapes."""
    found, queue = set(), [name]
    while queue:
        name = queue.pop()
        if name and name not in found:
            found.add(name)
            maker = graph.makers.get(name)
            queue += () if maker is None or maker.op == "Shape" else maker.inputs
    return found


def _vocabulary(module: OnnxDecoder) -> int | None:
    """Rows of the table that the ids are looked up in."""
    ids = module.inputs.ids
    tables = [table for table, indices in _look_ups(module) if ids in _behind(module.graph, indices)]
    return min((module.constant(table).shape[0] for table in tables), default=None)


def _last_position(module: OnnxDecoder) -> int | None:
    """How many positions the tables hold that positions are looked up in; None: there are no such tables."""
    limits = []
    for table, indices in _look_ups(module):
        behind = _behind(module.graph, indices)
        if module.inputs.ids not in behind and any(name not in module.hosts for name in behind):
            limits.append(_positions_within(module, indices, module.constant(table).shape[0]))
    return min(filter(None, limits), default=None)


def _positions_within(module: OnnxDecoder, indices: str, num_rows: int) -> int | None:
    """How many positions, from 0 on, are looked up inside a table of `num_rows`; None: that cannot be told."""
    positions = torch.arange(num_rows, device="cpu").unsqueeze(0)
    run = Run(module, torch.zeros_like(positions), positions)
    wanted = set(_needed_for(module, indices))
    run.all_of([i for i, node in enumerate(module.needed) if wanted & set(node.outputs)])
    found = run.value(indices)
    if not isinstance(found, torch.Tensor) or found.numel() != num_rows:
        return None
    outside = (found.reshape(-1) >= num_rows).nonzero()
    return int(outside[0]) if len(outside) else num_rows


def _needed_for(module: OnnxDecoder, name: str) -> set[str]:
    """The values that must be computed for one, shapes too."""
    return {output for node in needed_nodes(module.graph, name) for output in node.outputs if output}
