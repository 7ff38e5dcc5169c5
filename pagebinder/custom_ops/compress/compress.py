"""`pagebinder::compress` and `compress_norm_rope_store`: several tokens become one entry of a latent cache.

    ratio = 4, overlap:     a halves of window w - 1       b halves of window w
                               a a a a                         b b b b
                               \\______ softmax per channel over z ______/
                                   sum of weight * kv -> RMSNorm? -> RoPE at 4w -> entry w

    tokens (p)    0 1 2 3 | 4 5 6 7 | 8 9 ..      c = 2 if overlap (kv and z rows are [a | b]), else 1
    entry               0         1               there once its last token is computed: w < (p + 1) // ratio

T tokens, d width of an entry, R requests, N blocks. Source: DeepSeek-V4 (compressed sparse and heavily compressed
attention). The softmax of a request that is cut into steps is a running one, see `paged_compress`.
"""

from __future__ import annotations

import math

import torch

from pagebinder.custom_ops.latent.layouts import require
from pagebinder.custom_ops.latent.write import rotate_trailing
from pagebinder.custom_ops.library import define_op


def compress_reference(
    kv_TC, gate_TC, position_bias, norm_weight, inv_freq, *, ratio, overlap, eps, rope_scale=1.0
):
    """Compress one sequence from its first token, in float32.

    Args:
        kv_TC, gate_TC: [T, c * d] of one float type; z = gate + position_bias[p % ratio].
        position_bias: [ratio, c * d] in float32 or kv's type. norm_weight: [d]; None: no norm.
        inv_freq: [pairs] float32; without pairs nothing is rotated.
        ratio: tokens per entry. overlap: an entry also weighs the window before its own.
        rope_scale: factor on cos and sin.
    Returns:
        [T, d] in kv's dtype: row p holds entry (p + 1) / ratio - 1 where ratio divides p + 1, zeros elsewhere.
    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    width = check_compress(kv_TC, gate_TC, position_bias, norm_weight, inv_freq, ratio, overlap)
    out = kv_TC.new_zeros((len(kv_TC), width))
    windows = len(kv_TC) // ratio
    if windows == 0:
        return out
    kv = kv_TC[: windows * ratio].float().unflatten(0, (windows, ratio))
    z = gate_TC[: windows * ratio].float().unflatten(0, (windows, ratio)) + position_bias.float()
    if overlap:
        kv = torch.cat([_previous(kv[..., :width], 0.0), kv[..., width:]], dim=1)
        z = torch.cat([_previous(z[..., :width], -math.inf), z[..., width:]], dim=1)
    entries = (torch.softmax(z, dim=1) * kv).sum(1)
    positions = torch.arange(windows, device=kv.device) * ratio
    rows = norm_and_rotate(entries, norm_weight, inv_freq, positions, eps, rope_scale)
    out[ratio - 1 : windows * ratio : ratio] = rows.to(out.dtype)
    return out


def norm_and_rotate(entries_Ed, norm_weight, inv_freq, positions_E, eps: float, rope_scale: float):
    """RMSNorm (unless norm_weight is None), then interleaved RoPE of the trailing channels at `positions_E`.

    float32 [E, d] throughout.
    """
    normed = entries_Ed
    if norm_weight is not None:
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    if len(inv_freq) == 0:
        return normed
    angles = positions_E.float()[:, None] * inv_freq
    return rotate_trailing(normed, angles.cos() * rope_scale, angles.sin() * rope_scale)


def check_compress(kv, gate, position_bias, norm_weight, inv_freq, ratio: int, overlap: bool) -> int:
    """The width d of an entry. Raises ValueError where operands do not fit."""
    require(ratio > 0, "ratio must be positive")
    require(kv.dim() == 2 and kv.shape == gate.shape, "kv and gate are [T, c * d]")
    require(kv.is_floating_point() and kv.dtype == gate.dtype, "kv and gate must have one float type")
    width = entry_width(kv, overlap)
    require(kv.shape[1] == width * (2 if overlap else 1), "kv must be d wide, 2 * d with overlap")
    if norm_weight is not None:
        fits = norm_weight.dim() == 1 and norm_weight.is_floating_point()
        require(fits, "norm_weight is [d] of a float type")
        require(len(norm_weight) == width, "kv must be d wide, 2 * d with overlap, as norm_weight is")
    require(position_bias.shape == (ratio, kv.shape[1]), "position_bias is [ratio, c * d]")
    require(
        position_bias.dtype in (torch.float32, kv.dtype), "position_bias must be float32 or of kv's dtype"
    )
    require(inv_freq.dim() == 1 and inv_freq.dtype == torch.float32, "inv_freq is [pairs] float32")
    require(2 * len(inv_freq) <= width, "inv_freq rotates more channels than an entry has")
    return width


def entry_width(kv, overlap: bool) -> int:
    """Channels of an entry, of kv [T, c * d]."""
    return kv.shape[1] // (2 if overlap else 1)


def _previous(windows: torch.Tensor, before_first: float) -> torch.Tensor:
    """Each window's predecessor; the first has none."""
    return torch.cat([torch.full_like(windows[:1], before_first), windows[:-1]])


def check_fake(kv, norm_weight, overlap: bool) -> int:
    """The width of an entry, of tensors without values."""
    torch._check(kv.dim() == 2, lambda: "kv is [T, c * d]")
    width = entry_width(kv, overlap)
    fits = norm_weight is None or (norm_weight.dim() == 1 and norm_weight.shape[0] == width)
    torch._check(fits, lambda: "norm_weight is [d]")
    return width


def _fake(kv, gate, position_bias, norm_weight, inv_freq, *, overlap, **options):
    return kv.new_empty((kv.shape[0], check_fake(kv, norm_weight, overlap)))


COMPRESS = define_op(
    "compress",
    "(Tensor kv, Tensor gate, Tensor position_bias, Tensor? norm_weight, Tensor inv_freq, *, int ratio, "
    "bool overlap, float eps, float rope_scale=1.0) -> Tensor",
    reference=compress_reference,
    fake=_fake,
)
