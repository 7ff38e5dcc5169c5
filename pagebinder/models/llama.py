"""The Llama family in plain PyTorch: Llama, Qwen3 (QK-norm) and Mistral (sliding window).

Parameter names are those of `transformers`, so both read the same checkpoints. There is no cache here on
purpose: the compiler adds it.

Shapes: B sequences, T tokens, H query heads, G KV heads, D head width, C hidden width, V vocabulary.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from pagebinder.models.checkpoint import load_into, read_config
from pagebinder.models.llama_config import Llama3Rope, LlamaConfig, inverse_frequencies
from pagebinder.paths import replace_text, replaced, user_path

__all__ = [
    "Llama3Rope",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LlamaModel",
    "RMSNorm",
    "inverse_frequencies",
    "rotate",
]


def rotate(x_BHTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE. `cos` and `sin` are [B, 1, T, D] in x's dtype."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos + torch.cat((-second, first), dim=-1) * sin


class RMSNorm(nn.Module):
    """`x / rms(x)` in float32, cast back, times `weight`. Any shape [..., width]."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, layer_type: str):
        super().__init__()
        self.head_dim = config.head_dim
        self.is_sliding = layer_type == "sliding_attention"
        width, bias = config.hidden_size, config.attention_bias
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, q_width, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, width, bias=bias)
        has_qk_norm = config.model_type == "qwen3"
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_qk_norm else nn.Identity()

    def forward(self, x_BTC, cos, sin, window_mask):
        B, T, _ = x_BTC.shape
        q_BHTD = self.q_norm(self.q_proj(x_BTC).view(B, T, -1, self.head_dim)).transpose(1, 2)
        k_BGTD = self.k_norm(self.k_proj(x_BTC).view(B, T, -1, self.head_dim)).transpose(1, 2)
        v_BGTD = self.v_proj(x_BTC).view(B, T, -1, self.head_dim).transpose(1, 2)
        q_BHTD, k_BGTD = rotate(q_BHTD, cos, sin), rotate(k_BGTD, cos, sin)
        masking = {"attn_mask": window_mask} if self.is_sliding else {"is_causal": True}
        out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, enable_gqa=True, **masking)
        return self.o_proj(out_BHTD.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, layer_type: str):
        super().__init__()
        self.self_attn = Attention(config, layer_type)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, window_mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, window_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Embedding, layers, final norm: ids and positions [B, T] int64 -> hidden states [B, T, C]."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, position_ids):
        x = self.embed_tokens(input_ids)
        # Computed here and not kept as a buffer: `.to(torch.bfloat16)` would round a buffer.
        angles = position_ids[..., None].float() * inverse_frequencies(self.config, x.device)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        window_mask = None
        if self.config.sliding_window is not None:
            distance = position_ids[:, None, :, None] - position_ids[:, None, None, :]
            window_mask = (distance >= 0) & (distance < self.config.sliding_window)
        for layer in self.layers:
            x = layer(x, cos, sin, window_mask)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """A decoder-only language model with the parameter names of its `transformers` counterpart."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """ids and positions [B, T] int64 (default 0..T-1) -> logits [B, T, V] in the weights' dtype."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.lm_head(self.model(input_ids, position_ids))

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal weights of variance 1/fan_in; projections into the residual stream shrink with depth."""
        generator = torch.Generator().manual_seed(seed)
        depth_scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = parameter.shape[1] ** -0.5 * (depth_scale if into_residual else 1.0)
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    @classmethod
    def from_pretrained(cls, directory: str | Path, dtype: torch.dtype | None = None) -> "LlamaForCausalLM":
        """Load config.json and safetensors weights; `dtype=None` keeps the stored one.

        Raises `CheckpointError` when files or tensors are missing, unexpected or mis-shaped, and
        `UnsupportedLayerError` when config.json asks for something this file does not compute.
        """
        config = LlamaConfig.from_dict(read_config(directory))
        with torch.device("meta"):
            model = cls(config)
        load_into(model, directory, dtype)
        return model

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors, readable by `transformers.AutoModelForCausalLM`."""
        directory = user_path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        dtype = str(self.model.embed_tokens.weight.dtype).removeprefix("torch.")
        text = json.dumps({**self.config.to_dict(), "dtype": dtype}, indent=2) + "\n"
        replace_text(directory / "config.json", text)
        with replaced(directory / "model.safetensors") as new:
            save_file(tensors, new, metadata={"format": "pt"})
