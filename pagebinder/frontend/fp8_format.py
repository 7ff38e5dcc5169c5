"""How a checkpoint says that it keeps weights of linear layers in fp8: `quantization_config` -> `StoredFp8`.

    quant_method         weights [N, K] e4m3         scale                                   left out
    fp8                  128 x 128 blocks            weight_scale_inv [N/128, K/128]         modules_to_not_convert
    fp8, no block size   one scale                   weight_scale_inv []                     modules_to_not_convert
    fbgemm_fp8           one scale a row             weight_scale [N, 1]                     modules_to_not_convert
    compressed-tensors   tensor, channel or block    weight_scale [1] | [N, 1] | as above    ignore

A weight is its code times its scale. Checkpoints may also say how activations are quantised for kernels of fp8; here
they keep the model's dtype. Other methods are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagebinder.custom_ops.linear.weight_formats import BLOCK
from pagebinder.errors import CheckpointError

FORMATS = {"block": "fp8_block", "channel": "fp8", "tensor": "fp8_tensor"}


@dataclass(frozen=True, kw_only=True)
class StoredFp8:
    """`method`: quant_method. `granularity`: a key of FORMATS. `scale_name`: of the tensor beside `weight`.

    `scalar_shape`: that of the one scale of a tensor. `kept`: patterns of modules that are stored plain, None = those
    that transformers leaves out by default.
    """

    method: str
    granularity: str
    scale_name: str
    scalar_shape: tuple[int, ...] = ()
    kept: tuple[str, ...] | None = None

    @property
    def format(self) -> str:
        """Its name in `weight_formats`."""
        return FORMATS[self.granularity]

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of a weight's scale in the checkpoint."""
        if self.granularity == "block":
            return -(-rows // BLOCK), -(-columns // BLOCK)
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
    options = config.get("quantization_config") or (config.get("text_config") or {}).get(
        "quantization_config"
    )
    if not options:
        return None
    method = options.get("quant_method")
    reader = _READERS.get(method)
    if reader is None:
        raise CheckpointError(
            f"{where}: weights are quantised by {method!r}, which is not served; "
            f"{', '.join(map(repr, _READERS))} are. Or give the plain checkpoint and use "
            "CompileConfig(quantization=...)."
        )
    try:
        return reader(options)
    except _NotServedError as reason:
        raise CheckpointError(f"{where}: quant_method {method!r} with {reason} is not served.") from reason


class _NotServedError(Exception):
    """Which part of a method is not served."""


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise _NotServedError(what)


def _fp8(options: dict) -> StoredFp8:
    kept = options.get("modules_to_not_convert", options.get("ignored_layers"))
    _require(options.get("fmt", "e4m3") == "e4m3", f"fmt {options.get('fmt')!r}")
    _require(options.get("expert_dtype", "fp8") == "fp8", f"expert_dtype {options.get('expert_dtype')!r}")
    _require(not options.get("modules_to_convert"), "modules_to_convert (quantised embeddings)")
    blocks = options.get("weight_block_size", [BLOCK, BLOCK])
    _require(blocks is None or list(blocks) == [BLOCK, BLOCK], f"weight_block_size {blocks}")
    return StoredFp8(
        method="fp8",
        granularity="tensor" if blocks is None else "block",
        scale_name="weight_scale_inv",
        kept=None if kept is None else tuple(kept),
    )


def _fbgemm_fp8(options: dict) -> StoredFp8:
    kept = options.get("modules_to_not_convert")
    return StoredFp8(
        method="fbgemm_fp8",
        granularity="channel",
        scale_name="weight_scale",
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
        scale_name="weight_scale",
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


_READERS = {"fp8": _fp8, "fbgemm_fp8": _fbgemm_fp8, "compressed-tensors": _compressed_tensors}
