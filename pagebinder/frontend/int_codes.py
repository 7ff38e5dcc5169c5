"""Weights that tools for quantisation write in few bits: what their tensors say, as codes, zero points and scales.

A weight [N, K] is (code - zero point) * scale, with a zero point and a scale for each G neighbours of a row. Words of
32 bits hold several values of b bits, the first one in the lowest bits; values of 3 bits lie across words. Codes may
also be e2m1 (`weight_formats`), two in a byte, the first one in the lower half; they have no zero points.

    layout   codes                         zero points                 scales            group of each column
    gptq     qweight [K * b/32, N]         qzeros [K/G, N * b/32]      scales [K/G, N]   g_idx [K]
    awq      qweight [K, N * b/32]         qzeros [K/G, N * b/32]      scales [K/G, N]
    gemv     qweight [N, K * b/32]         qzeros [N, .]               scales [N, .]
    packed   weight_packed [N, K * b/32]   weight_zero_point           weight_scale      weight_g_idx [K], or -1
                                           [N * b/32, K/G]             [N, K/G]
    int8     weight [N, K] int8            weight_zero_point           weight_scale
                                           [N, K/G] int8               [N, K/G]
    bnb8     weight [N, K] int8                                        SCB [N] / 127
    nvfp4    weight_packed [N, K/2]                                    weight_scale [N, K/16] e4m3
             e2m1                                                      / weight_global_scale [1]
    modelopt weight [N, K/2] e2m1                                      weight_scale [N, K/16] e4m3
                                                                       * weight_scale_2 []
    mxfp4    weight_packed [N, K/2],                                   weight_scale [N, K/32] ue8m0
             ModelOpt's: weight

GPTQ's first format (checkpoint_format "gptq") stores zero points less 1. AWQ's words hold columns 0, 2, 4, 6, 1, 3,
5, 7 of each 8, and its version gemv pads groups. Of packed ones, codes and zero points are raised by half of their
range, and old files of 3 bits have ten values in a word. GPTQ: Frantar et al. 2022; AWQ: Lin et al. 2023; LLM.int8:
Dettmers et al. 2022; the tensors are those of AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors, bitsandbytes, and
NVIDIA's ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from pagebinder.custom_ops.latent.small_floats import from_e2m1
from pagebinder.errors import CheckpointError
from pagebinder.frontend.mx_numbers import scale_values
from pagebinder.frontend.quantized_module import with_rows

WORD = 32
AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # where column i of 8 lies
SLICE_WORDS = 1 << 22  # that are unpacked at once


class Codes(NamedTuple):
    """`bits` of a value; `values` [N, K] uint8; of each `group` of neighbours `zeros` int16, `scales` float32 [N, G].

    The last group may be smaller. `order`: the column of the weight that each column of these belongs to, int64 [K];
    None: in order. `is_e2m1`: values are no integers; zero points are half of the range then. `levels`: what scales
    are products of, to one rounding of float32: a number [] and one for each group [N, G], float32 that e4m3 holds.
    """

    bits: int
    group: int
    values: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    order: torch.Tensor | None = None
    is_e2m1: bool = False
    levels: tuple[torch.Tensor, torch.Tensor] | None = None

    def of_columns(self, parts: torch.Tensor, span: int = 1) -> torch.Tensor:
        """Zero points or scales [N, G] -> those of each `span` columns, which have one group."""
        return parts[:, torch.arange(0, self.values.shape[1], span, device=parts.device) // self.group]

    def integers(self) -> torch.Tensor:
        """Values less their zero points, int16 [N, K]."""
        return self.values.to(torch.int16) - self.of_columns(self.zeros)

    def of_rows(self, count: int) -> Codes:
        """The same, the last row again and again behind the others, until there are so many."""
        values, zeros, scales = (with_rows(each, count) for each in (self.values, self.zeros, self.scales))
        levels = None if self.levels is None else (self.levels[0], with_rows(self.levels[1], count))
        return self._replace(values=values, zeros=zeros, scales=scales, levels=levels)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K], rounded once."""
        numbers = from_e2m1(self.values) if self.is_e2m1 else self.integers().float()
        weight = (numbers * self.of_columns(self.scales)).to(dtype)
        return weight if self.order is None else weight[:, self.order.argsort()]


def group_of(columns: int, num_groups: int, said: int | None) -> int:
    """How many columns share a scale, as the config says it, or as the tensors do where they say something else.

    Raises:
        CheckpointError: they fit nothing.
    """
    group = said or columns
    if num_groups == -(-columns // group):
        return group
    if not num_groups or columns % num_groups:
        raise CheckpointError(f"{columns} columns have scales of {num_groups} groups.")
    return columns // num_groups


def read_gptq(tensors: Mapping[str, torch.Tensor], bits: int, group: int | None, zeros_less: int) -> Codes:
    values = unpacked(tensors["qweight"].t().contiguous(), bits)
    zeros = _raised(tensors["qzeros"], zeros_less, bits)[:, : len(values)].t().to(torch.int16)
    group = group_of(values.shape[1], len(tensors["scales"]), group)
    order = _order(tensors.get("g_idx"), values.shape[1], group)
    return _in_order(bits, group, values, zeros, tensors["scales"].t().float(), order)


def read_awq(tensors: Mapping[str, torch.Tensor], bits: int, group: int | None, zeros_less: int) -> Codes:
    scales = tensors["scales"].t().float()
    values = _awq_columns(unpacked(tensors["qweight"], bits)).t().contiguous()
    if "qzeros" in tensors:
        zeros = _awq_columns(unpacked(tensors["qzeros"], bits)).t().to(torch.int16)
    else:
        zeros = torch.full_like(scales, 1 << (bits - 1), dtype=torch.int16)
    return Codes(bits, group_of(values.shape[1], scales.shape[1], group), values, zeros, scales)


def read_gemv(tensors: Mapping[str, torch.Tensor], bits: int, group: int | None, zeros_less: int) -> Codes:
    values = unpacked(tensors["qweight"], bits)
    group = group or values.shape[1]
    groups = -(-values.shape[1] // group)  # behind them there is padding
    zeros = unpacked(tensors["qzeros"], bits)[:, :groups].to(torch.int16)
    return Codes(bits, group, values, zeros, tensors["scales"].float()[:, :groups].contiguous())


def read_packed(tensors: Mapping[str, torch.Tensor], bits: int, group: int | None, zeros_less: int) -> Codes:
    rows, columns = _shape_of(tensors)
    width = tensors["weight_packed"].shape[1]
    in_words = width == -(-columns // (WORD // bits))
    if not in_words and width != -(-columns * bits // WORD):
        raise CheckpointError(f"{columns} values of {bits} bits are in {width} words.")
    take = _values_in_words if in_words else unpacked
    values = take(tensors["weight_packed"], bits)[:, :columns]
    scales = tensors["weight_scale"].float()
    if "weight_zero_point" in tensors:
        packed = tensors["weight_zero_point"]
        zeros = take(packed.t().contiguous(), bits).t()[:rows].to(torch.int16)
    else:
        zeros = torch.full_like(scales, 1 << (bits - 1), dtype=torch.int16)
    group = group_of(columns, scales.shape[1], group)
    order = _order(tensors.get("weight_g_idx"), columns, group)
    return _in_order(bits, group, values.contiguous(), zeros, scales, order)


def read_int8(tensors: Mapping[str, torch.Tensor], bits: int, group: int | None, zeros_less: int) -> Codes:
    weight, scales = tensors["weight"], tensors["weight_scale"].float()
    scales = scales.reshape(1, 1).expand(len(weight), 1) if scales.numel() == 1 else scales
    zeros = tensors.get("weight_zero_point", torch.zeros(1, dtype=torch.int8, device=weight.device)).to(
        torch.int16
    )
    zeros = zeros.reshape(1, 1).expand_as(scales) if zeros.numel() == 1 else zeros
    group = group_of(weight.shape[1], scales.shape[1], group)
    return Codes(8, group, weight.view(torch.uint8) ^ 0x80, zeros + 128, scales)


def read_bnb8(tensors: Mapping[str, torch.Tensor], bits: int, group: int | None, zeros_less: int) -> Codes:
    if int(tensors.get("weight_format", 0)):
        raise CheckpointError(f"its weight_format is {int(tensors['weight_format'])}; 0 is read: rows.")
    return read_int8(
        {"weight": tensors["weight"], "weight_scale": tensors["SCB"][:, None].float() / 127}, 8, None, 0
    )


def read_nvfp4(tensors: Mapping[str, torch.Tensor], bits: int, group: int | None, zeros_less: int) -> Codes:
    whole = _one(tensors, "weight_global_scale")
    if not (whole.isfinite() and (1 / whole).isfinite()):
        raise CheckpointError(f"weight_global_scale is {float(whole)}.")
    scales = tensors["weight_scale"].float()
    return _e2m1(tensors["weight_packed"], group, scales / whole, (1 / whole, scales))


def read_modelopt(
    tensors: Mapping[str, torch.Tensor], bits: int, group: int | None, zeros_less: int
) -> Codes:
    whole = _one(tensors, "weight_scale_2")
    scales = tensors["weight_scale"].float()
    return _e2m1(tensors["weight"], group, scales * whole, (whole, scales))


def read_mxfp4(tensors: Mapping[str, torch.Tensor], bits: int, group: int | None, zeros_less: int) -> Codes:
    codes = tensors["weight_packed" if "weight_packed" in tensors else "weight"]
    return _e2m1(codes, group, scale_values(tensors["weight_scale"]))


def _e2m1(pairs: torch.Tensor, group: int | None, scales: torch.Tensor, levels=None) -> Codes:
    if pairs.dtype is not torch.uint8 or pairs.dim() != 2:
        raise CheckpointError(f"values of 4 bits are stored as {pairs.dtype} {list(pairs.shape)}.")
    values = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    zeros = torch.full_like(scales, 8, dtype=torch.int16)
    group = group_of(values.shape[1], scales.shape[1], group)
    return Codes(4, group, values, zeros, scales, is_e2m1=True, levels=levels)


def _one(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The one number of a tensor, []."""
    if tensors[name].numel() != 1:
        raise CheckpointError(f"{name} is {list(tensors[name].shape)}; one number is read.")
    return tensors[name].reshape(()).float()


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """words int32 [R, W] -> the values that their rows hold, uint8 [R, W * 32 / bits], and maybe some of padding.

    Raises:
        CheckpointError: words of another dtype.
    """
    if words.dtype is not torch.int32 or words.dim() != 2:
        raise CheckpointError(f"values of {bits} bits are stored as {words.dtype} {list(words.shape)}.")
    rows = max(1, SLICE_WORDS // max(words.shape[1], 1))
    take = _values_in_words if WORD % bits == 0 else _values_across_words
    parts = [take(part, bits) for part in words.split(rows)]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _values_in_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """As many whole values as a word has room for."""
    shifts = torch.arange(0, WORD - bits + 1, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def _values_across_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`bits` words hold 32 values."""
    words = torch.nn.functional.pad(words, (0, -words.shape[1] % bits))
    each = (words.long() & 0xFFFFFFFF).unflatten(1, (-1, bits))
    values = []
    for i in range(WORD):
        word, shift = divmod(i * bits, WORD)
        value = each[..., word] >> shift
        if shift + bits > WORD:
            value = value | each[..., word + 1] << (WORD - shift)
        values.append((value & (1 << bits) - 1).to(torch.uint8))
    return torch.stack(values, dim=-1).flatten(1)


def _awq_columns(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(1, (-1, len(AWQ_COLUMNS)))[..., list(AWQ_COLUMNS)].flatten(1)


def _raised(words: torch.Tensor, by: int, bits: int) -> torch.Tensor:
    """Words of zero points that are stored less 1 -> the zero points. Tools take it off words as whole numbers, so
    that a zero point of 0 borrows from its neighbour; where values lie across words, off each by itself."""
    if not by:
        return unpacked(words, bits)
    if WORD % bits:
        return unpacked(words, bits) + by & (1 << bits) - 1
    ones = sum(by << shift for shift in range(0, WORD, bits))
    raised = (words.long() + ones & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    return unpacked(raised, bits)


def _shape_of(tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    rows, columns = tensors["weight_shape"].flatten().tolist()
    return rows, columns


def _order(groups: torch.Tensor | None, columns: int, group: int) -> torch.Tensor | None:
    """The order in which the columns of each group are neighbours; None where they are.

    Raises:
        CheckpointError: groups that are not of that size.
    """
    if groups is None or group >= columns or bool((groups == -1).all()):
        return None
    groups = groups.long()
    in_a_row = torch.arange(columns, device=groups.device) // group
    if torch.equal(groups, in_a_row):
        return None
    order = torch.argsort(groups, stable=True)
    if len(groups) != columns or not torch.equal(groups[order], in_a_row):
        raise CheckpointError(f"its columns are not in groups of {group}.")
    return order


def _in_order(bits: int, group: int, values, zeros, scales, order: torch.Tensor | None) -> Codes:
    return Codes(bits, group, values if order is None else values[:, order], zeros, scales, order)
