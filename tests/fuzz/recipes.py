"""What a random decoder is made of: a recipe names one of each kind of ingredient, and hypothesis draws recipes.

Some ingredients are illegal: they let a token see what a cache cannot give it (later tokens, the batch). They are
drawn with low probability, one at a time, and a decoder with one of them must be refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

NORMS = (
    "rms cast_scale", "rms scale_cast", "rms offset", "rms none", "torch rms", "layer norm", "written layer norm",
    "none",
)  # fmt: skip
QK_NORMS = (None, None, "before transpose", "after transpose", "after rope")
POSITIONS = (
    "half", "half", "every_two", "chunked", "interleaved", "partial", "learned", "alibi", "by distance",
    "none",
)  # fmt: skip
BIASES = ("alibi", "by distance")  # positions that are added to the scores
SDPA = ("sdpa is_causal", "sdpa bool", "sdpa float")
WRITTEN = ("masked_fill", "additive", "where", "einsum")
MASKS = ("causal", "window", "chunk")
MASK_SOURCES = ("triangle", "arange", "positions", "buffer")
REPEATS = ("repeat_interleave", "expand", "native")
RESIDUALS = ("pre", "post", "parallel", "scaled", "sandwich")
MLPS = ("relu2", "swiglu", "geglu", "chunked gate_up", "gelu", "none")
# Unusual, and legal: each is a function of one token, or attention by another name.
EXTRAS = (
    None, None, None, "output gate", "log scaling", "values from keys", "clipped", "layer scale", "first values",
    "shared cache", "centred keys", "alternating positions", "scaled positions", "one position late",
    "scaled values", "scaled keys", "scaled output", "whole positions",
    "token shift", "convolution", "padding",
)  # fmt: skip
ILLEGAL = (
    "next token", "mean over tokens", "cumsum", "bidirectional", "largest position", "last token",
    "convolution ahead", "softmax over tokens", "linear attention", "number of tokens", "prefix of two",
    "strictly causal", "mask of content", "random drop", "running buffer", "window ahead", "router over tokens",
    "positions from the first", "roll", "pooling", "padding behind", "deviation over tokens", "sorted",
    "triangle product", "attention without softmax", "norm over tokens", "gather",
)  # fmt: skip
# These change the mask of an attention layer; the others are blocks of their own.
ILLEGAL_MASKS = ("bidirectional", "prefix of two", "strictly causal", "mask of content", "window ahead")


@dataclass(frozen=True)
class Recipe:
    """One decoder. Sizes in channels, `masks` of each layer, `reach` in tokens."""

    norm: str = "rms cast_scale"
    qk_norm: str | None = None
    positions: str = "half"
    attention: str = "sdpa is_causal"
    masks: tuple[str, ...] = ("causal", "causal")
    mask_source: str = "triangle"
    reach: int = 9
    soft_cap: float | None = None
    sinks: bool = False
    repeat: str = "repeat_interleave"
    heads: int = 4
    group: int = 2
    head_dim: int = 8
    value_dim: int = 8
    scale: float | None = None
    residual: str = "pre"
    mlp: str = "swiglu"
    fused_qkv: bool = False
    bias: bool = False
    tied: bool = False
    embedding_scale: bool = False
    final_cap: bool = False
    extra: str | None = None
    illegal: str | None = None
    seed: int = 0

    @property
    def written(self) -> bool:
        """Is attention spelled out, with its softmax?"""
        return self.attention in WRITTEN

    @property
    def kv_heads(self) -> int:
        return self.heads // self.group


def _consistent(**drawn) -> Recipe:
    """What cannot be written down is replaced: scores are only at hand where attention is spelled out."""
    written = drawn["attention"] in WRITTEN
    if not written:
        drawn |= {"soft_cap": None, "sinks": False}
        if drawn["positions"] in BIASES:
            drawn["attention"] = "sdpa float"
    if drawn["positions"] == "by distance":  # not behind soft-capped scores, nor within chunks
        drawn["soft_cap"] = None
        drawn["masks"] = tuple("window" if mask == "chunk" else mask for mask in drawn["masks"])
    if drawn["illegal"] in ILLEGAL_MASKS and drawn["attention"] == "sdpa is_causal":
        drawn["attention"] = "sdpa bool"
    if drawn["attention"] == "sdpa is_causal":
        drawn["masks"] = ("causal",) * len(drawn["masks"])
    if drawn["norm"] == "none" and drawn["residual"] == "post":
        drawn["norm"] = "rms none"  # without any norm a deep sum overflows
    if drawn["illegal"] == "mask of content":
        drawn["positions"] = "half" if drawn["positions"] in BIASES else drawn["positions"]
    if drawn["extra"] == "values from keys":
        drawn["value_dim"] = drawn["head_dim"]
    return Recipe(**drawn)


def recipes() -> st.SearchStrategy[Recipe]:
    """Random recipes, one in eight of them illegal."""
    return st.builds(
        _consistent,
        norm=st.sampled_from(NORMS),
        qk_norm=st.sampled_from(QK_NORMS),
        positions=st.sampled_from(POSITIONS),
        attention=st.sampled_from(SDPA + WRITTEN),
        masks=st.lists(st.sampled_from(MASKS), min_size=1, max_size=2).map(tuple),
        mask_source=st.sampled_from(MASK_SOURCES),
        reach=st.sampled_from((5, 6, 9, 12)),
        soft_cap=st.sampled_from((None, None, 3.0, 30.0)),
        sinks=st.sampled_from((False, False, True)),
        repeat=st.sampled_from(REPEATS),
        heads=st.sampled_from((2, 4, 6)),
        group=st.sampled_from((1, 2)),
        head_dim=st.sampled_from((8, 12, 16)),
        value_dim=st.sampled_from((8, 8, 12, 24)),
        scale=st.sampled_from((None, None, 0.5, 1.0)),
        residual=st.sampled_from(RESIDUALS),
        mlp=st.sampled_from(MLPS),
        fused_qkv=st.booleans(),
        bias=st.booleans(),
        tied=st.booleans(),
        embedding_scale=st.booleans(),
        final_cap=st.booleans(),
        extra=st.sampled_from(EXTRAS),
        illegal=st.sampled_from((None,) * 7 * len(ILLEGAL) + ILLEGAL),
        seed=st.integers(0, 3),
    )
