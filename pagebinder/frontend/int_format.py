"""How a checkpoint says that it keeps weights of linear layers as integers of 2, 3, 4 or 8 bits -> `StoredInts`.

    quant_method         layout (int_codes.py)     of the options                             left out
    gptq                 gptq                      bits, group_size, sym, checkpoint_format   lm_head, if not said
    awq                  awq                       bits, group_size, zero_point, version      modules_to_not_convert
    auto-round           gptq or awq               bits, group_size, sym, packing_format      as gptq
    compressed-tensors   packed (pack-quantized)   num_bits, group_size, symmetric            ignore
                         int8 (int-quantized)

Which layers are stored so, and in how many bits, is read from the checkpoint's files where they are at hand: tools
also leave layers out, or give some of them other sizes, in ways of their own (`dynamic`, `extra_config`, several
config_groups).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pagebinder.frontend import int_codes
from pagebinder.frontend.int_codes import WORD
from pagebinder.frontend.not_served import require

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """`marker`: the tensor that a layer has if it is stored so. `others`: what may lie beside it."""

    marker: str
    others: tuple[str, ...]
    read: Callable

    @property
    def names(self) -> tuple[str, ...]:
        return (self.marker, *self.others)


LAYOUTS = {
    "gptq": Layout("qweight", ("qzeros", "scales", "g_idx"), int_codes.read_gptq),
    "awq": Layout("qweight", ("qzeros", "scales"), int_codes.read_awq),
    "packed": Layout(
        "weight_packed",
        ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        int_codes.read_packed,
    ),
    "int8": Layout("weight_scale", ("weight", "weight_zero_point"), int_codes.read_int8),
}


@dataclass(frozen=True, kw_only=True)
class StoredInts:
    """`method`: quant_method. `layout`: a key of LAYOUTS. `group`: neighbours that share a scale, None = a row.

    `zeros_less`: what is added to zero points as they are stored. `kept`: patterns of modules that are stored plain,
    None = those that transformers leaves out by default. `layers`: shapes of the tensors of each layer that the
    checkpoint's files keep so, by `tail` of its path; None: unknown, `kept` says which. `bf16_scales`: all scales in
    them are bfloat16. `by_activation`: columns are in an order of their own.
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
    by_activation: bool = False

    granularity = "group"
    experts = None

    @property
    def tensors(self) -> Layout:
        return LAYOUTS[self.layout]

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Of a layer's tensors as the config says them, but for orders of columns."""
        words, groups = (
            (rows * self.bits // 32, columns * self.bits // 32),
            columns // (self.group or columns),
        )
        if self.layout == "gptq":
            return {"qweight": (words[1], rows), "qzeros": (groups, words[0]), "scales": (groups, rows)}
        if self.layout == "awq":
            return {"qweight": (columns, words[0]), "qzeros": (groups, words[0]), "scales": (groups, rows)}
        zeros = {} if self.symmetric else {"weight_zero_point": (words[0], groups)}
        if self.layout == "packed":
            return {"weight_packed": (rows, words[1]), "weight_scale": (rows, groups), **zeros}
        return {"weight": (rows, columns), "weight_scale": (rows, groups)}

    def read(self, tensors: Mapping[str, torch.Tensor], columns: int | None = None) -> int_codes.Codes:
        """The codes of a weight, in as many bits as its tensors have; tools may give some weights others.

        Args:
            columns: of the weight; None: as the tensors say.
        Raises:
            CheckpointError: tensors that contradict each other; KeyError: one that is missing.
        """
        bits = self.bits
        if self.layout == "gptq" and columns is None and "g_idx" in tensors:
            columns = len(tensors["g_idx"])
        if self.layout == "gptq" and columns is not None:
            bits = tensors["qweight"].shape[0] * WORD // columns
        elif self.layout == "packed":
            bits = tensors["weight_packed"].shape[1] * WORD // (columns or int(tensors["weight_shape"][1]))
        return self.tensors.read(tensors, bits, self.zeros_less)

    @property
    def endings(self) -> tuple[str, ...]:
        """Of names of tensors that only such weights have."""
        return tuple(f".{name}" for name in self.tensors.names if name != "weight")

    def codes_beside(self, name: str) -> str:
        """The tensor that marks the weight which another one belongs to."""
        return f"{name.rpartition('.')[0]}.{self.tensors.marker}"


def tail(path: str) -> str:
    """A layer's path from the name of its stack on: layers.3.mlp.up_proj, whatever models put around that."""
    names = path.split(".")
    first = next((i for i, name in enumerate(names) if name.isdigit()), len(names))
    return ".".join(names[max(0, min(first, len(names)) - 1) :])


def gptq(options: dict) -> StoredInts:
    bits, form = options.get("bits"), options.get("checkpoint_format") or options.get("format") or "gptq"
    require(bits in (2, 3, 4, 8), f"bits {bits}")
    require(form in ("gptq", "gptq_v2"), f"checkpoint_format {form!r}")
    return StoredInts(
        method=options["quant_method"],
        layout="gptq",
        bits=bits,
        group=_group(options),
        symmetric=bool(options.get("sym", True)),
        zeros_less=1 if form == "gptq" else 0,
        by_activation=bool(options.get("desc_act")),
        kept=() if options.get("lm_head") else None,
    )


def awq(options: dict) -> StoredInts:
    bits, version = options.get("bits", options.get("w_bit")), str(options.get("version", "gemm")).lower()
    require(bits == 4, f"bits {bits}")
    require(version == "gemm", f"version {version!r}")
    kept = options.get("modules_to_not_convert")
    return StoredInts(
        method=options["quant_method"],
        layout="awq",
        bits=bits,
        group=_group(options),
        symmetric=not options.get("zero_point", True),
        kept=None if kept is None else tuple(kept),
    )


def auto_round(options: dict) -> StoredInts:
    form = options.get("packing_format", "auto_round:auto_gptq")
    require(form in _AUTO_ROUND, f"packing_format {form!r}")
    read, more = _AUTO_ROUND[form]
    return read({**options, **more})


def compressed(options: dict, groups: list[dict], kept: tuple[str, ...]) -> StoredInts:
    """Of config groups of compressed-tensors whose weights are all integers; the first stands for layers that no file
    tells more of."""
    forms = {group.get("format") or options.get("format") for group in groups}
    require(len(forms) == 1, f"config_groups of the formats {', '.join(sorted(map(repr, forms)))}")
    form = forms.pop()
    require(form in _COMPRESSED, f"format {form!r}")
    for weights in (group["weights"] for group in groups):
        require(
            weights.get("strategy") in ("channel", "group", "tensor"), f"strategy {weights.get('strategy')!r}"
        )
        bits = weights.get("num_bits")
        require(bits in _COMPRESSED[form], f"num_bits {bits} as {form}")
    weights = groups[0]["weights"]
    return StoredInts(
        method="compressed-tensors",
        layout="packed" if form == "pack-quantized" else "int8",
        bits=weights["num_bits"],
        group=weights.get("group_size") if weights["strategy"] == "group" else None,
        symmetric=all(group["weights"].get("symmetric", True) for group in groups),
        by_activation=any(group["weights"].get("actorder") in ("group", True) for group in groups),
        kept=kept,
    )


def _group(options: dict) -> int | None:
    group = options.get("group_size", options.get("q_group_size", 128))
    return None if group in (-1, None) else group


_COMPRESSED = {"pack-quantized": (3, 4, 8), "int-quantized": (8,), "naive-quantized": (8,)}  # format -> bits
_AUTO_ROUND = {
    "auto_round:auto_gptq": (gptq, {"checkpoint_format": "gptq"}),
    "auto_round:gptqmodel": (gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round": (gptq, {"checkpoint_format": "gptq_v2"}),
    "auto_round:auto_awq": (awq, {"version": "gemm"}),
}
INT_READERS = {"gptq": gptq, "awq": awq, "auto-round": auto_round}
