"""Quantised K and V: what a row of one token and KV head is in bytes, encoding and decoding.

D width of k, Dv of v; codes are one byte a value, and a value is code * scale.

    a scale per row          | K: D codes | V: Dv codes | scale of K | scale of V |      D + Dv + 8 bytes (float32)
    per head, per tensor     | K: D codes | V: Dv codes |      D + Dv bytes, and fixed scales [2, G] beside the cache

    head 0 of a block, B = 3, D = Dv = 128       | row of slot 0 | row of slot 1 | row of slot 2 | then head 1 ...
                                                 0               264             528             792

    codes       largest    relative step
    fp8_e4m3    448        1/16 to 1/8, down to 2^-6; saturates
    fp8_e5m2    57344      1/8 to 1/4, down to 2^-14; saturates
    int8        127        1/127 of the row's largest value

A scale per row is amax / largest code, so nothing saturates and nothing has to be calibrated; a row's bytes depend on
that row alone, whatever else is in the batch. Fixed scales cost no bytes and must be known (or 1): what lies beyond
saturates. A NaN makes its row's scale NaN; fixed scales turn it into the largest code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST_CODE = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
FP8_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Largest rounding error: relative to the value, and in scales, where values are too small for that (or int8).
ROUNDING = {"fp8_e4m3": (2.0**-4, 2.0**-10), "fp8_e5m2": (2.0**-3, 2.0**-17), "int8": (0.0, 0.5)}
ROW_SCALE_BYTES = 8
MIN_SCALE = 2.0**-126


@dataclass(frozen=True)
class KVFormat:
    """A way to store K and V. `codes`: a key of LARGEST_CODE; `scales`: what shares one: "row", "head", "tensor"."""

    name: str
    codes: str
    scales: str

    @property
    def has_fixed_scales(self) -> bool:
        return self.scales != "row"

    def row_bytes(self, row_values: int) -> int:
        """Bytes of one token and head with D + Dv = row_values."""
        return row_values + (0 if self.has_fixed_scales else ROW_SCALE_BYTES)


KV_FORMATS = {
    format.name: format
    for format in (
        *(KVFormat(codes, codes, "row") for codes in LARGEST_CODE),
        *(KVFormat(f"{codes}_per_{unit}", codes, unit) for codes in FP8_TYPES for unit in ("head", "tensor")),
    )
}


def encode_rows(x: torch.Tensor, codes: str, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D], scale [...] or None (amax of each row) -> (codes [..., D] uint8, scale [...] float32).

    Nearest, ties to even, saturating; so does a NaN.
    """
    x, largest = x.float(), LARGEST_CODE[codes]
    if scale is None:
        scale = (x.abs().amax(-1) / largest).clamp(min=MIN_SCALE)
    scaled = (x / scale[..., None]).nan_to_num(nan=largest).clamp(-largest, largest)
    if codes == "int8":
        return scaled.round().to(torch.int8).view(torch.uint8), scale
    return scaled.to(FP8_TYPES[codes]).view(torch.uint8), scale


def decode_rows(data: torch.Tensor, codes: str, scale: torch.Tensor) -> torch.Tensor:
    """codes [..., D] uint8, scale [...] -> values [..., D] float32."""
    return data.view(FP8_TYPES.get(codes, torch.int8)).float() * scale[..., None]


def error_bound(x: torch.Tensor, codes: str, scale: torch.Tensor | None) -> torch.Tensor:
    """How far values of x [..., D] may come back from where they were, with `scale` as for `encode_rows`."""
    scale = encode_rows(x, codes, scale)[1][..., None]
    (relative, absolute), magnitude = ROUNDING[codes], x.float().abs()
    saturated = (magnitude - LARGEST_CODE[codes] * scale).clamp(min=0)
    rounded = torch.maximum(relative * magnitude, absolute * scale)
    return saturated + rounded * (1 + 1e-5)  # and float32's own rounding of x / scale


def encode_kv(k: torch.Tensor, v: torch.Tensor, codes: str, scales: torch.Tensor | None) -> torch.Tensor:
    """k [..., G, D], v [..., G, Dv] -> cache rows [..., G, row bytes] uint8; `scales` [2, G] float32 if fixed."""
    (k_codes, k_scale), (v_codes, v_scale) = (
        encode_rows(x, codes, None if scales is None else scales[i]) for i, x in enumerate((k, v))
    )
    if scales is not None:
        return torch.cat([k_codes, v_codes], dim=-1)
    own = torch.stack([k_scale, v_scale], dim=-1).view(torch.uint8)
    return torch.cat([k_codes, v_codes, own], dim=-1)


def decode_kv(rows: torch.Tensor, head_dim: int, codes: str, scales: torch.Tensor | None) -> torch.Tensor:
    """Cache rows [..., G, row bytes] -> K then V [..., G, D + Dv] float32; `scales` [2, G] if fixed."""
    if scales is None:
        rows, own = rows[..., :-ROW_SCALE_BYTES], rows[..., -ROW_SCALE_BYTES:]
        k_scale, v_scale = own.clone(memory_format=torch.contiguous_format).view(torch.float32).unbind(-1)
    else:
        k_scale, v_scale = scales
    k, v = rows[..., :head_dim].contiguous(), rows[..., head_dim:].contiguous()
    return torch.cat([decode_rows(k, codes, k_scale), decode_rows(v, codes, v_scale)], dim=-1)
