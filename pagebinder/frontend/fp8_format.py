"""How a checkpoint says that it keeps weights in 8 or 4 bits: `quantization_config` -> `StoredFp8`.

    quant_method         linear layers [N, K] e4m3     scale                                   left out
    fp8                  128 x 128 blocks              weight_scale_inv [N/128, K/128]         modules_to_not_convert
    fp8, no block size   one scale                     weight_scale_inv []                     modules_to_not_convert
    fp8 [1, 32], mxfp8   32 columns of a row           weight_scale_inv [N, K/32]              modules_to_not_convert
    fbgemm_fp8           one scale a row               weight_scale [N, 1]                     modules_to_not_convert
    compressed-tensors   tensor, channel or block      weight_scale [1] | [N, 1] | as above    ignore
    mxfp4                plain                                                                 modules_to_not_convert

    experts [E, N, K]    stored by                     codes                   scale, of 32 columns of a row
    mxfp8                fp8 [1, 32], mxfp8            NAME [E, N, K]          NAME_scale_inv [E, N, K/32]
    mxfp4                fp8 with expert_dtype fp4     NAME [E, N, K/2]        NAME_scale_inv [E, N, K/32]
    mxfp4                mxfp4                         NAME_blocks             NAME_scales [E, N, K/32]
                                                       [E, N, K/32, 16]
    as linear layers     the others

A weight is its code times its scale. Scales of 32 columns are powers of two, and the others may be: ue8m0, one byte.
Checkpoints may also say how activations are quantised for kernels of fp8; here they keep the model's dtype. Other
methods are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagebinder.custom_ops.linear.weight_formats import BLOCK
from pagebinder.errors import CheckpointError
from pagebinder.frontend.mx_numbers import GROUP, num_groups

# Granularities of scales whose codes a kernel reads -> the format's name in `weight_formats`.
FORMATS = {"block": "fp8_block", "channel": "fp8", "tensor": "fp8_tensor"}
GROUPED = "group"
SERVED = (
    "'fp8' (e4m3 in blocks of 128 x 128 or 1 x 32 or whole tensors; experts in fp8 or fp4), 'mxfp8' (1 x 32), "
    "'mxfp4', 'fbgemm_fp8' and 'compressed-tensors' (e4m3 by tensor, channel or block of 128 x 128)"
)


@dataclass(frozen=True, kw_only=True)
class StoredFp8:
    """`method`: quant_method. `granularity`: of linear layers, a key of FORMATS or GROUPED; None = they are plain.

    `experts`: mxfp8 or mxfp4, None = as linear layers. `scale_suffix`, `codes_suffix`: what the names of both tensors
    add to the weight's. `scalar_shape`: that of the one scale of a tensor. `kept`: patterns of modules that are
    stored plain, None = those that transformers leaves out by default.
    """

    method: str
    granularity: str | None
    scale_suffix: str
    codes_suffix: str = ""
    experts: str | None = None
    scalar_shape: tuple[int, ...] = ()
    kept: tuple[str, ...] | None = None

    @property
    def format(self) -> str:
        """Its name in `weight_formats`."""
        return FORMATS[self.granularity]

    @property
    def scale_name(self) -> str:
        """Of the tensor beside a linear layer's `weight`."""
        return f"weight{self.scale_suffix}"

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of a linear layer's scale in the checkpoint."""
        if self.granularity == "block":
            return -(-rows // BLOCK), -(-columns // BLOCK)
        if self.granularity == GROUPED:
            return rows, num_groups(columns)
        return (rows, 1) if self.granularity == "channel" else self.scalar_shape

    def __str__(self) -> str:
        return f"{self.format} as stored (quant_method {self.method})"


def stored_fp8(config: dict[str, Any], where: str) -> StoredFp8 | None:
    """What a config.json says; None: its weights are plain.

    Args:
        config: the options of config.json. where: its path, for messages.
    Raises:
        CheckpointError: a method, or a variant of one, that is not served; names it.
    """
    of_text = config.get("text_config") or {}
    options = config.get("quantization_config") or of_text.get("quantization_config")
    if not options:
        return None
    # DeepSeek-V4 says it beside its quantization_config
    of_experts = config.get("expert_dtype") or of_text.get("expert_dtype")
    options = ({"expert_dtype": of_experts} if of_experts else {}) | options
    method = options.get("quant_method")
    reader = _READERS.get(method)
    if reader is None:
        raise CheckpointError(
            f"{where}: weights are quantised by {method!r}, which is not served; served are {SERVED}. Or give the "
            "plain checkpoint and use CompileConfig(quantization=...)."
        )
    try:
        return reader(options)
    except _NotServedError as reason:
        raise CheckpointError(
            f"{where}: quant_method {method!r} with {reason} is not served; served are {SERVED}."
        ) from reason


class _NotServedError(Exception):
    """Which part of a method is not served."""


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise _NotServedError(what)


def _fp8(options: dict, default_blocks: tuple[int, int] = (BLOCK, BLOCK)) -> StoredFp8:
    kept = options.get("modules_to_not_convert", options.get("ignored_layers"))
    experts = options.get("expert_dtype", "fp8")
    _require(options.get("fmt", "e4m3") == "e4m3", f"fmt {options.get('fmt')!r}")
    _require(options.get("scale_fmt") in _SCALES, f"scale_fmt {options.get('scale_fmt')!r}")
    _require(experts in ("fp8", "fp4"), f"expert_dtype {experts!r}")
    _require(not options.get("modules_to_convert"), "modules_to_convert (quantised embeddings)")
    blocks = options.get("weight_block_size", default_blocks)
    granularity = "tensor" if blocks is None else _GRANULARITIES.get(tuple(blocks))
    _require(granularity is not None, f"weight_block_size {list(blocks or ())}")
    grouped = "mxfp8" if granularity == GROUPED else None
    return StoredFp8(
        method=options["quant_method"],
        granularity=granularity,
        scale_suffix="_scale_inv",
        experts="mxfp4" if experts == "fp4" else grouped,
        kept=None if kept is None else tuple(kept),
    )


def _mxfp8(options: dict) -> StoredFp8:
    stored = _fp8(options, (1, GROUP))
    _require(stored.granularity == GROUPED, f"weight_block_size {options.get('weight_block_size')}")
    return stored


def _mxfp4(options: dict) -> StoredFp8:
    kept = options.get("modules_to_not_convert")
    return StoredFp8(
        method="mxfp4",
        granularity=None,
        scale_suffix="_scales",
        codes_suffix="_blocks",
        experts="mxfp4",
        kept=None if kept is None else tuple(kept),
    )


def _fbgemm_fp8(options: dict) -> StoredFp8:
    kept = options.get("modules_to_not_convert")
    return StoredFp8(
        method="fbgemm_fp8",
        granularity="channel",
        scale_suffix="_scale",
        kept=None if kept is None else tuple(kept),
    )


def _compressed_tensors(options: dict) -> StoredFp8:
    groups = list((options.get("config_groups") or {}).values())
    _require(len(groups) == 1, f"{len(groups)} config_groups")
    targets, weights = groups[0].get("targets"), groups[0].get("weights") or {}
    _require(targets == ["Linear"], f"targets {targets}")
    _require(weights.get("type") == "float" and weights.get("num_bits") == 8, _described(weights))
    _require(weights.get("symmetric", True) and not weights.get("dynamic"), _described(weights))
    _require(not options.get("sparsity_config"), "a sparsity_config")
    _require(not options.get("kv_cache_scheme"), "a kv_cache_scheme")
    strategy = weights.get("strategy")
    _require(strategy in FORMATS, _described(weights))
    blocks = weights.get("block_structure")
    _require(strategy != "block" or list(blocks or ()) == [BLOCK, BLOCK], f"block_structure {blocks}")
    return StoredFp8(
        method="compressed-tensors",
        granularity=strategy,
        scale_suffix="_scale",
        scalar_shape=(1,),
        kept=tuple(_pattern(name) for name in options.get("ignore") or ()),
    )


def _described(weights: dict) -> str:
    names = ("num_bits", "type", "strategy", "group_size")
    return "weights of " + ", ".join(
        f"{name} {weights[name]}" for name in names if weights.get(name) is not None
    )


def _pattern(name: str) -> str:
    """compressed-tensors marks regular expressions; names are expressions for themselves."""
    return name.removeprefix("re:")


_SCALES = (None, "float", "ue8m0")
_GRANULARITIES = {(BLOCK, BLOCK): "block", (1, GROUP): GROUPED}
_READERS = {
    "fp8": _fp8,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
}
