"""Proves before a capture that the leaf of DeepSeek-V4 computes what this model's source does.

parts       every module of the leaf holds the weights and children that are read, and no others; options agree
            where the source reads one and the leaf another
whole       the source's own code beside the leaf, on a copy of the model with a few small layers of each kind:
            the user's config but for its widths and counts, random weights, two windows of the longest compressor

The first finds what somebody did to this model, the second what another version of transformers, or an option of the
config that nobody here reads, changes.
"""

from __future__ import annotations

import copy

import torch

MODEL = "DeepseekV4Model"
ROPE_TYPES = ("default", "yarn")
LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
TOLERANCE = 1e-3  # of float32 values of magnitude 1 behind two or three layers; a wrong formula is off by 0.1
MAX_RATIO = 1024  # tokens per entry that the miniature can be run with
PROBED_WINDOW = 48
# Widths and counts of the miniature: small, and enough index heads that no two scores tie at zero.
SMALL = {
    "vocab_size": 48, "hidden_size": 32, "moe_intermediate_size": 8, "num_attention_heads": 4, "q_lora_rank": 16,
    "o_groups": 2, "o_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 16,
    "index_topk": 5, "pad_token_id": None,
}  # fmt: skip
# Children that are read and not called, so that another class in their place would be ignored.
READ = {
    "compressor": ("DeepseekV4HCACompressor", "DeepseekV4CSACompressor"),
    "indexer": ("DeepseekV4Indexer",),
    "scorer": ("DeepseekV4IndexerScorer",),
    "input_norm": ("DeepseekV4UnweightedRMSNorm",),
    "kv_norm": ("DeepseekV4RMSNorm",),
}
# class -> (parameters and buffers, children); a child in brackets may be missing
_COMPRESSOR = "kv_proj gate_proj kv_norm rotary_emb"
KNOWN_PARTS = {
    "DeepseekV4Attention": (
        "sinks", "q_a_proj q_a_norm q_b_proj q_b_norm kv_proj kv_norm o_a_proj o_b_proj [compressor]",
    ),
    "DeepseekV4HCACompressor": ("position_bias", _COMPRESSOR),
    "DeepseekV4CSACompressor": ("position_bias", f"{_COMPRESSOR} indexer"),
    "DeepseekV4Indexer": ("position_bias", f"{_COMPRESSOR} q_b_proj scorer"),
    "DeepseekV4IndexerScorer": ("", "weights_proj"),
    "DeepseekV4HyperConnection": ("fn base scale", "input_norm"),
    "DeepseekV4HyperHead": ("hc_fn hc_base hc_scale", "input_norm"),
    "DeepseekV4DecoderLayer": ("", "self_attn mlp input_layernorm post_attention_layernorm attn_hc ffn_hc"),
    "DeepseekV4UnweightedRMSNorm": ("", ""),
    "DeepseekV4RMSNorm": ("weight", ""),
}  # fmt: skip


def reason_against_parts(model: torch.nn.Module) -> str | None:
    """What a module of the model has that the leaf does not read, lacks, or has otherwise than is understood."""
    models = [m for m in model.modules() if type(m).__name__ == MODEL]
    if len(models) != 1:
        return f"its layers are in {len(models)} modules of the class {MODEL}, not in one"
    rotary, ratio = models[0].rotary_emb, max(models[0].config.compress_rates.values())
    if ratio > MAX_RATIO:
        return f"it makes an entry of {ratio} tokens; up to {MAX_RATIO} can be proven"
    for path, module in model.named_modules():
        known = KNOWN_PARTS.get(type(module).__name__)
        try:
            reason = known and (_unknown_part(module, *known) or _unknown_option(module, rotary))
        except AttributeError as error:
            reason = f"lacks what is read of it: {error}"
        if reason:
            return f"{path} {reason}"
    return None


def _unknown_part(module: torch.nn.Module, tensors: str, children: str) -> str | None:
    optional = {name.strip("[]") for name in children.split() if name.startswith("[")}
    expected = {*tensors.split(), *(name.strip("[]") for name in children.split())}
    have = {name for name, part in _parts(module).items() if part is not None}
    if unread := sorted(have - expected):
        return f"has {', '.join(unread)}, which nobody here reads"
    if missing := sorted(expected - have - optional):
        return f"has no {', '.join(missing)}"
    for name, classes in READ.items():
        child = module._modules.get(name)
        if child is not None and type(child).__name__ not in classes:
            return f"has {name} of the class {type(child).__name__}, not {' or '.join(classes)}"
    return None


def _parts(module: torch.nn.Module) -> dict:
    return {**module._parameters, **module._buffers, **module._modules}


def _unknown_option(module: torch.nn.Module, rotary: torch.nn.Module) -> str | None:
    """Options that the leaf reads in one place and the source in another."""
    kind = type(module).__name__
    if kind == "DeepseekV4Attention":
        if module.layer_type not in LAYER_TYPES:
            return f"has the layer type {module.layer_type!r}"
        if module.sliding_window != module.config.sliding_window:
            return f"has a window of {module.sliding_window} tokens, its config one of {module.config.sliding_window}"
        if (module.compressor is None) != (module.layer_type == "sliding_attention"):
            return f"is a layer of {module.layer_type!r}, which its compressor does not fit"
    if kind == "DeepseekV4IndexerScorer" and module.softmax_scale <= 0:
        return f"scales scores by {module.softmax_scale} after their ReLU"  # the op scales before it
    own = getattr(module, "rotary_emb", None)
    return None if own is None else _unknown_rotation(own, rotary, module.rope_layer_type)


def _unknown_rotation(own: torch.nn.Module, rotary: torch.nn.Module, kind: str) -> str | None:
    """An indexer rotates queries by its own frequencies, which are the model's."""
    if own.rope_type.get(kind) not in ROPE_TYPES:
        return f"rotates by RoPE of the type {own.rope_type.get(kind)!r}; known are {', '.join(ROPE_TYPES)}"
    a, b = (getattr(part, f"{kind}_inv_freq") for part in (own, rotary))
    scales = [getattr(part, f"{kind}_attention_scaling") for part in (own, rotary)]
    if a.shape != b.shape or scales[0] != scales[1] or not (a.is_meta or torch.equal(a, b)):
        return "rotates by other frequencies than the attention around it"
    return None


class Miniature:
    """The source's class with the user's config made small, on the CPU, in float32, with random weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        source = next(m for m in model.modules() if type(m).__name__ == MODEL)
        config = small_config(source.config)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            self.model = type(source)(config).float().eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self.model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_matrix = parameter.dim() > 1 and not name.endswith("position_bias")
            parameter.data = noise * parameter.shape[-1] ** -0.5 if is_matrix else 0.5 + 0.5 * noise
        num_tokens = 2 * max(config.compress_rates.values()) + 3
        self.ids = torch.randint(config.vocab_size, (1, num_tokens), generator=generator)

    @torch.no_grad()
    def run(self, implementation: str) -> torch.Tensor:
        """Hidden states [T, C] with this attention function; "eager" is the source's own."""
        self.model.config._attn_implementation_internal = implementation
        positions = torch.arange(self.ids.shape[1])[None]
        return self.model(input_ids=self.ids, position_ids=positions, use_cache=False).last_hidden_state[0]

    def reason_against(self, expected: torch.Tensor, got: torch.Tensor) -> str | None:
        if got.shape == expected.shape and torch.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return None
        what = float((got - expected).abs().max()) if got.shape == expected.shape else "its shape"
        return (
            f"a small model with this config computes something else than is understood here, off by {what}"
        )


def small_config(config):
    """The config with few narrow layers: one of each pair of attention and feed-forward kinds, in their order."""
    small = copy.deepcopy(config)
    pairs = list(dict.fromkeys(zip(config.layer_types, config.mlp_layer_types)))
    for name, value in SMALL.items():
        setattr(small, name, value)
    small.num_hidden_layers = len(pairs)
    small.sliding_window = min(config.sliding_window, PROBED_WINDOW)
    small.layer_types, small.mlp_layer_types = (list(kinds) for kinds in zip(*pairs))
    small._attn_implementation_internal = small._experts_implementation_internal = "eager"
    return small
