"""A linear layer whose weight a checkpoint keeps as codes, as it is served."""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.linear.code_order import PANEL
from pagebinder.custom_ops.linear.group_scales import plain_scale
from pagebinder.custom_ops.linear.weight_formats import in_8_bits, num_weights
from pagebinder.custom_ops.linear.weight_numbers import codes_of_8_bits, dequantize

# Modules whose weight is read as a matrix, not applied: latent attention splits it and multiplies queries with it.
READ_AS_MATRIX = {".kv_b_proj": "latent attention", ".mixer.dt_proj": "Mamba"}
HEAD = "lm_head"  # its rows are those of logits, which the engine takes as they come


class QuantizedLinear(torch.nn.Module):
    """y = x W^T + b; W in 8, 6 or 4 bits. x [..., K] of the model's dtype -> [..., N].

    Args:
        codes, scale: of `format`, see `weight_formats`.
        order: the column of the weight that each column of the codes belongs to, int64 [K]; None: they are in order.
        num_rows: N; codes may have more (`rows_of_codes`). None: they have N.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.nn.Parameter | None,
        format: str,
        order: torch.Tensor | None = None,
        num_rows: int | None = None,
    ):
        super().__init__()
        if num_rows == len(codes) * PANEL:
            num_rows = None
        self.format, self.num_rows = format, num_rows
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("order", order)
        if num_rows is not None and bias is not None:
            padded = torch.nn.functional.pad(bias.detach(), (0, len(codes) * PANEL - num_rows))
            bias = torch.nn.Parameter(padded, requires_grad=False)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        y = torch.ops.pagebinder.quantized_linear(x, self.codes, self.scale, self.bias, format=self.format)
        return y if self.num_rows is None else y[..., : self.num_rows]

    def widen_codes(self) -> dict[str, str]:
        """Have codes of 8 bits instead of others that stand for integers, but that no GPU reads; returns {the format:
        that of now}, or nothing where codes are others."""
        old, new = self.format, in_8_bits(self.format)
        if new is None:
            return {}
        self.codes, self.format = codes_of_8_bits(self.codes, old), new
        return {old: new}

    def coded_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(codes, scale) of each weight."""
        return [(self.codes, self.scale)]

    def num_weights(self) -> int:
        """That codes stand for, without the rows that nobody looks at."""
        rows = len(self.codes) * PANEL
        return num_weights(self.codes) // rows * (rows if self.num_rows is None else self.num_rows)

    def weight(self) -> torch.Tensor:
        """The weight [N, K] that the codes stand for, float32."""
        weight = dequantize(self.codes, self.scale, self.format)[: self.num_rows]
        return weight if self.order is None else weight[:, self.order.argsort()]

    def _apply(self, fn, recurse=True):
        """A model that is moved or converted takes its scales along, in their dtype."""
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = moved_scale(scale, self.scale, self.format)
        return self


def moved_scale(scale: torch.Tensor, moved: torch.Tensor, format: str) -> torch.Tensor:
    """A scale tensor where a module was moved to, in its own dtype; two levels are for the kernels of a CPU."""
    if moved.device.type == "cuda" and scale.dtype is torch.uint8:
        return plain_scale(moved, format)
    return moved if moved.dtype is scale.dtype else scale.to(moved.device)


def rows_of_codes(path: str, rows: int) -> int:
    """How many codes have: kernels read panels of 32, so behind the last row come others that nobody looks at."""
    return rows if path == HEAD else -(-rows // PANEL) * PANEL


def with_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """The last row again and again behind the others, until there are so many."""
    return x if len(x) == count else torch.cat((x, x[-1:].expand(count - len(x), *x.shape[1:])))


def nothing_to_fill() -> torch.Tensor:
    """A `weight` for layers that have none: some models of transformers fill it at random where a loader has not."""
    weight = torch.empty(0)
    weight._is_hf_initialized = True
    return weight


def reason_against_codes(path: str, replaced: torch.nn.Module) -> str | None:
    """Why a linear layer needs a plain weight, whatever its codes are."""
    for ending, reader in READ_AS_MATRIX.items():
        if path.endswith(ending):
            return f"{reader} reads its weight as a matrix: it is expanded"
    if type(replaced) is not torch.nn.Linear:
        return f"it is a {type(replaced).__name__}: its weight is expanded"
    return None
