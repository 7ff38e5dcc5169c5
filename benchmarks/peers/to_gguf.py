"""A Qwen3, Qwen3-MoE or Llama checkpoint in bf16 as a GGUF file, for llama.cpp. Runs in llama.cpp's environment.

python to_gguf.py CHECKPOINT_DIR FILE.gguf [Q4_0 | Q8_0 | Q4_K_M | Q6_K]

Weights are written as they are, or all matrices in a format of llama.cpp's, but for Llama's q and k: llama.cpp turns
neighbouring channels of these, and transformers those of two halves. There is no tokenizer. K-quants are chosen by
llama.cpp itself.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

# what llama.cpp calls the parts of a layer, and whether they are matrices
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
FLOAT32 = ("ffn_gate_inp",)  # of experts' routers; vectors, too
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(path: Path):
    """(name, bf16 bits as uint16) of a safetensors file: numpy has no bf16."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r", 8 + length)
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            begin, end = entry["data_offsets"]
            yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in WHOLE:
        return f"{WHOLE[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.weight"


def stacked(source: Path):
    """`tensors`, with the experts of a layer as one [experts, ...] under llama.cpp's name."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, bits in tensors(source):
        if match := EXPERT.fullmatch(name):
            layer, expert, part = match[1].split(".")[2], int(match[2]), match[3]
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[expert] = bits
        else:
            yield gguf_name(name), bits
    for name, parts in experts.items():
        yield name, np.stack([parts[expert] for expert in sorted(parts)])


def neighbouring(bits: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads x 2 halves x D/2, K] of q or k with the two halves of a head in turns."""
    return bits.reshape(heads, 2, -1, bits.shape[1]).swapaxes(1, 2).reshape(bits.shape)


def convert(source: Path, target: Path, format: str | None = None) -> None:
    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"].replace("_", "")
    heads = {"attn_q.": config["num_attention_heads"], "attn_k.": config["num_key_value_heads"]}
    writer = GGUFWriter(target, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type({None: 32, "Q4_0": 2, "Q8_0": 7}[format])  # of most weights; 32 is bf16
    if kind == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
    if kind == "qwen3moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for name, bits in stacked(source / "model.safetensors"):
        if kind == "llama":
            bits = next((neighbouring(bits, n) for part, n in heads.items() if part in name), bits)
        if bits.ndim == 1 or any(part in name for part in FLOAT32):
            writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        elif format is not None:
            kind_of_weight = GGMLQuantizationType[format]
            weight = quantize((bits.astype(np.uint32) << 16).view(np.float32), kind_of_weight)
            writer.add_tensor(name, weight, raw_dtype=kind_of_weight)
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_by_library(source: Path, target: Path, format: str) -> None:
    """A file in bf16 as llama.cpp's own tool quantises it, which gives some tensors other kinds."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{format}")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    assert status == 0, f"llama_model_quantize returned {status}"


def main(source: Path, target: Path, format: str | None = None) -> None:
    if format is None or "K" not in format:
        return convert(source, target, format)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        convert(source, Path(folder) / "bf16.gguf")
        quantize_by_library(Path(folder) / "bf16.gguf", target, format)
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
