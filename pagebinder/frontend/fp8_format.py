"""How a checkpoint says that it keeps weights in floats of 8 or 4 bits: `quantization_config` -> `StoredFp8`.

    quant_method         linear layers [N, K] e4m3     scale                                   left out
    fp8                  128 x 128 blocks              weight_scale_inv [N/128, K/128]         modules_to_not_convert
    fp8, no block size   one scale                     weight_scale_inv []                     modules_to_not_convert
    fp8 [1, 32], mxfp8   32 columns of a row           weight_scale_inv [N, K/32]              modules_to_not_convert
    fbgemm_fp8           one scale a row               weight_scale [N, 1]                     modules_to_not_convert
    compressed-tensors   tensor, channel or block      weight_scale [1] | [N, 1] | as above    ignore
    modelopt             one scale                     weight_scale []                         ignore
                         one scale a row               weight_scale [N]
                         128 x 128 blocks              weight_scale [N/128, 1, K/128, 1]
                         32 columns of a row           weight_scale [N, K/32]
    mxfp4                plain                                                                 modules_to_not_convert

    experts [E, N, K]    stored by                     codes                   scale, of 32 columns of a row
    mxfp8                fp8 [1, 32], mxfp8            NAME [E, N, K]          NAME_scale_inv [E, N, K/32]
    mxfp4                fp8 with expert_dtype fp4     NAME [E, N, K/2]        NAME_scale_inv [E, N, K/32]
    mxfp4                mxfp4                         NAME_blocks             NAME_scales [E, N, K/32]
                                                       [E, N, K/32, 16]
    as linear layers     the others

A weight is its code times its scale. Scales of 32 columns are powers of two, and the others may be: ue8m0, one byte.
Checkpoints may also say how activations are quantised for kernels of fp8; here they keep the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pagebinder.custom_ops.linear.weight_formats import BLOCK
from pagebinder.frontend.mx_numbers import GROUP, num_groups
from pagebinder.frontend.not_served import described, require
from pagebinder.frontend.stored_names import NamedLayers, StoredTensors

# Granularities of scales whose codes a kernel reads -> the format's name in `weight_formats`.
FORMATS = {"block": "fp8_block", "channel": "fp8", "tensor": "fp8_tensor"}
GROUPED = "group"
# Scales for activations of fp8 kernels: here activations keep their dtype.
OF_ACTIVATIONS = ("activation_scale", "input_scale")
# Beside them, of other tools, and scales for keys and values.
UNREAD = (
    *OF_ACTIVATIONS, "input_global_scale", "input_zero_point", "output_scale", "output_zero_point",
    "q_scale", "k_scale", "v_scale",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StoredFp8(NamedLayers):
    """`method`: quant_method. `granularity`: of linear layers, a key of FORMATS or GROUPED; None = they are plain.

    `experts`: mxfp8 or mxfp4, None = as linear layers. `scale_suffix`, `codes_suffix`: what the names of both tensors
    add to the weight's. `scalar_shape`: that of the one scale of a tensor. `by_dims`: scales of rows are a vector,
    those of blocks have a dimension of 1 behind each. `kept`: patterns of modules that are stored plain, None = those
    transformers leaves out by default.
    """

    method: str
    granularity: str | None
    scale_suffix: str
    codes_suffix: str = ""
    experts: str | None = None
    scalar_shape: tuple[int, ...] = ()
    by_dims: bool = False
    layers: Mapping[str, bool] | None = None
    plain: frozenset[str] = frozenset()
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
            blocks = -(-rows // BLOCK), -(-columns // BLOCK)
            return (blocks[0], 1, blocks[1], 1) if self.by_dims else blocks
        if self.granularity == GROUPED:
            return rows, num_groups(columns)
        if self.granularity == "channel":
            return (rows,) if self.by_dims else (rows, 1)
        return self.scalar_shape

    def scale_of_kernels(self, scale: torch.Tensor) -> torch.Tensor:
        """A linear layer's scale in the shape of `weight_formats`, of groups [N, K/32]."""
        return scale.reshape(len(scale), -1) if self.granularity in ("block", GROUPED) else scale.reshape(-1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors of a linear layer's weight."""
        return "weight", self.scale_name, *OF_ACTIVATIONS

    @property
    def endings(self) -> tuple[str, ...]:
        """Of names of scales."""
        return (f".{self.scale_name}",) + ((f"proj{self.scale_suffix}",) if self.experts else ())

    def codes_beside(self, name: str) -> str:
        """The name of the codes of a scale."""
        return name.removesuffix(self.scale_suffix) + self.codes_suffix

    def expected(self, rows: int, columns: int) -> StoredTensors:
        """Of a linear layer's tensors, as the config says them."""
        return {
            "weight": ("F8_E4M3", (rows, columns)),
            self.scale_name: ("F32", self.scale_shape(rows, columns)),
        }

    def describes(self, tensors: StoredTensors) -> bool:
        """Are these the tensors of a linear layer's weight that is stored so?"""
        dtype, shape = tensors.get("weight", (None, ()))
        if dtype != "F8_E4M3" or len(shape) != 2 or self.scale_name not in tensors:
            return False
        return tensors[self.scale_name][1] == self.scale_shape(*shape)

    def with_layers(self, layers: Mapping[str, StoredTensors], plain: frozenset[str]) -> StoredFp8:
        """Knowing which layers are stored so, and which others are plain."""
        return replace(self, layers=dict.fromkeys(layers, True), plain=plain)

    def __str__(self) -> str:
        return f"{self.format} as stored (quant_method {self.method})"


def _fp8(options: dict, default_blocks: tuple[int, int] = (BLOCK, BLOCK)) -> StoredFp8:
    kept = options.get("modules_to_not_convert", options.get("ignored_layers"))
    experts = options.get("expert_dtype", "fp8")
    require(options.get("fmt", "e4m3") == "e4m3", f"fmt {options.get('fmt')!r}")
    require(options.get("scale_fmt") in _SCALES, f"scale_fmt {options.get('scale_fmt')!r}")
    require(experts in ("fp8", "fp4"), f"expert_dtype {experts!r}")
    require(not options.get("modules_to_convert"), "modules_to_convert (quantised embeddings)")
    blocks = options.get("weight_block_size", default_blocks)
    granularity = "tensor" if blocks is None else _GRANULARITIES.get(tuple(blocks))
    require(granularity is not None, f"weight_block_size {list(blocks or ())}")
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
    require(stored.granularity == GROUPED, f"weight_block_size {options.get('weight_block_size')}")
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


def modelopt(options: dict, kept: tuple[str, ...]) -> StoredFp8:
    """Of what ModelOpt says of weights whose quant_algo is one of MODELOPT_ALGORITHMS."""
    return StoredFp8(
        method="modelopt",
        granularity=MODELOPT_ALGORITHMS[options["quant_algo"].upper()],
        scale_suffix="_scale",
        by_dims=True,
        kept=kept,
    )


def compressed(weights: dict, kept: tuple[str, ...]) -> StoredFp8:
    """Of the weights of a config group of compressed-tensors, which are e4m3."""
    require(weights.get("type") == "float" and weights.get("num_bits") == 8, described(weights))
    require(weights.get("symmetric", True) and not weights.get("dynamic"), described(weights))
    strategy = weights.get("strategy")
    require(strategy in FORMATS, described(weights))
    blocks = weights.get("block_structure")
    require(strategy != "block" or list(blocks or ()) == [BLOCK, BLOCK], f"block_structure {blocks}")
    return StoredFp8(
        method="compressed-tensors", granularity=strategy, scale_suffix="_scale", scalar_shape=(1,), kept=kept
    )


MODELOPT_ALGORITHMS = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "channel",
    "FP8_PB_WO": "block",
    "MXFP8": GROUPED,
}
_SCALES = (None, "float", "ue8m0")
_GRANULARITIES = {(BLOCK, BLOCK): "block", (1, GROUP): GROUPED}
FP8_READERS = {"fp8": _fp8, "mxfp8": _mxfp8, "mxfp4": _mxfp4, "fbgemm_fp8": _fbgemm_fp8}
