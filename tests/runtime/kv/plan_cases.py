"""States and specs that the planner's tests share."""

from pagebinder.custom_ops.layer_state import (
    AttentionState,
    CrossAttentionState,
    EncoderOnlyState,
    LatentState,
    RecurrentState,
    RingState,
    ShortConvState,
)
from pagebinder.runtime.kv import LatentSpec, SlidingWindowLatentSpec


def attention(index, heads=2, dim=8, dtype="float16", window=None, chunk=None):
    return AttentionState(
        layer=f"a{index}", index=index, dtype=dtype, num_kv_heads=heads, head_dim=dim, head_dim_v=dim,
        window=window, chunk=chunk,
    )  # fmt: skip


def latent(index, width=576, window=None, dtype="bfloat16"):
    return LatentState(
        layer=f"m{index}", index=index, dtype=dtype, head_dim=width, latent_dim=width - 64, window=window
    )


def cross(index, heads=2, dim=8, dtype="float32"):
    return CrossAttentionState(
        layer=f"c{index}", index=index, dtype=dtype, num_kv_heads=heads, head_dim=dim, head_dim_v=dim
    )


def recurrent(index, shape=(4, 8, 8), dtype="float32"):
    return RecurrentState(layer=f"r{index}", index=index, dtype=dtype, shape=shape)


def short_conv(index, shape=(24, 3), dtype="bfloat16"):
    return ShortConvState(layer=f"s{index}", index=index, dtype=dtype, shape=shape)


def ring(index, rows=8, width=6, resume_multiple=4, dtype="float32"):
    return RingState(
        layer=f"g{index}", index=index, dtype=dtype, rows=rows, width=width, resume_multiple=resume_multiple
    )


def encoder_only(index):
    return EncoderOnlyState(layer=f"e{index}", index=index)


ONE_OF_EACH_KIND = [
    attention(0),
    attention(1, window=100),
    attention(2, chunk=96),
    latent(3),
    latent(4, window=130),
    cross(5),
    recurrent(6),
    short_conv(7),
    ring(8),
]


# Models by their published shapes.
def gemma_3_27b_like():
    """62 layers, five of six with a window of 1,024; 16 KV heads, 128 wide."""
    return [attention(i, 16, 128, "bfloat16", window=None if i % 6 == 5 else 1024) for i in range(62)]


def qwen3_next_like():
    """48 layers, three of four a gated delta net with 32 heads of 128 x 128 in fp32; else 2 KV heads, 256 wide."""
    return [
        attention(i, 2, 256, "bfloat16") if i % 4 == 3 else recurrent(i, (32, 128, 128)) for i in range(48)
    ]


def llama_4_like():
    """48 layers, three of four chunked at 8,192; 8 KV heads, 128 wide."""
    return [attention(i, 8, 128, "bfloat16", chunk=None if i % 4 == 3 else 8192) for i in range(48)]


ROWS = {"num_kv_heads": 1, "head_dim": 512, "head_dim_v": 0, "dtype": "uint8", "block_size": 128}
V4_LAYERS = ("swa", "swa", *("c4" if i % 2 == 0 else "c128" for i in range(41)))


def v4_flash_like():
    """The caches of DeepSeek-V4-Flash, compressor states as windows (entries of fp32 values)."""

    def rows(entry_bytes, tokens_per_entry):
        return LatentSpec(entry_bytes=entry_bytes, tokens_per_entry=tokens_per_entry, **ROWS)

    def window(entry_bytes, tokens):
        return SlidingWindowLatentSpec(entry_bytes=entry_bytes, window=tokens, **ROWS)

    specs = {}
    for i, kind in enumerate(V4_LAYERS):
        specs[f"{i}.swa"] = window(584, 128)
        if kind == "c4":
            specs |= {f"{i}.main": rows(584, 4), f"{i}.indexer": rows(132, 4)}
            specs |= {f"{i}.c4_state": window(8192, 8), f"{i}.c4_indexer_state": window(2048, 8)}
        elif kind == "c128":
            specs |= {f"{i}.main": rows(584, 128), f"{i}.c128_state": window(4096, 128)}
    return specs
