"""Checkpoints of DeepSeek-V4 as transformers writes them: DeepSeek's own tensor names, one tensor per expert matrix.

    layers.0.self_attn.q_a_proj.weight         layers.0.attn.wq_a.weight            (in memory | in the file)
    layers.0.mlp.experts.gate_up_proj          layers.0.ffn.experts.{0..E-1}.w1.weight, .w3.weight
    layers.0.mlp.experts.down_proj             layers.0.ffn.experts.{0..E-1}.w2.weight

The prediction layers are stored as mtp.0., mtp.1. and so on, which transformers skips.
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pagebinder.errors import CheckpointError
from pagebinder.models.checkpoint import read_config, weight_files
from pagebinder.models.deepseek_v4_config import DeepseekV4Config
from pagebinder.paths import replace_text, replaced, user_path

# (in memory, in the file), for names below "layers.N." or "mtp.N."; the first prefix that fits is replaced.
_NAMES = (
    ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("hc_head.hc_", "hc_head_"),
    ("self_attn.sinks", "attn.attn_sink"),
    ("self_attn.q_a_proj.", "attn.wq_a."),
    ("self_attn.q_a_norm.", "attn.q_norm."),
    ("self_attn.q_b_proj.", "attn.wq_b."),
    ("self_attn.kv_proj.", "attn.wkv."),
    ("self_attn.kv_norm.", "attn.norm."),
    ("self_attn.o_a_proj.", "attn.wo_a."),
    ("self_attn.o_b_proj.", "attn.wo_b."),
    ("self_attn.compressor.indexer.scorer.weights_proj.", "attn.indexer.weights_proj."),
    ("self_attn.compressor.indexer.q_b_proj.", "attn.indexer.wq_b."),
    ("self_attn.compressor.indexer.kv_proj.", "attn.indexer.compressor.wkv."),
    ("self_attn.compressor.indexer.gate_proj.", "attn.indexer.compressor.wgate."),
    ("self_attn.compressor.indexer.kv_norm.", "attn.indexer.compressor.norm."),
    ("self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape"),
    ("self_attn.compressor.kv_proj.", "attn.compressor.wkv."),
    ("self_attn.compressor.gate_proj.", "attn.compressor.wgate."),
    ("self_attn.compressor.kv_norm.", "attn.compressor.norm."),
    ("self_attn.compressor.position_bias", "attn.compressor.ape"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp.shared_experts.gate_proj.", "ffn.shared_experts.w1."),
    ("mlp.shared_experts.down_proj.", "ffn.shared_experts.w2."),
    ("mlp.shared_experts.up_proj.", "ffn.shared_experts.w3."),
    ("mlp.", "ffn."),
)
_LAYER = re.compile(r"((?:model\.layers|mtp)\.\d+\.)(.*)")
_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.w([123])\.weight")
_FLOAT32 = re.compile(
    r"(^|\.)(attn_hc|ffn_hc|hc_head|sinks|position_bias|e_score_correction_bias|enorm|hnorm|norm|[a-z_]*_norm|"
    r"[a-z_]*_layernorm)(\.|$)"
)


def keeps_float32(name: str) -> bool:
    """Is this parameter (its name in memory) float32 whatever the model's dtype: the rule of transformers."""
    return _FLOAT32.search(name) is not None


def stored_name(name: str) -> str:
    """The name in the file of a parameter in memory (but stacked experts)."""
    if name == "lm_head.weight":
        return "head.weight"
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    prefix, rest = found.groups()
    ours, theirs = next(((a, b) for a, b in _NAMES if rest.startswith(a)), ("", ""))
    return prefix + theirs + rest.removeprefix(ours)


def _split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """One entry per expert and matrix of a stacked tensor [E, ...]; any other tensor as it is."""
    stored = stored_name(name)
    if stored.endswith(".experts.down_proj"):
        stem = stored.removesuffix(".down_proj")
        return {f"{stem}.{i}.w2.weight": matrix.clone() for i, matrix in enumerate(tensor)}
    if not stored.endswith(".experts.gate_up_proj"):
        return {stored: tensor.contiguous()}
    stem, split = stored.removesuffix(".gate_up_proj"), {}
    for i, matrices in enumerate(tensor):
        gate, up = matrices.chunk(2)
        split |= {f"{stem}.{i}.w1.weight": gate.clone(), f"{stem}.{i}.w3.weight": up.clone()}
    return split


def write(model, directory: str | Path, max_shard_bytes: int | None = None) -> None:
    """Write `model`'s config.json and weights; above `max_shard_bytes`, several files with an index."""
    directory = user_path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors |= _split_experts(name, tensor.detach())
    dtype = str(model.model.embed_tokens.weight.dtype).removeprefix("torch.")
    text = json.dumps({**model.config.to_dict(), "dtype": dtype}, indent=2) + "\n"
    replace_text(directory / "config.json", text)
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        with replaced(directory / "model.safetensors") as new:
            save_file(tensors, new, metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        with replaced(directory / file) as new:
            save_file(shard, new, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    replace_text(directory / "model.safetensors.index.json", index + "\n")


def _shards(tensors: dict[str, torch.Tensor], max_bytes: int | None) -> list[dict[str, torch.Tensor]]:
    shards, used_bytes = [{}], 0
    for name, tensor in tensors.items():
        if max_bytes is not None and shards[-1] and used_bytes + tensor.nbytes > max_bytes:
            shards.append({})
            used_bytes = 0
        shards[-1][name] = tensor
        used_bytes += tensor.nbytes
    return shards


def read(directory: str | Path) -> tuple[DeepseekV4Config, dict[str, torch.Tensor]]:
    """The config and the stored tensors, under their names in the file. Raises `CheckpointError`."""
    config = DeepseekV4Config.from_dict(read_config(directory))
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(directory):
        tensors |= load_file(path)
    return config, tensors


def load_into(
    model, stored: dict[str, torch.Tensor], directory: str | Path, dtype: torch.dtype | None
) -> None:
    """Give `model` (built on the meta device) its tensors. Raises `CheckpointError` naming what does not fit."""
    wanted = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        embedding, head = stored.get("model.embed_tokens.weight"), stored.pop("head.weight", None)
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise CheckpointError(
                f"{directory}: tie_word_embeddings is set, but head.weight differs from the embedding."
            )
        wanted.pop("lm_head.weight")
    fitted, problems = {}, []
    expected = {key: t for name, meta in wanted.items() for key, t in _split_experts(name, meta).items()}
    problems += [f"missing {key}" for key in expected if key not in stored]
    problems += [f"unexpected {key}" for key in stored if key not in expected]
    for key in sorted(expected.keys() & stored.keys()):
        have, want = stored[key], expected[key]
        if have.shape != want.shape:
            problems.append(f"{key} is {list(have.shape)}, config.json says {list(want.shape)}")
        elif have.is_floating_point() != want.is_floating_point():
            problems.append(f"{key} is {have.dtype}, must be like {want.dtype}")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{directory} does not fit its config.json: {shown}.")
    for name in wanted:
        fitted[name] = _cast(name, _stacked(name, stored), dtype)
    if model.config.tie_word_embeddings:
        fitted["lm_head.weight"] = fitted["model.embed_tokens.weight"]
    model.load_state_dict(fitted, assign=True)
    model.tie_weights()


def _stacked(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    key = stored_name(name)
    stem, _, kind = key.rpartition(".")
    if not stem.endswith(".experts"):
        return stored[key]
    count = sum(1 for other in stored if other.startswith(stem + ".") and other.endswith(".w2.weight"))
    each = range(count)
    if kind == "down_proj":
        return torch.stack([stored[f"{stem}.{i}.w2.weight"] for i in each])
    pairs = ((stored[f"{stem}.{i}.w1.weight"], stored[f"{stem}.{i}.w3.weight"]) for i in each)
    return torch.stack([torch.cat(pair) for pair in pairs])


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.long()
    if keeps_float32(name):
        return tensor.float()
    return tensor if dtype is None else tensor.to(dtype)
