"""The functions that leaves put in place of transformers': same arguments, one op of ours each.

They serve one sequence from its first token, [1, T, ...], as a capture runs it. What they are told is a whitelist:
an argument that nobody here understands is an error, because an ignored one compiles a wrong model in silence.
"""

from __future__ import annotations

import math

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.attention_interface import IGNORED

# What transformers passes on to kernels that are not here, or to every layer; it has no meaning for the result.
# `cache_offset`: which of several caches, for layers that run more than once; there is none during a capture.
IGNORED_HERE = IGNORED | {"chunk_size", "position_embeddings", "cache_offset"}
L2NORM_EPS = 1e-6
# How to scan, not what: the results differ in rounding.
SCAN_CHOICES = {"use_mambapy", "use_associative_scan"}


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
    """x [1, C, T], weight [C, K], bias [C] or None -> [1, C, T]."""
    require_plain("causal_conv1d_fn", hidden_states, kwargs)
    if activation not in (None, "silu", "swish"):
        raise CaptureError(f"A causal convolution with the activation {activation!r} is not known here.")
    if weight.shape[1] == 1:  # the op looks back
        weight = torch.nn.functional.pad(weight, (1, 0))
    out_TC = torch.ops.pagebinder.short_conv(
        hidden_states[0].transpose(0, 1), weight, bias, activation=None if activation is None else "silu"
    )
    return out_TC.transpose(0, 1).unsqueeze(0)


def torch_chunk_gated_delta_rule(
    query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    **kwargs,
):  # fmt: skip
    """q, k [1, T, G, Dk], v [1, T, H, Dv], g and beta [1, T, H] -> ([1, T, H, Dv], None)."""
    require_plain("torch_chunk_gated_delta_rule", query, kwargs)
    require_no_state("torch_chunk_gated_delta_rule", initial_state, output_final_state)
    return _delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel), None


def chunk_kimi_delta_attention(
    query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    **kwargs,
):  # fmt: skip
    """q, k [1, T, H, Dk], v [1, T, H, Dv], g [1, T, H, Dk], beta [1, T, H] -> ([1, T, H, Dv], None)."""
    require_plain("chunk_kimi_delta_attention", query, kwargs)
    require_no_state("chunk_kimi_delta_attention", initial_state, output_final_state)
    return _delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel), None


def _delta_rule(query, key, value, g, beta, l2norm: bool) -> torch.Tensor:
    out = torch.ops.pagebinder.gated_delta_rule(
        query[0],
        key[0],
        value[0],
        g[0],
        beta[0],
        scale=query.shape[-1] ** -0.5,
        l2norm_eps=L2NORM_EPS if l2norm else None,
    )
    return out.unsqueeze(0)


def mamba2_chunk_scan(
    hidden_states, dt, A, B, C, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
    dt_limit=(0.0, math.inf), return_final_states=False, **kwargs,
):  # fmt: skip
    """x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N], D and dt_bias [H] -> [1, T, H, P] float32."""
    require_plain("mamba2_chunk_scan", hidden_states, kwargs)
    require_no_state("mamba2_chunk_scan", initial_states, return_final_states)
    low, high = (float(limit) for limit in dt_limit)
    return torch.ops.pagebinder.ssd(
        hidden_states[0],
        dt[0],
        A,
        B[0],
        C[0],
        D,
        dt_bias,
        dt_softplus=bool(dt_softplus),
        dt_min=low,
        dt_max=high if math.isfinite(high) else None,
    ).unsqueeze(0)


def mamba_selective_scan(
    hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False,
    **kwargs,
):  # fmt: skip
    """x and dt [1, W, T], A [W, N], B and C [1, N, T], D and delta_bias [W], z [1, W, T] -> [1, W, T]."""
    kwargs = {name: value for name, value in kwargs.items() if name not in SCAN_CHOICES}
    require_plain("mamba_selective_scan", hidden_states, kwargs)
    require_no_state("mamba_selective_scan", None, return_last_state)
    tokens = (x[0].transpose(0, 1) for x in (hidden_states, dt, B, C))
    out_TW = torch.ops.pagebinder.selective_scan(*tokens, A, D, delta_bias, dt_softplus=bool(delta_softplus))
    if z is not None:
        out_TW = out_TW * torch.nn.functional.silu(z[0].transpose(0, 1))
    return out_TW.transpose(0, 1).unsqueeze(0)


def require_plain(name: str, x: torch.Tensor, kwargs: dict) -> None:
    unknown = {k for k, v in kwargs.items() if k not in IGNORED_HERE and v is not None and v is not False}
    if unknown:
        raise CaptureError(
            f"{name} is passed {sorted(unknown)}, which is not understood here; ignoring it could change the result."
        )
    if x.shape[0] != 1:
        raise CaptureError(f"{name} is called with {x.shape[0]} sequences during capture; one is expected.")


def require_no_state(name: str, initial_state, wants_final_state: bool) -> None:
    if initial_state is not None or wants_final_state:
        raise CaptureError(f"{name} is given a cache during capture, which runs without one.")
