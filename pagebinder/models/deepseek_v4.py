"""DeepSeek-V4 in plain PyTorch: attention, decoder, language model. Trainable; no cache, the compiler adds it.

    ids -> embedding, copied to S streams
    layer: read the streams -> norm -> attention -> mix into the streams; the same around the experts
    streams -> one hidden state -> norm -> logits

Sliding layers attend to a window. Sparse ones (CSA) add the entries that an indexer selects, heavy ones (HCA) add
every entry of a coarser compression. Positions must be 0..T-1 in each sequence: windows of tokens are cut by row.

Parameter names are those of `transformers`, checkpoints are shared with it (`deepseek_v4_checkpoint`).
Shapes: B sequences, T tokens, H query heads, D head width, C hidden width, S streams, V vocabulary.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pagebinder.models import deepseek_v4_checkpoint as checkpoint
from pagebinder.models import deepseek_v4_mixing as mixing
from pagebinder.models.deepseek_v4_config import HEAVY, SLIDING, SPARSE, DeepseekV4Config, Rope, Yarn
from pagebinder.models.deepseek_v4_experts import MixtureOfExperts
from pagebinder.models.deepseek_v4_losses import indexer_loss
from pagebinder.models.deepseek_v4_parts import (
    Compressor,
    HyperConnection,
    HyperHead,
    RMSNorm,
    SparseCompressor,
    linear,
)

__all__ = ["DeepseekV4Config", "DeepseekV4ForCausalLM", "DeepseekV4Model", "Rope", "Yarn"]


class Attention(nn.Module):
    def __init__(self, config: DeepseekV4Config, layer_type: str):
        super().__init__()
        self.config, self.layer_type = config, layer_type
        self.rope = config.rope if layer_type == SLIDING else config.compress_rope
        width, eps = config.hidden_size, config.rms_norm_eps
        heads_width = config.num_attention_heads * config.head_dim
        self.q_a_proj = linear(width, config.q_lora_rank)
        self.q_a_norm = RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = linear(config.q_lora_rank, heads_width)
        self.kv_proj = linear(width, config.head_dim)
        self.kv_norm = RMSNorm(config.head_dim, eps)
        self.o_a_proj = linear(heads_width // config.o_groups, config.o_groups * config.o_lora_rank)
        self.o_b_proj = linear(config.o_groups * config.o_lora_rank, width)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))
        if layer_type == SPARSE:
            self.compressor = SparseCompressor(config)
        elif layer_type == HEAVY:
            self.compressor = Compressor(config, HEAVY, config.head_dim)

    def forward(self, x_BTC, position_ids, index_losses=None):
        config = self.config
        angles = position_ids[..., None].float() * self.rope.inverse_frequencies(x_BTC.device)
        cos, sin = angles.cos() * self.rope.scale, angles.sin() * self.rope.scale
        q_latent = self.q_a_norm(self.q_a_proj(x_BTC))
        q_BTHD = self.q_b_proj(q_latent).unflatten(-1, (config.num_attention_heads, config.head_dim))
        q_BTHD = mixing.q_norm_rope(q_BTHD, cos, sin, eps=config.rms_norm_eps)
        kv_BTD = mixing.rotate(self.kv_norm(self.kv_proj(x_BTC)), cos, sin)
        entries = indices = None
        if self.layer_type != SLIDING:
            entries = self.compressor(x_BTC)
        options = {
            "scale": config.head_dim**-0.5,
            "window": config.sliding_window,
            "ratio": config.ratio(self.layer_type),
        }
        if self.layer_type == SPARSE:
            indexer = self.compressor.indexer
            if index_losses is None:
                indices = indexer.select(*indexer(x_BTC, q_latent, cos, sin))
            else:
                # Learns from its own loss only: nothing flows into the layer's input.
                index = indexer(x_BTC.detach(), q_latent.detach(), cos, sin)
                indices = indexer.select(*index)
                mass = (q_BTHD, kv_BTD, entries, self.sinks)
                index_losses.append(indexer_loss(*index, *mass, index_scale=indexer.scale, **options))
        out_BTHD = mixing.compressed_attention(q_BTHD, kv_BTD, entries, indices, self.sinks, **options)
        grouped = mixing.inverse_rope_grouped_linear(
            out_BTHD, cos, sin, self.o_a_proj.weight, groups=config.o_groups
        )
        return self.o_b_proj(grouped)


class DecoderLayer(nn.Module):
    """Attention and experts, each between a read of the streams [B, T, S, C] and a write to them."""

    def __init__(self, config: DeepseekV4Config, layer_type: str, is_hash: bool):
        super().__init__()
        self.self_attn = Attention(config, layer_type)
        self.mlp = MixtureOfExperts(config, is_hash)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_hc = HyperConnection(config)
        self.ffn_hc = HyperConnection(config)

    def forward(self, streams, ids, position_ids, index_losses=None):
        post, comb, x_BTC = self.attn_hc(streams)
        update = self.self_attn(self.input_layernorm(x_BTC), position_ids, index_losses)
        streams = mixing.hyper_mix(streams, post, comb, update)
        post, comb, x_BTC = self.ffn_hc(streams)
        update = self.mlp(self.post_attention_layernorm(x_BTC), ids)
        return mixing.hyper_mix(streams, post, comb, update)


class DeepseekV4Model(nn.Module):
    """Embedding, layers, head of the streams, norm: ids and positions [B, T] int64 -> hidden states [B, T, C]."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        kinds = zip(config.layer_types, config.mlp_layer_types)
        self.layers = nn.ModuleList(DecoderLayer(config, kind, mlp == "hash_moe") for kind, mlp in kinds)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_head = HyperHead(config)

    def streams(self, input_ids, position_ids, index_losses=None) -> torch.Tensor:
        """The residual streams [B, T, S, C] after the last layer."""
        x_BTC = self.embed_tokens(input_ids)
        streams = x_BTC[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        for layer in self.layers:
            streams = layer(streams, input_ids, position_ids, index_losses)
        return streams

    def forward(self, input_ids, position_ids):
        return self.norm(self.hc_head(self.streams(input_ids, position_ids)))


class NextTokens(DecoderLayer):
    """Multi-token prediction: one sliding, score-routed layer that looks one token further ahead.

    Row p joins the main model's streams at p with the embedding of token p + 1 and predicts token p + 2. The
    embedding of row 0 is zero.
    """

    def __init__(self, config: DeepseekV4Config):
        super().__init__(config, SLIDING, is_hash=False)
        self.e_proj = linear(config.hidden_size, config.hidden_size)
        self.h_proj = linear(config.hidden_size, config.hidden_size)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_head = HyperHead(config)

    def join(self, streams: torch.Tensor, embedded_BTC: torch.Tensor, position_ids: torch.Tensor):
        """The layer's input streams [B, T, S, C]."""
        embedded = embedded_BTC.masked_fill((position_ids == 0)[..., None], 0.0)
        return self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(embedded))[:, :, None]


class DeepseekV4ForCausalLM(nn.Module):
    """The language model. `with_mtp` adds the multi-token prediction layers, which `forward` does not use."""

    def __init__(self, config: DeepseekV4Config, with_mtp: bool = False):
        super().__init__()
        self.config = config
        self.model = DeepseekV4Model(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        if with_mtp:
            self.mtp = nn.ModuleList(NextTokens(config) for _ in range(config.num_nextn_predict_layers))
        self.tie_weights()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """ids and positions [B, T] int64 (0..T-1, the default) -> logits [B, T, V] in the weights' dtype."""
        return self.lm_head(self.model(input_ids, _positions(input_ids, position_ids)))

    def mtp_logits(self, streams, next_ids, position_ids=None, depth: int = 0):
        """Run prediction layer `depth`: the streams [B, T, S, C] of rows p and the ids [B, T] of tokens p + 1.

        Returns the logits [B, T, V] of tokens p + 2 and the layer's streams, the input of the next depth.
        Raises `ValueError` when the model has no such layer.
        """
        if depth >= len(getattr(self, "mtp", ())):
            raise ValueError(f"there is no prediction layer {depth}: build the model with with_mtp=True.")
        layer, position_ids = self.mtp[depth], _positions(next_ids, position_ids)
        joined = layer.join(streams, self.model.embed_tokens(next_ids), position_ids)
        streams = layer(joined, next_ids, position_ids)
        return self.lm_head(layer.norm(layer.hc_head(streams))), streams

    def training_losses(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Mean losses in nats over windows [B, T + 1] of ids.

        "tokens": the next token; "indexer", with a sparse layer: how far the indexers are from the attention they
        select for; "mtp", with prediction layers: the token after the next.
        """
        index_losses, inputs, targets = [], ids[:, :-1], ids[:, 1:]
        streams = self.model.streams(inputs, _positions(inputs, None), index_losses)
        logits = self.lm_head(self.model.norm(self.model.hc_head(streams)))
        losses = {"tokens": F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())}
        if index_losses:
            losses["indexer"] = torch.stack(index_losses).mean()
        if hasattr(self, "mtp"):
            losses["mtp"] = self._mtp_loss(streams, ids)
        return losses

    def _mtp_loss(self, streams: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        losses = []
        for depth in range(len(self.mtp)):
            num_rows = streams.shape[1] - 1
            next_ids = ids[:, depth + 1 : depth + 1 + num_rows]
            logits, streams = self.mtp_logits(streams[:, :num_rows], next_ids, depth=depth)
            losses.append(F.cross_entropy(logits.float().flatten(0, 1), ids[:, depth + 2 :].flatten()))
        return torch.stack(losses).mean()

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, dtype: torch.dtype | None = None
    ) -> "DeepseekV4ForCausalLM":
        """Load config.json and safetensors weights, as transformers or `save_pretrained` wrote them.

        `dtype` is that of the matrices (None: as stored); norms, sinks, position biases and hyper-connections are
        float32 in any case. Raises `CheckpointError` when files or tensors are missing, unexpected or mis-shaped,
        and `UnsupportedLayerError` when config.json asks for something this file does not compute.
        """
        config, tensors = checkpoint.read(directory)
        with torch.device("meta"):
            model = cls(config, with_mtp=any(name.startswith("mtp.") for name in tensors))
        checkpoint.load_into(model, tensors, directory, dtype)
        return model

    def save_pretrained(self, directory: str | Path, max_shard_bytes: int | None = None) -> None:
        """Write config.json and safetensors weights, readable by `transformers.AutoModelForCausalLM`."""
        checkpoint.write(self, directory, max_shard_bytes)


def _positions(ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    return torch.arange(ids.shape[1], device=ids.device)[None] if position_ids is None else position_ids
