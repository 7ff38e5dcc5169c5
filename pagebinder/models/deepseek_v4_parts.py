"""The modules of a DeepSeek-V4 layer: norm, compressors, Lightning Indexer, hyper-connections.

Parameter names are those of `transformers`. Shapes: B sequences, T tokens, C hidden width, S residual streams,
Hi index heads, d width of an entry.
"""

import torch
from torch import nn

from pagebinder.models import deepseek_v4_mixing as mixing
from pagebinder.models.deepseek_v4_config import SPARSE, DeepseekV4Config


def linear(in_width: int, out_width: int) -> nn.Linear:
    return nn.Linear(in_width, out_width, bias=False)


class RMSNorm(nn.Module):
    """Normalise in float32, scale in float32, round once. Any shape [..., width]."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mixing.rms_norm(x, self.weight, self.eps)


class Compressor(nn.Module):
    """Hidden states [B, T, C] to token-aligned entries [B, T, width].

    Layers with few tokens per entry overlap: an entry also sees the window before its own, through separate
    projections (the first half of the channels).
    """

    def __init__(self, config: DeepseekV4Config, layer_type: str, width: int):
        super().__init__()
        self.overlap, self.ratio = layer_type == SPARSE, config.ratio(layer_type)
        projected = (2 if self.overlap else 1) * width
        self.rope, self.eps = config.compress_rope, config.rms_norm_eps
        self.kv_proj = linear(config.hidden_size, projected)
        self.gate_proj = linear(config.hidden_size, projected)
        self.position_bias = nn.Parameter(torch.zeros(self.ratio, projected))
        self.kv_norm = RMSNorm(width, config.rms_norm_eps)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return mixing.compress(
            self.kv_proj(x_BTC),
            self.gate_proj(x_BTC),
            self.position_bias,
            self.kv_norm.weight,
            self.rope.inverse_frequencies(x_BTC.device),
            ratio=self.ratio,
            overlap=self.overlap,
            eps=self.eps,
            rope_scale=self.rope.scale,
        )


class IndexScorer(nn.Module):
    """Holds the projection to a weight per index head, under transformers' name."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__()
        self.weights_proj = linear(config.hidden_size, config.index_n_heads)


class Indexer(Compressor):
    """Lightning Indexer: narrow keys of its own per entry, and queries that score them."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__(config, SPARSE, config.index_head_dim)
        self.num_heads, self.scale = config.index_n_heads, config.index_head_dim**-0.5
        self.topk = config.index_topk
        self.q_b_proj = linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.scorer = IndexScorer(config)

    def forward(self, x_BTC, q_latent, cos, sin):
        """-> q [B, T, Hi, d], k [B, T, d] token-aligned, weights [B, T, Hi] with Hi^-0.5 in them."""
        q = self.q_b_proj(q_latent).unflatten(-1, (self.num_heads, -1))
        q = mixing.rotate(q, cos[:, :, None], sin[:, :, None])
        return q, super().forward(x_BTC), self.scorer.weights_proj(x_BTC) * self.num_heads**-0.5

    def select(self, q, k, weights):
        """The entries that each query may read: [B, T, topk] int32."""
        return mixing.index_topk(q, k, weights, topk=self.topk, ratio=self.ratio, scale=self.scale)


class SparseCompressor(Compressor):
    """A compressor with overlap and the indexer that chooses among its entries."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__(config, SPARSE, config.head_dim)
        self.indexer = Indexer(config)


class HyperConnection(nn.Module):
    """The reading and writing weights of one block; see `mixing.hyper_connection`."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__()
        S = config.hc_mult
        self.iters, self.norm_eps, self.eps = config.hc_sinkhorn_iters, config.rms_norm_eps, config.hc_eps
        self.fn = nn.Parameter(torch.zeros((2 + S) * S, S * config.hidden_size))
        self.base = nn.Parameter(torch.zeros((2 + S) * S))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, streams_BTSC: torch.Tensor):
        return mixing.hyper_connection(
            streams_BTSC,
            self.fn,
            self.base,
            self.scale,
            sinkhorn_iters=self.iters,
            norm_eps=self.norm_eps,
            eps=self.eps,
        )


class HyperHead(nn.Module):
    """The streams [B, T, S, C] as one hidden state [B, T, C], before the final norm."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__()
        self.norm_eps, self.eps = config.rms_norm_eps, config.hc_eps
        self.hc_fn = nn.Parameter(torch.zeros(config.hc_mult, config.hc_mult * config.hidden_size))
        self.hc_base = nn.Parameter(torch.zeros(config.hc_mult))
        self.hc_scale = nn.Parameter(torch.ones(1))

    def forward(self, streams_BTSC: torch.Tensor) -> torch.Tensor:
        return mixing.hyper_head(
            streams_BTSC, self.hc_fn, self.hc_base, self.hc_scale, norm_eps=self.norm_eps, eps=self.eps
        )
