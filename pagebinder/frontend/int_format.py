"""How a checkpoint says that it keeps weights of linear layers as integers of 2, 3, 4 or 8 bits, or in 4 bits as
floats with scales of groups -> `StoredInts`.

    quant_method         layout (int_codes.py)     of the options                             left out
    gptq                 gptq                      bits, group_size, sym, checkpoint_format   lm_head, if not said
    awq                  awq or gemv               bits, group_size, zero_point, version      modules_to_not_convert
    auto-round           gptq or awq               bits, group_size, sym, packing_format      as gptq
    compressed-tensors   packed (pack-quantized)   num_bits, group_size, symmetric            ignore
                         int8 (int-quantized)
                         nvfp4, mxfp4 (...-pack-quantized)
    modelopt             modelopt                  quant_algo, config_groups                  ignore
    bitsandbytes, 8 bits bnb8                                                                 llm_int8_skip_modules

Which layers are stored so, and in how many bits, is read from the checkpoint's files where they are at hand: tools
also leave layers out, or give some of them other sizes, in ways of their own (`dynamic`, `extra_config`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend import int_codes
from pagebinder.frontend.int_codes import WORD
from pagebinder.frontend.not_served import described, require
from pagebinder.frontend.stored_names import NamedLayers, StoredTensors

Shapes = Mapping[str, tuple[int, ...]]
GEMV_GROUPS = 8  # whose zero points are in a word; words of a row are a multiple of 128 / the group's size


@dataclass(frozen=True)
class Layout:
    """`marker`: the tensor that a layer has if it is stored so. `dtypes`: of it and of what may lie beside it, in
    safetensors' names."""

    marker: str
    dtypes: Mapping[str, tuple[str, ...]]
    read: Callable

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.dtypes)

    @property
    def scales(self) -> str:
        return next(name for name in self.dtypes if "scale" in name or name == "SCB")

    def loaded_as(self, name: str) -> torch.dtype:
        """The dtype of a parameter that a loader fills: one that holds all that may be stored."""
        return _LOADED_AS.get(self.dtypes[name][0], torch.float32)


_WORDS, _INDEX, _FLOATS = ("I32",), ("I32", "I64"), ("F16", "BF16", "F32", "F64")
_LOADED_AS = {"I32": torch.int32, "I8": torch.int8, "U8": torch.uint8}
LAYOUTS = {
    "gptq": Layout(
        "qweight",
        {"qweight": _WORDS, "qzeros": _WORDS, "scales": _FLOATS, "g_idx": _INDEX},
        int_codes.read_gptq,
    ),
    "awq": Layout("qweight", {"qweight": _WORDS, "qzeros": _WORDS, "scales": _FLOATS}, int_codes.read_awq),
    "gemv": Layout("qweight", {"qweight": _WORDS, "qzeros": _WORDS, "scales": _FLOATS}, int_codes.read_gemv),
    "packed": Layout(
        "weight_packed",
        {
            "weight_packed": _WORDS, "weight_scale": _FLOATS, "weight_zero_point": _WORDS, "weight_shape": _INDEX,
            "weight_g_idx": _INDEX,
        },
        int_codes.read_packed,
    ),
    "int8": Layout(
        "weight_scale",
        {"weight_scale": _FLOATS, "weight": ("I8",), "weight_zero_point": ("I8",)},
        int_codes.read_int8,
    ),
    "nvfp4": Layout(
        "weight_packed",
        {"weight_packed": ("U8",), "weight_scale": ("F8_E4M3",), "weight_global_scale": _FLOATS},
        int_codes.read_nvfp4,
    ),
    "modelopt": Layout(
        "weight_scale_2",
        {"weight_scale_2": _FLOATS, "weight_scale": ("F8_E4M3",), "weight": ("U8",)},
        int_codes.read_modelopt,
    ),
    "mxfp4": Layout(
        "weight_packed", {"weight_packed": ("U8",), "weight_scale": ("U8", "F8_E8M0")}, int_codes.read_mxfp4
    ),
    "modelopt_mxfp4": Layout(
        "weight_scale", {"weight_scale": ("U8", "F8_E8M0"), "weight": ("U8",)}, int_codes.read_mxfp4
    ),
    "bnb8": Layout("SCB", {"SCB": _FLOATS, "weight": ("I8",), "weight_format": ("U8",)}, int_codes.read_bnb8),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StoredInts(NamedLayers):
    """`method`: quant_method. `layout`: a key of LAYOUTS. `group`: neighbours that share a scale, None = a row.

    `zeros_less`: what is added to zero points as they are stored. `kept`: patterns of modules that are stored plain,
    None = those that transformers leaves out by default. `layers`: shapes of the tensors of each layer that the
    checkpoint's files keep so, by its name there; None: unknown, `kept` says which. `bf16_scales`: all scales in them
    are bfloat16. `plain`: names of other layers there. `by_activation`: columns are in an order of their own.
    `needs`: tensors without which codes mean something else.
    """

    method: str
    layout: str
    bits: int
    group: int | None
    symmetric: bool
    zeros_less: int = 0
    kept: tuple[str, ...] | None = None
    layers: Mapping[str, Shapes] | None = None
    bf16_scales: bool = False
    plain: frozenset[str] = frozenset()
    by_activation: bool = False
    needs: tuple[str, ...] = ()

    granularity = "integers"
    experts = None

    @property
    def tensors(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def is_e2m1(self) -> bool:
        """Are values e2m1?"""
        return self.layout in ("nvfp4", "modelopt", "mxfp4", "modelopt_mxfp4")

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Of a layer's tensors as the config says them, but for orders of columns."""
        words = rows * self.bits // WORD, columns * self.bits // WORD
        groups = -(-columns // (self.group or columns))
        if self.layout == "gptq":
            return {"qweight": (words[1], rows), "qzeros": (groups, words[0]), "scales": (groups, rows)}
        if self.layout == "awq":
            return {"qweight": (columns, words[0]), "qzeros": (groups, words[0]), "scales": (groups, rows)}
        if self.layout == "gemv":
            padded = -(-groups // GEMV_GROUPS)
            padded += -padded % (128 // min(self.group or columns, 128))
            return {
                "qweight": (rows, words[1]),
                "qzeros": (rows, padded),
                "scales": (rows, padded * GEMV_GROUPS),
            }
        if self.is_e2m1:
            codes = "weight" if "modelopt" in self.layout else "weight_packed"
            whole = {"nvfp4": {"weight_global_scale": (1,)}, "modelopt": {"weight_scale_2": ()}}
            both = {codes: (rows, columns // 2), "weight_scale": (rows, groups)}
            return both | whole.get(self.layout, {})
        zeros = {} if self.symmetric else {"weight_zero_point": (words[0], groups)}
        if self.layout == "packed":
            return {"weight_packed": (rows, words[1]), "weight_scale": (rows, groups), **zeros}
        return {
            "weight": (rows, columns),
            **({"SCB": (rows,)} if self.layout == "bnb8" else {"weight_scale": (rows, groups)}),
        }

    def read(self, tensors: Mapping[str, torch.Tensor], columns: int | None = None) -> int_codes.Codes:
        """The codes of a weight, in as many bits as its tensors have; tools may give some weights others.

        Args:
            columns: of the weight; None: as the tensors say.
        Raises:
            CheckpointError: tensors that contradict each other, scales that are no numbers; KeyError: one is missing.
        """
        bits = self.bits
        if lacking := [name for name in (*self.needs, self.tensors.marker) if name not in tensors]:
            raise CheckpointError(f"its config says that it has {lacking[0]}, which is missing.")
        if self.layout == "gptq" and columns is None and "g_idx" in tensors:
            columns = len(tensors["g_idx"])
        if self.layout == "gptq" and columns is not None:
            bits = tensors["qweight"].shape[0] * WORD // columns
        elif self.layout == "packed":
            bits = tensors["weight_packed"].shape[1] * WORD // (columns or int(tensors["weight_shape"][1]))
        codes = self.tensors.read(tensors, bits, self.group, self.zeros_less)
        if not codes.scales.isfinite().all():
            raise CheckpointError("a scale is NaN or infinity.")
        return codes

    def expected(self, rows: int, columns: int) -> StoredTensors:
        """Of a layer's tensors, as the config says them."""
        shapes = self.shapes(rows, columns)
        return {name: (self.tensors.dtypes[name][0], shape) for name, shape in shapes.items()}

    def describes(self, tensors: StoredTensors) -> bool:
        """Are these the tensors of a weight that is stored so?"""
        wanted = self.tensors.dtypes
        return all(name in tensors for name in (self.tensors.marker, *self.needs)) and all(
            dtype in wanted[name] for name, (dtype, _) in tensors.items() if name in wanted
        )

    def with_layers(self, layers: Mapping[str, StoredTensors], plain: frozenset[str]) -> StoredInts:
        """Knowing of each layer its tensors, and which others are plain."""
        shapes = {
            name: {kind: shape for kind, (_, shape) in tensors.items() if kind in self.tensors.names}
            for name, tensors in layers.items()
        }
        scales = {
            tensors[self.tensors.scales][0] for tensors in layers.values() if self.tensors.scales in tensors
        }
        return replace(self, layers=shapes, plain=plain, bf16_scales=scales == {"BF16"})

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors of a weight, be it stored so or plain."""
        return tuple(dict.fromkeys((*self.tensors.names, "weight")))

    @property
    def endings(self) -> tuple[str, ...]:
        """Of names of tensors that only such weights have."""
        return tuple(f".{name}" for name in self.tensors.names if name != "weight")

    def codes_beside(self, name: str) -> str:
        """The tensor that marks the weight which another one belongs to."""
        return f"{name.rpartition('.')[0]}.{self.tensors.marker}"


def gptq(options: dict) -> StoredInts:
    bits, form = options.get("bits"), options.get("checkpoint_format") or options.get("format") or "gptq"
    require(bits in (2, 3, 4, 8), f"bits {bits!r}")
    require(form in ("gptq", "gptq_v2"), f"checkpoint_format {form!r}")
    for name in ("adapter", "rotation"):
        require(not options.get(name), f"{name} {options.get(name)!r}")
    require(options.get("pack_dtype") in (None, "int32"), f"pack_dtype {options.get('pack_dtype')!r}")
    return StoredInts(
        method=options["quant_method"],
        layout="gptq",
        bits=bits,
        group=_group(options),
        symmetric=bool(options.get("sym", True)),
        zeros_less=1 if form == "gptq" else 0,
        by_activation=bool(options.get("desc_act")),
        needs=("scales", "qzeros", *(("g_idx",) if options.get("desc_act") else ())),
        kept=() if options.get("lm_head") else None,
    )


def awq(options: dict) -> StoredInts:
    bits, version = options.get("bits", options.get("w_bit")), str(options.get("version") or "gemm").lower()
    require(bits == 4, f"bits {bits!r}")
    require(version in ("gemm", "gemv"), f"version {version!r}")
    kept = options.get("modules_to_not_convert")
    return StoredInts(
        method=options["quant_method"],
        layout="awq" if version == "gemm" else "gemv",
        bits=bits,
        group=_group(options),
        symmetric=not options.get("zero_point", True),
        needs=("scales", *(("qzeros",) if options.get("zero_point", True) or version == "gemv" else ())),
        kept=None if kept is None else tuple(kept),
    )


def auto_round(options: dict) -> StoredInts:
    form = options.get("packing_format", "auto_round:auto_gptq")
    require(form in _AUTO_ROUND, f"packing_format {form!r}")
    read, more = _AUTO_ROUND[form]
    return read({**options, **more})


def compressed(form: str, weights: dict, kept: tuple[str, ...]) -> StoredInts:
    """Of the weights of a config group of compressed-tensors, integers or floats of 4 bits, in this format."""
    if form in _COMPRESSED_FLOATS:
        layout, strategy, group = _COMPRESSED_FLOATS[form]
        said = tuple(weights.get(name) for name in ("num_bits", "type", "strategy", "group_size"))
        require(said == (4, "float", strategy, group) and weights.get("symmetric", True), described(weights))
        return _e2m1("compressed-tensors", layout, group, kept)
    require(form in _COMPRESSED, f"format {form!r}")
    require(weights.get("type", "int") == "int", described(weights))
    require(
        weights.get("strategy") in ("channel", "group", "tensor"), f"strategy {weights.get('strategy')!r}"
    )
    bits, is_packed = weights.get("num_bits"), form == "pack-quantized"
    require(bits in _COMPRESSED[form], f"num_bits {bits!r} as {form}")
    is_symmetric, by_activation = weights.get("symmetric", True), weights.get("actorder") in ("group", True)
    needs = {
        "weight_scale": True,
        "weight_shape": is_packed,
        "weight": not is_packed,
        "weight_zero_point": not is_symmetric,
        "weight_g_idx": by_activation,
    }
    return StoredInts(
        method="compressed-tensors",
        layout="packed" if is_packed else "int8",
        bits=bits,
        group=_checked(weights.get("group_size")) if weights["strategy"] == "group" else None,
        symmetric=is_symmetric,
        by_activation=by_activation,
        needs=tuple(name for name, is_needed in needs.items() if is_needed),
        kept=kept,
    )


def modelopt(options: dict, kept: tuple[str, ...]) -> StoredInts:
    """Of what ModelOpt says of weights whose quant_algo is one of MODELOPT_ALGORITHMS."""
    layout, group = MODELOPT_ALGORITHMS[options["quant_algo"].upper()]
    groups = [each.get("weights") or {} for each in (options.get("config_groups") or {}).values()]
    sizes = {weights.get("group_size") for weights in groups} | {options.get("group_size")}
    require(sizes <= {None, group}, f"group_size {sorted(sizes - {None, group}, key=str)}")
    return _e2m1("modelopt", layout, group, kept)


def _e2m1(method: str, layout: str, group: int, kept: tuple[str, ...]) -> StoredInts:
    return StoredInts(
        method=method,
        layout=layout,
        bits=4,
        group=group,
        symmetric=True,
        needs=LAYOUTS[layout].names,
        kept=kept,
    )


def bnb_int8(options: dict) -> StoredInts:
    """Of a quantization_config of bitsandbytes in 8 bits; the columns that it multiplies in 16 have codes, too."""
    kept = options.get("llm_int8_skip_modules")
    return StoredInts(
        method="bitsandbytes",
        layout="bnb8",
        bits=8,
        group=None,
        symmetric=True,
        needs=("weight",),
        kept=None if kept is None else tuple(kept),
    )


def _group(options: dict) -> int | None:
    group = options.get("group_size", options.get("q_group_size", 128))
    return _checked(None if group == -1 else group)


def _checked(group) -> int | None:
    require(group is None or (isinstance(group, int) and group > 0), f"group_size {group!r}")
    return group


MODELOPT_ALGORITHMS = {  # -> layout, group
    "NVFP4": ("modelopt", 16),
    "W4A16_NVFP4": ("modelopt", 16),
    "MXFP4": ("modelopt_mxfp4", 32),
}
_COMPRESSED_FLOATS = {  # format -> layout, strategy and group of its weights
    "nvfp4-pack-quantized": ("nvfp4", "tensor_group", 16),
    "mxfp4-pack-quantized": ("mxfp4", "group", 32),
}
_COMPRESSED = {"pack-quantized": (3, 4, 8), "int-quantized": (8,), "naive-quantized": (8,)}  # format -> bits
_AUTO_ROUND = {
    "auto_round:auto_gptq": (gptq, {"checkpoint_format": "gptq"}),
    "auto_round:gptqmodel": (gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round": (gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round:auto_awq": (awq, {"version": "gemm"}),
}
INT_READERS = {"gptq": gptq, "awq": awq, "auto-round": auto_round}
