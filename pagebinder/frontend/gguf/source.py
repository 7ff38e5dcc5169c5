"""A model in a GGUF file as a `ModelSource`: transformers' own class for it, with the file's weights.

options of the file      -> a config of transformers       config.py
that, on the meta device -> a source of each parameter     places.py
from_pretrained          -> the model: codes of blocks from the mapped file, everything else expanded
"""

from __future__ import annotations

from pathlib import Path

import torch

from pagebinder.errors import CheckpointError, ConfigError
from pagebinder.frontend import stored_loading
from pagebinder.frontend.checkpoint_tensors import CheckpointTensors
from pagebinder.frontend.gguf.architecture import architecture_of
from pagebinder.frontend.gguf.config import config_of
from pagebinder.frontend.gguf.file import GgufFile, read_gguf
from pagebinder.frontend.gguf.options import FREQUENCIES, Options
from pagebinder.frontend.gguf.places import sources_of
from pagebinder.frontend.gguf.tokenizer import end_tokens, tokenizer_of
from pagebinder.frontend.gguf.weights import StoredBlocks, plain_values, read_all
from pagebinder.frontend.source import ModelSource, facts_of, source_from_config
from pagebinder.sampling_defaults import said_by_gguf


def source_from_gguf(path: Path, *, dtype: torch.dtype | None = None, weights: bool = True) -> ModelSource:
    """Read a GGUF file; see file.py.

    Args:
        dtype: of activations, and of weights that keep no codes; None: that of plain files, else bfloat16.
        weights: False builds the model on the meta device (for `explain`).
    Raises:
        CheckpointError: no such file, or a damaged one; something that it holds or says is not served.
    """
    file = read_gguf(path)
    config = config_of(file)
    dtype = dtype or config.dtype
    if file.tensors["token_embd.weight"].kind not in ("F32", "F16", "BF16"):
        config.tie_word_embeddings = False  # rows are looked up in a plain table, and a head may keep codes
    try:
        module = source_from_config(config, dtype=dtype).module
    except ConfigError as error:
        raise CheckpointError(f"{path} describes a model that cannot be built: {error}") from error
    sources = sources_of(file, module)
    stored = StoredBlocks(file, sources.of, without_weights=not weights)
    if weights:
        stored.replace(module)
        module = _loaded(type(module), config, plain_values(module, stored, dtype), stored, dtype)
        read_all(module)
        result = stored_loading.finish(module, stored)
        _turn_frequencies(module, file)
    else:
        result = stored_loading.replaced_on_meta(module, stored)
    facts = facts_of(module.config, module)
    facts["eos_token_ids"] = end_tokens(file)
    facts["bos_token_id"] = file.options.get("tokenizer.ggml.bos_token_id")
    facts["sampling"] = said_by_gguf(file.options, str(path), facts["vocab_size"])
    return ModelSource(
        module=module.eval(), name=str(path), is_transformers=True, path=path.parent, file=path, config=module.config,
        stored_weights=result, tensors=CheckpointTensors(left_over=sources.unread), _tokenizer=tokenizer_of(file),
        **facts,
    )  # fmt: skip


def _loaded(
    kind: type, config, values: dict[str, torch.Tensor], stored: StoredBlocks, dtype: torch.dtype
) -> torch.nn.Module:
    config = config.__class__.from_dict(config.to_dict())
    config.quantization_config = {"quant_method": stored_loading.METHOD, "stored": stored}
    stored_loading.register()
    model, info = kind.from_pretrained(
        None, config=config, state_dict=values, dtype=dtype, output_loading_info=True
    )
    if wrong := {name: keys for name, keys in info.items() if keys}:
        raise CheckpointError(f"{stored.file.path} cannot be loaded: {wrong}")
    return model


def _turn_frequencies(model: torch.nn.Module, file: GgufFile) -> None:
    """Llama 3's frequencies of RoPE are those of its base, over factors that the file has."""
    if FREQUENCIES[0] not in file.tensors or architecture_of(file).in_config:
        return
    rotary = model.model.rotary_emb
    factors = torch.from_numpy(Options(file).factors(FREQUENCIES[0], len(rotary.inv_freq)))
    for name, buffer in list(rotary.named_buffers()):
        if name.endswith("inv_freq"):
            rotary.register_buffer(name, buffer / factors, persistent=False)
